"""Shares: masks whose effect is computed at the same time as the call, for when nothing can be prepared.

    x = (x + n) + (-n)        x + n goes to one server, the seed of n to the other, at once; the results are added

One rule: it takes the place of a Pool, and deals the same masks. Each server sees one share of a row, and a share
tells nothing without the other; but now both are needed at every call, and the slower one sets the pace.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import torch

from symbiosis.errors import ClosedError, DeadlineExceededError
from symbiosis.privacy.dealer import Key, PoolStats, Source
from symbiosis.privacy.draws import Grid, draw, fresh_seed


class Share:
    """Rows of masks [rows, d], and their effects [rows, d'], which may still be under way."""

    def __init__(self, masks: torch.Tensor, effects: Future[torch.Tensor], timeout_s: float) -> None:
        self.masks = masks
        self._effects = effects
        self._timeout_s = timeout_s

    @property
    def effects(self) -> torch.Tensor:
        try:
            return self._effects.result(self._timeout_s)
        except FutureTimeoutError as error:
            if self._effects.done():  # the server's own: it says more
                raise
            raise DeadlineExceededError(
                f"the second server gave no share within {self._timeout_s:g} s; request_timeout_s sets the limit"
            ) from error


class Shares:
    """Deals masks as a Pool does, without keeping any.

    Args:
        source: the second server.
        grid: what masks are drawn from.
        timeout_s: how long a share may take.
    """

    def __init__(self, source: Source, grid: Grid, timeout_s: float) -> None:
        self._source = source
        self.grid = grid
        self._timeout_s = timeout_s
        self._closed = False
        self._taken = 0

    def take(self, key: Key, rows: int, width: int) -> Share:
        """Rows of fresh masks; their effects are asked for, and not waited for."""
        if self._closed:
            raise ClosedError("the connection was closed")
        at_once = self._source.rows_at_once(key.op, key.modules, self.grid.dtype)
        parts = [(fresh_seed(), min(at_once, rows - start)) for start in range(0, rows, at_once)]
        future: Future[torch.Tensor] = Future()
        threading.Thread(target=self._ask, args=(key, parts, future), name="symbiosis-share", daemon=True).start()
        self._taken += rows
        masks = torch.cat([draw(seed, count, width, self.grid) for seed, count in parts])
        return Share(masks, future, self._timeout_s)

    def stats(self) -> PoolStats:
        return PoolStats(0, 0, self._taken, self._taken, 0.0, 0, 0.0)

    def close(self) -> None:
        self._closed = True

    def _ask(self, key: Key, parts: list[tuple[bytes, int]], future: Future[torch.Tensor]) -> None:
        try:
            effects = [self._source.effect(key.op, key.modules, seed, rows, self.grid.dtype) for seed, rows in parts]
            future.set_result(torch.cat(effects))
        except BaseException as error:
            future.set_exception(error)
