"""Policy without tensors: tasks are numbers here."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.errors import MessageTooLargeError, ServerBusyError
from symbiosis.flight.scheduler import (
    MIN_SLICE_TOKENS,
    SMALL_SEEN_S,
    Batch,
    Key,
    Scheduler,
    Task,
    form_batch,
)
from symbiosis.flight.shares import MAX_PASSED

Q = Key("forward", ("q",), "F32")


def task(key: Key = Q, tokens: int = 1, nbytes: int = 4, **fields: Any) -> Task:
    return Task(key=key, tokens=tokens, nbytes=nbytes, tensors=[], **fields)


def taken(scheduler: Scheduler) -> tuple[Task, ...]:
    batch = scheduler.next_batch(timeout_s=0)
    return () if batch is None else batch.tasks


# --- a client that is alone ---------------------------------------------------------------------------------------


def test_a_task_is_taken_at_once_where_nobody_else_is_about() -> None:
    now_s = 100.0
    scheduler = Scheduler(clock=lambda: now_s)
    first = task(client="a", enqueued_s=now_s)
    assert scheduler.submit_or_take(first) == Batch(Q, (first,))
    assert (scheduler.queued, scheduler.queued_bytes, scheduler.queued_tokens) == (0, 0, 0)

    other = task(client="b", enqueued_s=now_s)
    assert scheduler.submit_or_take(other) is None  # the first may call again at any moment
    assert taken(scheduler) == (other,)

    later = task(client="b", enqueued_s=now_s + 2)
    assert scheduler.submit_or_take(later) == Batch(Q, (later,))  # the first is gone


def test_a_task_is_queued_behind_others_of_its_client() -> None:
    scheduler = Scheduler()
    first, second = task(client="a"), task(client="a")
    scheduler.submit(first)
    assert scheduler.submit_or_take(second) is None
    assert taken(scheduler) == (first, second)


def test_a_closed_scheduler_refuses_a_client_that_is_alone() -> None:
    scheduler = Scheduler()
    scheduler.close()
    with pytest.raises(ServerBusyError, match="draining"):
        scheduler.submit_or_take(task(client="a"))


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


@given(st.lists(st.integers(17, 50), min_size=1), st.integers(1, 60))
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


# --- who goes first ------------------------------------------------------------------------------------------------


def test_small_requests_go_before_large_ones_and_large_ones_are_not_starved() -> None:
    scheduler = Scheduler()
    k = Key("forward", ("k",), "F32")
    large = task(Q, 1000, client="train")
    scheduler.submit(large)
    passed = 0
    while True:
        scheduler.submit(task(k, 1, client="decode"))
        if large in taken(scheduler):
            break
        passed += 1

    assert passed == MAX_PASSED


def test_a_small_request_does_not_ride_in_a_large_batch_of_its_key() -> None:
    scheduler = Scheduler()
    large, small = task(Q, 4000, client="train"), task(Q, 1, client="decode", enqueued_s=time.perf_counter())
    for one in (large, small):
        scheduler.submit(one)

    assert [taken(scheduler), taken(scheduler)] == [(small,), (large,)]


def test_a_small_request_shares_a_batch_that_is_quick() -> None:
    scheduler = Scheduler()
    other, small = task(Q, 40, client="train"), task(Q, 1, client="decode")
    for one in (other, small):
        scheduler.submit(one)

    assert set(taken(scheduler)) == {other, small}


def test_large_batches_are_sliced_only_while_small_requests_are_about() -> None:
    now_s = 100.0
    scheduler = Scheduler(clock=lambda: now_s)
    scheduler.done(Batch(Q, (task(Q, 1000),)), 0.1)
    assert scheduler.slice_tokens(Q) is None

    scheduler.submit(task(Q, 1, enqueued_s=now_s))
    assert scheduler.slice_tokens(Q) == MIN_SLICE_TOKENS  # 0.1 ms a token: 40 of them in 4 ms
    scheduler.done(Batch(Q, (task(Q, 1000),)), 0.001)
    assert scheduler.slice_tokens(Q) == 4000
    now_s += SMALL_SEEN_S + 1

    assert scheduler.slice_tokens(Q) is None


def test_between_slices_only_small_requests_are_taken() -> None:
    scheduler = Scheduler()
    large, small = task(Q, 1000), task(Q, 1)
    scheduler.submit(large)
    assert scheduler.next_small() is None
    scheduler.submit(small)

    batch = scheduler.next_small()

    assert batch is not None
    assert batch.tasks == (small,)
    assert taken(scheduler) == (large,)


def test_tenants_share_tokens_evenly_whoever_asks_for_more() -> None:
    """Ten of one tenant against one of another, all of them always waiting."""
    scheduler = Scheduler(max_batch_tokens=100)
    keys = [Key("forward", (str(i),), "F32") for i in range(11)]
    for i in range(10):
        scheduler.submit(task(keys[i], 100, client="many"))
    scheduler.submit(task(keys[10], 100, client="one"))
    served = {"many": 0, "one": 0}
    for _ in range(400):
        (done,) = taken(scheduler)
        served[done.client] += done.tokens
        scheduler.submit(task(done.key, 100, client=done.client))

    assert abs(served["one"] / sum(served.values()) - 0.5) < 0.01


def test_weights_shift_the_shares() -> None:
    scheduler = Scheduler(max_batch_tokens=100, weight_of=lambda client: 3.0 if client == "paying" else 1.0)
    for client in ("paying", "other"):
        scheduler.submit(task(Key("forward", (client,), "F32"), 100, client=client))
    served = {"paying": 0, "other": 0}
    for _ in range(400):
        (done,) = taken(scheduler)
        served[done.client] += done.tokens
        scheduler.submit(task(done.key, 100, client=done.client))

    assert abs(served["paying"] / sum(served.values()) - 0.75) < 0.02


@pytest.mark.parametrize("heavy_tasks", [1, 10])
def test_a_weight_is_of_a_tenant_however_many_clients_and_requests_it_has(heavy_tasks: int) -> None:
    """One tenant asks for ten times as much and has a tenth of the other's weight: load buys nothing."""
    scheduler = Scheduler(max_batch_tokens=100, weight_of={"light": 1.0, "heavy": 0.1}.__getitem__)
    for i in range(heavy_tasks):
        scheduler.submit(task(Key("forward", (f"h{i}",), "F32"), 100, client=f"heavy/{i}", tenant="heavy"))
    for i in range(2):
        scheduler.submit(task(Key("forward", (f"l{i}",), "F32"), 100, client=f"light/{i}", tenant="light"))
    served = {"light": 0, "heavy": 0}
    for _ in range(440):
        (done,) = taken(scheduler)
        served[done.tenant] += done.tokens
        scheduler.submit(task(done.key, 100, client=done.client, tenant=done.tenant))

    assert abs(served["light"] / sum(served.values()) - 10 / 11) < 0.02


