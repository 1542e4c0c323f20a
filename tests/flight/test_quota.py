"""Quotas: what is admitted, what is refused, and for how long. On a clock that stands still unless it is moved."""

from __future__ import annotations

import pytest

from symbiosis.errors import QuotaExceededError
from symbiosis.flight.quota import BURST_S, Meter, Quota


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run(meter: Meter, quota: Quota, tokens: int = 1, nbytes: int = 0, reply_bytes: int = 0) -> None:
    meter.enter(quota, tokens, nbytes)
    meter.leave(reply_bytes)


def retry_after_s(meter: Meter, quota: Quota) -> float:
    with pytest.raises(QuotaExceededError) as caught:
        meter.enter(quota, 1, 1)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def test_without_limits_everything_is_admitted(clock: Clock) -> None:
    meter = Meter(clock)
    for _ in range(100):
        run(meter, Quota(), 10**9, 10**12)


def test_over_time_the_rate_holds_whatever_the_size_of_calls(clock: Clock) -> None:
    meter, quota = Meter(clock), Quota(tokens_per_s=100)
    admitted = 0
    for step in range(4000):  # 40 s, in calls of 7, 31 or 470 tokens as fast as they are admitted
        clock.now_s += 0.01
        try:
            size = (7, 31, 470)[step % 3]
            run(meter, quota, size)
            admitted += size
        except QuotaExceededError:
            pass
    assert admitted == pytest.approx(100 * (40 + BURST_S), abs=470)


def test_after_the_time_that_a_refusal_names_a_call_is_admitted(clock: Clock) -> None:
    meter, quota = Meter(clock), Quota(tokens_per_s=10)
    run(meter, quota, 500)

    wait_s = retry_after_s(meter, quota)
    clock.now_s += wait_s - 0.1
    assert retry_after_s(meter, quota) == pytest.approx(0.1, abs=0.01)
    clock.now_s += 0.11
    run(meter, quota)


def test_replies_count_as_bytes(clock: Clock) -> None:
    meter, quota = Meter(clock), Quota(bytes_per_s=1000)
    run(meter, quota, nbytes=500, reply_bytes=11_500)

    assert retry_after_s(meter, quota) == pytest.approx(10, abs=0.1)


def test_calls_at_once_are_limited_and_leave_their_place(clock: Clock) -> None:
    meter, quota = Meter(clock), Quota(concurrent_calls=2)
    meter.enter(quota, 1, 1)
    meter.enter(quota, 1, 1)

    assert retry_after_s(meter, quota) > 0
    meter.leave(0)
    meter.enter(quota, 1, 1)


def test_a_call_over_one_limit_uses_up_nothing_of_another(clock: Clock) -> None:
    meter, quota = Meter(clock), Quota(tokens_per_s=10, bytes_per_s=10)
    run(meter, quota, tokens=1, nbytes=1000)
    for _ in range(50):
        retry_after_s(meter, quota)
    clock.now_s += 99

    run(meter, quota, tokens=19)  # all but one of what the tokens' bucket holds
    run(meter, quota, tokens=1)


def test_a_changed_quota_counts_at_once(clock: Clock) -> None:
    meter = Meter(clock)
    run(meter, Quota(tokens_per_s=1), 1000)

    run(meter, Quota(tokens_per_s=2000), 1000)
