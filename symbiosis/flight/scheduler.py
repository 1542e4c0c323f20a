"""Which requests are computed together, and when: Task, Batch, Scheduler.

Three policies meet here, in this order: who is due (`shares`), small requests before large ones, and whom
waiting pays for (`rendezvous`).

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
from symbiosis.flight.shares import SMALL_TOKENS, Shares

RETRY_AFTER_S = 0.2
LONGEST_RETRY_AFTER_S = 5.0
SLICE_S = 0.004  # how long a large batch may keep a small request waiting
MIN_SLICE_TOKENS = 64  # products of fewer rows cost more by the row
SMALL_SEEN_S = 10.0  # after the last small request, large batches are sliced for this long
MAX_KEYS = 10_000  # keys hold what clients choose
_order = itertools.count()


@dataclass(frozen=True)
class Key:
    """What has to be equal for two requests to share a batch; hashed once, as it is looked up a dozen times a call."""

    op: str
    modules: tuple[str, ...]
    dtype: str
    steps: tuple[Hashable, ...] = ()
    outputs: tuple[int, ...] = ()
    wrt: tuple[int, ...] = ()
    products: int = 0  # how many of a gradient's tensors are products that were kept
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = (self.op, self.modules, self.dtype, self.steps, self.outputs, self.wrt, self.products)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash


class CallKey(NamedTuple):
    """One call of one connection."""

    connection: str
    call_id: int


@dataclass(eq=False)
class Task:
    """One request, decoded and checked, and the future of its result.

    `deadline_s` is a reading of the scheduler's clock; `client` names one loop of calls, `tenant` whose it is (empty
    where the server asks for no tokens); `keep` is the name under which to keep what is computed on the way, None to
    keep nothing; `borrowed` tensors change once the reply is sent; `held_s` is how long it waited while the device was
    free.
    """

    key: Key
    tokens: int
    nbytes: int
    tensors: list[Any]
    borrowed: bool = False
    client: str = ""
    tenant: str = ""
    keep: CallKey | None = None
    enqueued_s: float = 0.0
    deadline_s: float = float("inf")
    busy_mark_s: float = 0.0
    held_s: float = 0.0
    order: int = field(default_factory=lambda: next(_order))
    result: Future[Any] = field(default_factory=Future)

    @property
    def small(self) -> bool:
        return self.tokens <= SMALL_TOKENS

    @property
    def account(self) -> str:
        """Whose share it is taken from."""
        return self.tenant or self.client


@dataclass(frozen=True)
class Batch:
    """Tasks of one key, to be computed as one."""

    key: Key
    tasks: tuple[Task, ...]

    @property
    def tokens(self) -> int:
        return sum(task.tokens for task in self.tasks)

    @property
    def small(self) -> bool:
        return all(task.small for task in self.tasks)


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
        max_queue_tokens: most tokens waiting; more is refused as well.
        max_wait_s: longest time that a task is held for another client (see `rendezvous`).
        weight_of: an account's share of the device, relative to others (see `shares`).
        clock: seconds, on the scale of `Task.enqueued_s`.
    """

    def __init__(
        self,
        *,
        max_batch_tokens: int = 8192,
        max_queue_bytes: int = 1 << 30,
        max_queue_tokens: int = 1 << 20,
        max_wait_s: float = 0.0,
        weight_of: Callable[[str], float] = lambda account: 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._rendezvous = Rendezvous(max_wait_s)
        self._shares = Shares(max_batch_tokens, weight_of)
        self._pace_s: dict[Key, float] = {}  # seconds per token, of the latest batch
        self._small_seen_s = float("-inf")
        self._busy_s = 0.0  # how long the device computed, in all
        self._queues: dict[Key, deque[Task]] = {}
        self._waiting: dict[str, int] = {}  # account -> tasks in the queues
        self._queued_bytes = self._queued_tokens = 0
        self._changed = threading.Condition()
        self._closed = False
        self.set_limits(max_batch_tokens, max_queue_bytes, max_queue_tokens, max_wait_s)

    def set_limits(self, max_batch_tokens: int, max_queue_bytes: int, max_queue_tokens: int, max_wait_s: float) -> None:
        """Replace the limits; what waits already stays, even where it is more than would be taken now."""
        with self._changed:
            self.max_batch_tokens = self._shares.slack_tokens = max_batch_tokens
            self.max_queue_bytes, self.max_queue_tokens = max_queue_bytes, max_queue_tokens
            self._rendezvous.max_wait_s = max_wait_s
            self._changed.notify_all()

    def submit(self, task: Task) -> None:
        """Queue a task.

        Raises:
            MessageTooLargeError: it could never be queued.
            ServerBusyError: the queue is full, or the scheduler is closed.
        """
        with self._changed:
            self._queue(task)
            self._changed.notify()

    def submit_or_take(self, task: Task) -> Batch | None:
        """Queue a task, unless nobody else is about whom it could wait for or ride with: then it is a batch already.

        Raises:
            MessageTooLargeError, ServerBusyError: as `submit`.
        """
        with self._changed:
            alone = not self._queues and self._rendezvous.is_alone(task.client, task.enqueued_s)
            self._queue(task)
            if alone:
                return self._take(task.key)
            self._changed.notify()
            return None

    def wait(self) -> bool:
        """Wait until a task is queued; False once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._queues or self._closed)
            return bool(self._queues)

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
            if len(self._pace_s) > MAX_KEYS:
                self._pace_s.clear()
            self._pace_s[batch.key] = compute_s / max(1, batch.tokens)
            self._rendezvous.ran(batch.key, {task.client: task.held_s for task in batch.tasks}, compute_s)

    def slice_tokens(self, key: Key) -> int | None:
        """How many tokens of a key may be computed without looking for small requests; None = any number."""
        if self._clock() - self._small_seen_s > SMALL_SEEN_S:
            return None
        pace_s = self._pace_s.get(key)
        return MIN_SLICE_TOKENS if pace_s is None else max(MIN_SLICE_TOKENS, int(SLICE_S / max(pace_s, 1e-9)))

    def next_small(self) -> Batch | None:
        """Small requests that are due, if any, to be computed between two slices of a large batch."""
        with self._changed:
            due = self._shares.due(self._waiting)
            keys = self._keys_of(self._ordered(), due, small=True)
            return self._take(keys[0], small_only=True) if keys else None

    def _choose(self) -> Key:
        """The key to run next, once it is worth running."""
        while True:
            now_s = self._clock()
            shortest_s = self._rendezvous.max_wait_s
            for keys in self._candidates():
                waiting = {key: {task.client for task in self._queues[key]} for key in keys}
                key, wait_s = self._rendezvous.choose(waiting, self._queues[keys[0]][0].enqueued_s, now_s)
                if wait_s <= 0 or self._closed:
                    return key
                shortest_s = min(shortest_s, wait_s)
            self._changed.wait(shortest_s)

    def _candidates(self) -> list[list[Key]]:
        """Keys that may run now, those to be preferred first; what waits for others must not keep the device idle."""
        keys = self._ordered()
        due = self._shares.due(self._waiting)
        ranks = [keys]
        if len(due) < len(self._waiting):
            ranks.append(self._keys_of(keys, due, small=False))
        if self._small_seen_s > float("-inf") and self._shares.small_first():
            ranks.append(self._keys_of(keys, due, small=True))
        return [rank for rank in reversed(ranks) if rank]

    def _ordered(self) -> list[Key]:
        return sorted(self._queues, key=lambda key: self._queues[key][0].order)

    def _keys_of(self, keys: list[Key], accounts: set[str], small: bool) -> list[Key]:
        """Keys that some of the accounts wait for, with small requests if told so."""
        return [
            key
            for key in keys
            if any(task.account in accounts and (task.small or not small) for task in self._queues[key])
        ]

    def close(self) -> None:
        """Refuse new tasks; what is queued is still handed out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def queued(self) -> int:
        with self._changed:
            return sum(map(len, self._queues.values()))

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    @property
    def queued_tokens(self) -> int:
        return self._queued_tokens

    def _queue(self, task: Task) -> None:
        self._admit(task)
        self._queues.setdefault(task.key, deque()).append(task)
        self._shares.arrived(task.account, self._waiting)
        self._waiting[task.account] = self._waiting.get(task.account, 0) + 1
        self._queued_bytes += task.nbytes
        self._queued_tokens += task.tokens
        if task.small:
            self._small_seen_s = task.enqueued_s
        task.busy_mark_s = self._busy_s
        self._rendezvous.arrived(task.client, task.key, task.tokens, task.enqueued_s)

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
                f"retry in {self._retry_after_s():.1f} s",
                retry_after_s=self._retry_after_s(),
            )
        if self._queued_tokens and self._queued_tokens + task.tokens > self.max_queue_tokens:
            raise ServerBusyError(
                f"queue is full: {self._queued_tokens:,} of {self.max_queue_tokens:,} tokens wait; "
                f"retry in {self._retry_after_s():.1f} s",
                retry_after_s=self._retry_after_s(),
            )

    def _retry_after_s(self) -> float:
        """About as long as half of what waits will take."""
        seconds = sum(
            self._pace_s.get(key, 0.0) * sum(task.tokens for task in queue) for key, queue in self._queues.items()
        )
        return min(LONGEST_RETRY_AFTER_S, max(RETRY_AFTER_S, seconds / 2))

    def _take(self, key: Key, small_only: bool = False) -> Batch:
        queue = self._queues[key]
        tasks = self._batch_of(queue, small_only)
        now_s = self._clock()
        taken = set(map(id, tasks))
        if len(tasks) == len(queue):
            queue.clear()
        else:
            self._queues[key] = queue = deque(task for task in queue if id(task) not in taken)
        for task in tasks:
            self._leave(task)
            task.held_s = max(0.0, now_s - task.enqueued_s - (self._busy_s - task.busy_mark_s))
        if not queue:
            del self._queues[key]
        batch = Batch(key, tasks)
        larger_wait = batch.small and any(not task.small for others in self._queues.values() for task in others)
        self._shares.ran(batch.small, larger_wait)
        return batch

    def _batch_of(self, queue: deque[Task], small_only: bool) -> tuple[Task, ...]:
        """Who is due first, and of these the small ones; in the order of arrival otherwise."""
        due, small_first = self._shares.due(self._waiting), self._shares.small_first()
        ranked = sorted(queue, key=lambda task: (task.account not in due, small_first and not task.small))
        limit = self.max_batch_tokens
        if ranked[0].small and (slice_tokens := self.slice_tokens(ranked[0].key)) is not None:
            limit = min(limit, slice_tokens)  # a small request rides with others only as far as that is quick
        return form_batch((task for task in ranked if task.small or not small_only), limit)

    def _leave(self, task: Task) -> None:
        self._queued_bytes -= task.nbytes
        self._queued_tokens -= task.tokens
        self._shares.served(task.account, task.tokens)
        self._waiting[task.account] -= 1
        if not self._waiting[task.account]:
            del self._waiting[task.account]
