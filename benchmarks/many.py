"""Rows with many clients: N at once, mixed load, and twenty adapters on one base.

One rule: N wrapped clients, each a process of its own with the server beside them, run on the cores on which N
local processes run; both in windows that alternate. Memory is what all processes of a side hold above imports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import adapters
from benchmarks.bench import METHOD, Bench, Window, seconds
from benchmarks.processes import Client, Server, pss_bytes
from benchmarks.results import Row, Spread, paired, percentile

WORKLOADS = (
    ("decode", (1, 8), "decode, batch 1"),
    ("train", (1, 64), "training 1x64"),
    ("train", (4, 128), "training 4x128"),
)
TARGETS = {
    "decode, batch 1": ">= 4x at 8 clients, memory <= 1/4",
    "training 1x64": ">= 1.0x at 8 clients, memory <= 1/3",
    "training 4x128": ">= 0.9x at 8 clients, memory <= 1/3",
}
ADAPTER_SHAPE = (1, 64)
COMPARED_STEPS = 6
CURVE_TOLERANCE = 1e-2
MIB = 1 << 20


class Crowd:
    """A server with wrapped clients, an observer of it, and as many local processes."""

    def __init__(self, bench: Bench, wrapped: int, local: int, methods: Sequence[str] = (METHOD,)) -> None:
        self.bench = bench
        self.server: Server = bench.server()
        self.observer: Client = bench.clients("wrapped", 1)[0]
        self.wrapped = bench.clients("wrapped", wrapped)
        self.local = bench.clients("local", local)
        bench.note_imports([self.observer, *self.wrapped, *self.local])
        self.observer.ask("connect", url=self.server.url)
        bench.load(self.wrapped, self.server.url, methods)
        bench.load(self.local, str(bench.options.base.folder), methods)
        self.plan = self.wrapped[0].ask("plan")

    def server_bytes(self) -> int:
        """What the server holds above imports; its imports are taken to be those of a client."""
        return pss_bytes(self.server.pid) - self.observer.bare_bytes

    def prepare(self, shape: tuple[int, int]) -> None:
        self.bench.prepare(self.wrapped, shape)
        self.bench.prepare(self.local, shape)

    def run(self, clients: Sequence[Client], work: str, window_s: float) -> Window:
        observer = self.observer if clients[0].kind == "wrapped" else None
        return self.bench.window([(client, work) for client in clients], window_s, observer)


def clients(bench: Bench) -> Iterator[Row]:
    """N = 1, 2, 4, ...: aggregate tokens per second, memory, step times, executor share."""
    counts = [count for count in bench.options.counts if _fits(bench, count)]
    if not counts:
        yield Row("clients", "not run", note=f"not even one local copy of {bench.options.base.name} fits in memory")
        return
    crowd = Crowd(bench, max(counts), max(counts))
    equal = bench.check(crowd.local[0], crowd.wrapped[0])
    for work, shape, what in WORKLOADS:
        crowd.prepare(shape)
        threads = _best_local_threads(crowd, work)
        alone_s = min(seconds(crowd.local[0].ask("repeat", work=work, count=1)["units"]))
        for count in counts:
            row = _count_row(crowd, work, what, count, threads, alone_s)
            row.equal = equal
            yield row
    dropped = [count for count in bench.options.counts if count not in counts]
    if dropped:
        numbers = ", ".join(map(str, dropped))
        yield Row("clients", f"N = {numbers}: not run", note="that many copies do not fit in memory")


def _fits(bench: Bench, count: int) -> bool:
    """Whether N local copies, the server and 2 N imports fit in the memory that is free now."""
    copy_bytes = _copy_bytes(bench)
    needed = (count + 1) * 1.15 * copy_bytes + (2 * count + 1) * 300 * MIB
    return needed < _available_bytes()


def _copy_bytes(bench: Bench) -> int:
    """Bytes of one copy of the base in the dtype under test."""
    stored = sum(path.stat().st_size for path in bench.options.base.folder.glob("*.safetensors"))
    stored_itemsize = 4 if bench.options.base.name == "demo" else 2
    return stored * {"float32": 4, "bfloat16": 2}[bench.options.base.dtype] // stored_itemsize


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))


def _best_local_threads(crowd: Crowd, work: str) -> int:
    """Threads per local process, tried with two processes at once: with more, one each can only win by more."""
    cores = crowd.bench.options.cores
    if len(crowd.local) < 2 or cores < 2:
        return cores if len(crowd.local) < 2 else 1
    speed: dict[int, float] = {}
    for threads in (1, cores):
        for client in crowd.local[:2]:
            client.ask("threads", count=threads)
            client.ask("repeat", work=work, count=1)
        speed[threads] = crowd.run(crowd.local[:2], work, crowd.bench.options.window_s / 2).tokens_per_s
    return max(speed, key=lambda threads: speed[threads])


def _count_row(crowd: Crowd, work: str, what: str, count: int, threads: int, alone_s: float) -> Row:
    bench, cores = crowd.bench, crowd.bench.options.cores
    row = Row("clients", f"{what}: {count} at once", "tokens/s", higher_is_better=True, plan=crowd.plan["plan"])
    row.target = TARGETS[what] if count == 8 else ""
    window_s = max(bench.options.window_s, 2.5 * alone_s * count)
    if window_s > bench.options.longest_window_s:
        row.note = f"not run: {count} steps take {alone_s * count:.0f} s, too long for --longest-window"
        return row
    sides = {"local": crowd.local[:count], "wrapped": crowd.wrapped[:count]}
    used = {"local": cores if count == 1 else threads, "wrapped": cores if count == 1 else 1}
    for side, members in sides.items():
        for client in members:
            client.ask("threads", count=used[side])
        crowd.run(members, work, 0.1)  # all warm
    rounds = max(1, min(bench.options.rounds, int(4 * bench.options.longest_window_s / (2 * window_s))))
    windows: dict[str, list[Window]] = {"local": [], "wrapped": []}
    for _ in range(rounds):
        for side, members in sides.items():
            windows[side].append(crowd.run(members, work, window_s))
    bench.say(f"{row.what}: {rounds} x {window_s:.0f} s")
    row.local, row.wrapped, row.ratio = paired(*([w.tokens_per_s for w in windows[side]] for side in sides))
    row.settings = {f"{side}_threads_per_client": used[side] for side in sides} | {"window_s": window_s}
    row.extra = _many_extra(crowd, windows)
    return row


def _many_extra(crowd: Crowd, windows: dict[str, list[Window]]) -> dict[str, Any]:
    """Memory, step times and executor share of both sides' windows."""
    took = {side: [value for window in found for value in window.seconds()] for side, found in windows.items()}
    held = {side: max(window.peak_bytes for window in found) for side, found in windows.items()}
    held["wrapped"] += crowd.server_bytes()
    busy = [window.busy for window in windows["wrapped"]]
    return {
        **{f"{side}_p{p}_s": percentile(took[side], p / 100) for side in took for p in (50, 95)},
        **{f"{side}_memory_bytes": held[side] for side in held},
        "memory_ratio": held["wrapped"] / held["local"] if held["local"] > 0 else None,
        "server_memory_bytes": crowd.server_bytes(),
        "executor_share": Spread.of([b["share"] for b in busy]).median,
        "mean_batch": Spread.of([b["mean_batch"] for b in busy]).median,
        "server_errors": sum(b["errors"] for b in busy),
        "transport": crowd.plan["transport"],
    }


