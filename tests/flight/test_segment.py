"""Segments: the same values as the modules give one by one, and nothing that was not checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from symbiosis.errors import InvalidInputError, UnknownModuleError
from symbiosis.flight import segment
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.protocol import Step

LAYER = "model.layers.0"
STEPS = (
    Step("linears", (f"{LAYER}.self_attn.o_proj",), (0,)),
    Step("add", (), (1, 2)),
    Step("call", (f"{LAYER}.post_attention_layernorm",), (3,)),
    Step("call", (f"{LAYER}.mlp",), (4,)),
    Step("add", (), (3, 5)),
    Step("call", ("model.layers.1.input_layernorm",), (6,)),
    Step("linears", tuple(f"model.layers.1.self_attn.{name}_proj" for name in "qkv"), (7,)),
)


@pytest.fixture(scope="module")
def base(tiny_llama: Callable[..., nn.Module]) -> BaseModel:
    return BaseModel(tiny_llama())


def test_a_decoder_layer_in_one_segment(base: BaseModel, tiny_llama: Callable[..., nn.Module]) -> None:
    model: Any = tiny_llama()
    context, residual = torch.randn(5, 48), torch.randn(5, 32)

    assert segment.check(base, STEPS, (6, 8), [[5, 48], [5, 32]]) == 32 + 96
    with torch.no_grad():
        stream, projected = segment.run(base, STEPS, (6, 8), [context, residual])
        first, second = model.model.layers
        hidden = residual + first.self_attn.o_proj(context)
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        normed = second.input_layernorm(hidden)
        expected = torch.cat([getattr(second.self_attn, f"{name}_proj")(normed) for name in "qkv"], dim=1)

    torch.testing.assert_close(stream, hidden)
    torch.testing.assert_close(projected, expected)


def test_bias_and_scale(tiny_gpt2: Callable[..., nn.Module]) -> None:
    model: Any = tiny_gpt2()
    base = BaseModel(model)
    name = "transformer.h.0.attn.c_proj"
    x = torch.randn(3, 32)
    steps = (Step("linears", (name,), (0,)), Step("bias", (name,), (1,)), Step("scale", (), (2,), 0.5))

    assert segment.check(base, steps, (3,), [[3, 32]]) == 32
    with torch.no_grad():
        torch.testing.assert_close(segment.run(base, steps, (3,), [x])[0], model.transformer.h[0].attn.c_proj(x) * 0.5)


def test_zero_tokens(base: BaseModel) -> None:
    with torch.no_grad():
        results = segment.run(base, STEPS, (6, 8), [torch.empty(0, 48), torch.empty(0, 32)])

    assert [tuple(result.shape) for result in results] == [(0, 32), (0, 96)]


BAD = {
    "a value that does not exist yet": ((Step("scale", (), (2,)),), (2,)),
    "a value before the first": ((Step("scale", (), (-1,)),), (1,)),
    "an output that does not exist": ((Step("scale", (), (0,)),), (3,)),
    "no output": ((Step("scale", (), (0,)),), ()),
    "adding different widths": ((Step("linears", (f"{LAYER}.self_attn.k_proj",), (1,)), Step("add", (), (1, 2))), (3,)),
    "adding one value": ((Step("add", (), (0,)),), (2,)),
    "a linear of another width": ((Step("linears", (f"{LAYER}.self_attn.q_proj",), (0,)),), (2,)),
    "a linear called as a block": ((Step("call", (f"{LAYER}.self_attn.q_proj",), (1,)),), (2,)),
    "a block called as a linear": ((Step("linears", (f"{LAYER}.mlp",), (1,)),), (2,)),
    "a bias that is not there": ((Step("bias", (f"{LAYER}.self_attn.q_proj",), (0,)),), (2,)),
    "a call of nothing": ((Step("call", (), (1,)),), (2,)),
    "linears of nothing": ((Step("linears", (), (1,)),), (2,)),
    "the bias of no module": ((Step("bias", (), (0,)),), (2,)),
}


@pytest.mark.parametrize("case", BAD)
def test_steps_that_do_not_fit_are_refused(base: BaseModel, case: str) -> None:
    steps, outputs = BAD[case]

    with pytest.raises(InvalidInputError):
        segment.check(base, steps, outputs, [[2, 48], [2, 32]])


def test_a_module_that_is_not_served_is_refused(base: BaseModel) -> None:
    with pytest.raises(UnknownModuleError, match="embed_tokens"):
        segment.check(base, (Step("call", ("model.embed_tokens",), (0,)),), (1,), [[2, 32]])


def test_inputs_of_different_lengths_are_refused(base: BaseModel) -> None:
    with pytest.raises(InvalidInputError, match="tokens"):
        segment.check(base, STEPS, (6,), [[2, 48], [3, 32]])
