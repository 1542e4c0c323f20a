"""Counters of tokens: who is due, and that nobody saves up or loses a claim. Numbers only."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from symbiosis.flight import shares
from symbiosis.flight.shares import Shares


def test_tenants_within_the_slack_are_all_due() -> None:
    policy = Shares(100)
    policy.served("a", 90)

    assert policy.due({"a", "b"}) == {"a", "b"}


def test_the_one_behind_goes_first_beyond_the_slack() -> None:
    policy = Shares(100)
    policy.served("a", 101)

    assert policy.due({"a", "b"}) == {"b"}
    assert policy.due({"a"}) == {"a"}  # nobody else waits


def test_being_away_saves_up_no_more_than_a_little() -> None:
    policy = Shares(100)
    policy.served("busy", 1_000_000)
    policy.arrived("idle", {"busy"})

    spent = 0
    while policy.due({"busy", "idle"}) == {"idle"}:
        policy.served("idle", 10)
        spent += 10

    assert spent <= shares.SAVED * 100


def test_a_loop_that_leaves_after_every_call_keeps_what_it_is_owed() -> None:
    policy = Shares(100)
    policy.served("busy", 150)
    for _ in range(5):
        policy.arrived("loop", {"busy"})

    assert policy.due({"busy", "loop"}) == {"loop"}


def test_a_weight_divides_what_is_counted() -> None:
    policy = Shares(100, {"paying": 2.0, "other": 1.0}.__getitem__)
    policy.served("paying", 300)
    policy.served("other", 40)

    assert policy.due({"paying", "other"}) == {"other"}
    policy.served("other", 20)
    assert policy.due({"paying", "other"}) == {"paying", "other"}


def test_requests_of_no_tokens_count_too() -> None:
    policy = Shares(10)
    for _ in range(11):
        policy.served("empty", 0)

    assert policy.due({"empty", "other"}) == {"other"}


def test_small_requests_yield_after_a_while() -> None:
    policy = Shares(100)
    for _ in range(shares.MAX_PASSED):
        assert policy.small_first()
        policy.ran(small=True, others_wait=True)
    assert not policy.small_first()

    policy.ran(small=False, others_wait=True)
    assert policy.small_first()


def test_names_that_clients_make_up_do_not_fill_the_memory() -> None:
    policy = Shares(100)
    for i in range(3 * shares.MAX_TENANTS):
        policy.arrived(f"name-{i}", {"steady"})

    assert len(policy._served) <= shares.MAX_TENANTS + 2


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 500)), max_size=80))
def test_of_those_that_wait_somebody_is_always_due(served: list[tuple[str, int]]) -> None:
    policy = Shares(100)
    for tenant, tokens in served:
        policy.arrived(tenant, set("abcd") - {tenant})
        policy.served(tenant, tokens)

    assert policy.due(set("abcd"))
