"""What the tests of the wire share: a raw stream that can break every rule, and peers that misbehave on cue."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as fl
import pytest
import torch

from symbiosis.flight import protocol
from symbiosis.flight.channel import FlightChannel

ROOT = Path(__file__).parents[2]
PEER = Path(__file__).with_name("peer.py")
OPEN = protocol.encode_header(protocol.Open(protocol=protocol.VERSION))


class RawStream:
    """A DoExchange stream without any of the client's care: sends what it is told to."""

    def __init__(self, url: str, command: bytes = OPEN, schema: pa.Schema | None = protocol.SCHEMA) -> None:
        self.client = fl.FlightClient(url)
        self.writer, self.reader = self.client.do_exchange(fl.FlightDescriptor.for_command(command))
        if schema is not None:
            self.writer.begin(schema)

    def send(self, header: Any, batch: pa.RecordBatch | None) -> tuple[Any, pa.RecordBatch | None]:
        """Send a frame, its header encoded unless it is bytes; the reply's header as plain data, and its body."""
        data = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
        if batch is None:
            self.writer.write_metadata(data)
        else:
            self.writer.write_with_metadata(batch, data)
        reply = self.reader.read_chunk()
        return msgspec.msgpack.decode(reply.app_metadata), reply.data

    def forward(self, module: str, x: torch.Tensor, call_id: int = 77) -> torch.Tensor:
        """An honest call on this stream."""
        specs = [protocol.spec_of(x)]
        request = protocol.Request(id=call_id, op="forward", modules=[module], tensors=specs, deadline_ms=10_000)
        header, body = self.send(request, protocol.encode_body([x]))
        assert header["type"] == "reply", header
        assert header["id"] == call_id
        return protocol.decode_body(body, msgspec.convert(header["tensors"], list[protocol.TensorSpec]))[0]

    def close(self) -> None:
        with contextlib.suppress(pa.ArrowException, OSError):
            self.reader.cancel()
            self.writer.close()
        self.client.close()


@pytest.fixture
def raw_stream() -> Iterator[Callable[..., RawStream]]:
    """raw_stream(url, command=..., schema=...): all are closed after the test."""
    with contextlib.ExitStack() as stack:

        def opened(*args: Any, **kwargs: Any) -> RawStream:
            stream = RawStream(*args, **kwargs)
            stack.callback(stream.close)
            return stream

        yield opened


@pytest.fixture
def peer() -> Iterator[Any]:
    """A Peer (peer.py) in this process."""
    server = _peer_module().Peer()
    yield server
    server.stop.set()
    threading.Thread(target=server.shutdown, daemon=True).start()


@pytest.fixture
def peer_process(python: Callable[..., subprocess.Popen[str]]) -> Callable[..., tuple[subprocess.Popen[str], str]]:
    """peer_process(port=0): a Peer in a process of its own, and its URL."""

    def start(port: int = 0) -> tuple[subprocess.Popen[str], str]:
        process = python(str(PEER), str(port))
        assert process.stdout is not None
        return process, f"grpc://127.0.0.1:{int(process.stdout.readline())}"

    return start


def _peer_module() -> ModuleType:
    # pytest's importlib mode puts no test folder on sys.path.
    spec = importlib.util.spec_from_file_location("symbiosis_test_peer", PEER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def channel_to() -> Iterator[Callable[..., FlightChannel]]:
    """channel_to(url, **options): all are closed after the test."""
    with contextlib.ExitStack() as stack:

        def opened(url: str, **options: Any) -> FlightChannel:
            channel = FlightChannel(url, **options)
            stack.callback(channel.close)
            return channel

        yield opened


def soon(seconds: float = 10.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def body(data: bytes = b"abc") -> pa.RecordBatch:
    return protocol.batch_of(pa.py_buffer(data))


@pytest.fixture
def echo() -> Callable[..., bytes]:
    """echo(channel, data=b"abc", deadline_s=10): one call to a Peer; returns the body that came back."""

    def call(channel: FlightChannel, data: bytes = b"abc", header: bytes = b"call", deadline_s: float = 10.0) -> bytes:
        reply = channel.exchange(header, body(data), soon(deadline_s))
        return protocol.body_of(reply.data).to_pybytes()

    return call


@pytest.fixture
def python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """python(*arguments): a Python process in which `import symbiosis` works; killed after the test."""
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
            start_new_session=True,  # so that what it forked can be ended with it
        )
        running.append(process)
        return process

    yield start
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
