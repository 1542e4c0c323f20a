"""Which requests are computed together, and when: Task, Batch, Scheduler.

One rule: policy only. No tensors are touched and no clock is read but the one given, so every decision
can be tested without a model or a thread. The unit of batching is one key: the same
modules, op and dtype, whoever asks and in whatever phase they are.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from symbiosis.errors import MessageTooLargeError, ServerBusyError
from symbiosis.flight.rendezvous import Rendezvous

RETRY_AFTER_S = 0.2
_order = itertools.count()


class Key(NamedTuple):
    """What has to be equal for two requests to share a batch."""

    op: str
    modules: tuple[str, ...]
    dtype: str
    steps: tuple[Hashable, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(eq=False)
class Task:
    """One request, decoded and checked, and the future of its result.

    `deadline_s` is a reading of the scheduler's clock; `client` names one loop of calls, `tenant` whose it is (empty
    where the server asks for no tokens); `held_s` is how long it waited while the device was free.
    """

    key: Key
    tokens: int
    nbytes: int
    tensors: list[Any]
    client: str = ""
    tenant: str = ""
    enqueued_s: float = 0.0
    deadline_s: float = float("inf")
    busy_mark_s: float = 0.0
    held_s: float = 0.0
    order: int = field(default_factory=lambda: next(_order))
    result: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True)
class Batch:
    """Tasks of one key, to be computed as one."""

    key: Key
    tasks: tuple[Task, ...]

    @property
    def tokens(self) -> int:
        return sum(task.tokens for task in self.tasks)


def form_batch(queue: Iterable[Task], max_tokens: int) -> tuple[Task, ...]:
    """The longest prefix of a queue within max_tokens; the first task always, however large."""
    chosen: list[Task] = []
    tokens = 0
    for task in queue:
        if chosen and tokens + task.tokens > max_tokens:
            break
        chosen.append(task)
        tokens += task.tokens
    return tuple(chosen)


class Scheduler:
    """Queues by key; hands out the batch whose oldest task has waited longest, unless waiting pays.

    Args:
        max_batch_tokens: most tokens computed together; one larger request still runs alone.
        max_queue_bytes: most bytes of input waiting; more is refused with ServerBusyError.
        max_wait_s: longest time that a task is held for another client (see `rendezvous`).
        clock: seconds, on the scale of `Task.enqueued_s`.
    """

    def __init__(
        self,
        *,
        max_batch_tokens: int = 8192,
        max_queue_bytes: int = 1 << 30,
        max_wait_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.max_batch_tokens = max_batch_tokens
        self.max_queue_bytes = max_queue_bytes
        self._clock = clock
        self._rendezvous = Rendezvous(max_wait_s)
        self._busy_s = 0.0  # how long the device computed, in all
        self._queues: dict[Key, deque[Task]] = {}
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._closed = False

    def submit(self, task: Task) -> None:
        """Queue a task.

        Raises:
            MessageTooLargeError: it could never be queued.
            ServerBusyError: the queue is full, or the scheduler is closed.
        """
        with self._changed:
            self._admit(task)
            self._queues.setdefault(task.key, deque()).append(task)
            self._queued_bytes += task.nbytes
            task.busy_mark_s = self._busy_s
            self._rendezvous.arrived(task.client, task.key, task.tokens, task.enqueued_s)
            self._changed.notify()

    def next_batch(self, timeout_s: float | None = None) -> Batch | None:
        """Wait for work and take a batch; None when closed and empty, or after timeout_s."""
        with self._changed:
            self._changed.wait_for(lambda: self._queues or self._closed, timeout_s)
            if not self._queues:
                return None
            return self._take(self._choose())

    def done(self, batch: Batch, compute_s: float) -> None:
        """Tell how long a batch took; being held is paid from what sharing saves."""
        with self._changed:
            self._busy_s += compute_s
            self._rendezvous.ran(batch.key, {task.client: task.held_s for task in batch.tasks}, compute_s)

    def _choose(self) -> Key:
        """The key to run next, once it is worth running."""
        while True:
            now_s = self._clock()
            waiting = {key: {task.client for task in self._queues[key]} for key in self._ordered()}
            key, wait_s = self._rendezvous.choose(waiting, self._queues[next(iter(waiting))][0].enqueued_s, now_s)
            if wait_s <= 0 or self._closed:
                return key
            self._changed.wait(wait_s)

    def _ordered(self) -> list[Key]:
        return sorted(self._queues, key=lambda key: self._queues[key][0].order)

    def close(self) -> None:
        """Refuse new tasks; what is queued is still handed out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def queued(self) -> int:
        with self._changed:
            return sum(map(len, self._queues.values()))

    def _admit(self, task: Task) -> None:
        if self._closed:
            raise ServerBusyError("the server is draining and takes no new calls", retry_after_s=1.0)
        if task.nbytes > self.max_queue_bytes:
            raise MessageTooLargeError(
                f"request of {task.nbytes:,} bytes exceeds the server's queue of {self.max_queue_bytes:,}"
            )
        if self._queued_bytes + task.nbytes > self.max_queue_bytes:
            raise ServerBusyError(
                f"queue is full: {self._queued_bytes:,} of {self.max_queue_bytes:,} bytes wait; "
                f"retry in {RETRY_AFTER_S} s",
                retry_after_s=RETRY_AFTER_S,
            )

    def _take(self, key: Key) -> Batch:
        queue = self._queues[key]
        tasks = form_batch(queue, self.max_batch_tokens)
        now_s = self._clock()
        for task in tasks:
            queue.popleft()
            self._queued_bytes -= task.nbytes
            task.held_s = max(0.0, now_s - task.enqueued_s - (self._busy_s - task.busy_mark_s))
        if not queue:
            del self._queues[key]
        return Batch(key, tasks)
