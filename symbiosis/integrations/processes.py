"""Child processes that never outlive the command that started them.

One rule: leaving the `Children` block, by whatever way, ends every child: asked first, then killed; and if this
process is killed itself, they end by themselves (`tethered`). What a child writes to standard error goes to a log
file, and the end of that file is in the error if the child fails.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType, TracebackType

from symbiosis.errors import DeadlineExceededError, SymbiosisError, from_wire

OnLine = Callable[[str], object]
GRACE_S = 5.0  # between the request to end and the kill
LOG_LINES = 15  # of a failed child, in the error
ERROR_LINE = re.compile(r"^error \[([A-Z_]+)\]: (.*)$", re.MULTILINE)  # as our server prints its own


class Child:
    """One running module, `python -m MODULE ARGS...`.

    Args:
        on_line: called with each line of standard output, in a thread of its own; None sends them to the log.
    """

    def __init__(
        self, name: str, words: Sequence[str], log: Path, environ: Mapping[str, str], on_line: OnLine | None
    ) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "symbiosis.integrations.tethered", *words],
                stdin=subprocess.PIPE,  # never written to: that it is open says that we live
                stdout=subprocess.PIPE if on_line else file,
                stderr=file,
                env=dict(environ),
                text=True,
                start_new_session=True,  # an interrupt of the kernel, or Ctrl-C in a terminal, is not meant for it
            )
        self._reader = threading.Thread(target=self._read, args=(on_line,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    @property
    def has_ended(self) -> bool:
        """It has ended, and every line it wrote was handed on."""
        return self.code is not None and not self._reader.is_alive()

    def failure(self) -> SymbiosisError:
        """Why it ended, out of its log."""
        text = self.log.read_bytes().decode(errors="replace")  # read_text would take \r for the end of a line
        if found := ERROR_LINE.findall(text):
            return from_wire(found[0][0], "\n".join(message for _, message in found))
        shown = [line.rpartition("\r")[2] for line in text.split("\n")]  # of a progress bar, its last state
        lines = [f"    {line}" for line in shown if line.strip()][-LOG_LINES:]
        log = "\n".join([f"the end of its log {self.log}:", *lines]) if lines else f"its log {self.log} is empty"
        return SymbiosisError(f"{self.name} {self._how_it_ended()}; {log}")

    def _how_it_ended(self) -> str:
        if self.code is not None and self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"

    def ask_to_end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def end(self, deadline_s: float) -> None:
        """Wait until `deadline_s` of the monotonic clock, then kill."""
        try:
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if self._process.stdin:
            self._process.stdin.close()

    def _read(self, on_line: OnLine | None) -> None:
        if self._process.stdout and on_line:
            with self._process.stdout as lines:
                for line in lines:
                    on_line(line)


class Children:
    """All children of one command, as a context manager."""

    def __init__(self, logs: Path, environ: Mapping[str, str]) -> None:
        self._logs = logs
        self._environ = environ
        self._all: list[Child] = []

    def start(
        self, name: str, *words: str, on_line: OnLine | None = None, environ: Mapping[str, str] = MappingProxyType({})
    ) -> Child:
        """Start `python -m WORDS...`; `name` is what errors call it, and its log file; `environ` is added."""
        child = Child(name, words, self._logs / f"{name}.log", {**self._environ, **environ}, on_line)
        self._all.append(child)
        return child

    def end(self) -> None:
        """End all that still run."""
        for child in self._all:
            child.ask_to_end()
        deadline_s = time.monotonic() + GRACE_S
        while self._all:
            self._all[-1].end(deadline_s)
            self._all.pop()  # only now: a Ctrl-C while we wait must not make us forget it

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.end()
        except KeyboardInterrupt:  # a second Ctrl-C: no more patience, but still nobody left behind
            for child in self._all:
                child.end(0.0)
            raise


def wait_for_file(path: Path, writer: Child, timeout_s: float, tick: Callable[[], None]) -> str:
    """The content of a file that a child is about to write; `tick` is called while it is not there.

    Raises:
        SymbiosisError: the child ended instead, for the reason in its log.
        DeadlineExceededError: nothing came in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while not path.exists():
        if writer.code is not None:
            raise writer.failure()
        if time.monotonic() > deadline_s:
            raise DeadlineExceededError(
                f"{writer.name} was not ready within {timeout_s:.0f} s; its log is {writer.log}"
            )
        tick()
        time.sleep(0.1)
    return path.read_text()


def wait_for_end(child: Child, timeout_s: float, tick: Callable[[], None]) -> None:
    """Return when a child has ended well; `tick` is called while it runs.

    Raises:
        SymbiosisError: it failed, for the reason in its log.
        DeadlineExceededError: it still runs.
    """
    deadline_s = time.monotonic() + timeout_s
    while not child.has_ended:
        if time.monotonic() > deadline_s:
            raise DeadlineExceededError(f"{child.name} took more than {timeout_s:.0f} s; its log is {child.log}")
        tick()
        time.sleep(0.1)
    if child.code:
        raise child.failure()


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process as Ctrl-C does: through every `finally`."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
