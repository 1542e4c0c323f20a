"""Adapters made on a remote base are ordinary PEFT adapters."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from symbiosis.adapters import base_modules, canonical_name
from symbiosis.connection import Connection
from tests.client.conftest import (
    FAMILIES,
    Served,
    adapt,
    assert_same_step,
    difference,
    greedy,
    run_step,
    train,
)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(input_ids=ids).logits
        return output


@pytest.mark.parametrize(
    ("served", "method"),
    [(family, "lora") for family in FAMILIES]
    + [(family, method) for family in ("llama", "gpt2") for method in ("lora-all", "ia3", "adalora")],
    indirect=["served"],
)
def test_a_saved_adapter_opens_in_plain_peft(
    served: Served, connection: Connection, tokens: Any, tmp_path: Path, method: str
) -> None:
    remote = adapt(connection.wrap(served.model()), served.config(method))
    train(remote, tokens(), steps=2)
    remote.save_pretrained(tmp_path / "remote")
    local = adapt(served.model(), served.config(method))
    local.save_pretrained(tmp_path / "local")

    opened = peft.PeftModel.from_pretrained(served.model(), tmp_path / "remote").eval()

    assert difference(logits(remote, tokens()), logits(opened, tokens())) <= 1e-5
    assert torch.equal(greedy(remote, tokens(1, 4)), greedy(opened, tokens(1, 4)))
    configs = [json.loads((tmp_path / side / "adapter_config.json").read_text()) for side in ("remote", "local")]
    assert configs[0] == configs[1]
    files = [load_file(tmp_path / side / "adapter_model.safetensors") for side in ("remote", "local")]
    assert {k: (v.shape, v.dtype) for k, v in files[0].items()} == {k: (v.shape, v.dtype) for k, v in files[1].items()}
    assert {path.name for path in (tmp_path / "remote").iterdir()} == {
        path.name for path in (tmp_path / "local").iterdir()
    }


@pytest.mark.parametrize("served", ["gpt2"], indirect=True)
def test_peft_finds_fan_in_fan_out_as_it_does_locally(served: Served, connection: Connection, tmp_path: Path) -> None:
    """On a Conv1D, peft corrects the config by what it finds; an nn.Linear in its place would flip it."""
    saved = []
    for side, wrap in (("local", lambda model: model), ("remote", connection.wrap)):
        config = peft.LoraConfig(target_modules=["c_attn", "mlp.c_proj"], task_type="CAUSAL_LM")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = peft.get_peft_model(wrap(served.model()), config)
        assert any("Setting fan_in_fan_out to True" in str(warning.message) for warning in caught)
        model.save_pretrained(tmp_path / side)
        saved.append(json.loads((tmp_path / side / "adapter_config.json").read_text()))

    assert saved[0]["fan_in_fan_out"] is True
    assert saved[0] == saved[1]


@pytest.mark.parametrize("served", ["llama", "gpt2"], indirect=True)
@pytest.mark.parametrize("skeleton", [True, False])
def test_an_adapter_trained_locally_is_loaded_on_a_remote_base(
    served: Served, connection: Connection, tokens: Any, tmp_path: Path, skeleton: bool
) -> None:
    local = adapt(served.model(), served.config("lora"))
    local.save_pretrained(tmp_path)

    base = connection.load_model() if skeleton else connection.wrap(served.model())
    remote = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True).eval()

    assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))


def test_the_base_is_recorded_by_name(connection: Connection, served: Served, tmp_path: Path) -> None:
    model = adapt(connection.load_model(), served.config("lora"))
    model.save_pretrained(tmp_path, save_embedding_layers=False)  # else peft asks the hub for that name

    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny-llama"


def test_an_adapter_can_be_turned_off(served: Served, connection: Connection, tokens: Any) -> None:
    for granularity in ("module", "auto"):
        model = adapt(connection.wrap(served.model(), granularity=granularity), served.config("lora-all"))
        adapted = logits(model, tokens())

        with model.disable_adapter():
            assert difference(logits(model, tokens()), logits(served.base, tokens())) <= 1e-5
            assert torch.equal(greedy(model, tokens(1, 4)), greedy(served.base, tokens(1, 4)))

        assert difference(logits(model, tokens()), adapted) <= 1e-5
        assert difference(adapted, logits(served.base, tokens())) > 1e-3


def test_several_adapters_take_turns(served: Served, connection: Connection, tokens: Any) -> None:
    def build(base: Any) -> Any:
        model = adapt(base, served.config("lora"))
        model.add_adapter("other", served.config("lora-all"))
        model.set_adapter("other")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(12)
            for name, parameter in model.named_parameters():
                if "other" in name:
                    parameter.copy_(0.05 * torch.randn_like(parameter))
        return model

    local, remote = build(served.model()), build(connection.wrap(served.model()))
    for name in ("other", "default", "other"):
        for model in (local, remote):
            model.set_adapter(name)
        assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))
    for model in (local, remote):
        model.base_model.set_adapter(["default", "other"])
    assert difference(logits(remote, tokens()), logits(local, tokens())) <= 1e-5
    remote.delete_adapter("other")
    remote.set_adapter("default")
    expected = adapt(served.model(), served.config("lora"))
    assert difference(logits(remote, tokens()), logits(expected, tokens())) <= 1e-5


def test_rows_of_a_batch_may_use_different_adapters(served: Served, connection: Connection, tokens: Any) -> None:
    outputs = []
    for wrap in (connection.wrap, lambda model: model):
        model = adapt(wrap(served.model()), served.config("lora"))
        model.add_adapter("other", served.config("lora-all"))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(12)
            for name, parameter in model.named_parameters():
                if "other" in name:
                    parameter.copy_(0.05 * torch.randn_like(parameter))
        with torch.no_grad():
            outputs.append(model.eval()(input_ids=tokens(3, 6), adapter_names=["default", "__base__", "other"]).logits)

    assert difference(*outputs) <= 1e-5


def test_an_adapter_can_be_taken_off(served: Served, connection: Connection, tokens: Any) -> None:
    model = adapt(connection.wrap(served.model()), served.config("lora"))

    base = model.unload()

    assert difference(logits(base, tokens()), logits(served.base, tokens())) <= 1e-5
    again = adapt(base, served.config("ia3"))
    local = adapt(served.model(), served.config("ia3"))
    assert_same_step(run_step(again, tokens()), run_step(local, tokens()))


@pytest.mark.parametrize("served", ["qwen2"], indirect=True)
def test_a_whole_model_save_holds_client_parameters_only(
    served: Served, connection: Connection, tokens: Any, tmp_path: Path
) -> None:
    model = connection.wrap(served.model())

    model.save_pretrained(tmp_path)

    saved = load_file(tmp_path / "model.safetensors")
    assert saved
    assert all(value.numel() for value in saved.values())
    expected = served.base.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in saved.items())
    assert not any(name.endswith("proj.weight") for name in saved)
    assert (tmp_path / "config.json").exists()


def test_torch_save_of_a_state_dict(served: Served, connection: Connection, tokens: Any, tmp_path: Path) -> None:
    model = adapt(connection.wrap(served.model()), served.config("lora"))
    before = run_step(model, tokens())
    torch.save(model.state_dict(), tmp_path / "state.pt")
    train(model, tokens(), steps=2, lr=0.1)

    model.load_state_dict(torch.load(tmp_path / "state.pt"))

    assert_same_step(run_step(model, tokens()), before)


@pytest.mark.parametrize("served", ["llama", "gpt2"], indirect=True)
@pytest.mark.parametrize("method", ["lora-all", "ia3"])
def test_base_modules_are_those_of_the_bare_model(served: Served, method: str) -> None:
    adapted = adapt(served.model(), served.config(method)).get_base_model()

    found = [canonical_name(path) for path, _ in base_modules(adapted)]
    bare = [path for path, _ in served.base.named_modules()]

    # A wrapped layer is met twice: peft's layer, and the one inside it.
    assert list(dict.fromkeys(found)) == bare
    assert not any("lora" in name or "ia3" in name for name in found)
