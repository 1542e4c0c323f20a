"""Public reports of others that would apply here, each as a test; the docstring names the report.

arrow #34731 and #13745, grpc #32758, petals #146, SkyRL #1920 and #2035 and transformers #22576 could not be found in
any store that we can search, and have no test of their own.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.flight as fl
import pytest
import torch

import symbiosis
from symbiosis.config import ServerOptions
from symbiosis.connection import Connection
from symbiosis.errors import ConfigError, ConnectError, DeadlineExceededError, InvalidInputError, RemoteComputeError
from symbiosis.flight import protocol
from symbiosis.flight.server import Server
from tests.faults.nursery import tiny_model
from tests.faults.proxy import Proxy
from tests.faults.servers import ServerProcess
from tests.faults.work import adapted

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


def test_tensors_beyond_a_message_are_split_and_no_message_can_reach_two_gibibytes(
    tiny_llama: Any, start_server: Callable[..., Server], connect: Connect
) -> None:
    """arrow #36254: gRPC ends a stream at a message of 2 GiB, whatever Flight was told."""
    with pytest.raises(ConfigError, match="max_message_bytes"):
        ServerOptions(model="m", max_message_bytes=2**30 + 1)
    server = start_server(tiny_llama(), max_message_bytes=65_536)
    conn = connect(server.url)
    x = torch.randn(5_000, 32)

    y = conn._caller.call("forward", [Q], [x])

    torch.testing.assert_close(y, tiny_llama().get_submodule(Q)(x).detach(), rtol=1e-4, atol=1e-5)
    assert conn.stats().calls >= 5_000 * 48 * 4 // 65_536


