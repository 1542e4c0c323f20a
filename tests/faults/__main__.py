"""`python -m tests.faults`: every scenario at full size, its figures against its targets, written to a file.

    python -m tests.faults [NAME ...] [--out faults.json] [--scale 1.0]

`make faults` runs all but the soak, `make soak` the soak. `--scale` shortens what takes long; the file says so.
Exit code 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import scenarios
from tests.faults.servers import Nursery
from tests.faults.work import TOLERANCE

Figures = dict[str, Any]
Target = Callable[[Figures], bool]


def exact(figures: Figures) -> bool:
    return bool(figures["largest_loss_difference"] <= TOLERANCE)


# name -> (run at a scale, what must hold of the figures, the same in words)
SCENARIOS: dict[str, tuple[Callable[[Nursery, float], Figures], Target, str]] = {
    "restarts": (
        lambda nursery, scale: scenarios.restarts(nursery, int(200 * scale), int(20 * scale), down_s=0.5),
        lambda f: exact(f) and f["steps_lost"] == 0,
        "same losses as undisturbed (1e-6), 0 steps lost",
    ),
    "replicas": (
        lambda nursery, scale: scenarios.two_replicas(nursery, 300 * scale, every_s=10.0, down_s=3.0),
        lambda f: exact(f) and f["failed_steps"] == 0,
        "no failed step, same losses",
    ),
    "network": (
        lambda nursery, scale: scenarios.bad_network(
            nursery, int(40 * scale), delay_s=0.05, reset_chance=0.01, outages=3, outage_s=5.0
        ),
        exact,
        "completes, same losses",
    ),
    "tenants": (
        lambda nursery, scale: scenarios.tenants(nursery, 20 * scale),
        lambda f: f["p99_ratio"] <= 2.0,
        "a light client's decode calls: p99 within 2x of alone",
    ),
    "overload": (
        lambda nursery, scale: scenarios.overload(nursery, 20 * scale),
        lambda f: f["goodput_ratio"] >= 0.9 and f["refusals"] > 0 and not f["other_errors"] and f["right_afterwards"],
        "refusals typed, goodput within 10% of the best",
    ),
    "soak": (
        lambda nursery, scale: scenarios.soak(nursery, 1800 * scale),
        lambda f: (
            not (f["wrong_results"] or f["stuck_clients"] or f["failed_calls"]) and abs(f["memory_growth"]) <= 0.03
        ),
        "server memory flat (3%), 0 wrong results, 0 failed calls, no stuck client",
    ),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCENARIOS)}; none = all but soak")
    parser.add_argument("--out", type=Path, default=Path("faults.json"), help="figures are added to this file")
    parser.add_argument("--scale", type=float, default=1.0, help="1 = full size")
    arguments = parser.parse_args(argv)
    names = arguments.names or [name for name in SCENARIOS if name != "soak"]
    if unknown := set(names) - set(SCENARIOS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(SCENARIOS)}")
    with Nursery() as nursery:
        results = [_run(nursery, name, arguments.scale, arguments.out) for name in names]
    return 0 if all(results) else 1


def _run(nursery: Nursery, name: str, scale: float, out: Path) -> bool:
    run, holds, words = SCENARIOS[name]
    started_s = time.monotonic()
    figures = run(nursery, scale)
    met = holds(figures)
    print(f"{name}: {'met' if met else 'MISSED'}: {words}")
    for key, value in figures.items():
        print(f"    {key:<28}{value:.3g}" if isinstance(value, float) else f"    {key:<28}{value}")
    sys.stdout.flush()
    known = json.loads(out.read_text()) if out.exists() else {}
    known[name] = {
        "target": words,
        "met": met,
        "scale": scale,
        "took_s": round(time.monotonic() - started_s, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        **figures,
    }
    out.write_text(json.dumps(known, indent=2) + "\n")
    return met


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
