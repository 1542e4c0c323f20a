"""Bench: the options of a run, and what the rows share: pairs of clients, windows, memory, other load.

One rule: what two sides have in common is decided here, once, so that no row can favour one of them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.bases import Base
from benchmarks.processes import Client, Server, Stage, cpu_seconds, pss_bytes
from benchmarks.results import compare

SEED = 11
LEAD_S = 0.3  # from sending a window's command to its start
METHOD = "lora"


@dataclass
class Options:
    """What a run measures, and for how long."""

    base: Base
    granularity: str = "auto"
    rounds: int = 5
    quick: bool = False
    counts: tuple[int, ...] = (1, 2, 4, 8, 16)
    copies: int = 4
    server_threads: int = 0
    server_options: tuple[str, ...] = ()
    window_s: float = 8.0
    longest_window_s: float = 90.0
    train_shape: tuple[int, int] = (4, 128)
    prompt_tokens: int = 16
    new_tokens: int = 33
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))


Unit = tuple[float, float, int, float | None]  # started, ended, tokens, loss


@dataclass(frozen=True)
class Setting:
    """How one side runs: which process, with how many threads."""

    client: Client
    threads: int
    text: str


class Bench:
    """Starts sides and drives them."""

    def __init__(self, options: Options, stage: Stage) -> None:
        self.options = options
        self.stage = stage

    # --- starting ---------------------------------------------------------------------------------

    def server(self, threads: int = 0) -> Server:
        """A server of the base, on all cores unless told otherwise."""
        options = self.options
        threads = threads or options.server_threads or options.cores
        return self.stage.server(options.base.server_model, options.base.dtype, threads, options.server_options)

    def clients(self, kind: str, count: int, omp_wait_policy: str = "PASSIVE") -> list[Client]:
        """Clients that have imported what they need, and no more."""
        return self.stage.clients(kind, count, omp_wait_policy)

    @staticmethod
    def note_imports(clients: Sequence[Client]) -> None:
        """Note what the clients hold before they load anything.

        For all sides at one moment: a library's pages are shared, so each process's part of them falls with
        every further process, and a side that was noted earlier would seem to hold less than it does.
        """
        for client in clients:
            client.bare_bytes = pss_bytes(client.pid)

    def load(self, clients: Sequence[Client], source: str, methods: Sequence[str] = (METHOD,), **changed: Any) -> None:
        """Load model and adapter; client i gets method i and its own data, the same on both sides."""
        for i, client in enumerate(clients):
            arguments = {"source": source, "dtype": self.options.base.dtype, "seed": SEED + i}
            if client.kind == "wrapped":
                arguments["granularity"] = changed.get("granularity", self.options.granularity)
            client.ask("load", method=methods[i % len(methods)], **arguments)
            client.ask("threads", count=1)
        self.prepare(clients, self.options.train_shape)

    def prepare(self, clients: Sequence[Client], shape: tuple[int, int], prompt: int = 0, new: int = 0) -> None:
        """Set the sizes of the work."""
        options = self.options
        sizes = {"prompt": prompt or options.prompt_tokens, "new": new or options.new_tokens}
        for i, client in enumerate(clients):
            client.ask("prepare", sequences=shape[0], length=shape[1], seed=SEED + i, **sizes)

    def check(self, local: Client, wrapped: Client) -> str:
        """Whether both do the same, in words."""
        return compare(local.ask("check"), wrapped.ask("check"), self.options.base.dtype)

    # --- driving ----------------------------------------------------------------------------------

    def best(self, settings: Sequence[Setting], work: str, count: int) -> Setting:
        """The setting with the fastest unit; each warms up with one repetition first."""

        def fastest_s(setting: Setting) -> float:
            setting.client.ask("threads", count=setting.threads)
            setting.client.ask("repeat", work=work, count=1)
            return min(seconds(setting.client.ask("repeat", work=work, count=count)["units"]))

        chosen = min(settings, key=fastest_s) if len(settings) > 1 else settings[0]
        chosen.client.ask("threads", count=chosen.threads)
        return chosen

    def window(self, jobs: Sequence[tuple[Client, str]], window_s: float, observer: Client | None = None) -> Window:
        """All clients work from one moment to another."""
        start_at_s = time.monotonic() + LEAD_S
        stop_at_s = start_at_s + window_s
        for client, work in jobs:
            client.send("until", work=work, start_at_s=start_at_s, stop_at_s=stop_at_s)
        if observer:
            observer.send("busy", start_at_s=start_at_s, stop_at_s=stop_at_s)
        peak = self._watch_memory([client for client, _ in jobs], stop_at_s)
        units = [client.answer()["units"] for client, _ in jobs]
        return Window(start_at_s, stop_at_s, units, peak, observer.answer() if observer else {})

    def _watch_memory(self, clients: Sequence[Client], stop_at_s: float) -> int:
        """Largest sum of what the clients hold above their imports, seen a few times in a window."""
        peak, pause_s = 0, max(0.5, (stop_at_s - time.monotonic()) / 5)
        while time.monotonic() + pause_s < stop_at_s:
            time.sleep(pause_s)
            peak = max(peak, sum(pss_bytes(client.pid) - client.bare_bytes for client in clients))
        return peak

    def say(self, text: str) -> None:
        """Progress, on stderr."""
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Window:
    """What clients did between two moments."""

    start_s: float
    stop_s: float
    units: list[list[Unit]]
    peak_bytes: int
    busy: dict[str, Any]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all clients per second; a unit under way at the end counts by the part inside."""
        tokens = sum(
            tokens * max(0.0, min(ended, self.stop_s) - started) / max(1e-9, ended - started)
            for units in self.units
            for started, ended, tokens, _ in units
        )
        return tokens / (self.stop_s - self.start_s)

    def seconds(self) -> list[float]:
        """How long the units took, of all clients."""
        return [value for units in self.units for value in seconds(units)]


def seconds(units: Sequence[Unit]) -> list[float]:
    """How long each unit took."""
    return [ended - started for started, ended, _, _ in units]


class OtherLoad:
    """How many cores other programs kept busy, on average, since this was made.

    A figure that was taken while something else ran is a trial figure; this says so in the JSON.
    """

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._busy_s, self._own_s = self._readings()

    def cores(self) -> float:
        busy_s, own_s = self._readings()
        wall_s = time.monotonic() - self._started_s
        return max(0.0, (busy_s - self._busy_s) - (own_s - self._own_s)) / wall_s

    @staticmethod
    def _readings() -> tuple[float, float]:
        with open("/proc/stat", encoding="ascii") as file:
            fields = [int(value) for value in file.readline().split()[1:]]
        busy = sum(fields[:8]) - fields[3] - fields[4]  # all but idle and iowait
        ended = os.times()
        own = ended.user + ended.system + ended.children_user + ended.children_system
        return busy / os.sysconf("SC_CLK_TCK"), own + cpu_seconds(_children())


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]
