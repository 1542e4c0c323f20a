"""Many at once: a thousand requests in the queue, 64 streams of mixed work; clients that stop, die or keep errors."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pyarrow as pa
import pyarrow.flight as fl
import pytest
import torch

import symbiosis
from symbiosis.connection import Connection
from symbiosis.errors import ConnectError, ServerBusyError
from symbiosis.flight import protocol
from symbiosis.flight.server import Server
from symbiosis.flight.tokens import TokenFile
from tests.faults.nursery import tiny_model
from tests.faults.scenarios import _checked_call
from tests.faults.servers import ServerProcess

Serve = Callable[..., ServerProcess]
Connect = Callable[..., Connection]
Q = "model.layers.0.self_attn.q_proj"


def eventually(condition: Callable[[], object], within_s: float = 20.0) -> bool:
    end_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)
    return bool(condition())


class Line:
    """One stream with one request on it, which nobody waits for yet."""

    def __init__(self, client: fl.FlightClient, name: str, x: torch.Tensor) -> None:
        command = protocol.encode_header(protocol.Open(protocol=protocol.VERSION, client=name))
        self.writer, self.reader = client.do_exchange(fl.FlightDescriptor.for_command(command))
        self.writer.begin(protocol.SCHEMA)
        request = protocol.Request(id=1, op="forward", modules=[Q], tensors=[protocol.spec_of(x)], deadline_ms=60_000)
        self.writer.write_with_metadata(protocol.encode_body([x]), protocol.encode_header(request))

    def answer(self) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The reply's header, and what was computed unless it is an error."""
        reply = self.reader.read_chunk()
        header = msgspec.msgpack.decode(reply.app_metadata)
        if header["type"] == "error":
            return header, None
        specs = msgspec.convert(header["tensors"], list[protocol.TensorSpec])
        return header, protocol.decode_body(reply.data, specs)[0]

    def end(self) -> None:
        with contextlib.suppress(pa.ArrowException, OSError):
            self.reader.cancel()
            self.writer.close()


def doing(server: Server, what: str) -> int:
    """How many streams of a server are reading, computing or writing."""
    return sum(stream.doing == what for stream in tuple(server._streams._open))


@pytest.fixture
def lines() -> Iterator[list[Line]]:
    opened: list[Line] = []
    yield opened
    for line in opened:
        line.end()


