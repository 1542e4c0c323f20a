"""Streams are counted, and connections that are dead or deaf are cut off under real clients."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest
import torch

import symbiosis
from symbiosis.errors import ServerBusyError
from symbiosis.flight import caretaker, protocol, streams
from symbiosis.flight.streams import Streams, shut_down

Factory = Callable[..., Any]
Q = "model.layers.0.self_attn.q_proj"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    end_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)
    return condition()


def test_a_client_may_have_so_many_streams_and_no_more() -> None:
    limited = Streams(2, 10.0, 10.0)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(limited.opened("greedy", "ipv4:1.2.3.4:5"))
            limited.check("greedy")
        stack.enter_context(limited.opened("greedy", "ipv4:1.2.3.4:5"))
        with pytest.raises(ServerBusyError, match="3 streams open, and may have 2"):
            limited.check("greedy")
        limited.check("another")
        assert limited.per_client() == {"greedy": 3}
    limited.check("greedy")


def test_who_is_overdue() -> None:
    clock = Clock()
    limited = Streams(10, idle_s=100.0, write_s=10.0, clock=clock)
    with ExitStack() as stack:
        idle, busy, also_busy, deaf = (
            stack.enter_context(limited.opened("c", peer)) for peer in ("idle", "mixed", "mixed", "deaf")
        )
        deaf.begins("writing", 0.0)
        assert limited.overdue() == set()
        clock.now_s = 11.0
        assert limited.overdue() == {"deaf"}
        clock.now_s = 101.0
        busy.begins("computing", 5.0)  # computing may take as long as it takes
        assert limited.overdue() == {"deaf", "idle"}
        busy.begins("reading", 101.0)
        also_busy.begins("reading", 50.0)
        assert limited.overdue() == {"deaf", "idle"}
        assert idle.doing == "reading"


@pytest.mark.parametrize("peer", ["unix:/tmp/x", "", "ipv4:127.0.0.1:1", "ipv6:[::1]:1", "ipv4:127.0.0.1:port"])
def test_a_peer_that_is_no_connection_of_ours(peer: str) -> None:
    assert not shut_down(peer)


def test_shutting_down_ends_one_connection_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        accepted = [listener.accept()[0] for _ in range(2)]
        host, port = clients[0].getsockname()

        assert shut_down(f"ipv4:{host}:{port}")

        clients[0].settimeout(5)
        assert clients[0].recv(1) == b""
        accepted[1].sendall(b"x")
        assert clients[1].recv(1) == b"x"
        for one in (*clients, *accepted):
            one.close()


def test_an_idle_client_is_cut_off_and_goes_on_when_it_calls_again(
    tiny_llama: Factory, start_server: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caretaker, "EVERY_S", 0.05)
    server = start_server(tiny_llama(), idle_timeout_s=0.3)
    with symbiosis.connect(server.url, same_host=False) as conn:
        x = torch.ones(2, 32)
        first = conn._caller.call("forward", [Q], [x])
        assert eventually(lambda: server._streams.cut_off == 1)
        assert eventually(lambda: server.stats().clients == 0)

        torch.testing.assert_close(conn._caller.call("forward", [Q], [x]), first)


def test_a_client_that_does_not_read_is_cut_off(
    tiny_llama: Factory, start_server: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caretaker, "EVERY_S", 0.05)
    server = start_server(tiny_llama(), write_timeout_s=0.5)
    client = fl.FlightClient(server.url)
    command = protocol.encode_header(protocol.Open(protocol=protocol.VERSION, client="deaf"))
    writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(command))
    writer.begin(protocol.SCHEMA)
    x = torch.ones(20_000, 32)
    request = protocol.Request(id=1, op="forward", modules=[Q], tensors=[protocol.spec_of(x)], deadline_ms=60_000)
    failed = threading.Event()

    def flood() -> None:
        try:
            while True:
                writer.write_with_metadata(protocol.encode_body([x]), protocol.encode_header(request))
        except (pa.ArrowException, OSError):
            failed.set()

    threading.Thread(target=flood, daemon=True).start()

    assert failed.wait(20)
    assert eventually(lambda: server._streams.cut_off == 1)
    assert eventually(lambda: server.stats().clients == 0)
    reader.cancel()
    client.close()


def test_calls_on_too_many_streams_are_refused_in_band(
    tiny_llama: Factory, start_server: Factory, raw_stream: Factory
) -> None:
    server = start_server(tiny_llama(), max_streams_per_client=2)
    command = protocol.encode_header(protocol.Open(protocol=protocol.VERSION, client="greedy"))
    x = torch.ones(1, 32)
    request = protocol.Request(id=5, op="forward", modules=[Q], tensors=[protocol.spec_of(x)], deadline_ms=60_000)
    opened = [raw_stream(server.url, command) for _ in range(2)]
    for one in opened:
        one.forward(Q, x)

    header, _ = raw_stream(server.url, command).send(request, protocol.encode_body([x]))

    assert (header["type"], header["code"], header["id"]) == ("error", "SERVER_BUSY", 5)
    opened[0].forward(Q, x)


def test_a_batch_that_hangs_is_reported_once_with_the_stacks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Hung:
        busy_since_s: float | None = time.perf_counter() - 100.0

    hung = Hung()
    watched = caretaker.Caretaker(streams.Streams(1, 1.0, 1.0), hung, watchdog_s=50.0)  # type: ignore[arg-type]
    dumped: list[bool] = []
    monkeypatch.setattr(caretaker.faulthandler, "dump_traceback", lambda **_: dumped.append(True))
    watched.look()
    watched.look()

    assert watched.stuck
    assert dumped == [True]
    assert "more than 50 s" in caplog.text
    hung.busy_since_s = None
    assert not watched.stuck


def test_work_of_a_client_that_went_away_is_not_computed(
    tiny_llama: Factory, start_server: Factory, raw_stream: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(tiny_llama())
    entered, leave = threading.Event(), threading.Event()
    run, rows = server.base.run, []

    def slow(op: str, modules: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
        rows.append(len(tensors[0]))
        entered.set()
        leave.wait(20)
        return run(op, modules, tensors)

    monkeypatch.setattr(server.base, "run", slow)
    with symbiosis.connect(server.url) as conn:
        first = threading.Thread(target=conn._caller.call, args=("forward", [Q], [torch.ones(1, 32)]), daemon=True)
        first.start()
        assert entered.wait(10)
        gone = raw_stream(server.url)
        x = torch.ones(7, 32)
        request = protocol.Request(id=5, op="forward", modules=[Q], tensors=[protocol.spec_of(x)], deadline_ms=60_000)
        gone.writer.write_with_metadata(protocol.encode_body([x]), protocol.encode_header(request))
        assert eventually(lambda: server.stats().queued == 1)
        gone.close()
        assert eventually(lambda: len(server._streams.per_client()) == 1)
        leave.set()
        first.join(10)
        assert eventually(lambda: server.stats().queued == 0)

    assert 7 not in rows
