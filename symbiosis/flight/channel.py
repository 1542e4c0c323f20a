"""The client half of the wire: a pool of open streams, deadlines, interruptible waits.

One rule: bytes in, bytes out. This module knows Flight and no tensors; every Flight error is turned
into one of ours here, at one point. A stream whose call did not end cleanly is never used again, so a
late reply can not be taken for another call's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.flight as fl
from pydantic import SecretStr

from symbiosis.config import is_loopback
from symbiosis.errors import (
    AuthError,
    ClosedError,
    ConfigError,
    ConnectError,
    DeadlineExceededError,
    MissingExtraError,
    PayloadError,
    ProtocolError,
    SymbiosisError,
)
from symbiosis.flight import protocol
from symbiosis.flight.tls import Tls, address, client_arguments, explain
from symbiosis.interrupts import Watch, WatchedCall

if TYPE_CHECKING:
    from symbiosis.privacy.payload import Offer

T = TypeVar("T")
GRACE_S = 1.0  # what gRPC gets to keep the time by itself; it cannot in a process forked after its threads were started
STALE_S = 1.0  # a stream that died while it was idle fails at once; what takes longer is another trouble
SCHEMES = ("grpc://", "grpc+tls://", "grpc+tcp://", "grpc+unix://")
NO_TLS = Tls()
UNAUTHENTICATED = "Detail: Unauthenticated"  # on a stream, pyarrow gives the status without its class
CHANNEL_OPTIONS = [
    # A channel of its own: no shared back-off state, and a quick retry when a server is restarted.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]


class Message(Protocol):
    """One message of a stream: header bytes and a record batch."""

    app_metadata: Any
    data: pa.RecordBatch | None


class Channel(Protocol):
    """The transport seam: everything above it runs over any object with these methods."""

    url: str
    open_header: bytes  # what streams are opened with: docs/protocol.md section 3

    @property
    def transport(self) -> str:
        """How calls go, for people."""

    def exchange(self, header: bytes, batch: pa.RecordBatch, deadline_s: float, reply_bytes: int = 0) -> Message:
        """Send one message on an open stream and wait for its answer.

        Args:
            header: of the request.
            batch: its body.
            deadline_s: a `time.monotonic()` reading.
            reply_bytes: the most that the body of the answer has.
        """

    def action(self, name: str, body: bytes, timeout_s: float) -> bytes:
        """Run one Flight action."""

    def download(self, ticket: bytes, timeout_s: float) -> Iterator[Message]:
        """The messages of a DoGet."""

    def close(self) -> None:
        """End all streams."""


def check_url(url: str) -> str:
    """Normalise a server URL.

    Raises:
        ConfigError: a scheme this version does not speak, or no host and port.
    """
    if not url.startswith(SCHEMES):
        raise ConfigError(
            f"{url!r} is not a server URL; expected grpc+tls://HOST:PORT, or grpc://HOST:PORT on this machine"
        )
    host, colon, port = url.partition("://")[2].rstrip("/").rpartition(":")
    if not url.startswith("grpc+unix://") and not (colon and host and port.isdigit()):
        raise ConfigError(f"{url!r} has no host and port; expected grpc://HOST:PORT, such as grpc://127.0.0.1:8815")
    return url.rstrip("/")


class FlightChannel:
    """Flight streams to one server.

    Args:
        url: `grpc+tls://HOST:PORT`, or `grpc://` without TLS.
        max_streams: most streams open at once; further calls wait for one.
        keepalive_s: how long a server may be silent until it is asked whether it lives, and until it is given up.
        tls: whom to trust, and what to show.
        token: sent with each stream, action and download.
        server_key: seals each stream for the server that has this key.
    """

    _client: fl.FlightClient | None = None  # made by the first call, in the process that makes it
    _pid = 0
    _worked = False

    def __init__(
        self,
        url: str,
        max_streams: int = 8,
        keepalive_s: float = 20.0,
        tls: Tls = NO_TLS,
        token: SecretStr | None = None,
        server_key: str | None = None,
    ) -> None:
        self._keepalive_ms = int(keepalive_s * 1e3)
        self.url = check_url(url)
        self._tls = tls
        self._token = token
        self._offer = _offering(server_key) if server_key else None
        if token and self.url.startswith(("grpc://", "grpc+tcp://")) and not is_loopback(address(self.url)[0]):
            raise ConfigError(f"{url}: without TLS everybody on the way could read the token; use grpc+tls://HOST:PORT")
        self.open_header = b""
        self._max_streams = max_streams
        self._watch = Watch()
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[_Stream] = []
        self._free = threading.Semaphore(max_streams)

    def exchange(self, header: bytes, batch: pa.RecordBatch, deadline_s: float, reply_bytes: int = 0) -> Message:
        while True:
            began_s = time.monotonic()
            stream = self._checkout(deadline_s)
            fresh = stream.calls == 0
            try:
                return self._exchange_on(stream, header, batch, deadline_s)
            except _Interrupted:
                continue  # the program handled the signal and goes on: the call is pure, send it again
            except ConnectError:
                # An idle stream dies with the server or a proxy; that says nothing about a new one.
                if fresh or self._closed or time.monotonic() - began_s > STALE_S:
                    raise

    @property
    def transport(self) -> str:
        return "Flight"

    def action(self, name: str, body: bytes, timeout_s: float) -> bytes:
        def run() -> bytes:
            options = self._call_options(timeout_s)
            results = list(self._connected().do_action(fl.Action(name, body), options))
            if len(results) != 1:
                raise ProtocolError(f"action {name} of {self.url} answered {len(results)} results, expected 1")
            return bytes(results[0].body)

        return self._interruptible(run, timeout_s + GRACE_S)

    def download(self, ticket: bytes, timeout_s: float) -> Iterator[Message]:
        options = self._call_options(timeout_s)
        reader = self._mapped(lambda: self._connected().do_get(fl.Ticket(ticket), options))
        try:
            while (chunk := self._interruptible(lambda: _next_chunk(reader), timeout_s + GRACE_S)) is not None:
                yield chunk
        finally:
            reader.cancel()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._forked():
                return
            idle = list(self._idle)
            self._idle.clear()
        self._watch.close()
        for stream in idle:
            stream.end()
        if self._client is not None:
            self._client.close()

    def __del__(self) -> None:
        # Freeing a stream waits for gRPC's threads, which a forked child does not have: it would never end.
        if self._forked():
            for inherited in (self._client, self._idle):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))

    def _forked(self) -> bool:
        return self._client is not None and self._pid != os.getpid()

    def _connected(self) -> fl.FlightClient:
        with self._lock:
            if self._closed:
                raise ClosedError(f"the connection to {self.url} was closed; call symbiosis.connect again")
            if self._forked():
                raise ClosedError(
                    f"the connection to {self.url} stayed in process {self._pid}, from which this one was forked: gRPC "
                    "does not survive a fork. Start the process with the method 'spawn' and connect in it, as "
                    "DataLoader(multiprocessing_context='spawn') does"
                )
            if self._client is None:
                self._pid = os.getpid()
                arguments = client_arguments(self.url, self._tls)
                self._client = fl.FlightClient(self.url, generic_options=self._options(), **arguments)
            return self._client

    def _options(self) -> list[tuple[str, int]]:
        # A server that is cut off or stopped sends no reset. gRPC's own limits keep pings rare: two in a row
        # without data, or servers would take them for abuse. It is the ping's own timeout that ends the wait for an
        # answer, not keepalive's; the last name is how long a connection may take to be made.
        names = (
            "grpc.keepalive_time_ms",
            "grpc.keepalive_timeout_ms",
            "grpc.http2.ping_timeout_ms",
            "grpc.min_reconnect_backoff_ms",
        )
        return [*CHANNEL_OPTIONS, *((name, self._keepalive_ms) for name in names), *_proxy(self.url)]

    def _checkout(self, deadline_s: float) -> _Stream:
        client = self._mapped(self._connected)
        if not self._free.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise DeadlineExceededError(
                f"all {self._max_streams} streams to {self.url} stayed busy until the deadline; raise max_streams"
            )
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            return self._interruptible(lambda: self._opened(client), deadline_s - time.monotonic())
        except BaseException:
            self._free.release()
            raise

    def _opened(self, client: fl.FlightClient) -> _Stream:
        offer = self._offer(self.open_header) if self._offer else None
        return _Stream(client, self.open_header, self._call_options(), offer)

    def _call_options(self, timeout_s: float | None = None) -> fl.FlightCallOptions:
        if self._token is None:
            return fl.FlightCallOptions(timeout=timeout_s)
        # In no variable of ours: tracebacks that show locals are shared, too.
        return fl.FlightCallOptions(
            timeout=timeout_s, headers=[(b"authorization", b"Bearer " + self._token.get_secret_value().encode())]
        )

    def _exchange_on(self, stream: _Stream, header: bytes, batch: pa.RecordBatch, deadline_s: float) -> Message:
        clean = False
        call = self._watch.call(stream.cancel, deadline_s)
        try:
            with call:
                reply = self._mapped(lambda: stream.exchange(header, batch), call)
            clean = True
            return reply
        finally:
            # KeyboardInterrupt may arrive anywhere above; a stream with an unread reply is not reused.
            with self._lock:
                reuse = clean and not self._closed
                if reuse:
                    self._idle.append(stream)
            self._free.release()
            if not reuse:
                stream.end()

    def _interruptible(self, run: Callable[[], T], timeout_s: float) -> T:
        """Run in a thread and wait for it, so that Ctrl-C returns at once; for rare steps, at 0.1 ms each.

        Opening a stream is one: while gRPC connects there is nothing yet that a Watch could cancel.
        """
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(self._mapped(run))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="symbiosis-rare-call", daemon=True).start()
        try:
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            raise self._translate(error, "expired") from None

    def _mapped(self, run: Callable[[], T], call: WatchedCall | None = None) -> T:
        """Run, with Flight's errors as ours: the one place where they are told apart."""
        try:
            result = run()
            self._worked = True
            return result
        except SymbiosisError:
            raise
        except (pa.ArrowException, OSError, StopIteration) as error:  # Arrow's IOError is OSError
            stopped = call.stopped if call else ""
            raise self._translate(error, stopped) from None

    def _translate(self, error: Exception, stopped: str) -> Exception:
        if stopped == "interrupted":
            return _Interrupted()
        if stopped == "expired" or isinstance(error, fl.FlightTimedOutError):
            return DeadlineExceededError(
                f"no reply from {self.url} within the deadline; the server may be overloaded or gone "
                "(connect_timeout_s and request_timeout_s set the limits)"
            )
        if isinstance(error, (fl.FlightUnauthenticatedError, fl.FlightUnauthorizedError)) or UNAUTHENTICATED in str(
            error
        ):
            return AuthError(
                f"{self.url} refused the token; ask its operator whether it is still good"
                if self._token
                else f"{self.url} asks for a token; give it as SYMBIOSIS_CLIENT_TOKEN, token_file= or token="
            )
        if self._closed:
            return ClosedError(f"the connection to {self.url} was closed while a call was under way")
        if (explained := self._explained()) is not None:
            return explained
        reason = str(error).partition(" gRPC client debug context")[0].partition("Detail:")[0] or "the stream ended"
        return ConnectError(
            f"no connection to {self.url}: {reason.strip().rstrip('.')}. Check that symbiosis-flight-server runs there "
            "and prints 'listening on', then repeat the call"
        )

    def _explained(self) -> SymbiosisError | None:
        """What TLS has to do with a failure: asked if it is in use, or if this channel never worked."""
        unix = self.url.startswith("grpc+unix://")
        asked = self.url.startswith("grpc+tls://") or not self._worked
        return explain(self.url, self._tls) if asked and not unix else None


