"""Extraction accounting: how many rows of each layer a tenant has seen the product of.

One rule: it counts, and promises no more. A linear layer is read out with d_in independent inputs (or d_out independent
gradients): y = x Wᵀ is then a system of equations that gives W. Ordinary training sends far more rows than that within
its first steps, and whether rows were chosen to be independent cannot be told from their number. So a count above d_in
means "could know this layer", not "has stolen it"; a budget delays and caps, and is worth as much as a second tenant's
token is hard to get.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping

from symbiosis.errors import BudgetExceededError

logger = logging.getLogger(__name__)
Width = tuple[int, int]  # d_in, d_out


class Extraction:
    """Rows per module of one tenant.

    Args:
        tenant: for the alarm.
        widths: d_in and d_out of each module that is counted.
        budget: most rows of a module, as a multiple of its d_in (gradients: d_out); None only counts.
    """

    def __init__(self, tenant: str, widths: Mapping[str, Width], budget: float | None) -> None:
        self._tenant = tenant
        self._widths = widths
        self._budget = budget
        self._lock = threading.Lock()
        self._shares: dict[str, float] = {}
        self._alarmed = False

    @property
    def share(self) -> float:
        """Of the module seen most: rows over what reads it out. 1 and more: the layer could be known."""
        with self._lock:
            return max(self._shares.values(), default=0.0)

    @property
    def modules(self) -> int:
        """How many modules could be known."""
        with self._lock:
            return sum(share >= 1 for share in self._shares.values())

    def count(self, op: str, modules: Collection[str], rows: int) -> None:
        """Count a call before it is computed.

        Raises:
            BudgetExceededError: one of the modules would exceed the budget; nothing was counted.
        """
        side = 1 if op == "grad_input" else 0
        added = {name: rows / max(1, self._widths[name][side]) for name in modules if name in self._widths}
        with self._lock:
            shares = {name: self._shares.get(name, 0.0) + share for name, share in added.items()}
            for name, share in shares.items():
                self._check(name, share)
            self._shares.update(shares)
            alarm = not self._alarmed and any(share >= 1 for share in shares.values())
            self._alarmed |= alarm
        if alarm:
            name = max(shares, key=lambda one: shares[one])
            logger.warning(
                "extraction: tenant %s has now sent as many rows to %s as it is wide, and could solve for its weights; "
                "said once, counts are in the statistics",
                self._tenant or "(none)",
                name,
            )

    def _check(self, name: str, share: float) -> None:
        if self._budget is not None and share > self._budget:
            raise BudgetExceededError(
                f"the extraction budget of {name} is used up: {share:,.1f} times the rows that determine its weights, "
                f"the limit is {self._budget:,.1f}; ask the operator (--extraction-budget)"
            )
