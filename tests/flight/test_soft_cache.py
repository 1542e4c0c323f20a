"""SoftCache: bounded, oldest out first, everything at most once."""

from __future__ import annotations

import threading

import torch

from symbiosis.flight.scheduler import CallKey
from symbiosis.flight.soft_cache import Kept, SoftCache


def kept(rows: int = 1) -> Kept:
    return Kept(("step",), (torch.zeros(rows, 10),), (torch.zeros(rows, 15),))  # 100 bytes a row


def key(call_id: int, connection: str = "a") -> CallKey:
    return CallKey(connection, call_id)


def test_what_was_put_is_taken_once() -> None:
    cache, entry = SoftCache(1000), kept()
    cache.put(key(1), entry)

    assert cache.take(key(1, "b")) is None
    assert cache.nbytes == 100
    assert cache.take(key(1)) is entry
    assert cache.take(key(1)) is None
    assert cache.nbytes == 0


def test_the_oldest_goes_first() -> None:
    cache = SoftCache(300)
    for call_id in (1, 2, 3, 4):
        cache.put(key(call_id), kept())

    assert cache.nbytes == 300
    assert cache.take(key(1)) is None
    assert all(cache.take(key(call_id)) for call_id in (2, 3, 4))


def test_what_is_larger_than_the_limit_evicts_nothing() -> None:
    cache = SoftCache(300)
    cache.put(key(1), kept(3))
    cache.put(key(2), kept(4))

    assert cache.take(key(2)) is None
    assert cache.take(key(1)) is not None


def test_the_same_call_twice_counts_once() -> None:
    cache = SoftCache(300)
    cache.put(key(1), kept())
    cache.put(key(1), kept(2))

    assert cache.nbytes == 200


def test_a_limit_of_zero_keeps_nothing() -> None:
    cache = SoftCache(0)
    cache.put(key(1), kept())

    assert cache.take(key(1)) is None


def test_threads_leave_the_sum_right() -> None:
    cache = SoftCache(2000)

    def work(start: int) -> None:
        for call_id in range(start, start + 300):
            cache.put(key(call_id), kept())
            cache.take(key(call_id - 2))

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert cache.nbytes == sum(100 for entry in list(cache._entries))
