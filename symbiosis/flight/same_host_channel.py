"""The client half of the same-host plane: calls through shared memory where the server is on this machine.

One rule: nobody has to know. The server offers the plane over Flight, to who may call it; where it does not, cannot be
reached, or is not wanted, calls go over the wire as ever, and `conn.stats()` says which way they went.

A slot belongs to the client. One holds the body of the request under way; one the reply, whose tensors lie in it
without a copy and give it back when they are freed. Where too many are held, replies are copied out instead.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from symbiosis.config import is_loopback
from symbiosis.errors import ClosedError, ConnectError, DeadlineExceededError, ProtocolError, from_wire
from symbiosis.flight import protocol
from symbiosis.flight.channel import FlightChannel, Message
from symbiosis.flight.protocol import Error, SameHost
from symbiosis.flight.same_host import (
    AVAILABLE,
    INLINE_BYTES,
    MAX_SLOTS,
    NO_SLOT,
    SLOTS_OF_MESSAGES,
    Link,
    Packet,
    Slot,
    close_all,
)
from symbiosis.flight.tls import address

logger = logging.getLogger(__name__)
OFFER_TIMEOUT_S = 5.0
SMALLEST_SLOT = 1 << 20


@dataclass(slots=True)
class _Reply:
    app_metadata: Any
    data: pa.RecordBatch | None


class _Lease:
    """Keeps a slot from being used again while tensors lie in it."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        slot.free = False

    def __del__(self) -> None:
        self._slot.free = True


class SameHostChannel:
    """A FlightChannel whose calls go through shared memory where they can.

    Args:
        flight: the channel for everything else.
        max_message_bytes: limit of one message in either direction.
        max_streams: most links open at once; further calls wait for one.
        keepalive_s: how long a server may be silent until it is asked whether it lives, and until it is given up.
    """

    def __init__(
        self, flight: FlightChannel, max_message_bytes: int, max_streams: int = 8, keepalive_s: float = 20.0
    ) -> None:
        self._flight = flight
        self.url = flight.url
        self._limit = max_message_bytes
        self._lock = threading.Lock()
        self._idle: list[_ClientLink] = []
        self._free = threading.Semaphore(max_streams)
        self._max_streams = max_streams
        self._keepalive_s = keepalive_s
        self._offered: bool | None = None  # None: not asked yet
        self._closed = False
        self._pid = os.getpid()

    @property
    def open_header(self) -> bytes:
        return self._flight.open_header

    @open_header.setter
    def open_header(self, header: bytes) -> None:
        self._flight.open_header = header

    @property
    def transport(self) -> str:
        """How calls go."""
        return "shared memory" if self._offered else self._flight.transport

    def action(self, name: str, body: bytes, timeout_s: float) -> bytes:
        return self._flight.action(name, body, timeout_s)

    def download(self, ticket: bytes, timeout_s: float) -> Iterator[Message]:
        return self._flight.download(ticket, timeout_s)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()
        self._flight.close()

    def exchange(self, header: bytes, batch: pa.RecordBatch, deadline_s: float, reply_bytes: int = 0) -> Message:
        if self._offered is False or self._pid != os.getpid():  # a forked child's sockets are its parent's
            return self._flight.exchange(header, batch, deadline_s, reply_bytes)
        while True:
            link = self._checkout(deadline_s)
            if link is None:
                return self._flight.exchange(header, batch, deadline_s, reply_bytes)
            fresh = link.calls == 0
            try:
                return self._exchange_on(link, header, protocol.body_of(batch), deadline_s, reply_bytes)
            except ConnectError:
                if fresh or self._closed:
                    raise  # an idle link dies with its server; that says nothing about a new one

    def _exchange_on(
        self, link: _ClientLink, header: bytes, body: pa.Buffer, deadline_s: float, reply_bytes: int
    ) -> Message:
        clean = False
        try:
            reply = link.exchange(header, body, deadline_s, reply_bytes)
            clean = True
            return reply
        except TimeoutError:
            raise DeadlineExceededError(
                f"no reply from {self.url} within the deadline; the server may be overloaded or gone "
                "(connect_timeout_s and request_timeout_s set the limits)"
            ) from None
        except OSError as error:
            if self._closed:
                raise ClosedError(f"the connection to {self.url} was closed while a call was under way") from None
            raise ConnectError(
                f"no connection to {self.url}: {error.strerror or error}. Check that symbiosis-flight-server runs "
                "there and prints 'listening on', then repeat the call"
            ) from None
        finally:
            # KeyboardInterrupt may arrive anywhere above; a link with an unread reply is not reused.
            with self._lock:
                reuse = clean and not self._closed
                if reuse:
                    self._idle.append(link)
            self._free.release()
            if not reuse:
                link.close()

    def _checkout(self, deadline_s: float) -> _ClientLink | None:
        """A link, opened now if none is idle; None where there is no such plane."""
        if not self._free.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise DeadlineExceededError(
                f"all {self._max_streams} links to {self.url} stayed busy until the deadline; raise max_streams"
            )
        link = None
        try:
            with self._lock:
                if self._closed:
                    raise ClosedError(f"the connection to {self.url} was closed; call symbiosis.connect again")
                if self._idle:
                    link = self._idle.pop()
            link = link or self._opened(deadline_s)
            return link
        finally:
            if link is None:
                self._free.release()

    def _opened(self, deadline_s: float) -> _ClientLink | None:
        """Ask the server for the plane, over Flight, and connect."""
        answer = protocol.decode_header(
            self._flight.action("same_host", b"", max(0.1, min(OFFER_TIMEOUT_S, deadline_s - time.monotonic()))),
            SameHost | Error,
        )
        if isinstance(answer, Error):
            self._without(from_wire(answer.code, answer.message))
            return None
        try:
            connected = _connected(answer, self.open_header)
        except (OSError, ProtocolError) as error:  # as in another container: its sockets are not ours
            self._without(error)
            return None
        self._offered = True
        limit = min(self._limit, answer.max_message_bytes)
        return _ClientLink(Link(connected), limit, self._keepalive_s, self._check_alive)

    def _check_alive(self) -> None:
        """A process that is stopped keeps its sockets open: ask for anything, over Flight.

        Raises:
            ConnectError: there was no answer.
        """
        try:
            self._flight.action("stats", b"", self._keepalive_s)
        except DeadlineExceededError:
            raise ConnectError(
                f"{self.url} was silent for {self._keepalive_s:g} s, and as long again when asked whether it lives"
            ) from None

    def _without(self, reason: Exception) -> None:
        logger.debug("calls to %s go over the wire: %s", self.url, reason)
        self._offered = False


