"""Who waits for whom: simulated loops of calls, no threads, no clock."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import pytest

from symbiosis.flight.rendezvous import MAX_CALLS, Rendezvous

KEYS = [f"layer-{i}" for i in range(20)]


@dataclass
class Loop:
    """A client that asks for KEYS in turn, `gap_s` after each answer."""

    name: str
    gap_s: float
    starts_s: float
    tokens: int = 64


@dataclass
class Outcome:
    batches: list[int]
    finished: dict[str, int]

    def mean_batch(self, last: int) -> float:
        return sum(self.batches[-last:]) / last


def simulate(loops: list[Loop], max_wait_s: float, seconds: float, compute_s: float = 0.001) -> Outcome:
    """One device, one queue, and clients that go round: what Scheduler and Executor do, with time as a number."""
    policy = Rendezvous(max_wait_s)
    now_s, arrivals = 0.0, [(loop.starts_s, i, 0) for i, loop in enumerate(loops)]
    heapq.heapify(arrivals)
    queue: dict[str, list[tuple[float, int, int]]] = {}
    outcome = Outcome([], {loop.name: 0 for loop in loops})
    while now_s < seconds:
        while arrivals and arrivals[0][0] <= now_s:
            at_s, who, position = heapq.heappop(arrivals)
            queue.setdefault(KEYS[position % len(KEYS)], []).append((at_s, who, position))
            policy.arrived(loops[who].name, KEYS[position % len(KEYS)], loops[who].tokens, at_s)
        if not queue:
            now_s = arrivals[0][0]
            continue
        keys = sorted(queue, key=lambda key: queue[key][0][0])
        waiting = {key: {loops[who].name for _, who, _ in queue[key]} for key in keys}
        key, wait_s = policy.choose(waiting, queue[keys[0]][0][0], now_s)
        if wait_s > 0:
            now_s = min(now_s + wait_s, arrivals[0][0] if arrivals else now_s + wait_s)
            continue
        batch = queue.pop(key)
        policy.ran(key, {loops[who].name: now_s - at_s for at_s, who, _ in batch}, compute_s)
        now_s += compute_s
        outcome.batches.append(len(batch))
        for _, who, position in batch:
            outcome.finished[loops[who].name] += 1
            heapq.heappush(arrivals, (now_s + loops[who].gap_s, who, position + 1))
    return outcome


def test_two_like_loops_out_of_step_meet_and_stay_together() -> None:
    loops = [Loop("a", 0.002, 0.0), Loop("b", 0.002, 0.0105)]

    apart, together = simulate(loops, 0.0, 3.0), simulate(loops, 0.2, 3.0)

    assert apart.mean_batch(200) == 1.0
    assert together.mean_batch(200) > 1.9


def test_slow_loops_far_out_of_step_meet_too() -> None:
    """Training on a busy machine: a call every 20 ms, half a step apart."""
    loops = [Loop("a", 0.02, 0.0), Loop("b", 0.02, 0.215)]

    assert simulate(loops, 3.0, 30.0).mean_batch(200) > 1.9


def test_meeting_does_not_cost_throughput() -> None:
    loops = [Loop("a", 0.002, 0.0), Loop("b", 0.002, 0.0105)]

    apart, together = simulate(loops, 0.0, 3.0), simulate(loops, 0.2, 3.0)

    assert sum(together.finished.values()) >= 0.98 * sum(apart.finished.values())


def test_a_lone_client_is_never_held() -> None:
    alone = simulate([Loop("a", 0.002, 0.0)], 0.2, 1.0)

    assert alone.finished["a"] == pytest.approx(1.0 / 0.003, rel=0.02)


def test_a_small_request_is_not_held_for_a_large_one() -> None:
    """Decoding beside training: only what it queues for anyway."""
    decode, train = Loop("decode", 0.001, 0.0, tokens=1), Loop("train", 0.02, 0.0051, tokens=512)

    outcome = simulate([decode, train], 0.2, 2.0)

    assert outcome.finished["decode"] > 0.9 * simulate([decode], 0.2, 2.0).finished["decode"]


def test_a_faster_loop_is_held_for_no_more_than_its_budget() -> None:
    """Loops of different speed can never stay together: the faster one must not be dragged down to the slower."""
    fast, slow = Loop("fast", 0.002, 0.0), Loop("slow", 0.02, 0.0051)

    outcome = simulate([fast, slow], 0.2, 10.0)

    alone = simulate([fast], 0.2, 10.0).finished["fast"]
    assert outcome.finished["fast"] > 0.75 * alone


def test_a_client_that_stopped_is_not_waited_for() -> None:
    policy = Rendezvous(0.2)
    for at_s, key in enumerate(KEYS):
        policy.arrived("gone", key, 1, at_s * 0.01)
    policy.arrived("gone", KEYS[0], 1, 0.2)
    policy.arrived("here", KEYS[1], 1, 5.0)

    assert policy.choose({KEYS[1]: {"here"}}, 5.0, 5.0) == (KEYS[1], 0.0)


def test_nobody_waits_longer_than_the_limit() -> None:
    policy = Rendezvous(0.05)
    for client in ("a", "b"):
        for at_s, key in enumerate(KEYS):
            policy.arrived(client, key, 1, at_s * 0.02)
    policy.arrived("b", KEYS[0], 1, 0.4)
    policy.arrived("a", KEYS[1], 1, 0.401)

    key, wait_s = policy.choose({KEYS[1]: {"a"}}, 0.401, 0.401)
    assert (key, 0 < wait_s <= 0.05) == (KEYS[1], True)
    assert policy.choose({KEYS[1]: {"a"}}, 0.401, 0.452) == (KEYS[1], 0.0)


def test_of_two_in_the_queue_the_one_behind_goes_first() -> None:
    policy = Rendezvous(0.2)
    for client in ("ahead", "behind"):
        for at_s, key in enumerate(KEYS):
            policy.arrived(client, key, 1, at_s * 0.005)
    policy.arrived("ahead", KEYS[3], 1, 0.2)
    policy.arrived("behind", KEYS[2], 1, 0.201)

    assert policy.choose({KEYS[3]: {"ahead"}, KEYS[2]: {"behind"}}, 0.2, 0.2015) == (KEYS[2], 0.0)


def test_switched_off_it_is_first_come_first_served() -> None:
    policy = Rendezvous(0.0)
    policy.arrived("a", "x", 1, 0.0)
    policy.arrived("b", "y", 1, 0.1)

    assert policy.choose({"x": {"a"}, "y": {"b"}}, 0.0, 0.2) == ("x", 0.0)


def test_what_sharing_saved_is_earned_within_bounds() -> None:
    policy = Rendezvous(0.2)
    for client in ("a", "b"):
        policy.arrived(client, "x", 1, 0.0)
        policy.arrived(client, "x", 1, 0.1)
    policy.ran("x", {"a": 0.0}, 0.3)
    before = policy._clients["b"].budget_s
    for _ in range(1000):
        policy.ran("x", {"a": 0.0, "b": 0.0}, 0.3)

    assert before < policy._clients["b"].budget_s <= MAX_CALLS * 0.1
