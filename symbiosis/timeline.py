"""Snapshots of a connection's sums over time, and the rates between them: what dashboards draw.

One rule: only sums are kept. What happened between two moments is their difference, so a timeline always agrees with
`Connection.stats()`, and thinning it out loses detail but no call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from symbiosis.telemetry import Stats, StepEvent

T = TypeVar("T")
MAX_POINTS = 240  # a chart is some 300 pixels wide
PARTS = ("local", "serialise", "network", "queue", "compute", "retry")  # where time goes, from here to there


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The sums at one moment.

    `clock_s` counts only time in which work was going on: in a notebook, while a cell ran.
    """

    clock_s: float
    stats: Stats
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened between two snapshots."""

    ended_s: float
    seconds: float
    stats: Stats

    def rate(self, field: str) -> float:
        """Of a sum in Stats, per second."""
        return float(getattr(self.stats, field)) / self.seconds if self.seconds > 0 else 0.0

    def parts(self) -> tuple[float, ...]:
        """Seconds of each of PARTS. Local is what no call accounts for."""
        in_calls_s = self.stats.wall_s - self.stats.local_s
        return (max(0.0, self.seconds - in_calls_s), *(getattr(self.stats, f"{part}_s") for part in PARTS[1:]))


class Timeline:
    """Snapshots in order, at most MAX_POINTS of them; the oldest half loses every other one when it is full."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self._clock_s = 0.0
        self._seen_s: float | None = None

    def resume(self, now_s: float) -> None:
        """Work goes on from here: the time since the last snapshot was a pause, and does not count."""
        self._seen_s = now_s

    def add(self, now_s: float, stats: Stats, memory_bytes: int = 0) -> None:
        """Take a snapshot; `now_s` is a reading of any clock that never goes back, the same each time."""
        self._clock_s += now_s - (now_s if self._seen_s is None else self._seen_s)
        self._seen_s = now_s
        self.snapshots.append(Snapshot(self._clock_s, stats, memory_bytes))
        self.snapshots = _thinned(self.snapshots)

    def intervals(self) -> list[Interval]:
        """All of them, in order."""
        return [between(a, b) for a, b in zip(self.snapshots, self.snapshots[1:], strict=False)]

    def windows(self, window_s: float) -> list[Interval]:
        """For each snapshot but the first, what happened in the `window_s` of work before it."""
        found, first = [], 0
        for last in range(1, len(self.snapshots)):
            while self.snapshots[first + 1].clock_s <= self.snapshots[last].clock_s - window_s:
                first += 1
            found.append(between(self.snapshots[first], self.snapshots[last]))
        return found

    def recent(self, window_s: float) -> Interval:
        """What happened in the last `window_s` of work, or since the start."""
        if not self.snapshots:
            return Interval(0.0, 0.0, Stats())
        last = self.snapshots[-1]
        earlier = [s for s in self.snapshots[:-1] if s.clock_s <= last.clock_s - window_s]
        return between((earlier or self.snapshots)[-1 if earlier else 0], last)


class Training:
    """The steps of a training loop, as `Connection.track` told of them, each with the sums at its end."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepEvent, Snapshot]] = []
        self.tokens = 0

    def add(self, event: StepEvent, stats: Stats) -> None:
        """A step ended; one with a number not above the last starts a new training."""
        if self.steps and event.step <= self.steps[-1][0].step:
            self.steps, self.tokens = [], 0
        self.tokens += event.tokens or 0
        self.steps.append((event, Snapshot(event.ended_s, stats)))
        self.steps = _thinned(self.steps)

    @property
    def last(self) -> StepEvent | None:
        return self.steps[-1][0] if self.steps else None

    def step_s(self) -> float | None:
        """Mean seconds of a step, from the second on."""
        if len(self.steps) < 2:
            return None
        (first, _), (last, _) = self.steps[0], self.steps[-1]
        return (last.ended_s - first.ended_s) / max(1, last.step - first.step)

    def remaining_s(self) -> float | None:
        """Until the last step at the mean pace, where the number of steps is known."""
        last, step_s = self.last, self.step_s()
        if last is None or last.steps is None or step_s is None:
            return None
        return max(0, last.steps - last.step) * step_s

    def intervals(self) -> list[Interval]:
        """What each step took; of steps that were thinned out, their mean."""
        found = []
        for (a, before), (b, after) in zip(self.steps, self.steps[1:], strict=False):
            found.append(_per(between(before, after), max(1, b.step - a.step)))
        return found


def between(before: Snapshot, after: Snapshot) -> Interval:
    """The difference of two snapshots."""
    return Interval(after.clock_s, after.clock_s - before.clock_s, after.stats - before.stats)


def _per(interval: Interval, steps: int) -> Interval:
    if steps == 1:
        return interval
    stats = interval.stats
    mean = Stats(**{f: getattr(stats, f) / steps for f in ("wall_s", *(f"{part}_s" for part in PARTS))})
    return Interval(interval.ended_s, interval.seconds / steps, mean)


def _thinned(points: Sequence[T]) -> list[T]:
    """The same points, or, when there are too many, every other one of the older half."""
    if len(points) <= MAX_POINTS:
        return list(points)
    half = len(points) // 2
    return [*points[:half:2], *points[half:]]
