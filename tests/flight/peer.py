"""A Flight server that echoes each message, unless its header is a cue to misbehave:

    sleep S    wait first              end      end the stream
    deaf       read and answer no more twice    answer two times

    python peer.py PORT                prints its port, then serves until it is killed

It imports pyarrow only, so that a process of its own starts at once.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

SCHEMA = pa.schema([("data", pa.uint8())])


class Peer(fl.FlightServerBase):
    def __init__(self, port: int = 0) -> None:
        super().__init__(f"grpc://127.0.0.1:{port}")
        self.commands: list[bytes] = []  # one per stream
        self.calls = 0
        self.stop = threading.Event()

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        self.commands.append(descriptor.command)
        with contextlib.suppress(StopIteration, pa.ArrowException, OSError):
            writer.begin(SCHEMA)
            while True:
                chunk = reader.read_chunk()
                self.calls += 1
                self.answer(chunk, bytes(chunk.app_metadata), writer)

    def answer(self, chunk: Any, cue: bytes, writer: Any) -> None:
        if cue.startswith(b"sleep "):
            self.stop.wait(float(cue.split()[1]))
        elif cue == b"deaf":
            self.stop.wait(60)
        elif cue == b"end":
            raise StopIteration
        elif cue == b"twice":
            writer.write_with_metadata(chunk.data, cue)
        writer.write_with_metadata(chunk.data, cue)

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        if action.type == "sleep":
            self.stop.wait(60)
        yield b"answer"

    def do_get(self, context: Any, ticket: Any) -> fl.FlightDataStream:
        batch = pa.RecordBatch.from_arrays([pa.array([1, 2, 3], pa.uint8())], schema=SCHEMA)
        return fl.GeneratorStream(SCHEMA, iter([(batch, b"first"), (batch, b"second")]))


if __name__ == "__main__":
    server = Peer(int(sys.argv[1]))
    print(server.port, flush=True)
    server.stop.wait()
