"""What happened, as frozen events: an EventBus that carries them and a Recorder that adds them up.

One rule: this module knows no tensors, no sockets and no UI; it imports the standard library only.
A subscriber that raises is dropped with one warning, never allowed to break a training step.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from symbiosis.tables import html_table

logger = logging.getLogger(__name__)

FORWARD_OPS = ("forward", "segment")  # the others take gradients back


@dataclass(frozen=True, slots=True)
class CallEvent:
    """One answered call to the server.

    Times are in seconds; `started_s` and `ended_s` are `time.perf_counter()` readings of the client.
    """

    op: str
    modules: tuple[str, ...]
    tokens: int
    bytes_out: int
    bytes_in: int
    started_s: float
    ended_s: float
    serialise_s: float
    queue_s: float
    compute_s: float
    batch_requests: int
    retries: int = 0
    retry_s: float = 0.0  # spent on tries that failed, and between them

    @property
    def elapsed_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def network_s(self) -> float:
        """What neither end can account for: sockets, gRPC, thread hand-overs of the server."""
        return max(0.0, self.elapsed_s - self.serialise_s - self.queue_s - self.compute_s - self.retry_s)


@dataclass(frozen=True, slots=True)
class Epsilon:
    """What a training under DP-SGD has spent of its budget: epsilon at delta."""

    spent: float
    target: float
    delta: float

    def __str__(self) -> str:
        return f"{self.spent:.3f} of {self.target:g}, delta {self.delta:g}"


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One step of a training loop, as `Connection.track` was told of it; what it was not told is None.

    `step` counts from 1; `tokens` are those of this step's batch.
    """

    step: int
    loss: float
    ended_s: float
    learning_rate: float | None = None
    tokens: int | None = None
    steps: int | None = None
    epsilon: Epsilon | None = None


Event = CallEvent | StepEvent


class EventBus:
    """Hands each event to every subscriber, in the thread that emits it."""

    def __init__(self) -> None:
        self._subscribers: tuple[Callable[[Event], None], ...] = ()
        self._lock = threading.Lock()

    def subscribe(self, handler: Callable[[Event], None]) -> Callable[[], None]:
        """Add a handler; the returned function removes it again."""
        with self._lock:
            self._subscribers = (*self._subscribers, handler)
        return lambda: self._remove(handler)

    def emit(self, event: Event) -> None:
        for handler in self._subscribers:
            try:
                handler(event)
            except Exception:
                logger.warning("telemetry handler %r failed and was removed", handler, exc_info=True)
                self._remove(handler)

    def _remove(self, handler: Callable[[Event], None]) -> None:
        with self._lock:
            self._subscribers = tuple(h for h in self._subscribers if h is not handler)


@dataclass(frozen=True)
class ServerState:
    """How one server of a connection fares, as far as its client knows."""

    url: str
    up: bool
    failures: int  # failed tries since it answered last
    failed_in_all: int
    last_error: str
    transport: str = "Flight"  # how calls go there

    def __str__(self) -> str:
        return "up" if self.up else f"down, {self.failures} failed tries; {self.last_error}"


