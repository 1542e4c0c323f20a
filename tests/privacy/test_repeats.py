"""Rows that come again: answered from memory, counted, refused over the budget."""

from __future__ import annotations

import pytest
import torch

from symbiosis.errors import PrivacyBudgetError
from symbiosis.privacy.repeats import FIRST_CAPACITY, ROW_OVERHEAD_BYTES, Memory, Repeats


def go(repeats: Repeats, x: torch.Tensor, exposure: float = 0.1) -> tuple[torch.Tensor, list[int]]:
    """One call of a layer that doubles; its result, and the rows that it sent."""
    plan = repeats.plan(x)
    repeats.spend(plan, torch.full((len(x),), exposure), "the test")
    y = torch.full_like(x, torch.nan)
    y[plan.sent] = 2 * x[plan.sent]
    repeats.finish(plan, y)
    return y, plan.sent


def test_a_row_is_sent_twice_and_then_remembered() -> None:
    repeats, x = Repeats(1.0, Memory(1 << 20)), torch.randn(3, 4)

    sent = [go(repeats, x)[1] for _ in range(3)]

    assert sent == [[0, 1, 2], [0, 1, 2], []]
    assert torch.equal(go(repeats, x)[0], 2 * x)
    assert repeats.answered == 6


def test_the_same_row_twice_in_a_call_is_sent_once() -> None:
    repeats, x = Repeats(1.0, Memory(1 << 20)), torch.randn(2, 4)[[0, 1, 0, 0]]

    y, sent = go(repeats, x)

    assert sent == [0, 1]
    assert torch.equal(y, 2 * x)


def test_known_and_new_rows_in_one_call() -> None:
    repeats, x = Repeats(1.0, Memory(1 << 20)), torch.randn(6, 4)
    go(repeats, x[:3])
    go(repeats, x[:3])

    y, sent = go(repeats, x[[3, 0, 4, 2, 4]])

    assert sent == [0, 2]
    assert torch.equal(y, 2 * x[[3, 0, 4, 2, 4]])


def test_over_the_budget_nothing_is_sent_or_counted() -> None:
    repeats, x = Repeats(0.25, Memory(0)), torch.randn(1, 4)
    go(repeats, x)
    go(repeats, x)

    for _ in range(2):
        with pytest.raises(PrivacyBudgetError, match=r"would be 0.3, over the budget of 0.25.*remember_bytes"):
            go(repeats, torch.cat([torch.randn(1, 4), x]))


def test_memory_is_bounded_over_all_modules() -> None:
    memory = Memory(3 * (16 + ROW_OVERHEAD_BYTES))
    first, second = Repeats(9.0, memory), Repeats(9.0, memory)
    x = torch.randn(2, 4)
    for _ in range(3):
        go(first, x)
        _, sent = go(second, x)

    assert memory.used_bytes == memory.limit_bytes
    assert len(sent) == 1


def test_rows_that_never_come_again_are_forgotten() -> None:
    memory = Memory(1 << 20)
    repeats = Repeats(9.0, memory)
    for _ in range(2 * FIRST_CAPACITY // 64):
        go(repeats, torch.randn(64, 2))
    assert len(repeats._rows) == FIRST_CAPACITY

    x = torch.randn(64, 2)
    for _ in range(3):
        go(repeats, x)
    assert memory.used_bytes == 64 * (8 + ROW_OVERHEAD_BYTES)
    for _ in range(4 * FIRST_CAPACITY // 64):  # doubles once, for what came again, and then forgets it
        go(repeats, torch.randn(64, 2))

    assert memory.used_bytes == 0
    assert len(repeats._rows) == 2 * FIRST_CAPACITY
