"""The same-host plane, both ends: packets over a Unix socket, and tensors in memory that both processes see.

    Slot      memory that a client made (memfd) and a server has mapped, too
    Packet    one request or reply: a header, and a body in the packet or in a slot (docs/protocol.md section 11)
    Link      a connected socket and the slots that were passed over it

One rule: a peer can neither crash nor block the other. A slot is sealed against shrinking before it is mapped, since a
page that is gone would kill who reads it; headers and small bodies are copied out of the packet before they are looked
at; every wait has an end. What only ends with a process is the kernel's to clean up: nothing here has a name in a
file system.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import torch

from symbiosis.errors import ProtocolError
from symbiosis.flight import protocol

AVAILABLE = sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET")
INLINE_BYTES = (
    64 << 10
)  # bodies up to here travel in the packet: copying them costs less than two processes' page faults
MAX_SLOTS = 64
SLOTS_OF_MESSAGES = 8  # all slots of a link together hold at most this many messages of the largest size
NO_SLOT = -1
TICKET_BYTES = 32

# header bytes, slot of the body, body bytes, slot for the reply
_FRAME = struct.Struct("<IiQi")
_LARGEST = _FRAME.size + protocol.MAX_HEADER_BYTES + INLINE_BYTES
_SEALS = 0 if not AVAILABLE else fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Slot:
    """Memory that two processes share. `free` is the client's: whether it may be offered or written to.

    Args:
        descriptor: of a memfd; it is not kept.
        nbytes: its size.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.free = True
        self._memory = mmap.mmap(descriptor, nbytes)
        self._buffer = pa.py_buffer(self._memory)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int) -> tuple[Slot, int]:
        """New memory, and a descriptor to pass on and close."""
        descriptor = os.memfd_create("symbiosis", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls(descriptor, nbytes), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def received(cls, descriptor: int, limit: int) -> Slot:
        """Memory that a peer passed; the descriptor is closed.

        Raises:
            ProtocolError: it may shrink, is larger than `limit`, or is no memory.
        """
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            nbytes = os.fstat(descriptor).st_size
            if seals & _SEALS != _SEALS:
                raise ProtocolError("a slot is not sealed against shrinking and growing (docs/protocol.md section 11)")
            if not 0 < nbytes <= limit:
                raise ProtocolError(f"a slot of {nbytes:,} bytes; the slots of a link have {limit:,} left")
            return cls(descriptor, nbytes)
        except OSError as error:
            raise ProtocolError(f"what was passed as a slot is no sealed memory: {error}") from None
        finally:
            os.close(descriptor)

    def body(self, nbytes: int, owner: Any = None) -> pa.Buffer:
        """The first bytes, without a copy; `owner` is kept alive with them.

        Raises:
            ProtocolError: there are not that many.
        """
        if nbytes > self.nbytes:
            raise ProtocolError(f"a body of {nbytes:,} bytes in a slot of {self.nbytes:,}")
        return pa.foreign_buffer(self._buffer.address, nbytes, base=owner or self) if nbytes else pa.py_buffer(b"")

    def write(self, body: pa.Buffer) -> None:
        """Copy a body here; with torch, which uses its threads and does not hold Python's lock.

        Raises:
            ProtocolError: it does not fit.
        """
        if body.size > self.nbytes:
            raise ProtocolError(f"a body of {body.size:,} bytes for a slot of {self.nbytes:,}")
        self._bytes[: body.size].copy_(protocol.tensor_over(body, 0, body.size, torch.uint8))


class Packet(NamedTuple):
    """What was received; `slot` is that of the body, `reply_slot` that for the reply."""

    header: bytes
    body: pa.Buffer | None  # None where it is in the slot
    nbytes: int
    slot: int
    reply_slot: int
    descriptors: list[int]


class Link:
    """One end of a connected socket. Not for several threads at once."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._received = bytearray(_LARGEST)

    def send(
        self,
        header: bytes,
        body: pa.Buffer,
        slot: int = NO_SLOT,
        reply_slot: int = NO_SLOT,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send a packet; the body travels in it unless a slot is named.

        Raises:
            OSError: the peer is gone, or does not read in time.
        """
        frame = _FRAME.pack(len(header), slot, body.size, reply_slot)
        parts = [frame, header] if slot != NO_SLOT else [frame, header, body]
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self.socket.sendmsg(parts, passed)

    def receive(self) -> Packet | None:
        """The next packet; None where the peer has closed.

        Raises:
            ProtocolError: it is none.
            OSError: nothing came in time.
        """
        size, ancillary, flags, _ = self.socket.recvmsg_into(
            [self._received], socket.CMSG_SPACE(4 * MAX_SLOTS), socket.MSG_CMSG_CLOEXEC
        )
        descriptors = _descriptors(ancillary)
        if not size and not descriptors:
            return None
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or size < _FRAME.size:
                raise ProtocolError(f"a packet of {size:,} bytes or more; expected {_FRAME.size} to {_LARGEST:,}")
            header_bytes, slot, nbytes, reply_slot = _FRAME.unpack_from(self._received)
            end = _FRAME.size + header_bytes
            inline = nbytes if slot == NO_SLOT else 0
            if header_bytes > protocol.MAX_HEADER_BYTES or end + inline != size:
                raise ProtocolError(f"a packet of {size:,} bytes says that it has {end + inline:,}")
        except ProtocolError:
            close_all(descriptors)
            raise
        view = memoryview(self._received)
        body = pa.py_buffer(bytes(view[end:size])) if slot == NO_SLOT else None
        return Packet(bytes(view[_FRAME.size : end]), body, nbytes, slot, reply_slot, descriptors)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in it
        self.socket.close()


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that were passed."""
    for descriptor in descriptors:
        os.close(descriptor)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()
