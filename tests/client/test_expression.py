"""What can be computed with a weight that is elsewhere is what local algebra gives; what cannot is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from symbiosis.errors import UnsupportedMethodError
from symbiosis.expression import Expression
from symbiosis.hollow import HollowWeight
from symbiosis.remote import RemoteConv1D, RemoteLinear
from symbiosis.row_norms import row_basis
from symbiosis.sharing import SharedInputs

OUT, IN, RANK = 24, 20, 3


class Remote:
    """Computes with one weight, in this process, and counts."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.calls: list[tuple[str, int]] = []

    def call(self, op: str, modules: Any, tensors: Any) -> torch.Tensor:
        self.calls.append((op, tensors[0].shape[0]))
        return tensors[0] @ (self.weight.t() if op == "forward" else self.weight)

    def segment(self, steps: Any, outputs: Any, tensors: Any) -> list[torch.Tensor]:
        raise NotImplementedError

    def weight_norms(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight.norm(dim=0), self.weight.norm(dim=1)


def matrix(*shape: int, seed: int = 1, requires_grad: bool = True) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_(requires_grad)


@pytest.fixture
def remote() -> Remote:
    return Remote(matrix(OUT, IN, seed=0, requires_grad=False))


@pytest.fixture
def layer(remote: Remote) -> RemoteLinear:
    return stand_in(remote, reveals=False)


def stand_in(remote: Remote, reveals: bool) -> RemoteLinear:
    original = nn.Linear(IN, OUT)
    return RemoteLinear("up", SharedInputs(remote, reveals=reveals), original)


A, B = matrix(RANK, IN, seed=2), matrix(OUT, RANK, seed=3)
SQUARE_IN, SQUARE_OUT = matrix(IN, IN, seed=4), matrix(OUT, OUT, seed=5)
COLUMN, ROW, SCALAR = matrix(OUT, 1, seed=6), matrix(IN, seed=7), matrix(seed=8)
INDICES = torch.randint(0, IN, (2, 30), generator=torch.Generator().manual_seed(9))
VALUES = matrix(30, seed=10)


def sparse() -> torch.Tensor:
    return torch.sparse_coo_tensor(INDICES, VALUES, (OUT, IN), check_invariants=True)


BUILDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda w: w,
    "a LoRA": lambda w: w + 0.5 * B @ A,
    "a LoRA, the other way round": lambda w: (B @ A) + w,
    "minus": lambda w: w - B @ A,
    "from": lambda w: B @ A - w,
    "rotated in": lambda w: w @ SQUARE_IN,
    "rotated out": lambda w: SQUARE_OUT @ w,
    "rotated both": lambda w: torch.mm(SQUARE_OUT, torch.matmul(w.detach(), SQUARE_IN)),
    "transposed twice": lambda w: (SQUARE_IN.t() @ w.T).transpose(0, 1),
    "scaled by a number": lambda w: 2 * w / 3,
    "scaled by a tensor": lambda w: SCALAR * w,
    "scaled by rows and columns": lambda w: w * COLUMN * ROW,
    "shifted": lambda w: w + COLUMN + ROW + SCALAR + 1.5,
    "of itself": lambda w: w + w * COLUMN,
    "a copy changed in place": lambda w: w.data.clone().add_(B @ A).mul_(0.5),
    "sparse": lambda w: w.clone() + sparse(),
    "rows replaced": lambda w: w.index_copy(dim=0, index=torch.tensor([3, 7]), source=SQUARE_IN[:2]),
    "cast": lambda w: (w.to(torch.float32) + B @ A).float(),
    "negated": lambda w: -(w + B @ A),
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_weight_made_of_the_weight(remote: Remote, layer: RemoteLinear, build: Any) -> None:
    parameters = (A, B, SQUARE_IN, SQUARE_OUT, COLUMN, ROW, SCALAR, VALUES)
    results = []
    for weight in (layer.weight, remote.weight.clone()):
        x = matrix(2, 5, IN, seed=11)
        y = functional.linear(x, build(weight), layer.bias)
        y.square().sum().backward()
        results.append([y, x.grad, *(parameter.grad for parameter in parameters)])
        for parameter in parameters:
            parameter.grad = None

    for got, expected in zip(*results, strict=True):
        assert (got is None) == (expected is None)
        if expected is not None:
            assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert type(results[0][0]) is torch.Tensor
    assert isinstance(layer.weight, HollowWeight)


APPLICATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda x, w: functional.linear(x, w),
    "linear, named": lambda x, w: functional.linear(input=x, weight=w, bias=None),
    "matmul": lambda x, w: torch.matmul(x, w.t()),
    "@": lambda x, w: x @ w.T,
    "towards the input": lambda x, w: functional.linear(functional.linear(x, w), w.t()),
    "@, towards the input": lambda x, w: (x @ w.mT) @ w,
}