def mixed(bench: Bench) -> Iterator[Row]:
    """One client decodes while another trains: what each does to the other, on both sides."""
    crowd = Crowd(bench, 2, 2)
    crowd.prepare(bench.options.train_shape)
    sides = {"local": crowd.local, "wrapped": crowd.wrapped}
    alone_s = min(seconds(crowd.local[1].ask("repeat", work="train", count=1)["units"]))
    window_s = min(bench.options.longest_window_s, max(bench.options.window_s, 6 * alone_s))
    found: dict[str, dict[str, list[Window]]] = {}
    for members in sides.values():
        crowd.run(members[:1], "decode", 0.1)
        crowd.run(members[1:], "train", 0.1)
    for _ in range(min(3, bench.options.rounds)):
        for side, (decoder, trainer) in sides.items():
            kept = found.setdefault(side, {"decode": [], "train": [], "both": []})
            kept["decode"].append(crowd.run([decoder], "decode", window_s))
            kept["train"].append(crowd.run([trainer], "train", window_s))
            kept["both"].append(bench.window([(decoder, "decode"), (trainer, "train")], window_s))
    bench.say("mixed: done")
    for index, work in enumerate(("decode", "train")):
        yield _mixed_row(crowd, found, index, work)


def _mixed_row(crowd: Crowd, found: dict[str, dict[str, list[Window]]], index: int, work: str) -> Row:
    other = "training" if work == "decode" else "decode"
    row = Row("mixed", f"{work} beside {other}", "tokens/s", higher_is_better=True, plan=crowd.plan["plan"])
    together = {side: [_only(w, index) for w in kept["both"]] for side, kept in found.items()}
    row.local, row.wrapped, row.ratio = paired(*([w.tokens_per_s for w in together[side]] for side in found))
    for side, kept in found.items():
        alone = Spread.of([window.tokens_per_s for window in kept[work]]).median
        row.extra[f"{side}_alone_tokens_per_s"] = alone
        row.extra[f"{side}_kept_share"] = Spread.of([w.tokens_per_s for w in together[side]]).median / alone
        row.extra[f"{side}_p95_s"] = percentile([s for w in together[side] for s in w.seconds()], 0.95)
    row.settings = {"threads_per_client": 1}
    return row


