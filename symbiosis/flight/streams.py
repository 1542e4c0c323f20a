"""The streams that clients hold open: how many each has, and which to cut off.

A client that stops reading blocks the thread that writes to it, and one that is gone without a word keeps its
threads for ever. pyarrow's server can end neither, so the TCP connection is shut down under them: gRPC then ends
its streams, and a client that lives opens new ones.

One rule: what is cut off loses nothing. Only a connection none of whose streams has moved for its time is cut,
and any call may be sent again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from symbiosis.errors import ServerBusyError

logger = logging.getLogger(__name__)
RETRY_AFTER_S = 1.0


@dataclass(eq=False)
class Stream:
    """One open DoExchange stream; `since_s` is when it began what it is doing."""

    client: str
    peer: str  # as gRPC names it, such as ipv4:127.0.0.1:40112
    doing: str  # reading, computing or writing
    since_s: float

    def begins(self, doing: str, now_s: float) -> None:
        self.doing, self.since_s = doing, now_s


class Streams:
    """All streams of a server.

    Args:
        max_per_client: most that one client may have open.
        idle_s: a connection whose streams all wait for requests this long is cut.
        write_s: one whose client does not read a reply for this long is cut.
        clock: seconds.
    """

    def __init__(
        self, max_per_client: int, idle_s: float, write_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.set_limits(max_per_client, idle_s, write_s)
        self._clock = clock
        self._open: set[Stream] = set()
        self._lock = threading.Lock()
        self.cut_off = 0

    def set_limits(self, max_per_client: int, idle_s: float, write_s: float) -> None:
        """Replace the limits; streams that are open are measured by them, too."""
        self._max_per_client = max_per_client
        self._limits_s = {"reading": idle_s, "writing": write_s}

    @contextlib.contextmanager
    def opened(self, client: str, peer: str) -> Iterator[Stream]:
        """A stream, for as long as it is open."""
        stream = Stream(client, peer, "reading", self._clock())
        with self._lock:
            self._open.add(stream)
        try:
            yield stream
        finally:
            with self._lock:
                self._open.discard(stream)

    def check(self, client: str) -> None:
        """Raises ServerBusyError: the client has more streams open than it may."""
        with self._lock:
            count = sum(stream.client == client for stream in self._open)
        if client and count > self._max_per_client:
            raise ServerBusyError(
                f"client {client} has {count} streams open, and may have {self._max_per_client}; "
                "close connections that are no longer used, or lower max_streams",
                retry_after_s=RETRY_AFTER_S,
            )

    def per_client(self) -> Counter[str]:
        """How many streams each client has open."""
        with self._lock:
            return Counter(stream.client for stream in self._open)

    def overdue(self) -> set[str]:
        """Peers to cut off: one stream is stuck in writing, or all have been idle too long."""
        now_s = self._clock()
        with self._lock:
            by_peer: dict[str, list[Stream]] = {}
            for stream in self._open:
                by_peer.setdefault(stream.peer, []).append(stream)
        return {peer for peer, streams in by_peer.items() if self._is_overdue(streams, now_s)}

    def cut(self) -> None:
        """Cut off whoever is overdue."""
        for peer in self.overdue():
            if shut_down(peer):
                self.cut_off += 1
                logger.warning("%s was cut off: it neither read nor sent anything for too long", peer)

    def cut_all(self) -> None:
        """Cut off everybody: the server ends."""
        with self._lock:
            peers = {stream.peer for stream in self._open}
        for peer in peers:
            shut_down(peer)

    def _is_overdue(self, streams: list[Stream], now_s: float) -> bool:
        late = [s.doing for s in streams if now_s - s.since_s > self._limits_s.get(s.doing, float("inf"))]
        return "writing" in late or len(late) == len(streams)


def shut_down(peer: str) -> bool:
    """Shut down this process's TCP connection to a peer; False if there is none, as over a Unix socket."""
    kind, _, address = peer.partition(":")
    host, _, port = address.replace("%5B", "[").replace("%5D", "]").rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return False
    wanted = (host.strip("[]").partition("%")[0], int(port))
    return any(_shut_down_if(int(name), wanted) for name in os.listdir("/proc/self/fd"))


def _shut_down_if(descriptor: int, wanted: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError):  # closed meanwhile, or not connected
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            name = connection.getpeername()
            if not isinstance(name, tuple):  # a Unix socket: same-host links end by themselves
                return False
            host, port, *_ = name
            if (host.removeprefix("::ffff:"), port) == wanted:  # gRPC's sockets serve both families
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False