@pytest.mark.parametrize("apply", APPLICATIONS.values(), ids=APPLICATIONS)
def test_ways_to_apply_it(remote: Remote, layer: RemoteLinear, apply: Any) -> None:
    x = matrix(2, 5, IN, seed=11)

    got, expected = apply(x, layer.weight), apply(x, remote.weight)

    assert torch.allclose(got, expected, atol=1e-4)
    (gradient,) = torch.autograd.grad(got.square().sum(), x)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), x)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-2)


def test_a_conv1d_weight_is_stored_the_other_way(remote: Remote) -> None:
    conv: Any = RemoteConv1D("up", SharedInputs(remote), Conv1D(OUT, IN))
    x = matrix(2, 5, IN, seed=11)

    assert conv.weight.shape == (IN, OUT)
    got = x @ (conv.weight + (B @ A).t())

    assert torch.allclose(got, x @ (remote.weight.t() + (B @ A).t()), atol=1e-5)


def test_a_parametrization_is_computed_with(remote: Remote, layer: RemoteLinear) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.columns = nn.Parameter(torch.linspace(0.5, 2, IN))

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * self.columns

    x = matrix(2, IN, seed=11)
    plain = layer(x)
    parametrize.register_parametrization(layer, "weight", Scale())
    scaled = layer(x)
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)

    assert torch.allclose(scaled, x @ (remote.weight * torch.linspace(0.5, 2, IN)).t() + layer.bias, atol=1e-5)
    assert torch.equal(layer(x), plain)


def test_under_autocast(remote: Remote, layer: RemoteLinear) -> None:
    x = matrix(2, IN, seed=11)
    with torch.autocast("cpu", torch.bfloat16):
        got = functional.linear(x, layer.weight + B @ A)

    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), functional.linear(x, remote.weight + B @ A), atol=0.2)


# --- what would show the adapter ---------------------------------------------------------------------------

THIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "W times a thin matrix": lambda w: w @ A.t(),
    "a thin matrix times W": lambda w: B.t() @ w,
}


@pytest.mark.parametrize("build", THIN.values(), ids=THIN)
def test_values_of_an_adapter_are_sent_by_leave_only(remote: Remote, layer: RemoteLinear, build: Any) -> None:
    with pytest.raises(UnsupportedMethodError, match="reveal_adapter=True"):
        torch.relu(build(layer.weight))
    assert not remote.calls

    open_layer = stand_in(remote, reveals=True)
    got, expected = torch.relu(build(open_layer.weight)), torch.relu(build(remote.weight))

    assert torch.allclose(got, expected, atol=1e-5)
    assert [rows for _, rows in remote.calls] == [RANK]
    gradients = [torch.autograd.grad(value.sum(), (A, B), allow_unused=True) for value in (got, expected)]
    for one, other in zip(*gradients, strict=True):
        assert one is None if other is None else torch.allclose(one, other, atol=1e-4)


def test_norms_of_the_weight_are_published(remote: Remote, layer: RemoteLinear) -> None:
    assert torch.allclose(torch.linalg.norm(layer.weight, dim=1), remote.weight.norm(dim=1))
    assert torch.allclose(layer.weight.data.norm(dim=0), remote.weight.norm(dim=0))
    assert torch.allclose(torch.norm(layer.weight.t(), dim=1), remote.weight.norm(dim=0))
    assert not remote.calls


def test_norms_of_a_sum_take_a_call_by_leave(remote: Remote, layer: RemoteLinear) -> None:
    with pytest.raises(UnsupportedMethodError, match="reveal_adapter=True"):
        torch.linalg.norm(layer.weight + B @ A, dim=1)
    open_layer = stand_in(remote, reveals=True)

    for _ in range(3):
        got = torch.linalg.norm(open_layer.weight + 0.5 * (B @ A).detach(), dim=1)
        assert torch.allclose(got, (remote.weight + 0.5 * B @ A).norm(dim=1), rtol=1e-5)

    assert remote.calls == [("forward", RANK)], "the same matrix was asked for again"
    changed = (B @ A).detach()
    changed[0, 0] += 1e-3
    expected = (remote.weight + changed).norm(dim=1)
    assert torch.allclose(torch.linalg.norm(open_layer.weight + changed, dim=1), expected, rtol=1e-5)
    zero = torch.linalg.norm(open_layer.weight + torch.zeros(OUT, IN), dim=1)
    assert torch.allclose(zero, remote.weight.norm(dim=1))
    assert len(remote.calls) == 2