def test_the_lightest_tenant_is_passed_over_but_not_for_ever() -> None:
    scheduler = Scheduler(max_batch_tokens=100, weight_of={"least": 0.01, "most": 100.0}.__getitem__)
    scheduler.submit(task(Key("forward", ("l",), "F32"), 100, tenant="least"))
    for _ in range(2):  # its first turn puts it behind by 10,000; the second comes after 1,000,000 tokens of the other
        batches = 0
        while True:
            scheduler.submit(task(Key("forward", ("m",), "F32"), 8000, tenant="most"))
            (done,) = taken(scheduler)
            if done.tenant == "least":
                break
            batches += 1
        scheduler.submit(task(done.key, 100, tenant="least"))

    assert 1 < batches <= 130


def test_small_requests_go_first_between_tenants_of_any_weight_that_are_even() -> None:
    scheduler = Scheduler(weight_of={"train": 10.0, "decode": 1.0}.__getitem__)
    large = task(Key("forward", ("t",), "F32"), 4000, tenant="train")
    small = task(Key("forward", ("d",), "F32"), 1, tenant="decode")
    for one in (large, small):
        scheduler.submit(one)

    assert [taken(scheduler), taken(scheduler)] == [(small,), (large,)]


def test_a_weight_that_changes_holds_for_the_tokens_that_follow() -> None:
    weights = {"a": 1.0, "b": 1.0}
    scheduler = Scheduler(max_batch_tokens=100, weight_of=weights.__getitem__)

    def share_of_a() -> float:
        served = {"a": 0, "b": 0}
        for _ in range(200):
            for tenant in weights:
                if tenant not in scheduler._waiting:
                    scheduler.submit(task(Key("forward", (tenant,), "F32"), 100, tenant=tenant))
            served[taken(scheduler)[0].tenant] += 1
        return served["a"] / 200

    assert abs(share_of_a() - 0.5) < 0.02
    weights["a"] = 3.0
    assert abs(share_of_a() - 0.75) < 0.02


