"""Clients that share a server: each gets the answers that it gets alone, and their requests are computed together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import symbiosis
from tests.client.conftest import Served, adapt, assert_same_step, greedy, run_step, train

STEPS = 12
# Batched with another's rows, a product is rounded differently: 1e-7 a layer, over twelve optimizer steps.
TOLERANCE = 1e-3


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs in threads of their own that start at the same moment."""
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        start.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(run, job) for job in jobs]]


@pytest.mark.parametrize("methods", [("lora", "ia3"), ("lora-all", "adalora")])
@pytest.mark.parametrize("served", ["llama", "gpt2"], indirect=True)
def test_each_gets_what_it_gets_alone(served: Served, tokens: Any, methods: tuple[str, str]) -> None:
    batches: list[int] = []

    def client(method: str, seed: int) -> tuple[list[float], torch.Tensor]:
        with symbiosis.connect(served.server.url) as conn:
            conn.bus.subscribe(lambda event: batches.append(event.batch_requests))
            model = adapt(conn.wrap(served.model()), served.config(method))
            losses = train(model, tokens(2, 10, seed=seed), steps=STEPS)
            return losses, greedy(model, tokens(1, 5, seed=seed))

    found = together(*(lambda m=m, s=s: client(m, s) for s, m in enumerate(methods)))

    assert max(batches) > 1, "nothing was computed together, so nothing was shown"
    for (losses, text), (seed, method) in zip(found, enumerate(methods), strict=True):
        local = adapt(served.model(), served.config(method))
        assert losses == pytest.approx(train(local, tokens(2, 10, seed=seed), steps=STEPS), abs=TOLERANCE)
        assert torch.equal(text, greedy(local, tokens(1, 5, seed=seed)))


def test_threads_of_one_connection(served: Served, tokens: Any) -> None:
    """Two models on one connection, each in its thread, and one model in two threads."""
    with symbiosis.connect(served.server.url) as conn:
        models = [adapt(conn.wrap(served.model()), served.config(method)) for method in ("lora", "ia3")]
        locals_ = [adapt(served.model(), served.config(method)) for method in ("lora", "ia3")]
        expected = [run_step(model, tokens()) for model in locals_]

        for _ in range(3):
            steps = together(*(lambda m=model: run_step(m, tokens()) for model in models))
            for step, local in zip(steps, expected, strict=True):
                assert_same_step(step, local)

        def forward(seed: int) -> torch.Tensor:
            with torch.no_grad():
                logits: torch.Tensor = models[0](input_ids=tokens(seed=seed)).logits
                return logits

        outputs = together(*(lambda s=s: forward(s) for s in range(4)))
        with torch.no_grad():
            for seed, logits in enumerate(outputs):
                torch.testing.assert_close(logits, locals_[0](input_ids=tokens(seed=seed)).logits, rtol=1e-4, atol=1e-5)


def test_training_beside_generation(served: Served, tokens: Any) -> None:
    def trains() -> list[float]:
        with symbiosis.connect(served.server.url) as conn:
            return train(adapt(conn.wrap(served.model()), served.config("lora")), tokens(4, 12), steps=STEPS)

    def generates() -> list[torch.Tensor]:
        with symbiosis.connect(served.server.url) as conn:
            model = conn.load_model()
            return [greedy(model, tokens(1, 4, seed=seed), num_beams=beams) for seed in range(3) for beams in (1, 3)]

    losses, texts = together(trains, generates)

    expected = train(adapt(served.model(), served.config("lora")), tokens(4, 12), steps=STEPS)
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    for text, (seed, beams) in zip(texts, [(s, b) for s in range(3) for b in (1, 3)], strict=True):
        assert torch.equal(text, greedy(served.base, tokens(1, 4, seed=seed), num_beams=beams))


def test_a_client_that_fails_or_leaves_does_not_disturb_others(served: Served, tokens: Any) -> None:
    def works() -> list[float]:
        with symbiosis.connect(served.server.url) as conn:
            return train(adapt(conn.wrap(served.model()), served.config("lora")), tokens(2, 10), steps=STEPS)

    def misbehaves() -> None:
        for _ in range(6):
            with symbiosis.connect(served.server.url) as conn:
                caller = conn._caller
                with pytest.raises(symbiosis.SymbiosisError):
                    caller.call("forward", ["model.layers.0.self_attn.q_proj"], [torch.zeros(2, 31)])
                conn.wrap(served.model())(input_ids=tokens())

    losses, _ = together(works, misbehaves)

    expected = train(adapt(served.model(), served.config("lora")), tokens(2, 10), steps=STEPS)
    assert losses == pytest.approx(expected, abs=TOLERANCE)
