"""Public reports of others that would apply here, each as a test; the docstring names the report."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pyarrow.flight as fl
import pytest
import torch

from symbiosis.connection import Connection
from symbiosis.flight import protocol
from tests.faults.servers import ServerProcess

Serve = Callable[..., ServerProcess]
Connect = Callable[..., Connection]
Q = "model.layers.0.self_attn.q_proj"
TICKET = protocol.encode_header(protocol.Ticket(what="parameters"))


def answers(conn: Connection) -> bool:
    return tuple(conn._caller.call("forward", [Q], [torch.ones(2, 32)]).shape) == (2, 48)


def test_downloads_beside_calls_do_not_deadlock_the_server(serve: Serve, connect: Connect) -> None:
    """arrow #40004: a server that streams from a Python generator held the GIL, and all of it stood still."""
    conn = connect(serve().url)
    finished = []

    def download() -> None:
        for _ in range(20):
            finished.append(sum(len(chunk[3]) for chunk in conn._download("parameters")))

    threads = [threading.Thread(target=download, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        assert answers(conn)
    for thread in threads:
        thread.join(60)

    assert len(finished) == 80
    assert len(set(finished)) == 1


def test_clients_that_vanish_in_a_download_leave_a_server_that_answers(serve: Serve, connect: Connect) -> None:
    """arrow #36043: after clients were killed in the middle of a DoGet, the server was busy for ever."""
    server = serve()
    for _ in range(20):
        client = fl.FlightClient(server.url)
        reader = client.do_get(fl.Ticket(TICKET))
        reader.read_chunk()
        reader.cancel()
        client.close()
    conn = connect(server.url)

    assert answers(conn)
    assert sum(len(chunk[3]) for chunk in conn._download("parameters")) > 0
    assert conn.health().status == "serving"


def test_a_download_that_stalls_can_be_ended(serve: Serve, connect: Connect) -> None:
    """arrow pull request #10318: a Flight call that waits for a message cannot be interrupted; ours have a deadline."""
    server = serve()
    conn = connect(server.url, request_timeout_s=1.0, retry_s=0)
    assert answers(conn)
    server.signal(signal.SIGSTOP)
    started_s = time.monotonic()
    with pytest.raises(TimeoutError):
        list(conn._download("parameters"))

    assert time.monotonic() - started_s < 1.0 + 1.0 + 1.5  # gRPC's own limit, its grace, and a busy machine
