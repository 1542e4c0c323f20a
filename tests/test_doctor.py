"""The doctor finds what is wrong, says what to do, and stops there."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from symbiosis import doctor
from symbiosis.flight.server import Server


def steps(url: str) -> list[tuple[str, bool]]:
    return [(finding.step, finding.good) for finding in doctor.examine(url)]


def test_a_server_that_is_well(llama_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([llama_server.url]) == 0

    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[1] for line in lines]
    assert names == ["URL", "DNS", "TCP", "connect", "model", "health", "latency", "bandwidth", "product"]
    assert all(line.startswith("[ok]") for line in lines)
    assert llama_server.base.fingerprint[:12] in lines[4]


def test_wrong_products_are_found(
    tiny_llama: Any, start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(tiny_llama())
    run = server.base.run

    def wrong(op: str, modules: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
        y = run(op, modules, tensors)
        return y * 1.01 if op == "grad_input" else y

    monkeypatch.setattr(server.base, "run", wrong)

    *before, last = doctor.examine(server.url)

    assert all(finding.good for finding in before)
    assert (last.step, last.good) == ("product", False)
    assert "do not train" in str(last)


def test_a_draining_server(tiny_llama: Any, start_server: Callable[..., Server]) -> None:
    server = start_server(tiny_llama())
    server._draining = True
    *_, last = doctor.examine(server.url)
    server._draining = False

    assert (last.step, last.good) == ("health", False)
    assert "another replica" in last.next


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def mute_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("url", "last", "says"),
    [
        ("http://x", "URL", "listening on"),
        ("grpc://no-such-host.invalid:1", "DNS", "IP address"),
        ("grpc://127.0.0.1:{closed}", "TCP", "start symbiosis-flight-server"),
        ("grpc://127.0.0.1:{mute}", "connect", "docs/errors.md"),
    ],
)
def test_it_stops_at_the_first_trouble_and_names_the_next_step(
    url: str, last: str, says: str, closed_port: int, mute_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CONNECT_TIMEOUT_S", 1.0)

    findings = list(doctor.examine(url.format(closed=closed_port, mute=mute_port)))

    assert [finding.good for finding in findings] == [True] * (len(findings) - 1) + [False]
    assert findings[-1].step == last
    assert says in findings[-1].next
    assert "next: " in str(findings[-1])


@pytest.mark.parametrize(("words", "code"), [([], 2), (["--help"], 0), (["a", "b"], 2), (["--flag"], 2)])
def test_usage(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(words) == code
    assert "doctor URL" in capsys.readouterr().out
