"""generate() in the modes that people use, token for token as locally."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from symbiosis.connection import Connection
from tests.client.conftest import FAMILIES, Served, adapt, train

NEW = {"max_new_tokens": 6, "min_new_tokens": 6}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
    "beam": {"num_beams": 3},
    "beam-sampling": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "num_return_sequences": {"do_sample": True, "num_return_sequences": 3},
    "no cache": {"do_sample": False, "use_cache": False},
    "static cache": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
    "penalty": {"do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
}


@pytest.fixture
def pair(served: Served, connection: Connection) -> tuple[Any, Any]:
    config = served.config("lora")
    return adapt(connection.wrap(served.model()), config, 0.2), adapt(served.model(), config, 0.2)


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    torch.manual_seed(17)
    mask = torch.ones_like(ids) if mask is None else mask
    generated: torch.Tensor = model.generate(input_ids=ids, attention_mask=mask, **{**NEW, **options})
    return generated


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("served", ["llama", "gpt2"], indirect=True)
def test_modes(pair: tuple[Any, Any], connection: Connection, tokens: Any, mode: str) -> None:
    remote, local = pair
    for ids in (tokens(1, 5), tokens(2, 4)):
        before = connection.stats().calls
        assert torch.equal(generate(remote, ids, **MODES[mode]), generate(local, ids, **MODES[mode]))
        assert connection.stats().calls > before


@pytest.mark.parametrize("served", FAMILIES, indirect=True)
def test_left_padding(pair: tuple[Any, Any], tokens: Any) -> None:
    ids, mask = tokens(3, 7), torch.ones(3, 7, dtype=torch.long)
    for row, padding in ((0, 4), (2, 2)):
        ids[row, :padding], mask[row, :padding] = 0, 0

    for options in ({"do_sample": False}, {"num_beams": 2}):
        remote, local = (generate(model, ids, mask, **options) for model in pair)
        assert torch.equal(remote, local)
    alone = generate(pair[0], ids[:1, 4:], do_sample=False)
    assert torch.equal(generate(pair[0], ids, mask, do_sample=False)[0, 7:], alone[0, 3:])


def test_inside_inference_mode(pair: tuple[Any, Any], tokens: Any) -> None:
    with torch.inference_mode():
        remote = generate(pair[0], tokens(2, 4), do_sample=False)
    assert torch.equal(remote, generate(pair[1], tokens(2, 4), do_sample=False))


def test_a_conversation_keeps_its_cache(pair: tuple[Any, Any], tokens: Any) -> None:
    answers = []
    for model in pair:
        ids, cache = tokens(1, 4), transformers.DynamicCache(config=model.config)
        for turn in range(3):
            ids = generate(model, ids, cache=cache, do_sample=False, max_new_tokens=3, min_new_tokens=3)
            ids = torch.cat([ids, tokens(1, 2, seed=turn)], dim=1)
        answers.append(ids)

    assert torch.equal(*answers)


def test_scores_and_hidden_states(pair: tuple[Any, Any], tokens: Any) -> None:
    remote, local = (
        model.generate(
            input_ids=tokens(1, 4),
            attention_mask=torch.ones(1, 4),
            do_sample=False,
            max_new_tokens=3,
            output_scores=True,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
        for model in pair
    )

    torch.testing.assert_close(torch.stack(remote.scores), torch.stack(local.scores), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(remote.hidden_states, local.hidden_states, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert isinstance(a, torch.Tensor)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_streamers_and_stopping_criteria(pair: tuple[Any, Any], tokens: Any) -> None:
    class Stop(transformers.StoppingCriteria):
        def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((ids.shape[0],), ids.shape[1] >= 7)

    class Stream(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen.extend(value.flatten().tolist())

        def end(self) -> None:
            self.seen.append(-1)

    results = []
    for model in pair:
        stream = Stream()
        ids = generate(
            model, tokens(1, 4), streamer=stream, stopping_criteria=[Stop()], do_sample=False, min_new_tokens=0
        )
        results.append((ids.tolist(), stream.seen))

    assert results[0] == results[1]
    assert len(results[0][0][0]) == 7


def test_the_model_may_train_between_generations(pair: tuple[Any, Any], tokens: Any) -> None:
    generated = []
    for model in pair:
        first = generate(model, tokens(1, 4), do_sample=False)
        losses = train(model, tokens(), steps=3, lr=0.05)
        generated.append((first.tolist(), generate(model, tokens(1, 4), do_sample=False).tolist(), losses))

    assert generated[0][:2] == generated[1][:2]
    assert generated[0][2] == pytest.approx(generated[1][2], abs=1e-4)
