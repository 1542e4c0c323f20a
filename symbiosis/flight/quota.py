"""How much a tenant may use: tokens and bytes per second, calls at once.

One rule: policy only. No clock is read but the one given, and nothing waits here: what is over a quota is refused at
once, with the time after which it would be admitted.

A call larger than a second's worth must be possible, so a bucket may go into debt: a call is admitted while anything is
left, and the debt delays the next one. Over time the rate holds. Rejected: waiting inside the server, which would keep
a thread and the request's memory for whoever asks for too much.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from symbiosis.errors import QuotaExceededError

BURST_S = 2.0  # what an idle tenant has saved up, in seconds of its rate
CONCURRENT_RETRY_S = 0.1

Rate = Annotated[float, Meta(gt=0)]


class Quota(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of one tenant; None is no limit."""

    tokens_per_s: Rate | None = None
    bytes_per_s: Rate | None = None
    concurrent_calls: Annotated[int, Meta(ge=1)] | None = None


class Bucket:
    """Tokens or bytes that flow in at a rate; not safe for threads by itself."""

    def __init__(self, rate: float, now_s: float) -> None:
        self.rate = rate
        self._level = rate * BURST_S
        self._now_s = now_s

    def wait_s(self, now_s: float) -> float:
        """How long until anything may be taken; 0 if now."""
        self._level = min(self.rate * BURST_S, self._level + self.rate * max(0.0, now_s - self._now_s))
        self._now_s = now_s
        return 0.0 if self._level > 0 else -self._level / self.rate + 1e-3

    def take(self, amount: float) -> None:
        self._level -= amount


class Meter:
    """What one tenant uses, held against its quota.

    Args:
        clock: seconds; only differences count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, Bucket] = {}
        self._calls = 0

    def enter(self, quota: Quota, tokens: int, nbytes: int) -> None:
        """Admit a call; `leave` must follow.

        Raises:
            QuotaExceededError: with retry_after_s.
        """
        rates = {"tokens": quota.tokens_per_s, "bytes": quota.bytes_per_s}
        with self._lock:
            if quota.concurrent_calls is not None and self._calls >= quota.concurrent_calls:
                raise QuotaExceededError(
                    f"{self._calls} calls are under way, the quota is {quota.concurrent_calls} at once; lower "
                    "max_streams, or ask the operator for more",
                    retry_after_s=CONCURRENT_RETRY_S,
                )
            buckets = {unit: self._bucket(unit, rate) for unit, rate in rates.items() if rate is not None}
            for unit, bucket in buckets.items():
                self._check(unit, bucket)
            for unit, bucket in buckets.items():
                bucket.take(tokens if unit == "tokens" else nbytes)
            self._calls += 1

    def leave(self, nbytes: int) -> None:
        """A call is done; its reply counts, too."""
        with self._lock:
            self._calls -= 1
            if "bytes" in self._buckets:
                self._buckets["bytes"].take(nbytes)

    def _bucket(self, unit: str, rate: float) -> Bucket:
        bucket = self._buckets.get(unit)
        if bucket is None or bucket.rate != rate:  # the first call, or the operator changed the quota
            bucket = self._buckets[unit] = Bucket(rate, self._clock())
        return bucket

    def _check(self, unit: str, bucket: Bucket) -> None:
        wait_s = bucket.wait_s(self._clock())
        if wait_s:
            raise QuotaExceededError(
                f"the quota of {bucket.rate:,.0f} {unit} per second is used up; retry in {wait_s:.3f} s, send less, or "
                "ask the operator for more",
                retry_after_s=wait_s,
            )
