"""`python -m symbiosis bench [URL]`: what a server gives this client: latency, bandwidth, tokens a second of a layer.

One rule: everything is measured through the ordinary client, one call at a time, so it is what a training loop here
would see, other clients' load included. It sends zeros and keeps nothing; a server counts it as any other use.

A layer is the linears of the model's first layer, each in a call of its own: the slowest way to use it. Training makes
one call for a whole layer where it can (docs/performance.md), so its rates are higher.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from symbiosis.connection import Connection, connect
from symbiosis.errors import MissingExtraError
from symbiosis.flight.protocol import DTYPES, ModuleInfo

CALLS = 100
TOKENS = (1, 16, 256, 2048)
SIZES_BYTES = (1 << 16, 1 << 20, 1 << 23)
REPEATS = 5  # of what moves many bytes
WARM_UP_CALLS = 3


@dataclass(frozen=True)
class Timing:
    """Seconds of several calls of one kind, as milliseconds; how much of them the server waited and computed."""

    what: str
    calls: int
    tokens: int
    bytes: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    queue_ms: float
    compute_ms: float
    network_ms: float

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.tokens / self.p50_ms

    @property
    def mb_per_s(self) -> float:
        """Both directions together, of the time that the server did not need."""
        return self.bytes / max(1e-3, self.network_ms) / 1e3


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a server and print what was found.

    Raises:
        MissingExtraError: rich is not installed, and no --json was asked for.
        SymbiosisError: the server cannot be reached, or a call failed.
    """
    args = _parse(argv)
    console = None if args.json else _console()
    with connect(args.url) as connection:
        found = measure(connection, args.calls, args.tokens)
        if console is None:
            print(json.dumps(found, indent=2))
        else:
            for table in _tables(found):
                console.print(table)
    return 0


def measure(connection: Connection, calls: int = CALLS, tokens: Sequence[int] = TOKENS) -> dict[str, Any]:
    """Latency, bandwidth and rates of one layer, as plain data.

    Args:
        connection: to the server that is measured.
        calls: how many single tokens are sent for the percentiles of the latency.
        tokens: batch sizes of the layer.
    """
    manifest = connection.manifest
    smallest, layer = _smallest(connection), first_layer(manifest.modules)
    one = _send(connection, smallest, "forward", 1)
    return {
        "url": connection.url,
        "model": manifest.model,
        "dtype": manifest.kept_as,
        "latency": _as_data(_timed(connection, "one token", 1, [one], calls)),
        "bandwidth": [_as_data(_bandwidth(connection, smallest, size)) for size in _sizes(connection)],
        "layer": [info.name for info in layer],
        "layers": [
            _as_data(_timed(connection, op, n, [_send(connection, info, op, n) for info in layer], REPEATS))
            for n in tokens
            for op in ("forward", "grad_input")
        ],
    }


def first_layer(modules: Sequence[ModuleInfo]) -> list[ModuleInfo]:
    """The linears of the model's first layer: those whose names begin alike, up to a number; all if none has one."""
    linears = [info for info in modules if info.kind in ("linear", "conv1d")]
    prefixes = [match.group(0) for info in linears if (match := re.match(r".*?\.\d+\.", info.name))]
    return [info for info in linears if not prefixes or info.name.startswith(prefixes[0])]


def _smallest(connection: Connection) -> ModuleInfo:
    linears = [info for info in connection.manifest.modules if info.kind in ("linear", "conv1d")]
    return min(linears, key=lambda info: (info.d_in * info.d_out, info.name))


def _send(connection: Connection, info: ModuleInfo, op: str, tokens: int) -> Callable[[], object]:
    width = info.d_in if op == "forward" else info.d_out
    x = torch.zeros(tokens, width, dtype=DTYPES[connection.manifest.dtype])  # [N, d_in] or [N, d_out]
    return lambda: connection._caller.call(op, [info.name], [x])


