"""Row and Spread: what a benchmark found, as it is written to JSON.

One rule: a figure is never one number. It is the median over rounds with its extremes, so that a reader
sees whether a difference is larger than the noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Median and extremes of a figure over rounds."""

    median: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass
class Row:
    """One line of the table.

    Attributes:
        name: the row group, such as "train".
        what: what was done, in words.
        unit: of `local` and `wrapped`.
        higher_is_better: how to read the ratio.
        local, wrapped: the two sides; None where there is nothing to compare with.
        ratio: wrapped / local, round by round.
        equal: how the results of both sides compared, in words; starts with "no" where they did not match.
        plan: what the wrapped side ran where.
        settings: threads, processes, sizes.
        extra: further figures of this row.
        target: what issue 3 asks for, in words.
        note: why a row is short, or was not run.
    """

    name: str
    what: str
    unit: str = ""
    higher_is_better: bool = False
    local: Spread | None = None
    wrapped: Spread | None = None
    ratio: Spread | None = None
    equal: str = ""
    plan: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    target: str = ""
    note: str = ""


def paired(local: Sequence[float], wrapped: Sequence[float]) -> tuple[Spread, Spread, Spread]:
    """Both sides and their ratio; a ratio is taken within a round, whose halves saw the same machine."""
    ratios = [w / b for b, w in zip(local, wrapped, strict=True)]
    return Spread.of(local), Spread.of(wrapped), Spread.of(ratios)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# Relative errors up to which two sides count as doing the same work: (loss, gradient norms).
TOLERANCES = {"float32": (1e-4, 1e-3), "bfloat16": (2e-2, 1e-1)}


def compare(local: dict[str, Any], wrapped: dict[str, Any], dtype: str) -> str:
    """What `Worker.check` gave on both sides, compared, in words."""
    loss = abs(local["loss"] - wrapped["loss"]) / abs(local["loss"])
    scale = max(local["norms"], default=0.0) or 1.0
    norms = max((abs(a - b) for a, b in zip(local["norms"], wrapped["norms"], strict=True)), default=0.0) / scale
    same = sum(a == b for a, b in zip(local["text"], wrapped["text"], strict=True))
    loss_limit, norms_limit = TOLERANCES[dtype]
    # In bfloat16 a tie between two tokens may fall either way, so text is reported there and judged in float32.
    judged = loss <= loss_limit and norms <= norms_limit and (dtype != "float32" or same == len(local["text"]))
    verdict = "yes" if judged else "no"
    return f"{verdict}: loss {loss:.0e}, gradients {norms:.0e}, {same}/{len(local['text'])} tokens"