@dataclass(frozen=True)
class Stats:
    """Sums over the calls since connect (or the last reset), and where the time went.

    `wall_s` runs from the start of the first call to the end of the last; `local_s` is the part of it
    spent outside calls: adapters, attention, norms, loss, optimizer, data. `tokens` are counted in every call,
    `model_tokens` once for each pass through the model. `privacy` is what masks or noise say of themselves, as
    (label, value), where they are on; `epsilon` is of the last tracked step that told it.
    """

    calls: int = 0
    tokens: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    wall_s: float = 0.0
    local_s: float = 0.0
    serialise_s: float = 0.0
    network_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    retry_s: float = 0.0
    retries: int = 0
    mean_batch: float = 0.0
    servers: tuple[ServerState, ...] = ()
    model_tokens: int = 0
    privacy: tuple[tuple[str, str], ...] = ()
    epsilon: Epsilon | None = None

    def __sub__(self, earlier: Stats) -> Stats:
        """The stats of the time between two snapshots: `after - before`."""
        plain = {
            f.name: getattr(self, f.name) - getattr(earlier, f.name)
            for f in fields(self)
            if f.name not in ("mean_batch", "servers", "privacy", "epsilon")
        }
        requests = self.mean_batch * self.calls - earlier.mean_batch * earlier.calls
        mean_batch = requests / plain["calls"] if plain["calls"] else 0.0
        return Stats(**plain, mean_batch=mean_batch, servers=self.servers, privacy=self.privacy, epsilon=self.epsilon)

    def __add__(self, other: Stats) -> Stats:
        """The sums of both."""
        return self - (Stats() - other)

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) pairs, formatted for people."""
        parts = ("local", "serialise", "network", "queue", "compute", *(["retry"] if self.retries else []))
        split = [(name, getattr(self, f"{name}_s")) for name in parts]
        uncertain = [state for state in self.servers if len(self.servers) > 1 or not state.up]
        return [
            ("calls", f"{self.calls:,}"),
            ("tokens", f"{self.model_tokens:,} through the model, {self.tokens:,} in all calls"),
            ("sent", f"{self.bytes_out / 1e6:,.1f} MB"),
            ("received", f"{self.bytes_in / 1e6:,.1f} MB"),
            *([("transport", ", ".join(sorted({state.transport for state in self.servers})))] if self.servers else []),
            ("mean batch", f"{self.mean_batch:.2f} requests"),
            *([("retries", f"{self.retries:,}")] if self.retries else []),
            *((state.url, str(state)) for state in uncertain),
            ("wall", f"{self.wall_s:.3f} s"),
            *((name, f"{s:.3f} s  {100 * s / self.wall_s if self.wall_s else 0:5.1f}%") for name, s in split),
            *([("epsilon", str(self.epsilon))] if self.epsilon else []),
            *self.privacy,
        ]

    def __str__(self) -> str:
        width = 18 if self.privacy else 11
        return "\n".join(f"{label:<{width}}{value}" for label, value in self.rows())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # what IPython shows of it

    def _repr_html_(self) -> str:
        return html_table(self.rows())


class Recorder:
    """Adds CallEvents up; safe to feed from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self._calls = self._tokens = self._bytes_out = self._bytes_in = self._batch_requests = self._retries = 0
            self._serialise_s = self._network_s = self._queue_s = self._compute_s = self._busy_s = self._retry_s = 0.0
            self._first_s = self._last_s = 0.0
            self._epsilon: Epsilon | None = None
            self._tokens_by_module: dict[str, int] = {}
            self._latest: deque[tuple[float, float]] = deque(maxlen=64)  # what a call that ends now may overlap

    def record(self, event: Event) -> None:
        """Add a call; of a step, keep what it says of privacy."""
        if not isinstance(event, CallEvent):
            self._epsilon = event.epsilon or self._epsilon
            return
        with self._lock:
            if not self._calls:
                self._first_s = self._last_s = event.started_s
            self._first_s = min(self._first_s, event.started_s)
            self._last_s = max(self._last_s, event.ended_s)
            self._calls += 1
            self._tokens += event.tokens
            self._bytes_out += event.bytes_out
            self._bytes_in += event.bytes_in
            self._batch_requests += event.batch_requests
            self._serialise_s += event.serialise_s
            self._network_s += event.network_s
            self._queue_s += event.queue_s
            self._compute_s += event.compute_s
            self._retries += event.retries
            self._retry_s += event.retry_s
            self._add_busy(event.started_s, event.ended_s)
            if event.op in FORWARD_OPS and event.modules:
                last = event.modules[-1]  # not the first: several segments may begin with the same norm
                self._tokens_by_module[last] = self._tokens_by_module.get(last, 0) + event.tokens

    def _add_busy(self, start_s: float, end_s: float) -> None:
        """Overlapping calls of several threads count once towards the time spent in calls."""
        while self._latest and self._latest[-1][1] >= start_s:
            start, end = self._latest.pop()
            self._busy_s -= end - start
            start_s, end_s = min(start, start_s), max(end, end_s)
        self._latest.append((start_s, end_s))
        self._busy_s += end_s - start_s

    def stats(self) -> Stats:
        with self._lock:
            wall_s = self._last_s - self._first_s
            return Stats(
                calls=self._calls,
                tokens=self._tokens,
                bytes_out=self._bytes_out,
                bytes_in=self._bytes_in,
                wall_s=wall_s,
                local_s=max(0.0, wall_s - self._busy_s),
                serialise_s=self._serialise_s,
                network_s=self._network_s,
                queue_s=self._queue_s,
                compute_s=self._compute_s,
                retry_s=self._retry_s,
                retries=self._retries,
                mean_batch=self._batch_requests / self._calls if self._calls else 0.0,
                # A token passes each module once: the busiest has seen them all.
                model_tokens=max(self._tokens_by_module.values(), default=0),
                epsilon=self._epsilon,
            )
