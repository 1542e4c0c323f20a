"""A block goes to the server whole, but only while nothing of the client's is inside."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import symbiosis
from symbiosis.block import RemoteBlock
from symbiosis.connection import Connection
from symbiosis.errors import ModelMismatchError, UnsupportedMethodError
from tests.client.conftest import (
    Served,
    adapt,
    assert_same_step,
    difference,
    greedy,
    remote_layers,
    run_step,
)


@pytest.fixture
def calls(connection: Connection) -> list[tuple[str, str]]:
    """(op, module) of every call from here on."""
    seen: list[tuple[str, str]] = []
    connection.bus.subscribe(lambda event: seen.extend((event.op, name) for name in event.modules))
    return seen


def whole(calls: list[tuple[str, str]]) -> set[str]:
    return {op for op, name in calls if name.endswith(".mlp")}


def parts(calls: list[tuple[str, str]]) -> set[str]:
    return {op for op, name in calls if ".mlp." in name}


@pytest.mark.parametrize("served", ["llama", "gpt2"], indirect=True)
def test_a_frozen_block_is_one_call_each_way(
    served: Served, connection: Connection, calls: list[tuple[str, str]], tokens: Any
) -> None:
    model = adapt(connection.wrap(served.model(), granularity="module"), served.config("lora"))

    run_step(model, tokens())

    assert whole(calls) == {"forward", "grad_input"}
    assert not parts(calls)


@pytest.mark.parametrize("served", ["llama", "gpt2"], indirect=True)
def test_an_adapter_inside_takes_it_apart(
    served: Served, connection: Connection, calls: list[tuple[str, str]], tokens: Any
) -> None:
    model = adapt(connection.wrap(served.model(), granularity="module"), served.config("ia3"))

    run_step(model, tokens())

    assert not whole(calls)
    assert parts(calls) == {"forward", "grad_input"}


def test_hooks_inside_take_it_apart_until_removed(
    served: Served, connection: Connection, calls: list[tuple[str, str]], tokens: Any
) -> None:
    model = connection.wrap(served.model(), granularity="module")
    seen = []
    for kind in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        calls.clear()
        handles = [getattr(layer.mlp.act_fn, kind)(lambda *args: seen.append(args)) for layer in model.model.layers]
        run_step(model, tokens())
        assert not whole(calls)
        for handle in handles:
            handle.remove()
    assert seen

    calls.clear()
    run_step(model, tokens())
    assert whole(calls)


def test_a_hook_on_the_block_itself_fires(served: Served, connection: Connection, tokens: Any) -> None:
    model = connection.wrap(served.model(), granularity="module")
    seen: list[torch.Tensor] = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output))

    with torch.no_grad():
        model(input_ids=tokens())
        served.base.model.layers[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output))
        served.base(input_ids=tokens())
    served.base.model.layers[0].mlp._forward_hooks.clear()

    assert difference(*seen) <= 1e-5


def test_a_module_put_in_by_hand_is_not_skipped(served: Served, connection: Connection, tokens: Any) -> None:
    """A trained bottleneck, then frozen: nothing about it asks for gradients, and it still counts."""

    class Bottleneck(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    logits = []
    for model in (connection.wrap(served.model(), granularity="module"), served.model()):
        model.model.layers[0].mlp.up_proj = Bottleneck(model.model.layers[0].mlp.up_proj)
        with torch.no_grad():
            logits.append(model(input_ids=tokens()).logits)

    assert difference(*logits) <= 1e-5
    assert difference(logits[0], served.base(input_ids=tokens()).logits) > 1e-4


@pytest.mark.parametrize("served", ["gpt2"], indirect=True)
def test_biases_trained_here_count(
    served: Served, connection: Connection, calls: list[tuple[str, str]], tokens: Any
) -> None:
    """The server would add its own biases: while ours are trained, and after that, they must not be lost."""
    config = peft.LoraConfig(target_modules=["c_attn"], bias="all", fan_in_fan_out=True, task_type="CAUSAL_LM")
    local = adapt(served.model(), config)
    remote = adapt(connection.wrap(served.model(), granularity="module"), config)
    assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))

    with torch.no_grad():  # as after loading them for inference
        for model in (local, remote):
            model.requires_grad_(False)
        assert difference(remote(input_ids=tokens()).logits, local(input_ids=tokens()).logits) <= 1e-5
    assert not whole(calls)


@pytest.mark.parametrize("served", ["gpt2"], indirect=True)
def test_biases_as_on_the_server_keep_it_whole(
    served: Served, connection: Connection, calls: list[tuple[str, str]], tokens: Any
) -> None:
    with torch.device("meta"):
        empty = type(served.base)(served.base.config).eval()
    for model in (connection.wrap(served.model(), granularity="module"), connection.wrap(empty, granularity="module")):
        calls.clear()
        with torch.no_grad():
            model(input_ids=tokens())
            model.to(torch.bfloat16)(input_ids=tokens())
        assert whole(calls)
        assert not parts(calls)


@pytest.mark.parametrize("served", ["gpt2"], indirect=True)
def test_active_dropout_is_drawn_here(
    served: Served, connection: Connection, calls: list[tuple[str, str]], tokens: Any
) -> None:
    local = adapt(served.model(), served.config("lora")).train()
    remote = adapt(connection.wrap(served.model(), granularity="module"), served.config("lora")).train()

    steps = []
    for model in (remote, local):
        torch.manual_seed(3)
        steps.append(run_step(model, tokens()))

    assert_same_step(*steps)
    assert not whole(calls)


def test_dropout_as_a_number_counts_too(served: Served, connection: Connection) -> None:
    model = connection.wrap(served.model(), granularity="module").train()
    mlp = model.model.layers[0].mlp
    assert mlp.forward.reason_against() == ""

    mlp.activation_dropout = 0.1

    assert "dropout" in mlp.forward.reason_against()
    assert mlp.eval().forward.reason_against() == ""


def test_a_call_with_more_than_its_input(served: Served, connection: Connection) -> None:
    mlp = connection.wrap(served.model(), granularity="module").model.layers[0].mlp
    with pytest.raises(TypeError, match="positional"):
        mlp(torch.zeros(1, 2, 32), 1)  # as its own forward says


def test_autocast_and_low_precision(served: Served, connection: Connection, tokens: Any) -> None:
    model = connection.wrap(served.model(), granularity="module")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens()).logits
        expected = served.base(input_ids=tokens()).logits

    assert logits.dtype == expected.dtype
    assert difference(logits, expected) <= 5e-2


# --- experts --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixtral() -> Any:
    config = transformers.MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(21)
        return transformers.MixtralForCausalLM(config).eval()


@pytest.fixture
def moe(mixtral: Any, start_server: Any) -> Iterator[Connection]:
    with symbiosis.connect(start_server(mixtral).url) as conn:
        yield conn


@pytest.fixture
def config() -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("granularity", ["linear", "auto"])
def test_experts_are_always_a_block(
    moe: Connection, mixtral: Any, config: peft.LoraConfig, tokens: Any, granularity: Any
) -> None:
    local = adapt(copy.deepcopy(mixtral), config)
    remote = adapt(moe.wrap(copy.deepcopy(mixtral), granularity=granularity), config)

    assert any(isinstance(vars(module).get("forward"), RemoteBlock) for module in remote.modules())
    assert sum(p.numel() for p in remote.parameters()) < sum(p.numel() for p in local.parameters()) / 2
    assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))
    assert torch.equal(greedy(remote, tokens(1, 5)), greedy(local, tokens(1, 5)))


def test_a_skeleton_with_experts(moe: Connection, mixtral: Any, tokens: Any) -> None:
    with torch.no_grad():
        got, expected = (model(input_ids=tokens()).logits for model in (moe.load_model(), mixtral))

    assert difference(got, expected) <= 1e-5


def test_experts_stay_out_of_checkpoints(moe: Connection, mixtral: Any, tokens: Any) -> None:
    remote = moe.wrap(copy.deepcopy(mixtral))
    state = remote.state_dict()

    assert all(value.numel() for value in state.values())
    assert not any("experts" in name for name in state)
    remote.load_state_dict(state)
    with pytest.raises(UnsupportedMethodError, match="stays on the server"):
        remote.load_state_dict(mixtral.state_dict())
    assert torch.equal(greedy(remote, tokens(1, 4)), greedy(mixtral, tokens(1, 4)))


def test_other_experts_are_noticed(moe: Connection, mixtral: Any) -> None:
    other = copy.deepcopy(mixtral)
    with torch.no_grad():
        other.model.layers[1].mlp.experts.down_proj[2, 0, 0] += 1e-2

    with pytest.raises(ModelMismatchError, match=r"model\.layers\.1\.mlp\S* has other values"):
        moe.wrap(other)
    assert not remote_layers(other)


def test_experts_come_back(moe: Connection, mixtral: Any, tokens: Any) -> None:
    model = moe.wrap(copy.deepcopy(mixtral), keep_weights=True)
    moe.unwrap(model)

    assert all(torch.equal(value, mixtral.state_dict()[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens()).logits, mixtral(input_ids=tokens()).logits)


def test_a_hook_on_the_experts_inside_a_block_is_called(moe: Connection, mixtral: Any, tokens: Any) -> None:
    """The block is then no longer computed whole; its experts, which have no weights here, still are."""
    remote, seen = moe.wrap(copy.deepcopy(mixtral)), []
    handle = remote.model.layers[0].mlp.experts.register_forward_hook(lambda module, args, out: seen.append(out))

    with torch.no_grad():
        got, expected = remote(input_ids=tokens()).logits, mixtral(input_ids=tokens()).logits
    assert len(seen) == 1
    assert difference(got, expected) <= 1e-5

    handle.remove()
    assert torch.equal(greedy(remote, tokens(1, 4)), greedy(mixtral, tokens(1, 4)))
