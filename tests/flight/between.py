"""What may stand between client and server: a tap on the wire, and a proxy that ends TLS and speaks Flight to both.

Both keep what they see; the proxy may also change it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

SCHEMA = pa.schema([("data", pa.uint8())])
Frame = tuple[bytes, bytes]  # header, body
Tamper = Callable[[str, int, Frame], list[Frame]]


def unchanged(direction: str, number: int, frame: Frame) -> list[Frame]:
    return [frame]


class Tap:
    """A TCP proxy on a free port; `change(direction, bytes)` may change what passes."""

    def __init__(self, port: int, change: Callable[[str, bytes], bytes] = lambda direction, data: data) -> None:
        self.seen = {"out": bytearray(), "in": bytearray()}
        self._change = change
        self._target = port
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                for direction, source, sink in (("out", client, server), ("in", server, client)):
                    threading.Thread(target=self._pump, args=(direction, source, sink), daemon=True).start()

    def _pump(self, direction: str, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.seen[direction] += data
                sink.sendall(self._change(direction, data))
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.close()


class FlightProxy(fl.FlightServerBase):
    """Forwards streams, actions and downloads; `tamper(direction, number, frame)` says what passes of each message.

    Messages are numbered from 0 in each direction of a stream; with sealed streams, "in" 0 is the accept.
    """

    def __init__(self, target: str, tamper: Tamper = unchanged) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.url = f"grpc://127.0.0.1:{self.port}"
        self.tamper = tamper
        self.change_command: Callable[[bytes], bytes] = lambda command: command
        self.change_answer: Callable[[str, bytes], bytes] = lambda name, answer: answer
        self.seen: dict[str, list[Frame]] = {"out": [], "in": []}
        self.commands: list[bytes] = []
        self._target = fl.FlightClient(target)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        self.commands.append(descriptor.command)
        command = self.change_command(descriptor.command)
        onward, back = self._target.do_exchange(fl.FlightDescriptor.for_command(command))
        onward.begin(SCHEMA)
        writer.begin(SCHEMA)
        answers = threading.Thread(target=self._pump, args=("in", back, writer), daemon=True)
        answers.start()
        self._pump("out", reader, onward)
        with contextlib.suppress(pa.ArrowException, OSError):
            onward.done_writing()
        answers.join()  # pyarrow crashes if a stream is used after its handler returned

    def _pump(self, direction: str, reader: Any, writer: Any) -> None:
        number = 0
        with contextlib.suppress(StopIteration, pa.ArrowException, OSError):
            while True:
                chunk = reader.read_chunk()
                frame = (
                    bytes(chunk.app_metadata),
                    chunk.data.column(0).buffers()[1].to_pybytes()[: len(chunk.data.column(0))],
                )
                self.seen[direction].append(frame)
                for header, body in self.tamper(direction, number, frame):
                    writer.write_with_metadata(as_batch(body), header)
                number += 1

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        for result in self._target.do_action(action):
            yield self.change_answer(action.type, bytes(result.body))

    def do_get(self, context: Any, ticket: Any) -> fl.FlightDataStream:
        chunks = self._target.do_get(ticket)

        def forward() -> Iterator[tuple[pa.RecordBatch, bytes]]:
            with contextlib.suppress(StopIteration):
                while True:
                    chunk = chunks.read_chunk()
                    yield chunk.data, bytes(chunk.app_metadata)

        return fl.GeneratorStream(SCHEMA, forward())


def as_batch(body: bytes) -> pa.RecordBatch:
    column = pa.Array.from_buffers(pa.uint8(), len(body), [None, pa.py_buffer(body)])
    return pa.RecordBatch.from_arrays([column], schema=SCHEMA)
