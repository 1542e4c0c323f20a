"""What the fault tests hold in their hands: a nursery, and servers of it that can be killed, stopped and restarted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

NURSERY = Path(__file__).with_name("nursery.py")
ROOT = Path(__file__).parents[2]


class Nursery:
    """A process that forks servers of one tiny model; use it as a context manager."""

    def __init__(self) -> None:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(NURSERY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        self._answer()

    def start(self, port: int = 0, **options: object) -> ServerProcess:
        return ServerProcess(self, *self.fork(port, options), options)

    def fork(self, port: int, options: dict[str, object]) -> tuple[int, int]:
        """Start a server; its process and port."""
        assert self._process.stdin is not None
        with self._lock:
            words = [str(port), *(f"{name}={value}" for name, value in options.items())]
            self._process.stdin.write(" ".join(words) + "\n")
            self._process.stdin.flush()
            pid, real_port = self._answer().split()
        return int(pid), int(real_port)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line or line.endswith("failed"):
            raise RuntimeError(f"a server of the nursery did not start: {line!r}")
        return line


class ServerProcess:
    """One server, at one port for ever, in one process after another."""

    def __init__(self, nursery: Nursery, pid: int, port: int, options: dict[str, object]) -> None:
        self._nursery = nursery
        self.pid = pid
        self.port = port
        self._options = options
        self.starts = 1
        self._restarting = threading.Lock()

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and wait until the process is gone."""
        self.signal(signal.SIGKILL)
        end_s = time.monotonic() + 10
        while Path(f"/proc/{self.pid}").exists() and time.monotonic() < end_s:
            time.sleep(0.005)

    def start(self) -> None:
        self.pid, _ = self._nursery.fork(self.port, self._options)
        self.starts += 1

    def restart(self, down_s: float = 0.0) -> None:
        with self._restarting:
            self.kill()
            time.sleep(down_s)
            self.start()
