"""A hollow weight shows what it stands for, and whoever wants its values is told by name that they are elsewhere."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from symbiosis.errors import UnsupportedMethodError
from symbiosis.hollow import HollowWeight


@pytest.fixture
def weight() -> HollowWeight:
    return HollowWeight((6, 8), torch.float32, "cpu", "layers.0.up_proj")


def test_it_holds_nothing_and_shows_its_shape(weight: HollowWeight) -> None:
    assert isinstance(weight, nn.Parameter)
    assert weight.numel() == 0
    assert weight.untyped_storage().nbytes() == 0
    assert weight.ds_shape == (6, 8)
    assert weight.ds_numel == 48
    assert weight.ndim == 2
    assert not weight.requires_grad
    assert weight.dtype == torch.float32
    assert repr(weight) == "HollowWeight(shape=(6, 8), dtype=torch.float32, held by the server)"


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.data,
        lambda w: w.detach(),
        lambda w: w.to("cpu"),
        lambda w: w.requires_grad_(False),
        copy.copy,
        copy.deepcopy,
        lambda w: pickle.loads(pickle.dumps(w)),
        lambda w: nn.Parameter(w, requires_grad=False),
    ],
    ids=["data", "detach", "to", "requires_grad_", "copy", "deepcopy", "pickle", "Parameter"],
)
def test_it_stays_hollow(weight: HollowWeight, change: Callable[[HollowWeight], torch.Tensor]) -> None:
    changed = change(weight)

    assert isinstance(changed, HollowWeight)
    assert changed.ds_shape == (6, 8)
    assert changed.module_name == "layers.0.up_proj"
    with pytest.raises(UnsupportedMethodError):
        changed.sum()


def test_a_cast_changes_the_dtype_only(weight: HollowWeight) -> None:
    cast = weight.to(torch.bfloat16)

    assert (cast.dtype, cast.ds_shape) == (torch.bfloat16, (6, 8))


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w + 1,
        lambda w: w @ torch.zeros(8, 1),
        lambda w: torch.zeros(2, 8) @ w.T,
        lambda w: w.t(),
        lambda w: w.mT,
        lambda w: w[0],
        lambda w: w.norm(),
        lambda w: w.data.norm(dim=1),
        lambda w: w.mul_(2),
        lambda w: w.data.add_(1),
        lambda w: w.copy_(torch.zeros(6, 8)),
        lambda w: torch.zeros(6, 8).copy_(w),
        lambda w: w.clone(),
        lambda w: w.tolist(),
        lambda w: w.numpy(),
        lambda w: w.view(-1),
        lambda w: torch.linalg.svd(w),
        lambda w: torch.linalg.qr(w.data),
        lambda w: torch.cat([w, w]),
        lambda w: nn.functional.linear(torch.zeros(2, 8), w),
        lambda w: torch.allclose(w, w),
    ],
)
def test_values_are_refused_by_name(weight: HollowWeight, use: Callable[[HollowWeight], object]) -> None:
    with pytest.raises(UnsupportedMethodError, match=r"values of the base weight of layers\.0\.up_proj"):
        use(weight)


def test_training_is_refused(weight: HollowWeight) -> None:
    for ask in (weight.requires_grad_, lambda: weight.requires_grad_(requires_grad=True)):
        with pytest.raises(UnsupportedMethodError, match="cannot be trained"):
            ask()
    with pytest.raises(UnsupportedMethodError, match="cannot be trained"):
        weight.requires_grad = True
    assert not weight.frozen
    weight.requires_grad = False
    assert weight.frozen
    assert copy.deepcopy(weight).frozen
