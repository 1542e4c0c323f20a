"""DoRA without base weights: the norms of W + B A from published norms and one call, exact, and only by leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.helpers import DoraCaching

import symbiosis
from symbiosis.connection import Connection
from symbiosis.errors import UnsupportedMethodError
from tests.client.conftest import (
    Served,
    adapt,
    assert_holds_no_base,
    assert_same_step,
    difference,
    greedy,
    run_step,
    train,
)


def dora(served: Served, **options: Any) -> peft.LoraConfig:
    target = ["c_attn", "mlp.c_proj"] if served.family == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    settings = {"r": 4, "target_modules": target, "use_dora": True, "fan_in_fan_out": served.family == "gpt2"}
    return peft.LoraConfig(**{**settings, "task_type": "CAUSAL_LM", **options})


@pytest.fixture
def revealing(served: Served) -> Iterator[Connection]:
    with symbiosis.connect(served.server.url, reveal_adapter=True) as conn:
        yield conn


def make(served: Served, connection: Connection, order: str, config: peft.LoraConfig) -> Any:
    if order == "wrap first":
        return adapt(connection.wrap(served.model()), config)
    return connection.wrap(adapt(served.model(), config))


@pytest.mark.parametrize(
    ("served", "order", "options"),
    [
        ("llama", "wrap first", {}),
        ("llama", "peft first", {}),
        ("llama", "wrap first", {"lora_dropout": 0.3}),
        ("llama", "peft first", {"lora_dropout": 0.3}),
        ("llama", "wrap first", {"init_lora_weights": False}),
        ("qwen2", "peft first", {"lora_dropout": 0.3}),  # biases, which DoRA takes off the base's result first
        ("gpt2", "wrap first", {"lora_dropout": 0.3}),  # weights stored the other way round
    ],
    indirect=["served"],
    ids=str,
)
def test_it_is_exact(served: Served, revealing: Connection, tokens: Any, order: str, options: dict[str, Any]) -> None:
    local = adapt(served.model(), dora(served, **options))
    remote = make(served, revealing, order, dora(served, **options))

    for mode in (True, False):
        steps = []
        for model in (remote.train(mode), local.train(mode)):
            torch.manual_seed(5)  # dropout is drawn here, in the same order
            steps.append(run_step(model, tokens()))
        assert_same_step(*steps)
        assert any("magnitude" in name for name in steps[0].gradients)
    assert torch.equal(greedy(remote, tokens(1, 5)), greedy(local, tokens(1, 5)))
    assert_holds_no_base(remote, served.base, local)

    curves = []
    for model in (remote.train(), local.train()):
        torch.manual_seed(6)
        curves.append(train(model, tokens(4, 12), steps=5))
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) <= 1e-4
    assert abs(curves[0][0] - curves[0][-1]) > 0.01


@pytest.mark.parametrize("options", [{}, {"init_lora_weights": False}], ids=str)
@pytest.mark.parametrize("served", ["llama", "gpt2"], indirect=True)
def test_magnitudes_start_as_locally(served: Served, revealing: Connection, options: dict[str, Any]) -> None:
    local = adapt(served.model(), dora(served, **options), scale=0.0)
    remote = adapt(revealing.wrap(served.model()), dora(served, **options), scale=0.0)

    magnitudes = {n: p for n, p in local.named_parameters() if "magnitude" in n}
    for name, parameter in remote.named_parameters():
        if "magnitude" in name:
            assert torch.allclose(parameter, magnitudes.pop(name), rtol=1e-6)
    assert not magnitudes


def test_the_server_is_asked_once_for_each_change(served: Served, revealing: Connection, tokens: Any) -> None:
    remote = adapt(revealing.wrap(served.model(), granularity="linear"), dora(served))
    plain = adapt(revealing.wrap(served.model(), granularity="linear"), dora(served, use_dora=False))

    def calls(model: Any) -> int:
        before = revealing.stats()
        run_step(model, tokens())
        return (revealing.stats() - before).calls

    for model in (plain, remote):
        calls(model), calls(model)
    assert calls(remote) == calls(plain), "nothing changed, and it was asked again"
    with torch.no_grad():
        for name, parameter in remote.named_parameters():
            if "lora_A" in name:
                parameter.mul_(1.01)
    assert calls(remote) == calls(plain) + 6  # three layers in each of two


def test_a_saved_adapter_opens_in_plain_peft(
    served: Served, revealing: Connection, tokens: Any, tmp_path: Path
) -> None:
    remote = adapt(revealing.load_model(), dora(served))
    train(remote, tokens(), steps=2)
    remote.save_pretrained(tmp_path, save_embedding_layers=False)

    opened = peft.PeftModel.from_pretrained(served.model(), tmp_path, is_trainable=True).eval()

    assert_same_step(run_step(remote, tokens()), run_step(opened, tokens()))


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_a_local_adapter_is_loaded(
    served: Served, revealing: Connection, tokens: Any, tmp_path: Path, low_cpu_mem_usage: bool
) -> None:
    local = adapt(served.model(), dora(served))
    local.save_pretrained(tmp_path)

    for base in (revealing.wrap(served.model()), revealing.load_model()):
        loaded = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True, low_cpu_mem_usage=low_cpu_mem_usage)
        assert_same_step(run_step(loaded.eval(), tokens()), run_step(local, tokens()))


def test_with_pefts_own_cache(served: Served, revealing: Connection, tokens: Any) -> None:
    local, remote = adapt(served.model(), dora(served)), adapt(revealing.wrap(served.model()), dora(served))

    with DoraCaching():
        for _ in range(2):
            assert torch.equal(greedy(remote, tokens(1, 5)), greedy(local, tokens(1, 5)))


def test_under_autocast(served: Served, revealing: Connection, tokens: Any) -> None:
    outputs = []
    for model in (adapt(served.model(), dora(served)), adapt(revealing.wrap(served.model()), dora(served))):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(run_step(model, tokens()))

    assert difference(outputs[1].logits, outputs[0].logits) <= 5e-2
    for name, gradient in outputs[0].gradients.items():
        assert difference(outputs[1].gradients[name], gradient) <= 0.2, name


def test_in_bfloat16(tiny_llama: Any, start_server: Any, tokens: Any) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True, task_type="CAUSAL_LM")
    server = start_server(tiny_llama(seed=3).to(torch.bfloat16))
    with symbiosis.connect(server.url, reveal_adapter=True) as connection:
        local = adapt(tiny_llama(seed=3).to(torch.bfloat16), config)
        remote = adapt(connection.wrap(tiny_llama(seed=3).to(torch.bfloat16)), config)

        got, expected = run_step(remote, tokens()), run_step(local, tokens())

    assert difference(got.logits, expected.logits) <= 5e-2


# --- by leave only ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["wrap first", "peft first"])
@pytest.mark.parametrize("served", ["llama", "gpt2"], indirect=True)
def test_without_leave_it_is_refused(served: Served, connection: Connection, tokens: Any, order: str) -> None:
    calls = connection.stats().calls
    base = served.model()

    with pytest.raises(UnsupportedMethodError, match=r"DoRA.*Instead, use LoRA.*reveal_adapter=True"):
        make(served, connection, order, dora(served)) if order == "peft first" else peft.get_peft_model(
            connection.wrap(base), dora(served)
        )

    assert connection.stats().calls == calls, "something was sent before it was refused"
    if order == "wrap first":  # and the model can be used
        local, remote = adapt(served.model(), served.config("lora")), adapt(base, served.config("lora"))
        assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))


def test_layers_that_stay_need_no_leave(served: Served, connection: Connection, tokens: Any) -> None:
    config = dora(served, target_modules=["q_proj", "embed_tokens"])
    local = adapt(served.model(), config)

    remote = connection.wrap(adapt(served.model(), config), local=["*.q_proj"])

    assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))


def test_leave_may_come_from_the_environment(served: Served, tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMBIOSIS_CLIENT_REVEAL_ADAPTER", "true")
    with symbiosis.connect(served.server.url) as connection:
        assert connection.options.reveal_adapter
        run_step(adapt(connection.wrap(served.model()), dora(served)), tokens())
