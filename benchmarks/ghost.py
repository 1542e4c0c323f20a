"""DP-SGD by clipping: time of a step and memory of a client, per-sample against ghost.

    python -m benchmarks.ghost [--rounds 3] [--steps 3] [--batch 16] [--length 32]

One rule: each figure is of a process of its own, on one server of the demo model, and the two take turns, so that what
else the machine does meets both. Memory is the peak while stepping, above what was resident before the first step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CLIPPINGS = ("per_sample", "ghost")
ADAPTERS = ("lora", "lora-all-r64")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ghost", description=__doc__.splitlines()[0])
    for name, default, words in (
        ("rounds", 3, "processes of each kind"),
        ("steps", 3, "timed steps of each process, after one that is not"),
        ("batch", 16, "records of a step"),
        ("length", 32, "tokens of a record"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{words} [default: {default}]")
    parser.add_argument("--child", nargs=3, metavar=("URL", "ADAPTER", "CLIPPING"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_child(*options.child, options.steps, options.batch, options.length)))
        return 0
    return _drive(options)


def _drive(options: argparse.Namespace) -> int:
    from symbiosis.notebook.session import KernelServer

    server = KernelServer("demo", ())
    try:
        server.wait(lambda: None)
        sizes = [f"--{name}={getattr(options, name)}" for name in ("steps", "batch", "length")]
        print(f"{'adapter':<14}{'clipping':<12}{'s a step: median, min, max':>30}{'MB: median, min, max':>28}")
        for adapter in ADAPTERS:
            found: dict[str, list[dict[str, Any]]] = {clipping: [] for clipping in CLIPPINGS}
            for _ in range(options.rounds):
                for clipping, results in found.items():
                    words = [sys.executable, "-m", "benchmarks.ghost", *sizes, "--child", server.url, adapter, clipping]
                    output = subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE).stdout
                    results.append(json.loads(output.splitlines()[-1]))
            for clipping, results in found.items():
                seconds = [s for result in results for s in result["seconds"]]
                memory = [result["peak_bytes"] / 1e6 for result in results]
                print(
                    f"{adapter:<14}{clipping:<12}{_three(seconds, '.2f'):>30}{_three(memory, ',.0f'):>28}", flush=True
                )
    finally:
        server.stop()
    return 0


def _three(values: list[float], form: str) -> str:
    return ", ".join(format(value, form) for value in (statistics.median(values), min(values), max(values)))


def _child(url: str, adapter: str, clipping: str, steps: int, batch: int, length: int) -> dict[str, Any]:
    import warnings

    import peft
    import torch
    from torch.utils.data import DataLoader

    import symbiosis
    from benchmarks.adapters import ALL, QV
    from symbiosis.integrations import memory
    from symbiosis.privacy import make_private

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    rank, targets = (8, QV) if adapter == "lora" else (64, ALL)
    with symbiosis.connect(url) as conn:
        model = peft.get_peft_model(conn.load_model(), peft.LoraConfig(r=rank, target_modules=targets)).train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        ids = torch.randint(10, 10_000, (4 * batch, length))
        loader = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=batch)
        budget: dict[str, Any] = {"target_epsilon": 8.0, "target_delta": 1e-4, "epochs": 1, "accountant": "rdp"}
        model, private, _ = make_private(model, optimizer, loader, **budget, clipping=clipping)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading; see proc(5)
        before, seconds = memory.resident_bytes(), []
        for step in range(steps + 1):
            part = ids[(step % 4) * batch :][:batch]
            started_s = time.perf_counter()
            private.zero_grad()
            model(input_ids=part, labels=part).loss.backward()
            private.step()
            seconds.append(time.perf_counter() - started_s)
        return {"seconds": seconds[1:], "peak_bytes": memory.peak_bytes() - before}


if __name__ == "__main__":
    sys.exit(main())
