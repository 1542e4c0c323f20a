"""Segments: the same values as the modules give one by one, and nothing that was not checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from symbiosis.errors import InvalidInputError, UnknownModuleError
from symbiosis.flight import gemm, segment
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
    with pytest.raises(InvalidInputError, match="one N"):
        segment.check(base, STEPS, (6,), [[2, 48], [3, 32]])


def grads_of(base: BaseModel, wrt: tuple[int, ...] = (0, 1), outputs: tuple[int, ...] = (6, 8)) -> dict[str, Any]:
    """Everything that `segment.grad` takes, for a decoder layer."""
    generator = torch.Generator().manual_seed(1)
    widths = {0: 48, 1: 32, 6: 32, 8: 96}
    inputs = [torch.randn(5, widths[place], generator=generator) for place in (0, 1)]
    grads = [torch.randn(5, widths[output], generator=generator) for output in outputs]
    return {"steps": STEPS, "outputs": outputs, "wrt": wrt, "grads": grads, "inputs": inputs}


def expected_grads(base: BaseModel, given: dict[str, Any]) -> list[torch.Tensor]:
    """Computed step by step by autograd, from the modules as they are."""
    values = [x.clone().requires_grad_() for x in given["inputs"]]
    leaves = list(values)
    for step in STEPS:
        args = [values[arg] for arg in step.args]
        if step.do == "add":
            values.append(args[0] + args[1])
        elif step.do == "call":
            values.append(base.modules[step.modules[0]].module(args[0].unsqueeze(0)).squeeze(0))  # type: ignore[union-attr]
        else:
            values.append(torch.cat([args[0] @ base.linears[name].weight.t() for name in step.modules], dim=1))
    outputs = [values[output] for output in given["outputs"]]
    return list(torch.autograd.grad(outputs, [leaves[place] for place in given["wrt"]], given["grads"]))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("wrt", [(0, 1), (1,), (1, 0)])
@pytest.mark.parametrize("outputs", [(6, 8), (8,), (6,)])
def test_the_gradient_of_a_decoder_layer(base: BaseModel, kept: bool, wrt: Any, outputs: Any) -> None:
    given = grads_of(base, wrt, outputs)
    with torch.no_grad():
        values, products = segment.run_and_keep(base, STEPS, (6, 8), given["inputs"])
        plain = segment.run(base, STEPS, (6, 8), given["inputs"])
        got = segment.grad(base, **given, products=products if kept else ())

    assert all(torch.equal(a, b) for a, b in zip(values, plain, strict=True))
    for a, b in zip(got, expected_grads(base, given), strict=True):
        torch.testing.assert_close(a, b)


def test_what_was_kept_is_not_computed_again(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    given = grads_of(base)
    computed: list[int] = []
    real = gemm.forward
    with torch.no_grad():
        _, products = segment.run_and_keep(base, STEPS, (6, 8), given["inputs"])
        monkeypatch.setattr(gemm, "forward", lambda x, weights: computed.append(len(weights)) or real(x, weights))  # type: ignore[func-returns-value]
        segment.grad(base, **given, products=products)
        assert not computed
        segment.grad(base, **given)

    assert len(products) == len(computed) == 4  # o_proj; gate, up and down: never q, k, v, whose values nobody needs


def test_rows_of_what_was_kept_serve_another_batch(base: BaseModel) -> None:
    """Two forwards computed as one, whose gradients come one by one."""
    given = grads_of(base)
    with torch.no_grad():
        _, products = segment.run_and_keep(base, STEPS, (6, 8), given["inputs"])
        expected = segment.grad(base, **given)
        for rows in (slice(0, 2), slice(2, 5)):
            own = {key: [t[rows] for t in given[key]] for key in ("grads", "inputs")}
            got = segment.grad(base, STEPS, (6, 8), (0, 1), **own, products=[p[rows] for p in products])
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b[rows])


class Inplace(nn.Module):
    """An MLP whose activation overwrites what its first linear gave."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(32, 64, bias=False), nn.Linear(64, 32), nn.ReLU(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class ByHalves(Inplace):
    """An MLP that works on some of its tokens at a time, as experts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(ByHalves, self).forward(part) for part in x.split([1, x.shape[1] - 1], dim=1)], dim=1)


@pytest.mark.parametrize("kind", [Inplace, ByHalves])
def test_products_that_would_not_repeat_the_forward_are_not_kept(
    tiny_llama: Callable[..., nn.Module], kind: type[nn.Module]
) -> None:
    model: Any = tiny_llama()
    model.model.layers[0].mlp = kind()
    strange = BaseModel(model)
    given = grads_of(strange)
    with torch.no_grad():
        _, products = segment.run_and_keep(strange, STEPS, (6, 8), given["inputs"])
        got = segment.grad(strange, **given, products=products)

    assert not products
    for a, b in zip(got, expected_grads(strange, given), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("wrt", "shapes", "match"),
    [
        ((), [[5, 32], [5, 96]], "no gradients"),
        ((2,), [[5, 32], [5, 96]], "no gradients"),
        ((0, 0), [[5, 32], [5, 96]], "no gradients"),
        ((-1,), [[5, 32], [5, 96]], "no gradients"),
        ((0,), [[5, 32], [5, 95]], "gradients of a segment"),
        ((0,), [[4, 32], [4, 96]], "gradients of a segment"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(base: BaseModel, wrt: Any, shapes: Any, match: str) -> None:
    with pytest.raises(InvalidInputError, match=match):
        segment.check_grad(base, STEPS, (6, 8), wrt, shapes, [[5, 48], [5, 32]])
    assert segment.check_grad(base, STEPS, (6, 8), (0, 1), [[5, 32], [5, 96]], [[5, 48], [5, 32]]) == 32 + 96
