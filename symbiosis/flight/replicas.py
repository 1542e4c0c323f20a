"""Servers that hold the same model, and which of them gets the next try of a call.

One rule: a call is sent again only where that is safe and may help, and never past its time. Safe it always
is: a call is a pure function of its request, and a stream is opened for one fingerprint, so that a server
which came back with other weights refuses it (ModelMismatchError) and ends the matter.

A client stays with one server as long as that answers, since servers learn its pace and line it up with
others (`flight/rendezvous.py`). It moves when its server fails, is busy, or has more clients than another.

Rejected: a retry library (tenacity, stamina). They repeat one call; here the state belongs to a server: how
long it is left alone is shared by all threads, another server may be free at once, and a wait ends with `close`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from symbiosis.errors import (
    ConnectError,
    DeadlineExceededError,
    ModelMismatchError,
    RemoteOutOfMemoryError,
    ServerBusyError,
    SymbiosisError,
    from_wire,
)
from symbiosis.flight import protocol
from symbiosis.flight.channel import Channel, Message
from symbiosis.telemetry import ServerState

logger = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE_S = 0.05  # after a first failure; doubled after each further one
LONGEST_PAUSE_S = 1.0
OUT_OF_MEMORY_TRIES = 3  # the server splits and tries again by itself: more would not help
PROBE_S = 1.0  # how often servers that failed are asked whether they are back
BALANCE_S = 30.0  # how often the number of clients of each is compared
PROBE_TIMEOUT_S = 5.0
# What says something of the server; all else is about the call.
OF_THE_SERVER = (ConnectError, ServerBusyError, DeadlineExceededError, RemoteOutOfMemoryError, ModelMismatchError)


class Replica:
    """One server and how it fared; changed under the lock of its Replicas."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.url = channel.url
        self.failures = 0  # since it answered last
        self.failed_in_all = 0
        self.first_failed_s = 0.0
        self.free_s = 0.0  # not tried again before this reading of time.monotonic()
        self.last_error = ""  # as text: the error itself would keep a call's tensors alive
        self.clients = 0

    def state(self) -> ServerState:
        return ServerState(
            url=self.url,
            up=not self.failures,
            failures=self.failures,
            failed_in_all=self.failed_in_all,
            last_error=self.last_error,
            transport=self.channel.transport,
        )

    def fail(self, error: SymbiosisError, now_s: float) -> None:
        if not self.failures:
            self.first_failed_s = now_s
        self.failures += 1
        self.failed_in_all += 1
        self.last_error = f"{error.code}: {error}"
        self.free_s = now_s + _pause_s(self.failures, error)


