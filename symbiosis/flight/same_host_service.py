"""The server half of the same-host plane: hands out tickets over Flight, and answers who comes with one.

One rule: it grants nothing that Flight would not. A ticket is given to who may call this server, once, for that
tenant; what comes over a link goes through the same checks, quotas and queue as what comes over the wire.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa

from symbiosis.errors import ProtocolError, ServerBusyError, SymbiosisError
from symbiosis.flight import protocol
from symbiosis.flight.protocol import SameHost
from symbiosis.flight.same_host import (
    INLINE_BYTES,
    MAX_SLOTS,
    NO_SLOT,
    SLOTS_OF_MESSAGES,
    TICKET_BYTES,
    Link,
    Slot,
    close_all,
)
from symbiosis.flight.tokens import Grant

logger = logging.getLogger(__name__)
TICKET_S = 10.0  # how long a ticket is good
MAX_TICKETS = 1024


class Chunk(NamedTuple):
    """A request as the service takes it from Flight; `borrowed` memory is the client's to write to after the reply."""

    app_metadata: bytes
    data: pa.RecordBatch
    borrowed: bool


class ServerLink:
    """One link, with what the service asks of Flight's reader, writer and context.

    Args:
        connected: the socket.
        limit: most bytes of all slots together.
        idle_s: how long to wait for a request.
        write_s: how long a client may take to read a reply.
    """

    def __init__(self, connected: socket.socket, limit: int, idle_s: float, write_s: float) -> None:
        self._link = Link(connected)
        self._slots: list[Slot] = []
        self._left = limit
        self._idle_s, self._write_s = idle_s, write_s
        self._reply_slot = NO_SLOT

    def read_chunk(self) -> Chunk:
        """The next request.

        Raises:
            StopIteration: the client is gone, silent for too long, or sent what is no request.
        """
        try:
            self._link.socket.settimeout(self._idle_s)
            packet = self._link.receive()
            if packet is None:
                raise StopIteration
            self._add(packet.descriptors)
            self._reply_slot = packet.reply_slot
            for slot in (packet.slot, packet.reply_slot):
                if not NO_SLOT <= slot < len(self._slots):
                    raise ProtocolError(f"slot {slot} of {len(self._slots)}")
            if packet.slot == packet.reply_slot != NO_SLOT:
                raise ProtocolError(f"slot {packet.slot} is for the body and for the reply")
            body = self._slots[packet.slot].body(packet.nbytes) if packet.body is None else packet.body
        except (ProtocolError, OSError) as error:
            logger.debug("a same-host link ends: %s", error)
            raise StopIteration from None
        return Chunk(packet.header, protocol.batch_of(body), packet.body is None)

    def write_with_metadata(self, batch: pa.RecordBatch, header: bytes) -> None:
        """Send a reply, in the slot for it if there is one that holds it."""
        body = protocol.body_of(batch)
        slot = self._reply_slot if body.size > INLINE_BYTES else NO_SLOT
        if body.size > INLINE_BYTES and (slot == NO_SLOT or body.size > self._slots[slot].nbytes):
            error = ProtocolError(f"the reply has {body.size:,} bytes, and no slot for it was named")
            header, body, slot = _error(header, error), pa.py_buffer(b""), NO_SLOT
        if slot != NO_SLOT:
            self._slots[slot].write(body)
        self._link.socket.settimeout(self._write_s)
        self._link.send(header, body, slot)

    def is_cancelled(self) -> bool:
        """Whether the client is gone."""
        poller = select.poll()  # a socket with a timeout would wait in `recv`, whatever flags say
        poller.register(self._link.socket, select.POLLRDHUP)
        return bool(poller.poll(0))

    def close(self) -> None:
        self._link.close()

    def _add(self, descriptors: list[int]) -> None:
        """Map new slots; they are numbered in the order in which they come."""
        for place, descriptor in enumerate(descriptors):
            try:
                if len(self._slots) >= MAX_SLOTS:
                    raise ProtocolError(f"more than {MAX_SLOTS} slots")
                slot = Slot.received(descriptor, self._left)
            except BaseException:
                close_all(descriptors[place + 1 :])
                raise
            self._slots.append(slot)
            self._left -= slot.nbytes


class SameHostPlane:
    """Listens on a socket that only this machine's processes can reach.

    Args:
        converse: answers all requests of a link: (link, grant, open header).
        max_message_bytes: limit of one message in either direction.
        idle_s: a link that asks for nothing for this long is closed.
        write_s: one whose client does not read a reply for this long is closed.
    """

    def __init__(
        self,
        converse: Callable[[ServerLink, Grant | None, bytes], None],
        max_message_bytes: int,
        idle_s: float,
        write_s: float,
    ) -> None:
        self._converse = converse
        self._max_message_bytes = max_message_bytes
        self._idle_s, self._write_s = idle_s, write_s
        self._tickets: dict[bytes, tuple[Grant | None, float]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.address = protocol.SAME_HOST_PREFIX + secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.address)  # no file: gone with the process
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="symbiosis-same-host", daemon=True).start()

    def offer(self, grant: Grant | None) -> SameHost:
        """Where to connect, and a ticket that is good once.

        Raises:
            ServerBusyError: too many tickets are out.
        """
        now_s, ticket = time.monotonic(), secrets.token_bytes(TICKET_BYTES)
        with self._lock:
            self._tickets = {known: given for known, given in self._tickets.items() if given[1] > now_s}
            if len(self._tickets) >= MAX_TICKETS:
                raise ServerBusyError(f"{MAX_TICKETS} tickets are out that nobody used", retry_after_s=TICKET_S)
            self._tickets[ticket] = grant, now_s + TICKET_S
        return SameHost(address=self.address, ticket=ticket, max_message_bytes=self._max_message_bytes)

    def close(self) -> None:
        """Take no more links; those that are open end with their clients, or the process."""
        self._closed = True
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waker:
            waker.settimeout(1.0)
            waker.connect("\0" + self.address)  # closing alone does not wake a thread in accept
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connected,), name="symbiosis-link", daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        limit = self._max_message_bytes * SLOTS_OF_MESSAGES
        link = ServerLink(connected, limit, self._idle_s, self._write_s)
        try:
            connected.settimeout(TICKET_S)
            hello = connected.recv(TICKET_BYTES + protocol.MAX_HEADER_BYTES)
            with self._lock:
                grant, until_s = self._tickets.pop(hello[:TICKET_BYTES], (None, 0.0))
            if time.monotonic() > until_s:
                return  # a process without a ticket gets no word
            self._converse(link, grant, hello[TICKET_BYTES:])
        except OSError:
            logger.debug("a same-host link ended", exc_info=True)
        except Exception:
            logger.exception("a same-host link failed")
        finally:
            link.close()


def _error(reply: bytes, error: SymbiosisError) -> bytes:
    return protocol.encode_header(protocol.Error(id=protocol.peek_id(reply), code=error.code, message=str(error)))
