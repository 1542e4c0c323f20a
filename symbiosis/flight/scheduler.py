"""Which requests are computed together, and when: Task, Batch, Scheduler.

One rule: policy only. No tensors are touched and no clock is read but the one passed in, so every
decision can be tested without a model or a thread. The unit of batching is one key: the same
modules, op and dtype, whoever asks and in whatever phase they are.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from symbiosis.errors import MessageTooLargeError, ServerBusyError

RETRY_AFTER_S = 0.2
_order = itertools.count()


class Key(NamedTuple):
    """What has to be equal for two requests to share a batch."""

    op: str
    modules: tuple[str, ...]
    dtype: str


@dataclass(eq=False)
class Task:
    """One request, decoded and checked, and the future of its result.

    `deadline_s` is a reading of the scheduler's clock; `client` names whose turn it is.
    """

    key: Key
    tokens: int
    nbytes: int
    tensors: list[Any]
    client: str = ""
    enqueued_s: float = 0.0
    deadline_s: float = float("inf")
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
    """Queues by key; hands out the batch whose oldest task has waited longest.

    Args:
        max_batch_tokens: most tokens computed together; one larger request still runs alone.
        max_queue_bytes: most bytes of input waiting; more is refused with ServerBusyError.
    """

    def __init__(self, *, max_batch_tokens: int = 8192, max_queue_bytes: int = 1 << 30) -> None:
        self.max_batch_tokens = max_batch_tokens
        self.max_queue_bytes = max_queue_bytes
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
            self._changed.notify()

    def next_batch(self, timeout_s: float | None = None) -> Batch | None:
        """Wait for work and take a batch; None when closed and empty, or after timeout_s."""
        with self._changed:
            self._changed.wait_for(lambda: self._queues or self._closed, timeout_s)
            if not self._queues:
                return None
            key = min(self._queues, key=lambda k: self._queues[k][0].order)
            return self._take(key)

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
        for task in tasks:
            queue.popleft()
            self._queued_bytes -= task.nbytes
        if not queue:
            del self._queues[key]
        return Batch(key, tasks)
