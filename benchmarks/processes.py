"""Processes: the server, the clients, and the stage that ends them all.

One rule: nothing is left behind. Every child belongs to a Stage and ends with it, whatever ends the driver:
an exception, a signal (children lose their stdin) or a kill (the kernel tells the server).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 900.0
END_TIMEOUT_S = 5.0
PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).resolve().parent.parent


class BenchmarkError(RuntimeError):
    """A child failed or took too long; the message holds the end of its log."""


class Process:
    """A child with a log."""

    def __init__(self, folder: Path, name: str, command: Sequence[str], env: dict[str, str]) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("w") as log:
            self._popen = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=_end_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def failure(self, what: str) -> BenchmarkError:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        return BenchmarkError(f"{self.name}: {what}\n{tail}")

    def ask_to_end(self) -> None:
        with contextlib.suppress(OSError):
            if self._popen.stdin:
                self._popen.stdin.close()
        self._popen.terminate()

    def end(self) -> None:
        self.ask_to_end()
        try:
            self._popen.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self._popen.stdout:
            self._popen.stdout.close()


class Server(Process):
    """`symbiosis-flight-server` on a free port."""

    def __init__(self, folder: Path, name: str, model: str, dtype: str, threads: int, options: Sequence[str]) -> None:
        self._port_file = folder / f"{name}.port"
        command = ["-m", "symbiosis.flight.cli", "--model", model, "--dtype", dtype, "--threads", str(threads)]
        command += ["--port", "0", "--port-file", str(self._port_file), *options]
        super().__init__(folder, name, command, {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"})
        self.url = ""

    def wait_until_listening(self) -> Server:
        """Wait for the port file.

        Raises:
            BenchmarkError: the server ended, or did not listen in time.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._port_file.exists():
            if not self.running:
                raise self.failure("ended while starting")
            if time.monotonic() > deadline_s:
                raise self.failure(f"did not listen within {START_TIMEOUT_S:.0f} s")
            time.sleep(0.1)
        self.url = f"grpc://127.0.0.1:{self._port_file.read_text().strip()}"
        return self


class Client(Process):
    """A `benchmarks.worker` process: local or wrapped."""

    def __init__(self, folder: Path, name: str, kind: str, omp_wait_policy: str) -> None:
        env = {"HF_HUB_OFFLINE": "1"} | ({"OMP_WAIT_POLICY": omp_wait_policy} if omp_wait_policy else {})
        super().__init__(folder, name, ["-m", "benchmarks.worker", kind], env)
        self.kind = kind
        self.bare_bytes = 0
        self._buffer = b""
        self._ready = False

    def wait_until_ready(self) -> None:
        """Wait until it has imported what it needs.

        Raises:
            BenchmarkError: it ended, or took too long.
        """
        if not self._ready:
            self.answer(START_TIMEOUT_S)
            self._ready = True

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """One command and its answer.

        Raises:
            BenchmarkError: the command failed, or took too long.
        """
        self.send(do, **arguments)
        return self.answer()

    def send(self, do: str, **arguments: Any) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._popen.stdin.flush()
        except OSError:
            raise self.failure("ended") from None

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._line(timeout_s))
        if "error" in answer:
            raise self.failure(answer["error"])
        return answer

    def _line(self, timeout_s: float) -> bytes:
        assert self._popen.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._popen.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
            part = os.read(self._popen.stdout.fileno(), 1 << 20) if ready else b""
            if not part:
                raise self.failure("ended" if ready else f"gave no answer within {timeout_s:.0f} s")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


class Stage:
    """Owns all children of a benchmark row, and their logs."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="symbiosis-bench-")
        self._children: list[Process] = []

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(self._children)
        self._folder.cleanup()

    def server(self, model: str, dtype: str, threads: int, options: Sequence[str] = ()) -> Server:
        """Start a server and wait until it listens."""
        name = f"server-{len(self._children)}"
        server = Server(Path(self._folder.name), name, model, dtype, threads, options)
        self._children.append(server)
        return server.wait_until_listening()

    def clients(self, kind: str, count: int, omp_wait_policy: str = "PASSIVE") -> list[Client]:
        """Start clients, a few at a time, and wait until they have imported what they need."""
        started: list[Client] = []
        for _ in range(count):
            client = Client(Path(self._folder.name), f"{kind}-{len(self._children)}", kind, omp_wait_policy)
            self._children.append(client)
            started.append(client)
            if len(started) % (os.cpu_count() or 1) == 0:
                client.wait_until_ready()
        for client in started:
            client.wait_until_ready()
        return started

    def end(self, children: Iterable[Process]) -> None:
        ending = list(children)
        for child in ending:
            child.ask_to_end()
        for child in ending:
            child.end()
        self._children = [child for child in self._children if child not in ending]


def pss_bytes(pid: int) -> int:
    """Proportional set size: a page shared by n processes counts 1/n in each."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of processes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def _end_with_parent() -> None:
    """In the child: end when the parent does, even if that was killed (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