def _only(window: Window, index: int) -> Window:
    return Window(window.start_s, window.stop_s, [window.units[index]], window.peak_bytes, window.busy)


def twenty(bench: Bench) -> Iterator[Row]:
    """Twenty adapters of different methods at once, where a few copies of the base fit in memory."""
    copies = bench.options.copies
    crowd = Crowd(bench, len(adapters.TWENTY), copies, adapters.TWENTY)
    crowd.prepare(ADAPTER_SHAPE)
    window_s = min(bench.options.longest_window_s, max(30.0, 4 * bench.options.window_s))
    curves = [_curve(client) for client in crowd.wrapped]
    _restart(crowd)
    windows: dict[str, list[Window]] = {"local": [], "wrapped": []}
    for round_number in range(max(1, min(3, bench.options.rounds))):
        windows["local"].append(crowd.run(crowd.local, "train", window_s))
        windows["wrapped"].append(crowd.run(crowd.wrapped, "train", window_s))
        bench.say(f"adapters: round {round_number + 1}")
    row = Row("adapters", f"{len(adapters.TWENTY)} adapters at once against {copies} local processes", "tokens/s", True)
    row.local, row.wrapped, row.ratio = paired(*([w.tokens_per_s for w in windows[side]] for side in windows))
    row.extra = _many_extra(crowd, windows) | _together(windows["wrapped"][0], curves)
    row.settings = {"budget_bytes": row.extra["local_memory_bytes"], "copies": copies, "shape": ADAPTER_SHAPE}
    verdict = "yes" if row.extra["curves_equal"] else "no"
    row.equal = f"{verdict}: largest loss difference {row.extra['worst_curve']:.0e}"
    row.target = "all 20 active, each with the loss curve it has alone, aggregate >= that of the 4"
    row.plan = crowd.plan["plan"]
    yield row


def _curve(client: Client) -> list[float]:
    """The losses of a client that trains alone."""
    units = client.ask("repeat", work="train", count=COMPARED_STEPS)["units"]
    return [loss for *_, loss in units]


def _restart(crowd: Crowd) -> None:
    for client in crowd.wrapped:
        client.ask("restart")
    crowd.prepare(ADAPTER_SHAPE)


def _together(window: Window, curves: list[list[float]]) -> dict[str, Any]:
    """How the first losses of each client compare with those it had alone, and how many were active."""
    worst: dict[str, float] = {}
    for method, units, alone in zip(adapters.TWENTY, window.units, curves, strict=True):
        losses = [loss for *_, loss in units if loss is not None]
        worst[method] = max((abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=False)), default=0.0)
    return {
        "active": sum(bool(units) for units in window.units),
        "steps": {method: len(units) for method, units in zip(adapters.TWENTY, window.units, strict=True)},
        "curve_differences": worst,
        "worst_curve": max(worst.values()),
        "curves_equal": max(worst.values()) <= CURVE_TOLERANCE,
    }
