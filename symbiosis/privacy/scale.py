"""Scale: how large the masks of one module and direction are, and how rows are put under them.

    x  ->  whole = round(x / step)  ->  sent = (whole + mask) * step          step = 2^e, mask an integer
    y  =   reply - step * effect                                              effect = mask Wᵀ

One rule: the step of an ordinary row is the same for every call. A scale per row would show its norm, and one
per call its largest. The first rows fix it: rows of up to twice their median norm are ordinary. A longer row, an
outlier, is put under a mask 2^k times as large, and k can be seen; `outliers` counts them.

Where a direction has become much quieter for many calls in a row, as gradients do when a loss falls, the scale
is fixed anew: with the old one the results would drown in rounding.
"""

from __future__ import annotations

import math

import torch

from symbiosis.privacy.draws import Grid

HEADROOM = 2.0  # of the limit over the median norm
QUIET = 16.0  # a call is quiet if its longest row is shorter than the limit by this
QUIET_CALLS = 64


class Scale:
    """The scale of one module and direction.

    Args:
        grid: what masks are drawn from.
        strength: the standard deviation of a mask's elements over the norm of the longest ordinary row.

    Attributes:
        outliers: rows that were longer than ordinary ones so far.
        fixed: how often the scale was fixed.
    """

    def __init__(self, grid: Grid, strength: float) -> None:
        self._sigma = grid.sigma
        self._strength = strength
        self._step = 0.0
        self._quiet = 0
        self.outliers = 0
        self.fixed = 0

    @property
    def limit(self) -> float:
        """The norm of the longest ordinary row."""
        return self._sigma * self._step / self._strength

    def steps(self, norms: torch.Tensor) -> torch.Tensor:
        """The step of each row, [N], for rows of these norms [N]; all are finite."""
        self._watch(norms)
        if not self._step:
            return torch.ones_like(norms)  # nothing but zeros so far: any mask hides them
        over = torch.log2((norms / self.limit).clamp_min(1.0)).ceil()
        self.outliers += int((over > 0).sum())
        return torch.ldexp(torch.full_like(norms, self._step), over)

    def exposures(self, norms: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """(norm / standard deviation of the mask)² of each row, [N]: what one sending gives away (docs/security.md)."""
        shares: torch.Tensor = norms / (self._sigma * steps)
        return shares.square()

    def _watch(self, norms: torch.Tensor) -> None:
        seen = norms[norms > 0]
        if not len(seen):
            return
        self._quiet = self._quiet + 1 if seen.max() * QUIET < self.limit else 0
        if not self._step or self._quiet >= QUIET_CALLS:
            self._fix(HEADROOM * seen.median().item())

    def _fix(self, limit: float) -> None:
        self._step = math.ldexp(1.0, math.ceil(math.log2(self._strength * limit / self._sigma)))
        self._quiet = 0
        self.fixed += 1
