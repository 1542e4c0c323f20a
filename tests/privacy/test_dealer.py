"""The pool: each row of a mask once, refilled ahead of time, and what happens when there are none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from symbiosis.errors import ClosedError, ConnectError, DeadlineExceededError, MasksExhaustedError
from symbiosis.privacy.dealer import FEWEST_ROWS, Key, Pool
from symbiosis.privacy.draws import SINGLE, draw

KEY, OTHER = Key("forward", ("q",)), Key("grad_input", ("q",))
WIDTH, OUT = 6, 3
WEIGHT = torch.randn(OUT, WIDTH, generator=torch.Generator().manual_seed(1))
PATIENCE_S = 30.0


class Dealer:
    """Deals by itself; slow, broken or stopped on demand."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.seeds: list[bytes] = []
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None

    def effect(self, op: str, modules: Sequence[str], seed: bytes, rows: int, dtype: torch.dtype) -> torch.Tensor:
        assert self.open.wait(PATIENCE_S)
        self.calls.append((op, rows))
        self.seeds.append(seed)
        if self.error is not None:
            raise self.error
        return draw(seed, rows, WIDTH, SINGLE) @ WEIGHT.t()

    def rows_at_once(self, op: str, modules: Sequence[str], dtype: torch.dtype) -> int:
        return 100


@pytest.fixture
def dealer() -> Dealer:
    return Dealer()


@pytest.fixture
def make(dealer: Dealer) -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def build(limit_bytes: int = 1 << 20, timeout_s: float = PATIENCE_S, when_empty: str = "wait") -> Pool:
        pools.append(Pool(dealer, SINGLE, limit_bytes, timeout_s, when_empty))  # type: ignore[arg-type]
        return pools[-1]

    yield build
    dealer.open.set()
    for pool in pools:
        pool.close()


def settle(pool: Pool, rows: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while pool.stats().rows < rows:
        assert time.monotonic() < deadline_s, pool.stats()
        time.sleep(0.005)


def test_effects_belong_to_their_masks(make: Callable[..., Pool]) -> None:
    pool = make()

    for rows in (1, 5, 70, 250):  # more than one dealing holds, too
        taken = pool.take(KEY, rows, WIDTH)
        assert taken.masks.shape == (rows, WIDTH)
        torch.testing.assert_close(taken.effects, taken.masks @ WEIGHT.t(), rtol=1e-4, atol=100)


def test_each_row_is_handed_out_once_to_many_threads(make: Callable[..., Pool], dealer: Dealer) -> None:
    pool, taken = make(), []

    def work(number: int) -> None:
        for step in range(20):
            taken.append(pool.take(KEY, 1 + (number + step) % 7, WIDTH).masks)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)

    rows = torch.cat(taken)
    assert len(taken) == 120
    assert len(torch.unique(rows, dim=0)) == len(rows)
    assert len(set(dealer.seeds)) == len(dealer.seeds)


def test_a_key_is_refilled_from_its_second_use(make: Callable[..., Pool], dealer: Dealer) -> None:
    pool = make()
    pool.take(KEY, 4, WIDTH)
    assert dealer.calls == [("forward", 4)]  # a call that is made once leaves nothing behind

    pool.take(KEY, 4, WIDTH)
    settle(pool, FEWEST_ROWS - 4)
    before, waits = len(dealer.calls), pool.stats().waits
    for _ in range(3):
        pool.take(KEY, 4, WIDTH)

    assert len(dealer.calls) == before
    assert pool.stats().waits == waits == 2


def test_a_pool_keeps_to_its_bytes_but_serves_who_waits(make: Callable[..., Pool]) -> None:
    limit_bytes = 100 * 4 * (WIDTH + OUT)
    pool = make(limit_bytes)

    for _ in range(5):
        pool.take(KEY, 40, WIDTH)
        pool.take(OTHER, 40, WIDTH)
    assert pool.take(KEY, 300, WIDTH).rows == 300

    deadline_s = time.monotonic() + 0.2
    while time.monotonic() < deadline_s:
        assert pool.stats().nbytes <= limit_bytes + 100 * 4 * (WIDTH + OUT)  # one dealing more than the limit
    assert pool.stats().dealt_rows >= pool.stats().taken_rows == 700