class _ClientLink:
    """A link and the slots of it, for one call at a time.

    Args:
        link: to the server.
        limit: most bytes of one message in either direction.
        keepalive_s: how long the server may be silent until it is asked whether it lives.
        check_alive: asks it; raises ConnectError.
    """

    def __init__(self, link: Link, limit: int, keepalive_s: float, check_alive: Callable[[], None]) -> None:
        self._link = link
        self._keepalive_s, self._check_alive = keepalive_s, check_alive
        self._slots: list[Slot] = []
        self._left = limit * SLOTS_OF_MESSAGES
        self._held_limit = self._left // 2
        self.calls = 0

    def exchange(self, header: bytes, body: pa.Buffer, deadline_s: float, reply_bytes: int) -> Message:
        new: list[int] = []
        try:
            request_slot = reply_slot = NO_SLOT
            if body.size > INLINE_BYTES:
                request_slot = self._slot(body.size, new)
                self._slots[request_slot].write(body)
            if reply_bytes > INLINE_BYTES:
                reply_slot = self._slot(reply_bytes, new, besides=request_slot)
            self._link.socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            self._link.send(header, body, request_slot, reply_slot, new)
        finally:
            close_all(new)
        packet = self._awaited(deadline_s)
        if packet is None:
            raise ConnectionResetError("the server closed the link")
        close_all(packet.descriptors)
        self.calls += 1
        if packet.body is not None:
            return _Reply(packet.header, protocol.batch_of(packet.body))
        if packet.slot != reply_slot:
            raise ProtocolError(f"the reply is in slot {packet.slot}, which was not offered for it")
        return _Reply(packet.header, protocol.batch_of(self._taken(self._slots[reply_slot], packet.nbytes)))

    def close(self) -> None:
        self._link.close()

    def _awaited(self, deadline_s: float) -> Packet | None:
        """The next packet; a server that is silent for long is asked whether it lives."""
        while True:
            left_s = max(0.001, deadline_s - time.monotonic())
            self._link.socket.settimeout(min(left_s, self._keepalive_s))
            try:
                return self._link.receive()
            except TimeoutError:
                if left_s <= self._keepalive_s:
                    raise
                self._check_alive()

    def _slot(self, nbytes: int, new: list[int], besides: int = NO_SLOT) -> int:
        """The smallest free slot that holds so much, or a new one, whose descriptor is added to `new`."""
        fitting = [
            (slot.nbytes, number)
            for number, slot in enumerate(self._slots)
            if slot.free and slot.nbytes >= nbytes and number != besides
        ]
        if fitting:
            return min(fitting)[1]
        size = max(SMALLEST_SLOT, 1 << (nbytes - 1).bit_length())
        if size > self._left or len(self._slots) >= MAX_SLOTS:
            raise ConnectionResetError("its slots are used up")  # by sizes that differ: a new link begins with none
        slot, descriptor = Slot.create(size)
        new.append(descriptor)
        self._slots.append(slot)
        self._left -= size
        return len(self._slots) - 1

    def _taken(self, slot: Slot, nbytes: int) -> pa.Buffer:
        """The body of a reply: where it lies, or a copy where many are held already."""
        held = sum(other.nbytes for other in self._slots if not other.free)
        count = sum(not other.free for other in self._slots)
        if held + slot.nbytes > self._held_limit or count >= MAX_SLOTS // 2:
            return pa.py_buffer(slot.body(nbytes).to_pybytes())
        return slot.body(nbytes, _Lease(slot))


def on_this_host(url: str) -> bool:
    """Whether a server may be on this machine, and this system has what the plane needs."""
    return AVAILABLE and (url.startswith("grpc+unix://") or is_loopback(address(url)[0]))


def _connected(answer: SameHost, open_header: bytes) -> socket.socket:
    if not answer.address.startswith(protocol.SAME_HOST_PREFIX):  # a server does not choose what we connect to
        raise ProtocolError(f"the server named {answer.address!r} as its socket")
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.settimeout(OFFER_TIMEOUT_S)
        connected.connect("\0" + answer.address)
        connected.send(answer.ticket + open_header)
    except BaseException:
        connected.close()
        raise
    return connected