def _sizes(connection: Connection) -> list[int]:
    """A message at a time: what is split would be measured as several."""
    return [size for size in SIZES_BYTES if size <= connection.manifest.max_message_bytes // 2]


def _bandwidth(connection: Connection, info: ModuleInfo, size: int) -> Timing:
    itemsize = DTYPES[connection.manifest.dtype].itemsize
    tokens = max(1, size // (max(info.d_in, info.d_out) * itemsize))
    return _timed(connection, f"{size >> 10} KiB", tokens, [_send(connection, info, "forward", tokens)], REPEATS)


def _timed(
    connection: Connection, what: str, tokens: int, sends: Sequence[Callable[[], object]], repeats: int
) -> Timing:
    """Several times all of `sends`, one after another."""
    for _ in range(WARM_UP_CALLS if tokens == 1 else 1):
        for send in sends:
            send()
    before, times_ms = connection.stats(), []
    for _ in range(repeats):
        started_s = time.perf_counter()
        for send in sends:
            send()
        times_ms.append(1e3 * (time.perf_counter() - started_s))
    spent = connection.stats() - before
    return Timing(
        what=what,
        calls=spent.calls,
        tokens=tokens,
        bytes=(spent.bytes_out + spent.bytes_in) // repeats,
        p50_ms=percentile(times_ms, 50),
        p90_ms=percentile(times_ms, 90),
        p99_ms=percentile(times_ms, 99),
        max_ms=max(times_ms),
        queue_ms=1e3 * spent.queue_s / repeats,
        compute_ms=1e3 * spent.compute_s / repeats,
        network_ms=1e3 * spent.network_s / repeats,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _as_data(timing: Timing) -> dict[str, Any]:
    return {**asdict(timing), "tokens_per_s": timing.tokens_per_s, "mb_per_s": timing.mb_per_s}


def _tables(found: dict[str, Any]) -> list[Any]:
    from rich.table import Table
    from rich.text import Text

    latency = Table(title=Text(f"{found['model']} ({found['dtype']}) at {found['url']}; times in ms"))
    for name in ("a call of", "p50", "p90", "p99", "worst", "queue", "compute", "network", "MB/s"):
        latency.add_column(name, justify="left" if name == "a call of" else "right", no_wrap=True)
    keys = ("p50_ms", "p90_ms", "p99_ms", "max_ms", "queue_ms", "compute_ms", "network_ms")
    for row in (found["latency"], *found["bandwidth"]):
        rate = "" if row is found["latency"] else f"{row['mb_per_s']:,.0f}"
        latency.add_row(row["what"], *(f"{row[key]:.2f}" for key in keys), rate)
    layers = Table(title=Text(f"a layer: {len(found['layer'])} linears, a call each"))
    for name in ("tokens", "op", "p50 ms", "worst ms", "compute ms", "tokens/s"):
        layers.add_column(name, justify="left" if name == "op" else "right")
    for row in found["layers"]:
        cells = (f"{row[key]:.2f}" for key in ("p50_ms", "max_ms", "compute_ms"))
        layers.add_row(f"{row['tokens']:,}", row["what"], *cells, f"{row['tokens_per_s']:,.0f}")
    return [latency, layers]


def _console() -> Any:
    try:
        from rich.console import Console
    except ImportError as error:
        raise MissingExtraError(
            "bench draws with the package rich, which is not installed; run: pip install 'symbiosis-flight[notebook]', "
            "or give --json"
        ) from error
    return Console()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m symbiosis bench", description="Measure a server from here.")
    parser.add_argument("url", nargs="?", metavar="URL", help="the server; not given: SYMBIOSIS_CLIENT_URL")
    parser.add_argument("--calls", type=_count, default=CALLS, metavar="N", help="for the latency (%(default)s)")
    shown = ",".join(map(str, TOKENS))
    parser.add_argument(
        "--tokens", type=_counts, default=TOKENS, metavar="N,N", help=f"batch sizes of a layer ({shown})"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return parser.parse_args(argv)


def _count(word: str) -> int:
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {word!r}")
    return int(word)


def _counts(word: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in word.split(","))