class _Interrupted(Exception):
    """A signal ended the call and its Python handler chose not to raise."""


class _Stream:
    """One open DoExchange stream, for one call at a time."""

    def __init__(
        self, client: fl.FlightClient, open_header: bytes, options: fl.FlightCallOptions, offer: Offer | None
    ) -> None:
        command = offer.command if offer else open_header
        self._writer, self._reader = client.do_exchange(fl.FlightDescriptor.for_command(command), options)
        if offer is None:
            self._writer.begin(protocol.SCHEMA)
            self._session = None
        else:
            with contextlib.suppress(pa.ArrowException, OSError):  # a refusal may have ended the stream: it says why
                self._writer.begin(protocol.SCHEMA)
            self._session = offer.accepted(self._reader.read_chunk().app_metadata)
        self.calls = 0

    def exchange(self, header: bytes, batch: pa.RecordBatch) -> Message:
        if self._session:
            header, batch = self._session.seal(header, batch)
        self._writer.write_with_metadata(batch, header)
        reply: Message = self._reader.read_chunk()
        if self._session:
            reply = self._session.open(reply)
            if not reply.data.num_rows:
                _raise_ended(reply.app_metadata)
        self.calls += 1
        return reply

    def cancel(self) -> None:
        with contextlib.suppress(pa.ArrowException):
            self._reader.cancel()

    def end(self) -> None:
        self.cancel()
        with contextlib.suppress(pa.ArrowException, OSError):
            self._writer.close()


def _raise_ended(header: bytes) -> None:
    """After this error the server reads no more of a stream, though a proxy may keep it open."""
    answer = protocol.decode_header(header, protocol.AnyReply)
    if isinstance(answer, protocol.Error) and answer.code == PayloadError.code:
        raise PayloadError(answer.message)


def _offering(server_key: str) -> Callable[[bytes], Offer]:
    try:
        from symbiosis.privacy.payload import Offer
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"payload encryption needs the package {error.name}, which is not installed; "
            "run: pip install 'symbiosis-flight[privacy]'"
        ) from error
    return lambda open_header: Offer(server_key, open_header)


def _next_chunk(reader: Any) -> Any:
    try:
        return reader.read_chunk()
    except StopIteration:
        return None


def _proxy(url: str) -> list[tuple[str, int]]:
    loopback = not url.startswith("grpc+unix://") and is_loopback(address(url)[0])
    return [("grpc.enable_http_proxy", 0)] if loopback else []
