"""Pool: masks and their effects, dealt ahead of time by a server that sees nothing else.

    here     seed ──▶ mask n [rows, d]                   drawn from the seed, on both sides
    dealer   seed ──▶ n ──▶ n Wᵀ [rows, d']              the effect

One rule: each row of a mask is handed out once. An empty pool makes its caller wait, or fails; it never hands
out a row twice, and what is not masked is never sent.

A key (operation and modules) is refilled once it has been used twice: calls that are made only once, while the
layers that share an input are being found out, shall not fill the pool. The key that waited longest since its
last use is refilled first, for layers are used in turn.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch

from symbiosis.errors import ClosedError, DeadlineExceededError, MasksExhaustedError, SymbiosisError
from symbiosis.privacy.draws import Grid, draw, fresh_seed

FEWEST_ROWS = 64  # dealt at once, where a call takes few: a call to the dealer costs as much for one row
STALE_ROUNDS = 4  # a key that was not used while all others were used so often gives its masks away


class Source(Protocol):
    """A server that draws masks; a Caller is one."""

    def effect(self, op: str, modules: Sequence[str], seed: bytes, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """What an operation gives for the mask [rows, d] of a seed: [rows, d']."""

    def rows_at_once(self, op: str, modules: Sequence[str], dtype: torch.dtype) -> int:
        """Most rows of one call."""


class Key(NamedTuple):
    """What masks are for: their effect depends on it."""

    op: str
    modules: tuple[str, ...]


class Masks(NamedTuple):
    """Rows of masks [rows, d], in whole numbers, and their effects [rows, d']."""

    masks: torch.Tensor
    effects: torch.Tensor

    @property
    def rows(self) -> int:
        return self.masks.shape[0]

    @property
    def nbytes(self) -> int:
        return self.rows * self.masks.element_size() * (self.masks.shape[1] + self.effects.shape[1])

    def split(self, rows: int) -> tuple[Masks, Masks]:
        return Masks(self.masks[:rows], self.effects[:rows]), Masks(self.masks[rows:], self.effects[rows:])


@dataclass
class _Shelf:
    """The masks of one key."""

    width: int
    chunks: deque[Masks] = field(default_factory=deque)
    rows: int = 0
    wanted: int = 0  # rows that somebody waits for
    target: int = FEWEST_ROWS
    uses: int = 0
    last_use: int = 0
    row_bytes: int = 0
    error: SymbiosisError | None = None

    def take(self, rows: int) -> Masks:
        taken: list[Masks] = []
        while rows:
            chunk = self.chunks.popleft()
            if chunk.rows > rows:
                chunk, rest = chunk.split(rows)
                self.chunks.appendleft(rest)
            taken.append(chunk)
            rows -= chunk.rows
            self.rows -= chunk.rows
        if len(taken) == 1:
            return taken[0]
        return Masks(torch.cat([chunk.masks for chunk in taken]), torch.cat([chunk.effects for chunk in taken]))


@dataclass(frozen=True)
class PoolStats:
    """How a pool is doing. Rates are rows a second of dealing.

    Attributes:
        wanted_rows: what would be ahead if all that is refilled were full; pool_bytes may allow less.
        state: whether more is being dealt, or was until the dealer failed.
    """

    rows: int
    nbytes: int
    dealt_rows: int
    taken_rows: int
    rows_per_s: float
    waits: int
    waited_s: float
    wanted_rows: int = 0
    state: Literal["idle", "dealing", "failed", "closed"] = "idle"

    def rows_of_text(self) -> list[tuple[str, str]]:
        """(label, value) pairs, formatted for people."""
        return [
            ("masks ahead", f"{self.rows:,} of {self.wanted_rows:,} rows, {self.nbytes / 1e6:,.1f} MB"),
            ("dealt", f"{self.dealt_rows:,} rows, {self.rows_per_s:,.0f} rows/s"),
            ("used", f"{self.taken_rows:,} rows"),
            ("waits", f"{self.waits:,}, {self.waited_s:.3f} s"),
        ]


class Pool:
    """Masks ahead of time, refilled by a thread of its own.

    Args:
        source: the dealer.
        grid: what masks are drawn from.
        limit_bytes: most bytes that are kept ahead; what somebody waits for is dealt in any case.
        timeout_s: how long `take` waits.
        when_empty: "wait", or "raise": a key's first two calls wait in any case.
    """

    def __init__(
        self,
        source: Source,
        grid: Grid,
        limit_bytes: int,
        timeout_s: float,
        when_empty: Literal["wait", "raise"] = "wait",
    ) -> None:
        self._source = source
        self.grid = grid
        self._limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._when_empty = when_empty
        self._shelves: dict[Key, _Shelf] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._paused = self._closed = self._busy = False
        self._takes = self._nbytes = self._dealt = self._taken = self._waits = 0
        self._waited_s = self._dealing_s = 0.0

    def take(self, key: Key, rows: int, width: int) -> Masks:
        """Rows of masks [rows, width] that nobody got before.

        Raises:
            MasksExhaustedError: there are too few, and `when_empty` is "raise".
            DeadlineExceededError: they were not dealt in time.
            SymbiosisError: what the dealer said.
        """
        with self._changed:
            shelf = self._shelves.setdefault(key, _Shelf(width))
            self._use(shelf, rows)
            if shelf.rows < rows:
                self._wait(key, shelf, rows)
            taken = shelf.take(rows)
            self._nbytes -= taken.nbytes
            self._taken += rows
            self._changed.notify_all()
            return taken

    def stats(self) -> PoolStats:
        with self._changed:
            rate = self._dealt / self._dealing_s if self._dealing_s else 0.0
            rows = sum(shelf.rows for shelf in self._shelves.values())
            wanted = sum(shelf.target for _, shelf in self._refilled())
            return PoolStats(
                rows, self._nbytes, self._dealt, self._taken, rate, self._waits, self._waited_s, wanted, self._state()
            )

    def close(self) -> None:
        """Stop dealing; the masks are thrown away."""
        with self._changed:
            self._closed = True
            self._shelves.clear()
            self._changed.notify_all()

    def _state(self) -> Literal["idle", "dealing", "failed", "closed"]:
        if self._closed:
            return "closed"
        return "failed" if self._paused else "dealing" if self._busy else "idle"

    # --- taking -----------------------------------------------------------------------------------

    def _use(self, shelf: _Shelf, rows: int) -> None:
        self._takes += 1
        shelf.uses += 1
        shelf.last_use = self._takes
        shelf.target = max(FEWEST_ROWS, 2 * rows)
        self._paused, self._busy = False, True  # until the thread has looked
        if self._thread is None:
            self._thread = threading.Thread(target=self._deal, name="symbiosis-masks", daemon=True)
            self._thread.start()

    def _wait(self, key: Key, shelf: _Shelf, rows: int) -> None:
        if self._when_empty == "raise" and shelf.uses > 2:
            self._changed.notify_all()
            raise MasksExhaustedError(
                f"{rows:,} rows of masks are needed for {key.op} of {', '.join(key.modules)} and {shelf.rows:,} are "
                "there; wait a little and repeat the call, or use Masking(when_empty='wait')"
            )
        started_s = time.monotonic()
        shelf.wanted += rows
        self._changed.notify_all()
        try:
            ready = self._changed.wait_for(
                lambda: self._closed or shelf.error is not None or shelf.rows >= rows, self._timeout_s
            )
        finally:
            shelf.wanted -= rows
            self._waits += 1
            self._waited_s += time.monotonic() - started_s
        error, shelf.error = shelf.error, None
        if error is not None:
            raise error
        if self._closed:
            raise ClosedError("the connection was closed while a call waited for masks")
        if not ready:
            raise DeadlineExceededError(
                f"the dealer gave no {rows:,} rows of masks for {key.op} of {', '.join(key.modules)} within "
                f"{self._timeout_s:g} s; request_timeout_s sets the limit"
            )

    # --- dealing ----------------------------------------------------------------------------------

    def _deal(self) -> None:
        while True:
            with self._changed:
                while (job := self._next()) is None and not self._closed:
                    self._busy = False
                    self._changed.wait()
            if job is None:
                return
            self._deal_one(*job)

    def _deal_one(self, key: Key, shelf: _Shelf, rows: int) -> None:
        started_s = time.monotonic()
        try:
            rows = min(rows, self._source.rows_at_once(key.op, key.modules, self.grid.dtype))
            seed = fresh_seed()
            effects = self._source.effect(key.op, key.modules, seed, rows, self.grid.dtype)
            dealt = Masks(draw(seed, rows, shelf.width, self.grid), effects)
        except SymbiosisError as error:
            with self._changed:
                shelf.error = error if shelf.wanted else None
                self._paused = True  # until somebody asks again: a dealer that is gone is not called in a loop
                self._changed.notify_all()
            return
        with self._changed:
            shelf.chunks.append(dealt)
            shelf.rows += rows
            shelf.row_bytes = dealt.nbytes // rows
            self._nbytes += dealt.nbytes
            self._dealt += rows
            self._dealing_s += time.monotonic() - started_s
            self._changed.notify_all()

    def _next(self) -> tuple[Key, _Shelf, int] | None:
        """What to deal next: what somebody waits for, else what is low and fits."""
        if self._closed:
            return None
        for key, shelf in self._shelves.items():
            if shelf.wanted > shelf.rows and shelf.error is None:
                return key, shelf, max(shelf.wanted - shelf.rows, FEWEST_ROWS if shelf.uses > 1 else 0)
        low = [(s.last_use, key, s) for key, s in self._refilled() if 2 * s.rows <= s.target]
        if not low or self._paused:
            return None
        _, key, shelf = min(low, key=lambda item: item[0])
        missing = shelf.target - shelf.rows
        rows = min(missing, (self._limit_bytes - self._nbytes) // shelf.row_bytes)
        if rows < min(missing, FEWEST_ROWS):
            return (key, shelf, FEWEST_ROWS) if self._free_stale() else None
        return key, shelf, rows

    def _refilled(self) -> list[tuple[Key, _Shelf]]:
        """Not what is stale: it would be dealt, thrown away for others and dealt again, without end."""
        return [(key, s) for key, s in self._shelves.items() if s.uses > 1 and s.last_use >= self._stale_before]

    @property
    def _stale_before(self) -> int:
        return self._takes - STALE_ROUNDS * len(self._shelves)

    def _free_stale(self) -> bool:
        """Throw away masks of keys that are no longer used; True if there were any."""
        stale = [shelf for shelf in self._shelves.values() if shelf.rows and shelf.last_use < self._stale_before]
        for shelf in stale:
            self._nbytes -= sum(chunk.nbytes for chunk in shelf.chunks)
            shelf.chunks.clear()
            shelf.rows = 0
        return bool(stale)
