"""Layers that are given the same tensor share a call, and only then."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from symbiosis.remote import RemoteLinear
from symbiosis.sharing import SharedInputs

D_IN, WIDTHS = 8, {"q": 6, "k": 4, "v": 5}


class FakeRemote:
    """Computes what the server would, and writes down what it was asked."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.calls: list[tuple[str, tuple[str, ...]]] = []

    def call(self, op: str, modules: Sequence[str], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        self.calls.append((op, tuple(modules)))
        weight = torch.cat([self.weights[name] for name in modules])
        x = tensors[0].detach()
        return x @ (weight.t() if op == "forward" else weight).to(x.dtype)

    def segment(self, *_: object) -> list[torch.Tensor]:
        raise AssertionError("nothing is deferred here")

    @property
    def forwards(self) -> list[tuple[str, ...]]:
        return [modules for op, modules in self.calls if op == "forward"]

    @property
    def backwards(self) -> list[tuple[str, ...]]:
        return [modules for op, modules in self.calls if op == "grad_input"]


class Layers:
    """q, k and v of one input, remote and local."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.local = {name: nn.Linear(D_IN, width) for name, width in WIDTHS.items()}
        self.remote = FakeRemote({name: layer.weight.detach().clone() for name, layer in self.local.items()})
        shared = SharedInputs(self.remote)
        self.layers = {name: RemoteLinear(name, shared, layer) for name, layer in self.local.items()}
        for layer in self.layers.values():
            layer.requires_grad_(False)

    def __call__(self, x: torch.Tensor, names: str = "qkv") -> list[torch.Tensor]:
        return [self.layers[name](x) for name in names]

    def learn(self) -> None:
        self(torch.randn(2, D_IN))
        self.remote.calls.clear()

    def check(self, x: torch.Tensor, outputs: Sequence[torch.Tensor], names: str = "qkv") -> None:
        for name, output in zip(names, outputs, strict=True):
            torch.testing.assert_close(output, self.local[name](x))


@pytest.fixture
def qkv() -> Layers:
    layers = Layers()
    layers.learn()
    return layers


def test_the_first_pass_asks_for_each_layer_and_learns() -> None:
    layers = Layers()
    x = torch.randn(2, 3, D_IN)

    layers.check(x, layers(x))
    assert layers.remote.forwards == [("q",), ("k",), ("v",)]

    layers.remote.calls.clear()
    y = torch.randn(2, 3, D_IN)
    layers.check(y, layers(y))
    assert layers.remote.forwards == [("q", "k", "v")]


def test_one_call_each_way(qkv: Layers) -> None:
    x = torch.randn(2, 3, D_IN, requires_grad=True)

    loss = sum(output.square().sum() for output in qkv(x))
    (grad,) = torch.autograd.grad(loss, x)

    (expected,) = torch.autograd.grad(sum(layer(x).square().sum() for layer in qkv.local.values()), x)
    torch.testing.assert_close(grad, expected)
    assert qkv.remote.calls == [("forward", ("q", "k", "v")), ("grad_input", ("q", "k", "v"))]


def test_any_member_may_come_first(qkv: Layers) -> None:
    x = torch.randn(2, D_IN)

    qkv.check(x, qkv(x, "vqk"), "vqk")

    assert len(qkv.remote.forwards) == 1


def test_an_input_changed_in_place_makes_a_real_call(qkv: Layers) -> None:
    x = torch.randn(2, D_IN)
    q = qkv.layers["q"](x)
    expected_q = qkv.local["q"](x)

    x.mul_(2)
    k = qkv.layers["k"](x)

    torch.testing.assert_close(q, expected_q)
    torch.testing.assert_close(k, qkv.local["k"](x))
    assert len(qkv.remote.forwards) == 2


def test_an_equal_but_other_tensor_makes_a_real_call(qkv: Layers) -> None:
    x = torch.randn(2, D_IN)

    qkv.layers["q"](x)
    qkv.layers["k"](x.clone())
    qkv.layers["k"](x.view_as(x))

    assert len(qkv.remote.forwards) == 3


def test_a_result_is_used_once(qkv: Layers) -> None:
    x = torch.randn(2, D_IN)
    qkv(x)

    again = qkv.layers["k"](x)

    qkv.check(x, [again], "k")
    assert qkv.remote.forwards == [("q", "k", "v"), ("k",)]


def test_a_sibling_nobody_wants_ends_the_sharing(qkv: Layers) -> None:
    for _ in range(3):
        x = torch.randn(2, D_IN)
        qkv.check(x, qkv(x, "qk"), "qk")

    assert qkv.remote.forwards[0] == ("q", "k", "v")
    assert qkv.remote.forwards[-1] == ("q", "k")  # the two that are still called together were learnt anew


def test_siblings_with_inputs_of_their_own_are_not_joined() -> None:
    layers = Layers()
    for _ in range(2):
        for name in "qkv":
            layers.layers[name](torch.randn(2, D_IN))

    assert layers.remote.forwards == [("q",), ("k",), ("v",)] * 2


def test_a_result_without_gradients_is_not_used_with_them(qkv: Layers) -> None:
    x = torch.randn(2, D_IN, requires_grad=True)
    with torch.no_grad():
        qkv.layers["q"](x)

    k = qkv.layers["k"](x)

    assert k.requires_grad
    assert len(qkv.remote.forwards) == 2


def test_an_input_that_asks_for_gradients_later_makes_a_real_call(qkv: Layers) -> None:
    x = torch.randn(2, D_IN)
    qkv.layers["q"](x)
    x.requires_grad_()

    qkv.layers["k"](x).sum().backward()

    torch.testing.assert_close(x.grad, qkv.local["k"].weight.detach().sum(0).expand(2, -1))


def test_a_result_of_inference_mode_is_not_used_outside(qkv: Layers) -> None:
    x = torch.randn(2, D_IN)
    with torch.no_grad():
        with torch.inference_mode():
            qkv.layers["q"](x)
        k = qkv.layers["k"](x)

    assert not k.is_inference()
    assert len(qkv.remote.forwards) == 2


def test_inference_tensors_are_never_shared(qkv: Layers) -> None:
    with torch.inference_mode():
        x = torch.randn(2, D_IN)
        q, _, v = qkv(x)
        x.mul_(2)  # which such a tensor does not record
        qkv.check(x, [qkv.layers["k"](x)], "k")
        qkv.check(x / 2, [q, v], "qv")

    assert qkv.remote.forwards == [("q",), ("k",), ("v",), ("k",)]


def test_threads_do_not_exchange_results(qkv: Layers) -> None:
    x = torch.randn(2, D_IN)
    qkv.layers["q"](x)
    found: list[torch.Tensor] = []

    thread = threading.Thread(target=lambda: found.append(qkv.layers["k"](x)))
    thread.start()
    thread.join()

    qkv.check(x, found, "k")
    assert qkv.remote.forwards == [("q", "k", "v"), ("k",)]


def test_autocast_makes_another_moment(qkv: Layers) -> None:
    x = torch.randn(2, D_IN)
    qkv.layers["q"](x)

    with torch.autocast("cpu", torch.bfloat16):
        k = qkv.layers["k"](x)

    assert k.dtype == torch.bfloat16
    assert len(qkv.remote.forwards) == 2


def test_a_sibling_used_without_gradient_leaves_the_others_right(qkv: Layers) -> None:
    x = torch.randn(2, D_IN, requires_grad=True)

    q, k, _ = qkv(x)
    (q.sum() + k.detach().sum()).backward()

    torch.testing.assert_close(x.grad, qkv.local["q"].weight.detach().sum(0).expand(2, -1))
    assert qkv.remote.backwards == [("q",)]


def test_no_gradient_is_asked_for_an_input_that_needs_none(qkv: Layers) -> None:
    bias = nn.Parameter(torch.zeros(WIDTHS["q"]))

    (qkv.layers["q"](torch.randn(2, D_IN)) + bias).sum().backward()

    assert bias.grad is not None
    assert qkv.remote.backwards == []


class Stage(nn.Module):
    """Something with a parameter of its own around shared layers, to be checkpointed."""

    def __init__(self, layers: dict[str, nn.Module], scale: float) -> None:
        super().__init__()
        self.layers = layers
        self.scale = nn.Parameter(torch.full((D_IN,), scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x * self.scale)
        q, k, v = (self.layers[name](h) for name in "qkv")
        mixed = torch.cat([q * k.sum(-1, keepdim=True), v], dim=-1)  # [2, 11]
        return x + mixed[..., :D_IN] * self.scale


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_across_checkpoints(qkv: Layers, use_reentrant: bool) -> None:
    def run(layers: dict[str, nn.Module]) -> list[torch.Tensor]:
        stages = [Stage(layers, 0.5), Stage(layers, 0.7), Stage(layers, -0.9)]
        torch.manual_seed(1)
        x = torch.randn(2, D_IN, requires_grad=True)
        y = x
        for stage in stages:
            y = checkpoint(stage, y, use_reentrant=use_reentrant)
        y.square().sum().backward()
        return [x.grad, *(stage.scale.grad for stage in stages)]  # type: ignore[list-item]

    for got, expected in zip(run(qkv.layers), run(qkv.local), strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(got, expected)
    # Three stages, computed twice, one call each; one more for each stage's gradient.
    assert qkv.remote.forwards == [("q", "k", "v")] * 6
    assert qkv.remote.backwards == [("q", "k", "v")] * 3


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_result_does_not_cross_a_checkpoint(qkv: Layers, use_reentrant: bool) -> None:
    """q inside a checkpoint and k outside it, of one and the same tensor (a value primed across gave 1 for 151)."""

    def run(layers: dict[str, nn.Module]) -> torch.Tensor:
        x = torch.ones(2, D_IN, requires_grad=True)
        q = checkpoint(lambda t: layers["q"](t), x, use_reentrant=use_reentrant)
        (q.sum() * 3 + layers["k"](x).sum() * 50).backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(run(qkv.layers), run(qkv.local))
    assert ("k",) in qkv.remote.forwards  # a call of its own


def test_a_result_of_a_recomputation_is_not_used_after_it(qkv: Layers) -> None:
    """A checkpoint of somebody's own, which recomputes from the very tensor that the forward pass was given."""

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            ctx.given = given
            return qkv(x)[0]  # all three, or the sharing would end here

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            with torch.enable_grad():
                return torch.autograd.grad(qkv.layers["q"](ctx.given), ctx.given, grad)[0], None

    x = torch.randn(2, D_IN, requires_grad=True)
    Recompute.apply(x, x).sum().backward()
    qkv.remote.calls.clear()

    qkv.check(x, [qkv.layers["k"](x)], "k")

    assert len(qkv.remote.forwards) == 1


def test_checkpoint_hooks_are_not_kept_alive(qkv: Layers) -> None:
    class Big:
        pass

    big = Big()
    alive = weakref.ref(big)

    def stage(t: torch.Tensor, held: Big = big) -> torch.Tensor:
        return qkv.layers["q"](t) * 2

    x = torch.randn(2, D_IN, requires_grad=True)
    checkpoint(stage, x, use_reentrant=False).sum().backward()
    del big, stage, x

    assert alive() is None


def test_in_place_work_on_one_result_leaves_its_siblings_alone(qkv: Layers) -> None:
    x = torch.randn(1, D_IN, requires_grad=True)  # one row: the parts of a reply are contiguous as they are
    q, k, v = qkv(x)
    expected = [layer(x) for layer in qkv.local.values()]

    q.mul_(3)
    k.add_(1)

    torch.testing.assert_close([q, k, v], [expected[0] * 3, expected[1] + 1, expected[2]])
    (q.sum() + k.sum() + v.sum()).backward()
    grad, x.grad = x.grad, None
    (expected[0].sum() * 3 + expected[1].sum() + expected[2].sum()).backward()
    torch.testing.assert_close(grad, x.grad)


def test_results_are_contiguous_and_no_views(qkv: Layers) -> None:
    for output in qkv(torch.randn(2, 3, D_IN)):
        assert output.is_contiguous()
        assert output._base is None
        output.view(6, -1)


def test_more_siblings_than_a_call_may_name_are_asked_for_alone() -> None:
    torch.manual_seed(0)
    local = {str(i): nn.Linear(D_IN, 3, bias=False) for i in range(17)}
    remote = FakeRemote({name: layer.weight.detach().clone() for name, layer in local.items()})
    shared = SharedInputs(remote)
    layers = {name: RemoteLinear(name, shared, layer) for name, layer in local.items()}

    for _ in range(3):
        x = torch.randn(2, D_IN)
        for name, layer in layers.items():
            torch.testing.assert_close(layer(x), local[name](x))

    assert max(len(names) for names in remote.forwards) <= 16


def test_a_twice_backward_pass_works_and_double_backward_says_that_it_does_not(qkv: Layers) -> None:
    x = torch.randn(2, D_IN, requires_grad=True)
    loss = qkv.layers["q"](x).square().sum()

    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x, create_graph=True)

    torch.testing.assert_close(first, second)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        second.sum().backward()
