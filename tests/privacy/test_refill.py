"""Waiting for masks: until no more are dealt, with a bar, and never for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.connection import Connection
from symbiosis.errors import ConfigError, DeadlineExceededError, MasksExhaustedError
from symbiosis.privacy import fill_masks, refill
from symbiosis.privacy.dealer import PoolStats
from tests.privacy.conftest import Pair


@pytest.fixture
def masked(pair: Pair) -> Iterator[Connection]:
    """After three passes: what is used twice is dealt ahead."""
    with symbiosis.connect(pair.server.url, privacy=pair.masking()) as connection:
        model = connection.wrap(pair.model())
        for seed in range(3):
            ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                model(input_ids=ids)
        yield connection


def test_it_returns_when_no_more_is_dealt(masked: Connection) -> None:
    pool = fill_masks(masked)

    assert pool.state == "idle"
    assert pool.wanted_rows / 2 < pool.rows <= pool.wanted_rows
    assert fill_masks(masked).dealt_rows == pool.dealt_rows
    assert f"{pool.rows:,} of {pool.wanted_rows:,} rows" in str(masked.stats())


def test_the_bar_follows_the_pool(masked: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    class Bar(refill.tqdm):  # type: ignore[misc,type-arg]
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "disable": True})
            bars.append(self)

        def update(self, n: float | None = 1) -> None:  # a bar that is off counts nothing
            self.n += n or 0

    assert masked.privacy is not None
    stats = masked.privacy.stats
    levels = iter([("dealing", 10), ("dealing", 40), ("idle", 60)])

    def scripted() -> Any:
        state, rows = next(levels)
        found = stats()
        pool = PoolStats(rows, 0, rows, 0, 1.0, 0, 0.0, 60, state)  # type: ignore[arg-type]
        return found.__class__(**{**vars(found), "pool": pool})

    monkeypatch.setattr(masked.privacy, "stats", scripted)
    monkeypatch.setattr(refill, "tqdm", Bar)
    fill_masks(masked)

    (bar,) = bars
    assert (bar.n, bar.total) == (60, 60)


def test_a_dealer_that_failed_is_said(masked: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_masks(masked)
    pool: Any = masked.privacy._pool  # type: ignore[union-attr]
    monkeypatch.setattr(pool, "_paused", True)

    with pytest.raises(MasksExhaustedError, match=r"the dealer failed, and .* rows of masks are there"):
        fill_masks(masked)


def test_it_does_not_wait_for_ever(masked: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_masks(masked)
    pool: Any = masked.privacy._pool  # type: ignore[union-attr]
    monkeypatch.setattr(pool, "_busy", True)

    with pytest.raises(DeadlineExceededError, match=r"within timeout_s=0\.2"):
        fill_masks(masked, timeout_s=0.2)


def test_without_masks_ahead_there_is_nothing_to_wait_for(pair: Pair, masked: Connection) -> None:
    with symbiosis.connect(pair.server.url) as plain, pytest.raises(ConfigError, match="keeps no masks ahead"):
        fill_masks(plain)
    options = pair.masking(mode="shares")
    with symbiosis.connect(pair.server.url, privacy=options) as shares, pytest.raises(ConfigError, match="no masks"):
        fill_masks(shares)
    masked.close()
    with pytest.raises(ConfigError, match="is closed"):
        fill_masks(masked)