@pytest.mark.parametrize("how", ["refused", "failed"])
def test_errors_that_are_kept_keep_nothing_of_what_was_sent(
    how: str,
    tiny_llama: Any,
    start_server: Callable[..., Server],
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """arrow #36540: a program that held on to the error of a failed DoExchange held on to its memory."""
    server = start_server(tiny_llama())
    conn = connect(server.url, retry_s=0)
    if how == "failed":
        monkeypatch.setattr(server.base, "run", lambda *_: 1 / 0)
    caplog.set_level(logging.CRITICAL, "symbiosis")  # pytest keeps what is logged, tracebacks and all
    width = 7 if how == "refused" else 32
    x = torch.ones(width, 8_000).T  # to be sent, it has to be copied: 0.2 or 1 MB
    kept: list[BaseException] = []

    def fail() -> None:
        with pytest.raises((InvalidInputError, RemoteComputeError)) as caught:
            conn._caller.call("forward", [Q], [x])
        kept.append(caught.value)

    for _ in range(10):
        fail()
    before_bytes, arrow_bytes = psutil.Process().memory_info().rss, pa.total_allocated_bytes()
    for _ in range(60):
        fail()

    grown_bytes = psutil.Process().memory_info().rss - before_bytes
    assert grown_bytes < 30 * x.nbytes  # of 60; allocators keep some
    assert pa.total_allocated_bytes() - arrow_bytes < x.nbytes
    assert all(error.__traceback__ is not None for error in kept)


@pytest.mark.parametrize("used", [False, True])
def test_a_server_that_was_closed_gives_its_model_back(used: bool, tiny_llama: Any, connect: Connect) -> None:
    """arrow #50684: a Flight server was never freed, nor what it referred to."""
    model = tiny_llama()
    weight = weakref.ref(model.get_submodule(Q).weight)
    server = symbiosis.serve(model, port=0, drain_timeout_s=1.0)
    if used:
        conn = connect(server.url)
        assert answers(conn)
        conn.close()
    server.close()
    del server, model

    end_s = time.monotonic() + 10
    while weight() is not None and time.monotonic() < end_s:
        gc.collect()
        time.sleep(0.05)
    assert weight() is None


def test_a_signal_ends_a_server_in_the_middle_of_a_download(serve: Serve) -> None:
    """arrow #11932: a Flight server that streamed from a generator could not be stopped by SIGTERM or SIGINT."""
    server = serve(drain_timeout_s=1.0)
    client = fl.FlightClient(server.url)
    reader = client.do_get(fl.Ticket(TICKET))
    reader.read_chunk()
    started_s = time.monotonic()

    server.signal(signal.SIGTERM)
    while Path(f"/proc/{server.pid}").exists() and time.monotonic() - started_s < 20:
        time.sleep(0.02)

    assert not Path(f"/proc/{server.pid}").exists()
    assert time.monotonic() - started_s < 1.0 + 2.0 + 3.0  # the drain, pyarrow's end, and a busy machine
    reader.cancel()
    client.close()


def test_a_server_that_accepts_and_says_nothing_is_given_up() -> None:
    """arrow #44560: a client without a deadline waited for ever for a server that never answered."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        started_s = time.monotonic()
        with pytest.raises((ConnectError, DeadlineExceededError)):
            symbiosis.connect(f"grpc://127.0.0.1:{mute.getsockname()[1]}", connect_timeout_s=1.0)

    assert time.monotonic() - started_s < 1.0 + 1.5


@pytest.mark.timeout(60)
def test_pings_keep_an_idle_connection_and_are_never_taken_for_abuse(serve: Serve, connect: Connect) -> None:
    """arrow #44916: a Flight server cannot be told how many pings to bear, and ends connections that send more."""
    with Proxy(serve().port) as proxy:
        conn = connect(proxy.url, keepalive_s=1.0)
        assert answers(conn)
        connections = proxy.connections
        time.sleep(4.5)  # four pings without data, if nothing held them back; gRPC forgives two

        assert answers(conn)
        assert proxy.connections == connections
        assert conn.stats().retries == 0


def test_children_of_a_connected_process_neither_hang_nor_disturb_it(serve: Serve, connect: Connect) -> None:
    """grpc #18075: `! ls` in a notebook, between gRPC calls, hung, or broke the connection."""
    conn = connect(serve().url)
    for _ in range(5):
        assert answers(conn)
        assert subprocess.run(["true"], timeout=20).returncode == 0
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert answers(conn)
    assert conn.stats().retries == 0


def test_a_device_that_hangs_is_seen_and_calls_end_in_time(
    tiny_llama: Any, start_server: Callable[..., Server], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lorax #149: a kernel hung in production; the server answered health checks, and requests waited for ever."""
    server = start_server(tiny_llama(), watchdog_s=0.3)
    conn = connect(server.url, request_timeout_s=1.0, retry_s=0)
    run, free = server.base.run, threading.Event()
    monkeypatch.setattr(server.base, "run", lambda *given: (free.wait(60), run(*given))[1])
    started_s = time.monotonic()

    with pytest.raises(DeadlineExceededError):
        answers(conn)

    assert time.monotonic() - started_s < 1.0 + 1.5
    assert server._caretaker.stuck  # /livez fails, so that a supervisor restarts it
    free.set()
    assert answers(connect(server.url))
    assert not server._caretaker.stuck


def test_whatever_a_batch_raises_costs_only_who_caused_it(
    tiny_llama: Any, start_server: Callable[..., Server], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang #23141: an assertion about a mixed batch ended the scheduler, and with it the server, for everybody."""
    server = start_server(tiny_llama())
    run, poison = server.base.run, 13.0

    def asserting(op: str, modules: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
        assert not (tensors[0] == poison).any()
        return run(op, modules, tensors)

    monkeypatch.setattr(server.base, "run", asserting)
    expected = tiny_llama().get_submodule(Q)(torch.ones(2, 32)).detach()
    conns = [connect(server.url, retry_s=0) for _ in range(6)]

    def work(i: int) -> int:
        failed = 0
        for _ in range(10):
            try:
                y = conns[i]._caller.call("forward", [Q], [torch.full((2, 32), poison if i == 0 else 1.0)])
            except RemoteComputeError as error:
                failed += "AssertionError" in str(error)
            else:
                torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
        return failed

    with ThreadPoolExecutor(6) as pool:
        failed = list(pool.map(work, range(6)))

    assert failed == [10, 0, 0, 0, 0, 0]
    assert server._executor.busy_since_s is None


def test_gradients_of_several_passes_add_up_for_each_client_by_itself(
    serve: Serve, connect: Connect, perturb: Any, tokens: Any
) -> None:
    """SkyRL #2008: a server that held gradients cleared them at each pass, so that a step saw the last one only.

    Here the client holds them: of two clients that take turns, each has the sum of its own.
    """
    conns = [connect(serve().url) for _ in range(2)]
    models = [adapted(conn.load_model(), seed=i) for i, conn in enumerate(conns)]
    local = [adapted(tiny_model(), seed=i) for i in range(2)]
    for step in range(3):
        for i in range(2):
            for model in (models[i], local[i]):
                ids = tokens(seed=10 * i + step)
                model(input_ids=ids, labels=ids).loss.backward()

    for ours, theirs in zip(models, local, strict=True):
        gradients = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
        assert gradients
        for name, parameter in ours.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