@pytest.fixture
def held(tiny_llama: Any, start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> Any:
    """held(**options): a server whose device computes nothing until its `go` is set, and the tokens of its batches."""

    def start(**options: Any) -> tuple[Server, threading.Event, list[int]]:
        server, go, batches = start_server(tiny_llama(), **options), threading.Event(), []
        run = server.base.run

        def wait_and_run(op: str, modules: list[str], tensors: list[torch.Tensor]) -> torch.Tensor:
            batches.append(tensors[0].shape[0])
            go.wait(60)
            return run(op, modules, tensors)

        monkeypatch.setattr(server.base, "run", wait_and_run)
        return server, go, batches

    return start


# --- a thousand requests --------------------------------------------------------------------------------


def test_a_thousand_queued_requests_are_all_answered_and_leave_nothing(
    held: Any, tiny_llama: Any, lines: list[Line]
) -> None:
    server, go, batches = held(max_batch_tokens=512)
    client = fl.FlightClient(server.url)
    inputs = [torch.full((3, 32), float(i)) for i in range(1000)]
    for i, x in enumerate(inputs):
        lines.append(Line(client, f"client-{i % 20}", x))
    assert eventually(lambda: server._scheduler.queued_tokens + sum(batches) == 3000)
    assert server._scheduler.queued > 800  # the others are in the batch that is held

    go.set()
    answers = [line.answer() for line in lines]

    weight = tiny_llama().get_submodule(Q).weight.detach()
    for x, (header, y) in zip(inputs, answers, strict=True):
        assert header["type"] == "reply"
        torch.testing.assert_close(y, x @ weight.T, rtol=1e-4, atol=1e-3)  # of sums up to 1000 times a weight
    assert (server._scheduler.queued, server._scheduler.queued_bytes, server._scheduler.queued_tokens) == (0, 0, 0)
    assert (sum(batches), max(batches)) <= (3000, 512)
    assert len(batches) < 50  # they shared products
    for line in lines:
        line.end()
    client.close()
    assert eventually(lambda: server.stats().clients == 0)


def test_what_a_queue_does_not_take_is_refused_at_once_and_the_rest_is_answered(held: Any, lines: list[Line]) -> None:
    server, go, batches = held(max_queue_tokens=100)
    client = fl.FlightClient(server.url)
    for i in range(200):
        lines.append(Line(client, f"client-{i % 20}", torch.ones(3, 32)))
    assert eventually(lambda: server._service.errors + server._scheduler.queued + sum(batches) // 3 == 200)
    refused = server._service.error_codes[ServerBusyError.code]
    assert server._scheduler.queued == 33  # 99 of 100 tokens; the others are in the batch that is held

    go.set()
    headers = [line.answer()[0] for line in lines]

    errors = [header for header in headers if header["type"] == "error"]
    assert {header["code"] for header in errors} == {ServerBusyError.code}
    assert all(0 < header["retry_after_ms"] <= 5000 for header in errors)
    assert len(errors) == refused
    assert refused > 100
    for line in lines:
        line.end()
    client.close()


def test_requests_whose_clients_went_away_are_never_computed(held: Any, lines: list[Line]) -> None:
    server, go, batches = held()
    client = fl.FlightClient(server.url)
    for i in range(100):
        lines.append(Line(client, f"client-{i % 20}", torch.ones(3, 32)))
    assert eventually(lambda: server._scheduler.queued + sum(batches) // 3 == 100)
    taken = sum(batches) // 3
    assert taken < 50

    for line in lines[1:]:
        line.end()
    assert eventually(lambda: doing(server, "computing") == 1)
    go.set()

    assert lines[0].answer()[0]["type"] == "reply"
    assert eventually(lambda: server._scheduler.queued == 0)
    assert server.stats().requests <= taken + 1  # the one that is waited for may not have come first
    client.close()


def test_64_streams_of_mixed_work_at_once_are_all_right(serve: Serve, connect: Connect) -> None:
    server, model = serve(), tiny_model()
    shared = [connect(server.url, max_streams=16) for _ in range(4)]
    start = threading.Barrier(64)

    def work(i: int) -> list[bool]:
        chance = random.Random(i)
        start.wait(30)
        return [_checked_call(shared[i % 4], model, chance) for _ in range(6)]

    with ThreadPoolExecutor(64) as pool:
        results = [right for found in pool.map(work, range(64)) for right in found]

    assert len(results) == 64 * 6
    assert all(results)
    assert sum(conn.stats().retries for conn in shared) == 0


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.5, 2.0)])
def test_tenants_share_a_busy_device_by_their_weights_whatever_their_load(
    weights: tuple[float, float],
    tmp_path: Path,
    tiny_llama: Any,
    start_server: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second has four times the clients of the first; the device alone is what there is too little of."""
    file = TokenFile(tmp_path / "tokens.json")
    tokens = [file.create(name) for name in ("few", "many")]
    for name, weight in zip(("few", "many"), weights, strict=True):
        file.set_weight(name, weight)
    server = start_server(tiny_llama(), tokens=str(file.path), max_batch_tokens=100, max_wait_us=0)
    run, stop = server.base.run, threading.Event()
    monkeypatch.setattr(server.base, "run", lambda *given: (time.sleep(0.003), run(*given))[1])

    def work(token: str) -> None:
        with symbiosis.connect(server.url, token=token) as conn:
            while not stop.is_set():
                conn._caller.call("forward", [Q], [torch.ones(100, 32)])

    with ThreadPoolExecutor(20) as pool:
        for token in (*[tokens[0]] * 4, *[tokens[1]] * 16):
            pool.submit(work, token)
        assert eventually(lambda: server.stats().clients == 20)
        before = {name: server.ledger.account(name).tokens for name in ("few", "many")}
        assert eventually(lambda: sum(server.ledger.account(name).tokens for name in before) >= 60_000)
        served = {name: server.ledger.account(name).tokens - before[name] for name in before}
        stop.set()

    assert served["few"] / sum(served.values()) == pytest.approx(weights[0] / sum(weights), rel=0.1)


# --- clients that stop or die ---------------------------------------------------------------------------

# Reads nothing of what it asks for, without torch: it starts in a moment.
GREEDY = """
import sys
import pyarrow as pa, pyarrow.flight as fl
url, command, header, size = sys.argv[1], bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3]), int(sys.argv[4])
schema = pa.schema([pa.field("data", pa.uint8())])
batch = pa.record_batch([pa.array(bytes(size), pa.uint8())], schema=schema)
writer, reader = fl.FlightClient(url).do_exchange(fl.FlightDescriptor.for_command(command))
writer.begin(schema)
writer.write_with_metadata(batch, header)
reader.read_chunk()
writer.write_with_metadata(batch, header)
print("asked", flush=True)
sys.stdin.readline()
reader.read_chunk()
"""


@pytest.fixture
def greedy() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """greedy(url): a client process that asked for two large replies and has read one of them."""
    processes: list[subprocess.Popen[str]] = []

    def start(url: str) -> subprocess.Popen[str]:
        spec = protocol.TensorSpec("F32", [50_000, 32])
        request = protocol.Request(id=1, op="forward", modules=[Q], tensors=[spec], deadline_ms=60_000)
        opening = protocol.Open(protocol=protocol.VERSION, client="greedy")
        words = [url, *(protocol.encode_header(header).hex() for header in (opening, request)), str(50_000 * 32 * 4)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-c", GREEDY, *words], stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_client_that_was_stopped_is_cut_off_while_others_go_on(
    tiny_llama: Any, start_server: Callable[..., Server], connect: Connect, greedy: Callable[..., Any]
) -> None:
    server = start_server(tiny_llama(), write_timeout_s=0.5)
    conn = connect(server.url)
    process = greedy(server.url)
    process.send_signal(signal.SIGSTOP)
    assert eventually(lambda: doing(server, "writing"))

    end_s = time.monotonic() + 20
    calls = 0
    while server._streams.cut_off == 0 and time.monotonic() < end_s:
        assert conn._caller.call("forward", [Q], [torch.ones(3, 32)]).shape == (3, 48)
        calls += 1

    assert server._streams.cut_off == 1
    assert calls > 10
    assert eventually(lambda: server.stats().clients == 1)  # its thread is free again
    assert conn.stats().retries == 0
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate("\n", timeout=20)
    assert process.returncode == 1
    assert "Flight" in errors  # it is told, and could connect again


def test_a_client_that_was_killed_leaves_no_stream(
    tiny_llama: Any, start_server: Callable[..., Server], connect: Connect, greedy: Callable[..., Any]
) -> None:
    server = start_server(tiny_llama())
    conn = connect(server.url)
    process = greedy(server.url)
    assert eventually(lambda: doing(server, "writing"))

    process.kill()

    assert eventually(lambda: server.stats().clients == 0)
    assert conn._caller.call("forward", [Q], [torch.ones(3, 32)]).shape == (3, 48)


# --- errors that are kept -------------------------------------------------------------------------------


def test_200_failed_calls_with_kept_errors_leave_both_ends_as_they_were(serve: Serve, connect: Connect) -> None:
    server = serve()
    conn = connect(server.url)
    there = psutil.Process(server.pid)
    kept: list[BaseException] = []

    def fail() -> None:
        try:
            conn._caller.call("forward", [Q], [torch.ones(1000, 7)])  # 7 is not its width
        except symbiosis.SymbiosisError as error:
            kept.append(error)

    for _ in range(20):
        fail()
    before = (there.num_threads(), there.num_fds())
    grown_bytes = there.memory_info().rss
    for _ in range(200):
        fail()
    grown_bytes = there.memory_info().rss - grown_bytes

    assert len(kept) == 220
    assert (there.num_threads(), there.num_fds()) <= (before[0] + 4, before[1] + 4)
    assert grown_bytes < 4 << 20  # 200 bodies of 28 kB would be 5.6 MB
    assert len(conn._replicas.home._idle) <= 8
    assert conn._caller.call("forward", [Q], [torch.ones(3, 32)]).shape == (3, 48)


def test_the_kept_error_of_a_connection_that_was_lost_holds_no_socket(serve: Serve, connect: Connect) -> None:
    server = serve()
    conn = connect(server.url, retry_s=0, request_timeout_s=5)
    kept: list[BaseException] = []

    def works() -> bool:
        try:
            conn._caller.call("forward", [Q], [torch.ones(3, 32)])
        except ConnectError as error:
            kept.append(error)
            return False
        return True

    def lose() -> None:
        assert eventually(works)
        server.kill()
        assert not works()
        server.start()

    for _ in range(3):
        lose()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        lose()

    assert len(kept) >= 13
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 3)
