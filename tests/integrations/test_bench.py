"""`bench`: numbers that belong together, of a real server; a table, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

import symbiosis
from symbiosis.errors import ConnectError, MissingExtraError
from symbiosis.flight.protocol import ModuleInfo
from symbiosis.flight.server import Server
from symbiosis.integrations import bench
from symbiosis.integrations.bench import first_layer, percentile


def info(name: str, kind: Any = "linear") -> ModuleInfo:
    return ModuleInfo(name=name, kind=kind, d_in=1, d_out=1, parameters=1, tied=False, hashes={})


def test_json_has_every_number(llama_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([llama_server.url, "--json", "--calls", "20", "--tokens", "1,64"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["url"], found["dtype"]) == ("tiny-llama", llama_server.url, "F32")
    assert found["latency"]["calls"] == 20
    assert [row["what"] for row in found["bandwidth"]] == ["64 KiB", "1024 KiB", "8192 KiB"]
    assert len(found["layer"]) == 7  # q, k, v, o, gate, up, down
    assert [(row["tokens"], row["what"]) for row in found["layers"]] == [
        (1, "forward"), (1, "grad_input"), (64, "forward"), (64, "grad_input"),
    ]  # fmt: skip
    for row in (found["latency"], *found["bandwidth"], *found["layers"]):
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert 0 < row["compute_ms"] < row["max_ms"]
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["tokens"] / row["p50_ms"])
        assert row["mb_per_s"] > 0
    for row in found["layers"]:
        assert row["calls"] == bench.REPEATS * 7
    # 64 KiB out of the smallest linear, 32 -> 24: as many bytes as its rows, and headers
    assert 0.9 < found["bandwidth"][0]["bytes"] / (65_536 * (1 + 24 / 32)) < 1.1


def test_a_table_shows_the_same(llama_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([llama_server.url, "--calls", "5", "--tokens", "16"]) == 0

    shown = capsys.readouterr().out
    for words in ("tiny-llama (F32) at", "times in ms", "one token", "64 KiB", "7 linears", "grad_input", "tokens/s"):
        assert words in shown


def test_small_messages_bound_the_sizes(tiny_llama: Any, start_server: Callable[..., Server]) -> None:
    server = start_server(tiny_llama(), max_message_bytes=1 << 18)
    with symbiosis.connect(server.url) as conn:
        found = bench.measure(conn, calls=2, tokens=(1,))

    assert [row["what"] for row in found["bandwidth"]] == ["64 KiB"]
    assert found["bandwidth"][0]["calls"] == bench.REPEATS


def test_the_first_layer_is_that_of_the_first_number() -> None:
    names = ["embed", "h.0.a", "h.0.b", "h.1.a", "h.10.a", "head"]

    assert [i.name for i in first_layer([*map(info, names), info("h.0.norm", "norm")])] == ["h.0.a", "h.0.b"]
    assert [i.name for i in first_layer([info("a"), info("b")])] == ["a", "b"]


@pytest.mark.parametrize(("percent", "value"), [(50, 50), (90, 90), (99, 99), (100, 100), (0, 1)])
def test_percentiles(percent: float, value: float) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == value
    assert percentile([7.0], percent) == 7.0


@pytest.mark.parametrize("words", [["--calls", "0"], ["--tokens", "1,x"], ["--tokens", ""]])
def test_a_number_that_is_none_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["grpc://x:1", *words])
    assert "expected a number from 1" in capsys.readouterr().err


def test_without_rich_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(MissingExtraError, match="give --json"):
        bench.main(["grpc://127.0.0.1:1"])


def test_no_server_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMBIOSIS_CLIENT_CONNECT_TIMEOUT_S", "0.5")
    with pytest.raises(ConnectError):
        bench.main(["grpc://127.0.0.1:1", "--json"])
