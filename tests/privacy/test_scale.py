"""Scales: what a server can tell from the size of a mask, and how exactly rows are put under them."""

from __future__ import annotations

import pytest
import torch

from symbiosis.privacy.draws import DOUBLE, SINGLE, Grid, draw
from symbiosis.privacy.scale import QUIET_CALLS, Scale


def rows(norms: list[float], width: int = 64) -> torch.Tensor:
    x = torch.randn(len(norms), width, generator=torch.Generator().manual_seed(3))
    return x / x.norm(dim=1, keepdim=True) * torch.tensor(norms)[:, None]


def test_ordinary_rows_share_one_step_whatever_their_norm() -> None:
    scale = Scale(SINGLE, 16.0)

    steps = scale.steps(torch.tensor([1.0, 1.2, 0.01, 1.9]))
    later = scale.steps(torch.tensor([0.5, 0.0, 1e-9]))

    assert len({*steps.tolist(), *later.tolist()}) == 1
    assert scale.outliers == 0
    assert torch.log2(steps[0]).item() == round(torch.log2(steps[0]).item())  # a power of two: products are exact


def test_no_ordinary_row_is_more_exposed_than_the_strength_says() -> None:
    scale = Scale(SINGLE, 16.0)
    norms = torch.tensor([1.0, 1.0, 1.0, scale.limit])
    scale.steps(norms)

    edge = torch.tensor([scale.limit, 2.5 * scale.limit, 612 * scale.limit])

    assert (scale.exposures(edge, scale.steps(edge)) <= 1.0001 / 16**2).all()


def test_outliers_are_seen_by_their_power_of_two_and_counted() -> None:
    scale = Scale(SINGLE, 16.0)
    step = scale.steps(torch.ones(5))[0].item()

    steps = scale.steps(torch.tensor([1.0, 1.01 * scale.limit, 612 * scale.limit]))

    assert steps.tolist() == [step, 2 * step, 1024 * step]
    assert scale.outliers == 2


@pytest.mark.parametrize("grid", [SINGLE, DOUBLE], ids=["single", "double"])
def test_a_masked_row_is_a_whole_number_of_steps_exactly(grid: Grid) -> None:
    """Otherwise the low bits of a sum show what was added to the mask."""
    scale = Scale(grid, 1.0)
    x = rows([1.0, 2.0, 50.0, 0.3]).to(grid.dtype)
    steps = scale.steps(x.norm(dim=1))[:, None]
    mask = draw(bytes(32), *x.shape, grid)

    whole = (x / steps).round()
    sent = (whole + mask) * steps

    assert torch.equal(sent.double() / steps.double(), whole.double() + mask.double())
    assert (whole + mask).abs().max() < 2 / torch.finfo(grid.dtype).eps
    assert ((whole * steps - x).abs() <= steps / 2).all()


def test_nothing_but_zeros_fixes_no_scale() -> None:
    scale = Scale(SINGLE, 16.0)

    scale.steps(torch.zeros(4))
    assert scale.fixed == 0
    scale.steps(torch.tensor([0.0, 3.0]))

    assert scale.fixed == 1
    assert 6 <= scale.limit <= 12  # twice the median of what is not zero, up to a power of two


def test_a_direction_that_became_quiet_gets_a_new_scale() -> None:
    scale = Scale(SINGLE, 16.0)
    scale.steps(torch.ones(3))
    limit = scale.limit

    for _ in range(QUIET_CALLS - 1):
        scale.steps(torch.full((3,), 1e-3))
    assert scale.limit == limit
    scale.steps(torch.full((3,), 1e-3))

    assert scale.fixed == 2
    assert scale.limit == pytest.approx(limit / 1000, rel=0.5)


def test_a_loud_call_in_between_keeps_the_scale() -> None:
    scale = Scale(SINGLE, 16.0)
    scale.steps(torch.ones(3))

    for call in range(3 * QUIET_CALLS):
        scale.steps(torch.full((3,), 1.0 if call % QUIET_CALLS == 0 else 1e-3))

    assert scale.fixed == 1


def test_sigma_is_that_of_the_sum_of_four_uniform_numbers() -> None:
    assert pytest.approx(2.0**22 / 3**0.5, rel=1e-6) == SINGLE.sigma
    assert pytest.approx(2.0**32 / 3**0.5, rel=1e-6) == DOUBLE.sigma
