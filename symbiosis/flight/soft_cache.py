"""SoftCache: what a forward computed on the way, kept for the gradient that may follow.

One rule: nothing depends on it. What was evicted, or never kept, is computed again from inputs that the client sends
once more, with the same result.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

from symbiosis.flight.scheduler import CallKey


@dataclass(frozen=True)
class Kept:
    """Inputs of a segment, and the products of its linears in the order in which they are computed; each [N, d]."""

    steps: tuple[object, ...] = ()
    inputs: tuple[torch.Tensor, ...] = ()
    products: tuple[torch.Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.inputs, *self.products))


class SoftCache:
    """What calls computed, by call, within a limit of bytes; the oldest goes first. For any thread.

    Args:
        max_bytes: the limit; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._entries: OrderedDict[CallKey, Kept] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: CallKey, kept: Kept) -> None:
        """Keep what a call computed, unless it alone is above the limit."""
        if kept.nbytes > self.max_bytes:
            return
        with self._lock:
            self._drop(key)
            self._entries[key] = kept
            self.nbytes += kept.nbytes
            while self.nbytes > self.max_bytes:
                self._drop(next(iter(self._entries)))

    def take(self, key: CallKey) -> Kept | None:
        """What a call computed, which is then no longer kept; None if it is not here."""
        with self._lock:
            return self._drop(key)

    def _drop(self, key: CallKey) -> Kept | None:
        kept = self._entries.pop(key, None)
        self.nbytes -= kept.nbytes if kept else 0
        return kept
