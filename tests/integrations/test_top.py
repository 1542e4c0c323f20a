"""`top`: one answer, two answers, a server that is gone, one that was started again."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import symbiosis
from symbiosis.connection import Connection
from symbiosis.errors import ConnectError, MissingExtraError
from symbiosis.flight.server import Server
from symbiosis.integrations import top
from symbiosis.integrations.top import TopView


@pytest.fixture
def conn(start_server: Callable[..., Server], tiny_llama: Callable[..., nn.Module]) -> Iterator[Connection]:
    with symbiosis.connect(start_server(tiny_llama()).url) as connection:
        yield connection


def test_once_prints_the_numbers_and_ends(conn: Connection, capsys: pytest.CaptureFixture[str]) -> None:
    conn.load_model()(input_ids=torch.ones(2, 9, dtype=torch.long))

    assert top.main([conn.url, "--once"]) == 0

    shown = capsys.readouterr().out
    assert "tiny-llama at" in shown
    assert conn.url in shown
    assert re.search(rf"requests\W+{conn.server_stats().requests}\W", shown)


def test_two_answers_make_rates(conn: Connection) -> None:
    view = TopView(conn)
    first = conn.server_stats()
    later = msgspec.structs.replace(
        first, requests=first.requests + 30, batches=first.batches + 10, tokens=first.tokens + 800,
        compute_s=first.compute_s + 0.5, uptime_s=first.uptime_s + 2,
    )  # fmt: skip
    view.before, view.last = (10.0, first), (12.0, later)

    rows = dict(view.rows())
    assert rows["requests"].endswith(", 15/s")
    assert rows["tokens in calls"].endswith(", 400/s")
    assert rows["requests per batch"].endswith(", now 3.00")
    assert rows["computing"].endswith(", now 25%")


def test_a_server_that_is_gone_stays_on_the_screen(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    view = TopView(conn)
    view.ask()
    rows = view.rows()

    def gone(timeout_s: float) -> Any:
        raise ConnectError("gone")

    monkeypatch.setattr(conn, "server_stats", gone)
    view.ask()

    assert view.rows() == rows
    assert view.problem.startswith("no answer (CONNECT) for ")
    with pytest.raises(ConnectError):
        TopView(conn).ask()


def test_a_restarted_server_begins_anew(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    view = TopView(conn)
    view.ask()
    young = msgspec.structs.replace(conn.server_stats(), uptime_s=0.0, requests=0)
    monkeypatch.setattr(conn, "server_stats", lambda timeout_s: young)
    view.ask()

    assert view.before is None
    assert dict(view.rows())["requests"] == "0"


def test_without_rich_it_says_what_to_install(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(MissingExtraError, match="symbiosis-flight\\[notebook\\]"):
        top.main([conn.url])


@pytest.mark.parametrize("word", ["0", "x", "nan"])
def test_an_interval_too_short_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        top.main(["grpc://x:1", "--interval", word])
    assert f"expected seconds from 0.25, got '{word}'" in capsys.readouterr().err
