"""Policy without tensors: tasks are numbers here."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.errors import MessageTooLargeError, ServerBusyError
from symbiosis.flight.scheduler import Batch, Key, Scheduler, Task, form_batch

Q = Key("forward", ("q",), "F32")


def task(key: Key = Q, tokens: int = 1, nbytes: int = 4, **fields: Any) -> Task:
    return Task(key=key, tokens=tokens, nbytes=nbytes, tensors=[], **fields)


def taken(scheduler: Scheduler) -> tuple[Task, ...]:
    batch = scheduler.next_batch(timeout_s=0)
    return () if batch is None else batch.tasks


# --- which tasks make a batch -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "limit", "chosen"),
    [
        ([1, 2, 3], 6, 3),
        ([1, 2, 3], 5, 2),
        ([6, 1], 6, 1),
        ([7, 1], 6, 1),  # larger than the limit: alone, not never
        ([1, 7, 1], 6, 1),  # no overtaking: the third waits behind the second
        ([0, 0, 6], 6, 3),
        ([], 6, 0),
    ],
)
def test_a_batch_is_the_longest_prefix_within_the_limit(tokens: list[int], limit: int, chosen: int) -> None:
    assert len(form_batch([task(tokens=n) for n in tokens], limit)) == chosen


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(1, 60))
def test_batches_take_every_task_once_and_in_order(tokens: list[int], limit: int) -> None:
    scheduler = Scheduler(max_batch_tokens=limit)
    tasks = [task(tokens=n) for n in tokens]
    for one in tasks:
        scheduler.submit(one)

    batches = []
    while batch := taken(scheduler):
        batches.append(batch)

    assert [one for batch in batches for one in batch] == tasks
    assert all(len(batch) == 1 or sum(one.tokens for one in batch) <= limit for batch in batches)
    assert scheduler.queued == 0


def test_tokens_of_a_batch_add_up() -> None:
    assert Batch(Q, (task(tokens=3), task(tokens=4))).tokens == 7


# --- what is computed together ------------------------------------------------------------------------------------


def test_tasks_of_one_key_are_one_batch_whoever_asks() -> None:
    scheduler = Scheduler()
    tasks = [task(client="a"), task(client="b"), task(client="a")]
    for one in tasks:
        scheduler.submit(one)

    assert taken(scheduler) == tuple(tasks)


@pytest.mark.parametrize(
    "other",
    [
        Key("grad_input", ("q",), "F32"),
        Key("forward", ("k",), "F32"),
        Key("forward", ("q", "k"), "F32"),
        Key("forward", ("q",), "BF16"),
        Key("segment", ("q",), "F32"),
        Key("forward", ("q",), "F32", outputs=(1,)),
    ],
    ids=str,
)
def test_tasks_of_another_key_are_another_batch(other: Key) -> None:
    scheduler = Scheduler()
    first, second = task(), task(other)
    scheduler.submit(first)
    scheduler.submit(second)

    assert taken(scheduler) == (first,)
    assert taken(scheduler) == (second,)


def test_the_order_of_modules_matters() -> None:
    scheduler = Scheduler()
    scheduler.submit(task(Key("forward", ("q", "k"), "F32")))
    scheduler.submit(task(Key("forward", ("k", "q"), "F32")))  # its columns are in another order

    assert len(taken(scheduler)) == 1


def test_the_oldest_task_is_served_first() -> None:
    scheduler = Scheduler()
    k = Key("forward", ("k",), "F32")
    first, second, third = task(Q), task(k), task(Q)
    for one in (first, second, third):
        scheduler.submit(one)

    assert taken(scheduler) == (first, third)
    assert taken(scheduler) == (second,)


def test_a_task_left_behind_by_a_full_batch_keeps_its_place() -> None:
    scheduler = Scheduler(max_batch_tokens=10)
    k = Key("forward", ("k",), "F32")
    first, left, later = task(Q, 10), task(Q, 10), task(k, 10)
    for one in (first, left, later):
        scheduler.submit(one)

    assert [taken(scheduler) for _ in range(3)] == [(first,), (left,), (later,)]


# --- limits -------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    scheduler = Scheduler(max_queue_bytes=100)
    scheduler.submit(task(nbytes=60))

    with pytest.raises(ServerBusyError, match="60 of 100 bytes wait") as caught:
        scheduler.submit(task(nbytes=41))

    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s < 10
    assert scheduler.queued == 1


def test_a_full_queue_takes_tasks_again_once_a_batch_was_taken() -> None:
    scheduler = Scheduler(max_queue_bytes=100)
    scheduler.submit(task(nbytes=100))
    taken(scheduler)

    scheduler.submit(task(nbytes=100))

    assert scheduler.queued == 1


def test_the_queue_is_bounded_over_all_keys() -> None:
    scheduler = Scheduler(max_queue_bytes=100)
    scheduler.submit(task(Q, nbytes=60))

    with pytest.raises(ServerBusyError):
        scheduler.submit(task(Key("forward", ("k",), "F32"), nbytes=60))


def test_a_task_that_could_never_be_queued_is_too_large_and_not_busy() -> None:
    with pytest.raises(MessageTooLargeError, match="101 bytes exceeds the server's queue of 100"):
        Scheduler(max_queue_bytes=100).submit(task(nbytes=101))


# --- waiting and closing -------------------------------------------------------------------------------------------


def test_no_batch_comes_from_an_empty_queue_after_the_timeout() -> None:
    started_s = time.monotonic()

    assert Scheduler().next_batch(timeout_s=0.05) is None
    assert time.monotonic() - started_s >= 0.05


def test_a_waiting_executor_is_woken_by_a_task() -> None:
    scheduler, batches = Scheduler(), []
    thread = threading.Thread(target=lambda: batches.append(scheduler.next_batch()))
    thread.start()
    time.sleep(0.05)

    scheduler.submit(task())
    thread.join(5)

    assert len(batches) == 1
    assert batches[0] is not None


def test_a_waiting_executor_is_woken_by_close() -> None:
    scheduler, batches = Scheduler(), []
    thread = threading.Thread(target=lambda: batches.append(scheduler.next_batch()))
    thread.start()
    time.sleep(0.05)

    scheduler.close()
    thread.join(5)

    assert batches == [None]


def test_a_closed_scheduler_refuses_and_hands_out_what_it_has() -> None:
    scheduler = Scheduler()
    accepted = task()
    scheduler.submit(accepted)

    scheduler.close()

    with pytest.raises(ServerBusyError, match="draining") as caught:
        scheduler.submit(task())
    assert caught.value.retry_after_s is not None
    assert taken(scheduler) == (accepted,)
    assert scheduler.next_batch() is None
    assert scheduler.next_batch() is None


def test_closing_ends_a_wait_for_another_client() -> None:
    scheduler = Scheduler(max_wait_s=60.0)
    k = Key("forward", ("k",), "F32")
    now_s = time.perf_counter()
    for at_s in (-3.0, -2.0, -1.0):  # both go q, k, q, k once a second; b is a little behind
        scheduler.submit(task(Q, client="a", enqueued_s=now_s + at_s))
        scheduler.submit(task(Q, client="b", enqueued_s=now_s + at_s + 0.1))
        scheduler.submit(task(k, client="a", enqueued_s=now_s + at_s + 0.5))
        scheduler.submit(task(k, client="b", enqueued_s=now_s + at_s + 0.6))
    scheduler.close()
    started_s = time.monotonic()

    while scheduler.next_batch() is not None:
        pass

    assert time.monotonic() - started_s < 1.0


def test_many_submitters_and_one_taker_lose_nothing() -> None:
    scheduler = Scheduler(max_batch_tokens=7)
    keys = [Key("forward", (name,), "F32") for name in "abc"]
    tasks = [[task(keys[i % 3], tokens=i % 4) for i in range(100)] for _ in range(4)]
    threads = [threading.Thread(target=lambda mine=mine: [scheduler.submit(t) for t in mine]) for mine in tasks]
    for thread in threads:
        thread.start()
    found: list[Task] = []
    while len(found) < 400:
        batch = scheduler.next_batch(timeout_s=5)
        assert batch is not None
        assert len({one.key for one in batch.tasks}) == 1
        found.extend(batch.tasks)
    for thread in threads:
        thread.join()

    assert set(map(id, found)) == {id(one) for mine in tasks for one in mine}
    assert scheduler.queued == 0
