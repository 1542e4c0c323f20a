"""The service over a real port: what a call is answered with, alone and in company."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pyarrow.flight as fl
import pytest
import torch

from symbiosis.errors import ProtocolError
from symbiosis.flight import protocol
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.ledger import Party
from symbiosis.flight.protocol import Manifest, Open, Ticket
from symbiosis.flight.server import Server

Factory = Callable[..., Any]
LAYER = "model.layers.0"
Q, K, MLP = f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.k_proj", f"{LAYER}.mlp"
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}  # rounding depends on what else is in the batch


class Gate:
    """A base model whose products wait at a gate, so that a test decides what is queued when."""

    def __init__(self, base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base = base
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)
        run = base.run

        def gated(*arguments: Any) -> torch.Tensor:
            self.entered.release()
            self.open.wait(20)
            return run(*arguments)

        monkeypatch.setattr(base, "run", gated)


@pytest.fixture
def gate(tiny_llama: Factory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(BaseModel(tiny_llama()), monkeypatch)
    yield gate
    gate.open.set()


def request(op: str, modules: list[str], *tensors: torch.Tensor, call_id: int = 1, deadline_ms: int = 20_000) -> Any:
    specs = [protocol.spec_of(tensor) for tensor in tensors]
    return protocol.Request(id=call_id, op=op, modules=modules, tensors=specs, deadline_ms=deadline_ms)  # type: ignore[arg-type]


def call(stream: Any, op: str, modules: list[str], *tensors: torch.Tensor, **fields: Any) -> tuple[Any, Any]:
    """The header of the reply, and its tensor if it is one."""
    header, body = stream.send(request(op, modules, *tensors, **fields), protocol.encode_body(tensors))
    if header["type"] == "error":
        return header, None
    (tensor,) = protocol.decode_body(body, msgspec.convert(header["tensors"], list[protocol.TensorSpec]))
    return header, tensor


def send(stream: Any, op: str, modules: list[str], *tensors: torch.Tensor, **fields: Any) -> None:
    """Only the first half of a call."""
    header = protocol.encode_header(request(op, modules, *tensors, **fields))
    stream.writer.write_with_metadata(protocol.encode_body(tensors), header)


def receive(stream: Any) -> Any:
    return msgspec.msgpack.decode(stream.reader.read_chunk().app_metadata)


# --- one call ----------------------------------------------------------------------------------------------------


def test_reply_tells_what_was_done(llama_server: Server, raw_stream: Factory) -> None:
    started_s = time.perf_counter()
    header, y = call(raw_stream(llama_server.url), "forward", [Q, K], torch.randn(5, 32), call_id=1234567)
    elapsed_us = (time.perf_counter() - started_s) * 1e6

    assert header["id"] == 1234567
    assert y.shape == (5, 72)
    assert header.get("batch_requests", 1) == 1
    assert header["batch_tokens"] == 5
    assert 0 <= header.get("queue_us", 0) + header.get("compute_us", 0) <= header["server_us"] <= elapsed_us


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reply_has_the_dtype_of_the_request(dtype: torch.dtype, llama_server: Server, raw_stream: Factory) -> None:
    x = torch.randn(3, 32).to(dtype)

    _, y = call(raw_stream(llama_server.url), "forward", [Q], x)

    assert y.dtype == dtype
    expected = x.float() @ llama_server.base.linears[Q].weight.t()
    # bfloat16 keeps 8 bits, so half a unit in the last place is 2**-9; fp32 rounding may tip a tie.
    torch.testing.assert_close(y.float(), expected, rtol=2**-8, atol=1e-5)


def test_requests_of_one_stream_are_answered_in_order(llama_server: Server, raw_stream: Factory) -> None:
    stream = raw_stream(llama_server.url)
    for call_id in (5, 3, 9):
        send(stream, "forward", [Q], torch.randn(call_id, 32), call_id=call_id)

    replies = [receive(stream) for _ in range(3)]

    assert [(reply["id"], reply["tensors"][0]["shape"]) for reply in replies] == [(n, [n, 48]) for n in (5, 3, 9)]


@pytest.mark.parametrize("op", ["forward", "grad_input"])
def test_zero_rows_are_answered_with_zero_rows(op: str, llama_server: Server, raw_stream: Factory) -> None:
    stream = raw_stream(llama_server.url)
    x = torch.empty(0, 32)

    assert call(stream, op, [Q], torch.empty(0, 32 if op == "forward" else 48))[1].shape[0] == 0
    assert call(stream, op, [MLP], *([x] if op == "forward" else [x, x]))[1].shape == (0, 32)


def test_a_stream_may_name_the_fingerprint(llama_server: Server, raw_stream: Factory) -> None:
    command = protocol.encode_header(Open(protocol=1, fingerprint=llama_server.base.fingerprint, client="c"))

    header, _ = call(raw_stream(llama_server.url, command=command), "forward", [Q], torch.randn(1, 32))

    assert header["type"] == "reply"


# --- several clients -----------------------------------------------------------------------------------------------


def test_two_clients_at_once_share_a_batch(gate: Gate, start_server: Factory, raw_stream: Factory) -> None:
    server = start_server(gate.base, max_wait_us=0)
    first, second, third = (raw_stream(server.url) for _ in range(3))
    send(first, "forward", [K], torch.randn(1, 32))  # holds the device
    assert gate.entered.acquire(timeout=5)
    xs = torch.randn(4, 32), torch.randn(2, 32)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call, s, "forward", [Q], x) for s, x in zip((second, third), xs, strict=True)]
        while server.stats().queued < 2:
            time.sleep(0.005)
        gate.open.set()
        answers = [one.result(10) for one in calls]

    for x, (header, y) in zip(xs, answers, strict=True):
        assert (header["batch_requests"], header["batch_tokens"]) == (2, 6)
        torch.testing.assert_close(y, x @ gate.base.linears[Q].weight.t(), **TOLERANCE)
    assert receive(first)["type"] == "reply"
    assert server.stats().mean_batch == 1.5


def test_nan_of_one_client_does_not_reach_another(gate: Gate, start_server: Factory, raw_stream: Factory) -> None:
    server = start_server(gate.base, max_wait_us=0)
    first, second, third = (raw_stream(server.url) for _ in range(3))
    send(first, "forward", [K], torch.randn(1, 32))
    assert gate.entered.acquire(timeout=5)
    healthy, sick = torch.randn(3, 32), torch.full((2, 32), float("nan"))
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call, s, "forward", [MLP], x) for s, x in ((second, sick), (third, healthy))]
        while server.stats().queued < 2:
            time.sleep(0.005)
        gate.open.set()
        (_, bad), (header, good) = (one.result(10) for one in calls)

    assert header["batch_requests"] == 2
    assert bad.isnan().all()
    with torch.no_grad():
        expected = gate.base.blocks[MLP].forward(healthy)
    torch.testing.assert_close(good, expected, **TOLERANCE)


# --- refusals that depend on load ----------------------------------------------------------------------------------


def test_a_deadline_that_passes_in_the_queue(gate: Gate, start_server: Factory, raw_stream: Factory) -> None:
    server = start_server(gate.base)
    first, second = raw_stream(server.url), raw_stream(server.url)
    send(first, "forward", [K], torch.randn(1, 32))
    assert gate.entered.acquire(timeout=5)
    started_s = time.monotonic()

    header, _ = call(second, "forward", [Q], torch.randn(1, 32), call_id=8, deadline_ms=100)

    assert (header["code"], header["id"]) == ("DEADLINE_EXCEEDED", 8)
    # The server waits a second longer than the client: who gives up first should be the client.
    assert time.monotonic() - started_s < 2.0
    gate.open.set()
    assert receive(first)["type"] == "reply"
    assert call(second, "forward", [Q], torch.randn(1, 32))[0]["type"] == "reply"


def test_a_deadline_found_passed_by_the_executor_says_how_long_it_waited(
    gate: Gate, start_server: Factory, raw_stream: Factory
) -> None:
    server = start_server(gate.base)
    first, second = raw_stream(server.url), raw_stream(server.url)
    send(first, "forward", [K], torch.randn(1, 32))
    assert gate.entered.acquire(timeout=5)
    send(second, "forward", [Q], torch.randn(1, 32), deadline_ms=50)
    time.sleep(0.2)

    gate.open.set()

    header = receive(second)
    assert header["code"] == "DEADLINE_EXCEEDED"
    assert "in the queue" in header["message"]


def test_a_full_queue_is_busy_and_says_when_to_come_back(
    gate: Gate, start_server: Factory, raw_stream: Factory
) -> None:
    server = start_server(gate.base, max_message_bytes=2048, max_queue_bytes=2048)
    streams = [raw_stream(server.url) for _ in range(3)]
    x = torch.randn(8, 32)  # 1,024 bytes
    send(streams[0], "forward", [K], x)
    assert gate.entered.acquire(timeout=5)  # on the device: no longer queued
    send(streams[1], "forward", [Q], x)
    while server.stats().queued < 1:
        time.sleep(0.005)

    header, _ = call(streams[2], "forward", [Q], torch.randn(9, 32))

    assert header["code"] == "SERVER_BUSY"
    assert header["retry_after_ms"] > 0
    gate.open.set()
    assert [receive(stream)["type"] for stream in streams[:2]] == ["reply", "reply"]
    assert call(streams[2], "forward", [Q], torch.randn(9, 32))[0]["type"] == "reply"


@pytest.mark.parametrize(
    ("op", "modules", "widths"),
    [
        ("forward", [Q, K], [32]),
        ("grad_input", [Q, K], [72]),
        ("forward", [MLP], [32]),
        ("grad_input", [MLP], [32, 32]),
    ],
    ids=["forward", "grad_input", "block forward", "block grad_input"],
)
@pytest.mark.parametrize("limit", [1024, 5000, 65536])
def test_too_large_names_a_number_of_tokens_that_fits(
    op: str, modules: list[str], widths: list[int], limit: int, tiny_llama: Factory, start_server: Factory,
    raw_stream: Factory,
) -> None:  # fmt: skip
    stream = raw_stream(start_server(tiny_llama(), max_message_bytes=limit).url)
    header, _ = call(stream, op, modules, *(torch.randn(1000, width) for width in widths))
    assert header["code"] == "MESSAGE_TOO_LARGE"
    (named,) = re.findall(r"send at most ([\d,]+) tokens", header["message"])
    fitting = int(named.replace(",", ""))

    assert fitting >= 1
    assert call(stream, op, modules, *(torch.randn(fitting, width) for width in widths))[0]["type"] == "reply"
    # Two tensors have a gap of up to 63 bytes between them, so one token more may still fit: never two.
    more = fitting + len(widths)
    header, _ = call(stream, op, modules, *(torch.randn(more, width) for width in widths))
    assert header["code"] == "MESSAGE_TOO_LARGE"


def test_a_failure_while_computing_is_told_without_details(
    tiny_llama: Factory, start_server: Factory, raw_stream: Factory, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    base = BaseModel(tiny_llama())
    server = start_server(base)
    stream = raw_stream(server.url)

    def fail(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("weights live in /srv/secret.py")

    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr(base, "run", fail)
        header, _ = call(stream, "forward", [Q], torch.randn(1, 32), call_id=4)

    assert (header["code"], header["id"]) == ("REMOTE_COMPUTE", 4)
    assert "secret" not in header["message"]
    assert "secret" in caplog.text  # the operator finds it
    assert call(stream, "forward", [Q], torch.randn(1, 32))[0]["type"] == "reply"


def test_a_defect_of_the_service_is_told_without_details(
    llama_server: Server, raw_stream: Factory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = raw_stream(llama_server.url)

    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("in /srv/secret.py")

    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr(llama_server._service, "_task", fail)
        header, _ = call(stream, "forward", [Q], torch.randn(1, 32), call_id=4)

    assert (header["code"], header["id"]) == ("REMOTE_COMPUTE", 4)
    assert "secret" not in header["message"]
    assert call(stream, "forward", [Q], torch.randn(1, 32))[0]["type"] == "reply"


def test_refusing_a_stream_again_and_again_holds_no_requests(llama_server: Server) -> None:
    # One exception object answers all requests of a bad stream. Raised each time, its traceback would grow by a
    # frame per request, and each frame holds the request.
    class Chunk:
        app_metadata = b""
        data = None

    refusal = ProtocolError("refused")
    for _ in range(5):
        llama_server._service._answer(Chunk(), Party(), refusal, None)

    assert refusal.__traceback__ is None


def test_errors_are_counted(tiny_llama: Factory, start_server: Factory, raw_stream: Factory) -> None:
    server = start_server(tiny_llama())
    stream = raw_stream(server.url)
    for _ in range(3):
        call(stream, "forward", ["nope"], torch.randn(1, 32))
    call(stream, "forward", [Q], torch.randn(7, 32))

    stats = server.stats()

    assert (stats.errors, stats.requests, stats.tokens, stats.batches) == (3, 1, 7, 1)


# --- actions and downloads -----------------------------------------------------------------------------------------


def act(server: Server, name: str, body: bytes = b"") -> bytes:
    with fl.FlightClient(server.url) as client:
        (answer,) = client.do_action(fl.Action(name, body))
        return bytes(answer.body)


def test_hello_is_answered_with_the_manifest(llama_server: Server) -> None:
    hello = protocol.encode_header(protocol.Hello(protocol=protocol.VERSION))

    manifest: Manifest = protocol.decode_header(act(llama_server, "hello", hello), Manifest)

    base = llama_server.base
    assert manifest.fingerprint == base.fingerprint
    assert manifest.modules == base.module_infos()
    assert manifest.parameters == base.parameter_infos()
    assert (manifest.model, manifest.dtype, manifest.architecture) == ("tiny-llama", "F32", "LlamaForCausalLM")
    assert manifest.max_message_bytes == llama_server.options.max_message_bytes
    assert msgspec.json.decode(manifest.config)["hidden_size"] == 32


def test_actions_are_listed(llama_server: Server) -> None:
    with fl.FlightClient(llama_server.url) as client:
        listed = {action.type for action in client.list_actions()}

    assert listed == {"hello", "health", "stats"}


def download(server: Server, what: str) -> list[tuple[protocol.Chunk, bytes]]:
    ticket = protocol.encode_header(Ticket(what=what))  # type: ignore[arg-type]
    with fl.FlightClient(server.url) as client:
        return [
            (protocol.decode_header(c.app_metadata, protocol.Chunk), protocol.body_of(c.data).to_pybytes())
            for c in client.do_get(fl.Ticket(ticket))
        ]


def joined(chunks: list[tuple[protocol.Chunk, bytes]]) -> dict[str, bytes]:
    """The contents by name, after a check that chunks come in order and without gaps."""
    found: dict[str, bytes] = {}
    totals: dict[str, int] = {}
    for header, data in chunks:
        assert header.offset_bytes == len(found.get(header.name, b""))
        found[header.name] = found.get(header.name, b"") + data
        totals[header.name] = header.total_bytes
    assert {name: len(content) for name, content in found.items()} == totals
    return found


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("chunk_bytes", [protocol.CHUNK_BYTES, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_arrive_whole_and_in_chunks(
    dtype: torch.dtype, chunk_bytes: int, tiny_qwen2: Factory, start_server: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "CHUNK_BYTES", chunk_bytes)
    server = start_server(tiny_qwen2().to(dtype))

    chunks = download(server, "parameters")

    assert max(len(data) for _, data in chunks) <= chunk_bytes
    assert joined(chunks) == {name: bytes_of(tensor) for name, tensor in server.base.parameters.items()}


def test_an_empty_parameter_is_one_empty_chunk(tiny_llama: Factory, start_server: Factory) -> None:
    base = BaseModel(tiny_llama())
    base.parameters["empty"] = torch.empty(0, 5)

    found = joined(download(start_server(base), "parameters"))

    assert found["empty"] == b""


def test_files_arrive_as_they_are(llama_server: Server) -> None:
    assert joined(download(llama_server, "files")) == llama_server.base.files()


def test_a_failing_download_ends_with_an_error_in_band(
    llama_server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> dict[str, bytes]:
        raise OSError("cannot write /tmp/secret.py")

    monkeypatch.setattr(llama_server.base, "files", fail)
    ticket = protocol.encode_header(Ticket(what="files"))

    with caplog.at_level(logging.CRITICAL), fl.FlightClient(llama_server.url) as client:
        (chunk,) = client.do_get(fl.Ticket(ticket))

    error = protocol.decode_header(chunk.app_metadata, protocol.Error)
    assert error.code == "REMOTE_COMPUTE"
    assert "secret" not in error.message