class Replicas:
    """One or several servers of one model, tried in turn.

    Args:
        channels: one to each server.
        retry_s: longest time that a call is tried again; 0 = never.
    """

    def __init__(self, channels: Sequence[Channel], retry_s: float) -> None:
        self._replicas = [Replica(channel) for channel in channels]
        self._home = self._replicas[0]
        self._retry_s = retry_s
        self._fingerprint = ""
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def home(self) -> Channel:
        """The channel to the server that calls go to."""
        return self._home.channel

    @property
    def urls(self) -> list[str]:
        return [replica.url for replica in self._replicas]

    def states(self) -> tuple[ServerState, ...]:
        """How each server fares, as far as is known here; asks nobody."""
        with self._lock:
            return tuple(replica.state() for replica in self._replicas)

    def run(self, attempt: Callable[[Channel], T], deadline_s: float) -> T:
        """Make a call, again and elsewhere where that is safe and may help.

        Args:
            attempt: sends the call over a channel; raises what the server or the channel reports.
            deadline_s: a `time.monotonic()` reading.

        Raises:
            SymbiosisError: that of the last try.
        """
        give_up_s = min(deadline_s, time.monotonic() + self._retry_s)
        tries = 0
        while True:
            replica = self._pick()
            tries += 1
            try:
                result = attempt(replica.channel)
            except SymbiosisError as error:
                wait_s = self._on_error(replica, error)
                hopeless = isinstance(error, RemoteOutOfMemoryError) and tries >= OUT_OF_MEMORY_TRIES
                if hopeless or not _worth_another_try(error) or time.monotonic() + wait_s >= give_up_s:
                    raise
            else:
                if replica.failures:
                    self._on_success(replica)
                return result
            self._closed.wait(wait_s)  # the next try says so if it was closed

    def download(self, ticket: bytes, timeout_s: float) -> Iterator[Message]:
        """The messages of a DoGet, each once; after a failure it begins anew and skips what was delivered."""
        messages: Iterator[Message] = iter(())
        delivered, fresh = 0, True

        def following(channel: Channel) -> Message | None:
            nonlocal messages, fresh
            try:
                if fresh:
                    messages, fresh = channel.download(ticket, timeout_s), False
                    for _ in range(delivered):
                        next(messages, None)
                return next(messages, None)
            except BaseException:
                fresh = True
                raise

        while (message := self.run(following, time.monotonic() + timeout_s)) is not None:
            delivered += 1
            yield message

    def each(self, ask: Callable[[Channel], T]) -> dict[str, T | SymbiosisError]:
        """Ask every server; what each answers or raises, by URL. Those that cannot be reached count as failed."""
        answers: dict[str, T | SymbiosisError] = {}
        for replica in self._replicas:
            try:
                answers[replica.url] = ask(replica.channel)
            except SymbiosisError as error:
                self._on_error(replica, error)
                answers[replica.url] = error
        return answers

    def open(self, header: bytes, fingerprint: str) -> None:
        """Begin: streams are opened with this header, on the server that has the fewest clients."""
        self._fingerprint = fingerprint
        for replica in self._replicas:
            replica.channel.open_header = header
        if len(self._replicas) > 1:
            self._probe(balance=True, at_once=True)
            threading.Thread(target=self._keep_probing, name="symbiosis-replicas", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        for replica in self._replicas:
            replica.channel.close()

    # --- choosing -----------------------------------------------------------------------------------

    def _pick(self) -> Replica:
        if not self._home.failures:
            return self._home
        with self._lock:
            # One that failed is tried by calls only where no other is left; else `_probe` finds out.
            self._home = min(self._replicas, key=lambda r: (r.failures > 0, r.free_s if r.failures else r.clients))
            return self._home

    def _on_error(self, replica: Replica, error: SymbiosisError) -> float:
        """Note a failed try; seconds until another one makes sense."""
        if not isinstance(error, OF_THE_SERVER) or self._closed.is_set():
            return error.retry_after_s or 0.0  # a quota: about this client, whatever the server
        with self._lock:
            now_s = time.monotonic()
            replica.fail(error, now_s)
            wait_s = 0.0
            if all(other.failures for other in self._replicas):
                wait_s = max(0.0, min(other.free_s for other in self._replicas) - now_s)
        if replica.failures == 1:
            logger.warning("%s [%s]", str(error), error.code)
        return wait_s

    def _on_success(self, replica: Replica) -> None:
        with self._lock:
            failures, replica.failures, replica.free_s = replica.failures, 0, 0.0
            away_s = time.monotonic() - replica.first_failed_s
        if failures:
            logger.info("%s answers again, %.1f s and %d failed tries later", replica.url, away_s, failures)

    # --- looking after several ----------------------------------------------------------------------

    def _keep_probing(self) -> None:
        balanced_s = time.monotonic()
        while not self._closed.wait(PROBE_S):
            balance = time.monotonic() - balanced_s > BALANCE_S
            balanced_s = time.monotonic() if balance else balanced_s
            self._probe(balance)

    def _probe(self, balance: bool, at_once: bool = False) -> None:
        """Ask servers that failed whether they are back, and all of them how many clients they have."""
        for replica in self._replicas:
            if balance or (replica.failures and replica.free_s <= time.monotonic()):
                self._ask(replica)
        if balance:
            self._balance(at_once)

    def _ask(self, replica: Replica) -> None:
        try:
            replica.clients = self._clients_of(replica.channel)
        except SymbiosisError as error:
            self._on_error(replica, error)
        else:
            if replica.failures and replica.free_s <= time.monotonic():
                self._on_success(replica)

    def _clients_of(self, channel: Channel) -> int:
        stats: Any = protocol.decode_header(
            channel.action("stats", b"", PROBE_TIMEOUT_S), protocol.ServerStats | protocol.Error
        )
        if isinstance(stats, protocol.Error):
            raise from_wire(stats.code, stats.message)
        if stats.fingerprint != self._fingerprint:
            raise ModelMismatchError(
                f"{channel.url} came back with a model of fingerprint {stats.fingerprint[:12]}, this connection is "
                f"for {self._fingerprint[:12]}; it is left alone"
            )
        return int(stats.clients)

    def _balance(self, at_once: bool) -> None:
        """Move to a server with fewer clients; by chance, or all clients of a full one would move at once."""
        with self._lock:
            up = [replica for replica in self._replicas if not replica.failures]
            fewest = min(up, key=lambda replica: (replica.clients, random.random()), default=self._home)
            if at_once or (fewest.clients + 1 < self._home.clients and random.random() < 0.5):
                self._home = fewest


def _worth_another_try(error: SymbiosisError) -> bool:
    return error.retryable and not isinstance(error, DeadlineExceededError)


def _pause_s(failures: int, error: SymbiosisError) -> float:
    """Twice as long after each failure, and by chance up to half of it shorter: clients must not come back as one."""
    longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16))
    jittered_s = longest_s * random.uniform(0.5, 1.0)
    return max(jittered_s, (error.retry_after_s or 0.0) * random.uniform(1.0, 1.25))