def test_limits_that_are_replaced_hold_for_what_comes_next() -> None:
    scheduler = Scheduler(max_queue_tokens=100)
    scheduler.submit(task(tokens=60))

    scheduler.set_limits(max_batch_tokens=50, max_queue_bytes=1 << 20, max_queue_tokens=50, max_wait_s=0.0)

    with pytest.raises(ServerBusyError, match="60 of 50 tokens wait"):
        scheduler.submit(task(tokens=1))
    assert len(taken(scheduler)) == 1  # what was admitted stays


def test_within_a_key_those_who_got_less_go_first() -> None:
    scheduler = Scheduler(max_batch_tokens=100)
    for _ in range(5):
        scheduler.submit(task(Q, 100, client="many"))
        taken(scheduler)
    queue = [task(Q, 100, client="many") for _ in range(3)]
    for one in queue:
        scheduler.submit(one)
    scheduler.submit(light := task(Q, 100, client="light"))

    batches = [taken(scheduler) for _ in range(4)]

    assert batches[0] == (light,)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 300), st.sampled_from("qk")), min_size=1, max_size=60))
def test_every_task_is_taken_once_whatever_comes(arrivals: list[tuple[str, int, str]]) -> None:
    scheduler = Scheduler(max_batch_tokens=200)
    tasks = [task(Key("forward", (name,), "F32"), tokens, client=client) for client, tokens, name in arrivals]
    found: list[Task] = []
    for i, one in enumerate(tasks):
        scheduler.submit(one)
        if i % 3 == 0:
            found.extend(taken(scheduler))
    while batch := taken(scheduler):
        found.extend(batch)

    assert sorted(map(id, found)) == sorted(map(id, tasks))
    assert (scheduler.queued, scheduler._waiting, scheduler._queued_bytes, scheduler._queued_tokens) == (0, {}, 0, 0)


def test_the_queue_is_bounded_in_tokens_too() -> None:
    scheduler = Scheduler(max_queue_tokens=100)
    scheduler.submit(task(tokens=60))

    with pytest.raises(ServerBusyError, match="60 of 100 tokens wait"):
        scheduler.submit(task(tokens=41))
    taken(scheduler)
    scheduler.submit(task(tokens=500))  # one that is larger than the queue still runs, alone


def test_a_longer_queue_asks_for_a_longer_pause() -> None:
    scheduler = Scheduler(max_queue_tokens=1000)
    scheduler.done(Batch(Q, (task(Q, 100),)), 0.4)
    scheduler.submit(task(Q, 1000))

    with pytest.raises(ServerBusyError) as caught:
        scheduler.submit(task(Q, 1))

    assert caught.value.retry_after_s == pytest.approx(2.0)
