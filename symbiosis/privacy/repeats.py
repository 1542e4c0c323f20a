"""Repeats: rows that were sent before are not sent again.

The mean of many maskings of one row is the row. And rows do repeat: without positions in it, the input of a
model's first layer is a function of the token alone. So a row that comes again is answered from memory, and a
row that only pads the message goes in its place, so that the number of rows says nothing.

One rule: the exposures of one row add up to no more than the budget. Rows are known by a keyed hash of their
bits. That a row is nearly another one, as in a second epoch, cannot be seen here; docs/security.md counts it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from symbiosis.errors import PrivacyBudgetError

FIRST_CAPACITY = 2048  # rows known per module and direction; doubled when one comes again
LAST_CAPACITY = 1 << 18
ROW_OVERHEAD_BYTES = 300  # of Python's objects around a remembered answer


class Memory:
    """How many bytes of answers may be remembered, over all modules."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.key = secrets.token_bytes(32)

    def take(self, nbytes: int) -> bool:
        fits = self.used_bytes + nbytes <= self.limit_bytes
        self.used_bytes += nbytes if fits else 0
        return fits


@dataclass
class _Known:
    exposure: float = 0.0
    answer: torch.Tensor | None = None  # [d_out]


class Repeats:
    """What is known of the rows of one module and direction.

    Args:
        budget: the largest sum of exposures of one row.
        memory: for the answers.
    """

    def __init__(self, budget: float, memory: Memory) -> None:
        self._budget = budget
        self._memory = memory
        self._rows: OrderedDict[bytes, _Known] = OrderedDict()
        self._capacity = FIRST_CAPACITY
        self._grown = False
        self.answered = 0

    def plan(self, x: torch.Tensor) -> Plan:
        """Which rows of x [N, d] must be sent."""
        key = self._memory.key
        digests = [hashlib.blake2b(row, digest_size=16, key=key).digest() for row in x.numpy()]
        return Plan(digests, {d: k for d in digests if (k := self._rows.get(d)) is not None})

    def spend(self, plan: Plan, exposures: torch.Tensor, what: str) -> None:
        """Count the rows that are about to be sent.

        Raises:
            PrivacyBudgetError: one of them was sent as often as the budget allows; nothing was counted.
        """
        sent = [(plan.digests[row], exposures[row].item()) for row in plan.sent]
        for digest, exposure in sent:
            spent = self._rows[digest].exposure if digest in self._rows else 0.0
            if spent + exposure > self._budget:
                raise PrivacyBudgetError(
                    f"a row of {what} was sent so often that its exposure would be {spent + exposure:.3g}, over the "
                    f"budget of {self._budget:.3g}, and there was no memory to keep its answer: raise remember_bytes "
                    f"(now {self._memory.limit_bytes:,}), or strength, or row_budget, in Masking(...)"
                )
        for digest, exposure in sent:
            self._known(digest).exposure += exposure

    def finish(self, plan: Plan, y: torch.Tensor) -> None:
        """Fill in the rows of y [N, d'] that were not sent, and remember what came again."""
        for row, digest in enumerate(plan.digests):
            first = plan.first[digest]
            known = plan.known.get(digest)
            if known is not None and known.answer is not None:
                y[row] = known.answer
            elif row != first:
                y[row] = y[first]
        self.answered += len(plan.digests) - len(plan.sent)
        for digest in plan.known.keys() | plan.doubles:
            self._remember(digest, y[plan.first[digest]])

    def _known(self, digest: bytes) -> _Known:
        if digest in self._rows:
            self._grown = True
            self._rows.move_to_end(digest)
            return self._rows[digest]
        if len(self._rows) >= self._capacity:
            if self._grown and self._capacity < LAST_CAPACITY:
                self._capacity, self._grown = 2 * self._capacity, False
            else:
                self._forget()
        return self._rows.setdefault(digest, _Known())

    def _forget(self) -> None:
        _, known = self._rows.popitem(last=False)
        if known.answer is not None:
            self._memory.used_bytes -= known.answer.nbytes + ROW_OVERHEAD_BYTES

    def _remember(self, digest: bytes, answer: torch.Tensor) -> None:
        known = self._known(digest)
        if known.answer is None and self._memory.take(answer.nbytes + ROW_OVERHEAD_BYTES):
            known.answer = answer.clone()


class Plan:
    """Which rows of a call are sent, and what is known of the others.

    Attributes:
        digests: of each row.
        known: what is known of them.
        first: where each of them stands first.
        doubles: those that stand there more than once.
        sent: the places of the rows that are sent.
    """

    def __init__(self, digests: Sequence[bytes], known: dict[bytes, _Known]) -> None:
        self.digests = digests
        self.known = known
        self.first: dict[bytes, int] = {}
        self.doubles: set[bytes] = set()
        self.sent: list[int] = []
        for row, digest in enumerate(digests):
            if self.first.setdefault(digest, row) != row:
                self.doubles.add(digest)
            elif digest not in known or known[digest].answer is None:
                self.sent.append(row)
