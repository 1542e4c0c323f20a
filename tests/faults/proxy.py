"""A TCP proxy that misbehaves on purpose: it delays, throttles, swallows, resets and flips bytes.

    with Proxy(port) as proxy:
        conn = symbiosis.connect(proxy.url)
        proxy.delay_s = 0.05

What it does may be changed at any time; it runs an asyncio loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

PIECE_BYTES = 65_536


class Proxy:
    """Leads to a port of this machine.

    Attributes:
        delay_s: added to each piece, in each direction.
        bytes_per_s: most that passes in each direction of a connection; 0 = no limit.
        swallow: let nothing pass, and say nothing, as a cut cable does.
        reset_chance: for each piece, that its connection is reset instead.
        flip_chance: for each piece, that one bit of it is flipped.
        down: refuse new connections.
    """

    def __init__(self, port: int, seed: int = 0) -> None:
        self._target = port
        self._random = random.Random(seed)
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.swallow = False
        self.reset_chance = 0.0
        self.flip_chance = 0.0
        self.down = False
        self.connections = self.resets = self.flips = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faults-proxy", daemon=True)
        self._thread.start()
        self._server = self._wait(self._listen())
        self.port = int(self._server.sockets[0].getsockname()[1])
        self.url = f"grpc://127.0.0.1:{self.port}"

    def reset_all(self) -> None:
        """Reset every connection that is open."""
        self._wait(self._reset_open())

    def close(self) -> None:
        self._wait(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _reset_open(self) -> None:
        for writer in tuple(self._open):
            self._reset(writer)

    async def _end(self) -> None:
        self._server.close()
        await self._reset_open()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.down:
            self._reset(writer)
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            self._reset(writer)
            return
        finally:
            self._tasks.discard(task)
        self._open.update((writer, far_writer))
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink, (writer, far_writer)))
            self._tasks.add(pump)
            pump.add_done_callback(self._tasks.discard)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        both: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while piece := await source.read(PIECE_BYTES):
                if self._random.random() < self.reset_chance:
                    self.resets += 1
                    break
                await self._hold(len(piece))
                sink.write(self._spoiled(piece))
                await sink.drain()
        for writer in both:
            self._reset(writer)

    async def _hold(self, size: int) -> None:
        await asyncio.sleep(self.delay_s + (size / self.bytes_per_s if self.bytes_per_s else 0.0))
        while self.swallow:
            await asyncio.sleep(0.02)

    def _spoiled(self, piece: bytes) -> bytes:
        if self._random.random() >= self.flip_chance:
            return piece
        self.flips += 1
        spoiled = bytearray(piece)
        spoiled[self._random.randrange(len(piece))] ^= 1 << self._random.randrange(8)
        return bytes(spoiled)

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        """Close with a reset, as a crashed peer's kernel does, instead of an orderly end."""
        self._open.discard(writer)
        raw = writer.get_extra_info("socket")
        if raw is not None and raw.fileno() != -1:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