def test_masks_of_keys_that_are_no_longer_used_make_room(make: Callable[..., Pool]) -> None:
    pool = make(FEWEST_ROWS * 4 * (WIDTH + OUT))
    for _ in range(2):
        pool.take(OTHER, 1, WIDTH)
    settle(pool, FEWEST_ROWS - 1)

    for _ in range(100):
        pool.take(KEY, 1, WIDTH)

    deadline_s = time.monotonic() + PATIENCE_S
    while pool._shelves[OTHER].rows:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_an_empty_pool_raises_if_it_is_told_to(make: Callable[..., Pool], dealer: Dealer) -> None:
    pool = make(when_empty="raise")
    pool.take(KEY, 4, WIDTH)
    pool.take(KEY, 4, WIDTH)
    settle(pool, 1)
    dealer.open.clear()

    with pytest.raises(MasksExhaustedError, match=r"200 rows of masks are needed for forward of q and \d+ are there"):
        pool.take(KEY, 200, WIDTH)
    dealer.open.set()
    settle(pool, 200)  # it was asked for, so more is dealt ahead

    assert pool.take(KEY, 200, WIDTH).rows == 200


def test_a_dealer_that_does_not_answer_is_a_deadline(make: Callable[..., Pool], dealer: Dealer) -> None:
    dealer.open.clear()

    with pytest.raises(DeadlineExceededError, match=r"no 4 rows of masks for forward of q within 0.1 s"):
        make(timeout_s=0.1).take(KEY, 4, WIDTH)


def test_an_error_of_the_dealer_reaches_who_waits_and_is_no_end(make: Callable[..., Pool], dealer: Dealer) -> None:
    pool = make()
    dealer.error = ConnectError("the dealer is gone")
    with pytest.raises(ConnectError, match="the dealer is gone"):
        pool.take(KEY, 4, WIDTH)
    time.sleep(0.05)
    assert len(dealer.calls) == 1  # nobody waits, so nobody is asked again and again

    dealer.error = None
    assert pool.take(KEY, 4, WIDTH).rows == 4


def test_closing_wakes_who_waits(make: Callable[..., Pool], dealer: Dealer) -> None:
    pool, errors = make(), []
    dealer.open.clear()

    def work() -> None:
        with pytest.raises(ClosedError) as caught:
            pool.take(KEY, 4, WIDTH)
        errors.append(caught.value)

    thread = threading.Thread(target=work)
    thread.start()
    deadline_s = time.monotonic() + PATIENCE_S
    while not pool._shelves and time.monotonic() < deadline_s:
        time.sleep(0.005)
    pool.close()
    thread.join(PATIENCE_S)

    assert len(errors) == 1


def test_a_pool_without_room_still_serves_who_waits(make: Callable[..., Pool]) -> None:
    """Nothing fits and nothing is stale: the dealing thread must wait for the next call, and not end."""
    pool = make(0)
    for _ in range(3 * FEWEST_ROWS):
        assert pool.take(KEY, 1, WIDTH).rows == 1
        assert pool.take(OTHER, 1, WIDTH).rows == 1

    assert pool._thread is not None
    assert pool._thread.is_alive()


def test_the_dealing_thread_outlives_the_clearing_of_stale_masks(make: Callable[..., Pool]) -> None:
    """Making room happens once: whoever asks twice what to deal next finds nothing the second time."""
    row_bytes = 4 * (WIDTH + OUT)
    pool = make(FEWEST_ROWS * row_bytes)
    for _ in range(2):
        pool.take(OTHER, 1, WIDTH)
    settle(pool, FEWEST_ROWS - 1)
    for _ in range(6):  # each wait deals more than fits, with the stale masks of the other key and without
        for _ in range(FEWEST_ROWS):
            pool.take(KEY, 1, WIDTH)

    assert pool._thread is not None
    assert pool._thread.is_alive()


def test_a_full_pool_stops_dealing_though_a_key_is_stale(make: Callable[..., Pool], dealer: Dealer) -> None:
    """Masks of a key that is no longer used make room once, and are not dealt again until it is used again."""
    row_bytes = 4 * (WIDTH + OUT)
    pool = make(limit_bytes=3 * FEWEST_ROWS * row_bytes)
    for key in (KEY, OTHER):
        for _ in range(20):
            pool.take(key, FEWEST_ROWS, WIDTH)

    dealt = -1
    deadline_s = time.monotonic() + PATIENCE_S
    while dealt != (dealt := len(dealer.calls)):
        assert time.monotonic() < deadline_s, f"{dealt} dealings, and no end"
        time.sleep(0.2)

    pool.take(KEY, FEWEST_ROWS, WIDTH)  # which waits for masks of its own
    assert pool.stats().nbytes <= 4 * FEWEST_ROWS * row_bytes