def test_a_norm_has_no_gradient(remote: Remote) -> None:
    norms = torch.linalg.norm(stand_in(remote, reveals=True).weight + B @ A, dim=1)

    with pytest.raises(UnsupportedMethodError, match="gradient"):
        norms.sum().backward()


def test_the_norm_of_a_sum_with_a_full_matrix_is_refused(remote: Remote) -> None:
    layer = stand_in(remote, reveals=True)

    with pytest.raises(UnsupportedMethodError, match="high rank"):
        torch.linalg.norm(layer.weight + matrix(OUT, IN, requires_grad=False), dim=1)
    assert not remote.calls


@pytest.mark.parametrize("rank", [0, 1, 5, 12, 20, 31, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_basis_of_the_rows(rank: int, dtype: torch.dtype) -> None:
    delta = (matrix(80, rank, seed=1) @ matrix(rank, 64, seed=2)).detach().to(dtype)

    basis = row_basis(delta, torch.finfo(dtype).eps)

    assert basis is not None
    tolerance = 64 * torch.finfo(dtype).eps
    assert len(basis) == rank if dtype is torch.float32 else len(basis) >= rank
    rest = delta.float() - delta.float() @ basis.float().t() @ basis.float()
    assert rest.norm() <= tolerance * delta.float().norm()


@pytest.mark.parametrize("rank", [33, 64])
def test_a_rank_above_half_has_no_basis(rank: int) -> None:
    assert row_basis((matrix(80, rank, seed=1) @ matrix(rank, 64, seed=2)).detach()) is None


# --- what stays refused --------------------------------------------------------------------------------------

REFUSED: dict[str, Callable[[Any], object]] = {
    "elementwise": lambda w: functional.linear(torch.zeros(2, IN), w * matrix(OUT, IN)),
    "in place": lambda w: w.add_(B @ A),
    "in place on data": lambda w: w.data.__iadd__(B @ A),
    "set": lambda w: setattr(w, "data", w.data + B @ A),
    "set to what is here": lambda w: setattr(w, "data", torch.zeros(OUT, IN)),
    "its values": lambda w: (w + B @ A).abs(),
    "times the identity": lambda w: (w @ torch.eye(IN)).cpu().numpy(),
    "a wide product": lambda w: torch.relu(w @ SQUARE_IN),
    "copied": lambda w: torch.zeros(OUT, IN).copy_(w + B @ A),
    "decomposed": lambda w: torch.linalg.svd(w + B @ A),
    "spectral norm": lambda w: torch.linalg.matrix_norm(w, ord=2),
    "a list": lambda w: (w + B @ A).tolist(),
    "divided by": lambda w: 1 / w,
    "indexed": lambda w: (w + B @ A)[:, 0] + 1,
}


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("reveals", [False, True])
def test_what_needs_the_values_is_refused(remote: Remote, use: Any, reveals: bool) -> None:
    layer = stand_in(remote, reveals)

    with pytest.raises(UnsupportedMethodError, match=r"base weight of up.*Instead"):
        use(layer.weight)
    assert isinstance(layer.weight, HollowWeight)
    assert layer.weight.untyped_storage().nbytes() == 0
    assert not remote.calls


def test_it_shows_what_it_is(layer: RemoteLinear) -> None:
    expression = layer.weight + B @ A

    assert isinstance(expression, Expression)
    assert (expression.shape, expression.dtype, expression.ndim) == ((OUT, IN), torch.float32, 2)
    assert expression.T.shape == (IN, OUT)
    assert expression.to(torch.bfloat16).dtype == torch.bfloat16
    assert "up" in repr(expression)


def test_siblings_still_share_a_call(remote: Remote) -> None:
    """SHiRA on q and v: both read x through their weight."""
    shared = SharedInputs(remote)
    shared.remote.call = (
        lambda op, names, tensors: torch.cat(  # type: ignore[method-assign]
            [remote.calls.append((op, len(names))) or tensors[0] @ remote.weight.t() for _ in names][-len(names) :],
            dim=1,
        )
    )
    layers = [RemoteLinear(name, shared, nn.Linear(IN, OUT)) for name in ("q", "v")]
    for _ in range(2):
        x = matrix(2, 5, IN)
        for one in layers:
            functional.linear(x, one.weight + B @ A)

    assert max(count for _, count in remote.calls) == 2
