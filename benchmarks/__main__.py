"""`python -m benchmarks run` measures, `python -m benchmarks report` writes.

One rule: a run writes its JSON after every row, so an interrupted run is a shorter one, not a lost one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import bases, many, report, single
from benchmarks.bench import Bench, Options, OtherLoad
from benchmarks.processes import ROOT, BenchmarkError, Stage
from benchmarks.results import Row

SINGLE: dict[str, Callable[[single.Pair], Iterator[Row]]] = {
    "train": single.train,
    "prefill": single.prefill,
    "decode": single.decode,
    "traffic": single.traffic,
    "call": single.calls,
}
MANY: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "clients": many.clients,
    "mixed": many.mixed,
    "adapters": many.twenty,
}
QUICK = ("train", "decode", "traffic", "call")
PACKAGES = ("torch", "transformers", "peft", "pyarrow", "symbiosis-flight")


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    arguments = _parser().parse_args()
    try:
        return int(arguments.run(arguments))
    except BenchmarkError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="measure, write JSON, print a table")
    _add_run_options(run)
    run.set_defaults(run=_run)
    show = commands.add_parser("report", help="markdown of one or more results, on stdout or into a marked section")
    show.add_argument("results", nargs="+", type=Path)
    show.add_argument("--into", type=Path, help="replace the marked section of this file instead of printing")
    show.add_argument("--plots", type=Path, help="also draw plots into this folder (needs matplotlib)")
    show.set_defaults(run=_report)
    return parser


def _add_run_options(run: argparse.ArgumentParser) -> None:
    run.add_argument("--rows", default="", help=f"comma-separated, of: {', '.join((*SINGLE, *MANY))}; default: all")
    run.add_argument("--base", default="220m", choices=bases.NAMES)
    run.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    run.add_argument("--granularity", default="auto", help="as in Connection.wrap")
    run.add_argument("--quick", action="store_true", help=f"a first look in under 3 minutes: {', '.join(QUICK)}")
    run.add_argument("--rounds", type=int, default=0, help="alternations per row; default 5, quick 3")
    run.add_argument("--counts", default="1,2,4,8,16", help="how many clients at once, for the row `clients`")
    run.add_argument("--copies", type=int, default=4, help="local processes in the memory budget of `adapters`")
    run.add_argument("--server-threads", type=int, default=0, help="default: all cores")
    run.add_argument("--server-option", action="append", default=[], help="one more word for the server's command line")
    run.add_argument("--longest-window", type=float, default=90.0, help="seconds; longer measurements are left out")
    run.add_argument("--cache", type=Path, default=None, help="where base models are kept; default: the user's cache")
    run.add_argument("--out", type=Path, required=True, help="JSON file")


def _run(arguments: argparse.Namespace) -> int:
    names = [name for name in arguments.rows.split(",") if name] or list(QUICK if arguments.quick else (*SINGLE, *MANY))
    if unknown := [name for name in names if name not in SINGLE and name not in MANY]:
        raise SystemExit(f"--rows: unknown {', '.join(unknown)}; known are {', '.join((*SINGLE, *MANY))}")
    options = _options(arguments)
    document: dict[str, Any] = {"about": _about(options), "rows": []}
    started_s = time.monotonic()
    for row, load in _rows(options, names):
        document["rows"].append(dataclasses.asdict(row) | {"other_load_cores": load})
        document["about"]["took_s"] = time.monotonic() - started_s
        _write(arguments.out, document)
        print(report.line(document["rows"][-1]), flush=True)
    return 0


def _options(arguments: argparse.Namespace) -> Options:
    from platformdirs import user_cache_path

    cache_dir = arguments.cache or user_cache_path("symbiosis") / "benchmarks"
    cache_dir.mkdir(parents=True, exist_ok=True)
    return Options(
        base=bases.prepare(arguments.base, arguments.dtype, cache_dir),
        granularity=arguments.granularity,
        rounds=arguments.rounds or (3 if arguments.quick else 5),
        quick=arguments.quick,
        counts=tuple(int(count) for count in arguments.counts.split(",")),
        copies=arguments.copies,
        server_threads=arguments.server_threads,
        server_options=tuple(arguments.server_option),
        longest_window_s=arguments.longest_window,
    )


def _rows(options: Options, names: list[str]) -> Iterator[tuple[Row, float]]:
    """All rows, each with how many cores other programs kept busy meanwhile."""
    chosen = [name for name in names if name in SINGLE]
    if chosen:
        with Stage() as stage:
            pair = single.Pair(Bench(options, stage))
            for name in chosen:
                yield from _watched(SINGLE[name](pair))
    for name in (name for name in names if name in MANY):
        with Stage() as stage:
            yield from _watched(MANY[name](Bench(options, stage)))


def _watched(rows: Iterator[Row]) -> Iterator[tuple[Row, float]]:
    load = OtherLoad()
    for row in rows:
        yield row, load.cores()
        load = OtherLoad()


def _about(options: Options) -> dict[str, Any]:
    return {
        "base": options.base.name,
        "dtype": options.base.dtype,
        "granularity": options.granularity,
        "rounds": options.rounds,
        "quick": options.quick,
        "date": time.strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain", "-uno") else ""),
        "cores": options.cores,
        "processor": _processor(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "server_options": list(options.server_options),
    }


def _processor() -> str:
    """Model and the instructions that decide how fast a bfloat16 GEMM is."""
    text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    flags = fields.get("flags", "").split()
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{fields.get('model name', platform.machine())} ({', '.join(known) or 'no AVX'})"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _git(*arguments: str) -> str:
    found = subprocess.run(["git", "-C", str(ROOT), *arguments], text=True, capture_output=True, check=False)
    return found.stdout.strip()


def _write(path: Path, document: dict[str, Any]) -> None:
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps(document, indent=1))
    part.replace(path)


def _report(arguments: argparse.Namespace) -> int:
    documents = [json.loads(path.read_text()) for path in arguments.results]
    text = report.markdown(documents)
    if arguments.plots:
        report.plot(documents, arguments.plots)
    if arguments.into:
        arguments.into.write_text(report.replaced(arguments.into.read_text(), text))
    else:
        print(text)
    return 0


def _on_signal(number: int, frame: Any) -> NoReturn:
    print(f"benchmarks: ended by {signal.Signals(number).name}", file=sys.stderr)
    raise SystemExit(128 + number)  # unwinds the Stage, which ends all children


if __name__ == "__main__":
    sys.exit(main())
