"""Ends blocking calls: on Ctrl-C and at their deadline.

A gRPC read blocks in C++, where Python's signal handlers do not run. Handing every call to a reader
thread would make it interruptible for about 0.1 ms each, as much as the call itself. Instead the
calling thread reads by itself, and one watching thread cancels the call: it learns of signals through
`signal.set_wakeup_fd`, which the C-level handler writes to at once.

One rule: the wake-up descriptor is borrowed for the length of a call and given back after it, and what
it receives is passed on to the previous owner (asyncio uses the same one).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType

POLL_S = 0.1  # how late a deadline may be noticed
LINGER_S = 2.0  # how long the thread keeps polling after the last call, so that steps need not wake it


class Watch:
    """Watches the calls of one connection. Its thread starts with the first call, in each process."""

    def __init__(self) -> None:
        self._calls: set[WatchedCall] = set()
        self._lock = threading.RLock()  # a signal handler may run, and close a connection, in the thread that holds it
        self._pid = 0
        self._asleep = False
        self._closed = False
        self._reader = self._writer = self._previous = -1

    def call(self, cancel: Callable[[], None], deadline_s: float) -> WatchedCall:
        """A context manager around one blocking call.

        Args:
            cancel: ends the blocked call; runs in the watching thread, must not raise.
            deadline_s: a `time.monotonic()` reading.
        """
        return WatchedCall(self, cancel, deadline_s)

    def close(self) -> None:
        """End the calls under way, and then the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._pid != os.getpid():
                return
            calls = tuple(self._calls)
            self._wake()  # with the lock held: the thread cannot have closed the pipe
        for call in calls:
            call.stop("closed")

    def _add(self, call: WatchedCall) -> None:
        with self._lock:
            if self._closed:
                call.stop("closed")
                return
            if self._pid != os.getpid():
                self._start()
            self._calls.add(call)
        if self._asleep:
            self._wake()
        if call.in_main:
            previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            call.borrowed = True
            if previous != self._writer:  # ours is still there if a signal cut the end of the last call short
                self._previous = previous

    def _remove(self, call: WatchedCall) -> None:
        if call.borrowed:
            signal.set_wakeup_fd(self._previous, warn_on_full_buffer=False)
        self._calls.discard(call)

    def _start(self) -> None:
        """Pipe and thread of this process; a forked child must not share its parent's.

        Ctrl-C in here leaves `_pid` as it was: the next call starts another thread, and this one ends.
        """
        self._calls = set()
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._reader, self._writer = reader, writer
        threading.Thread(target=self._loop, args=(reader, writer), name="symbiosis-watch", daemon=True).start()
        self._pid = os.getpid()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._writer, b"\0")

    def _needed(self, reader: int) -> bool:
        # While a call is under way its thread may hold our descriptor as the process's: not closed before.
        with self._lock:
            return self._reader == reader and (bool(self._calls) or not self._closed)

    def _loop(self, reader: int, writer: int) -> None:
        poller = select.poll()  # select() refuses descriptors above 1023
        poller.register(reader, select.POLLIN)
        busy_s = time.monotonic()
        while self._needed(reader):
            idle = not self._closed and not self._calls and time.monotonic() - busy_s > LINGER_S
            self._asleep = idle
            # A call that began before _asleep was set did not wake us: look once more before sleeping.
            sleep = idle and not self._calls
            ready = poller.poll(None if sleep else POLL_S * 1e3)
            self._asleep = False
            if ready:
                self._on_signals(os.read(reader, 64))
            if self._calls:
                busy_s = time.monotonic()
                self._expire(busy_s)
        os.close(reader)
        os.close(writer)

    def _on_signals(self, received: bytes) -> None:
        signals = received.replace(b"\0", b"")
        if signals and self._previous != -1:  # also after the call, whose end may have been quicker than this thread
            with contextlib.suppress(OSError):
                os.write(self._previous, signals)
        if signal.SIGINT in signals:
            for call in tuple(self._calls):
                if call.in_main:
                    call.stop("interrupted")

    def _expire(self, now_s: float) -> None:
        for call in tuple(self._calls):
            if now_s > call.deadline_s:
                call.stop("expired")
                self._calls.discard(call)


class WatchedCall:
    """One call under watch; `stopped` says why it was ended, if it was: interrupted, expired or closed."""

    __slots__ = ("_cancel", "_watch", "borrowed", "deadline_s", "in_main", "stopped")

    def __init__(self, watch: Watch, cancel: Callable[[], None], deadline_s: float) -> None:
        self._watch = watch
        self._cancel = cancel
        self.deadline_s = deadline_s
        self.in_main = threading.get_ident() == threading.main_thread().ident
        self.borrowed = False  # the process's wake-up descriptor is ours
        self.stopped = ""

    def stop(self, why: str) -> None:
        if not self.stopped:
            self.stopped = why
            self._cancel()

    def __enter__(self) -> WatchedCall:
        try:
            self._watch._add(self)
        except BaseException:  # Ctrl-C in there: __exit__ would not be called
            self._watch._remove(self)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch._remove(self)
