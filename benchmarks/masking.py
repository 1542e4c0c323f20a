"""`python -m benchmarks.masking`: what masks cost in time, on the demo model; a table for docs/security.md.

One rule: settings take turns within a round, and a ratio is of one round. Server and dealer are processes of their own
on the same cores as the client, which is the worst case: a dealer on another host costs no core here. Each round has
tokens of its own, or rows that come again would be answered from memory.

`ahead` waits, unmeasured, until the pool is full before each step: what is online. `refilled` does not wait, so that
the dealer's work is in the step that takes its masks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.processes import Process

START_S = 300.0
QUIET_S = 1.0  # a pool that did not grow for so long is full
SETTINGS = ("none", "dealer, ahead", "dealer, refilled", "shares", "exact, ahead", "exact, refilled")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masking", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of a training step, in 4 sequences")
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--out", type=Path, help="write the seconds of each round as JSON")
    options = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = [stack.enter_context(_Served(folder, name)).url for name in ("server", "dealer")]
        found = _measure(urls[0], urls[1], options, stack)
    if options.out:
        options.out.write_text(json.dumps(found, indent=2))
    for work, seconds in found.items():
        _show(work, seconds)
    return 0


class _Served:
    """A server of the demo model in a process of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / f"{name}.port"
        command = ["-m", "symbiosis.flight.cli", "--model", "demo", "--port", "0", "--port-file", str(self._file)]
        environ = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = Process(folder, name, [*command, "--tokens", "off"], environ)

    @property
    def url(self) -> str:
        end_s = time.monotonic() + START_S
        while not self._file.exists():
            if not self._process.running or time.monotonic() > end_s:
                raise self._process.failure("did not start")
            time.sleep(0.1)
        return f"grpc://127.0.0.1:{int(self._file.read_text())}"

    def __enter__(self) -> _Served:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end()


def _measure(server: str, dealer: str, options: Any, stack: ExitStack) -> dict[str, dict[str, list[float]]]:
    import peft
    import torch

    import symbiosis
    from symbiosis.privacy import Masking

    def ids(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randint(100, 10_000, (4, options.tokens // 4), generator=generator)

    modes: dict[str, Any] = {mode: Masking(dealer=dealer, mode=mode) for mode in ("dealer", "shares", "exact")}  # type: ignore[arg-type]
    clients: dict[str, tuple[Any, Any]] = {}
    for mode, privacy in {"none": None, **modes}.items():
        conn = stack.enter_context(symbiosis.connect(server, privacy=privacy))
        model = conn.load_model(granularity="linear")
        config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        clients[mode] = conn, peft.get_peft_model(model, config)

    def train(model: Any, number: int) -> None:
        model.train()
        model.zero_grad()
        model(input_ids=ids(number), labels=ids(number)).loss.backward()

    def decode(model: Any, number: int) -> None:
        model.eval()
        n = options.new_tokens
        prompt = ids(number)[:1, :4]
        mask = torch.ones_like(prompt)
        model.generate(input_ids=prompt, attention_mask=mask, do_sample=False, max_new_tokens=n, min_new_tokens=n)

    works: dict[str, Callable[[Any, int], None]] = {f"training step of {options.tokens} tokens": train}
    works[f"{options.new_tokens} tokens of greedy text"] = decode
    return {name: _rounds(work, clients, options.rounds) for name, work in works.items()}


def _rounds(
    work: Callable[[Any, int], None], clients: dict[str, tuple[Any, Any]], rounds: int
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    for number in range(rounds + 2):  # the first two find out which layers share a call, and what to deal
        for setting in SETTINGS:
            conn, model = clients[setting.partition(",")[0]]
            if setting.endswith("ahead"):
                _fill(conn)
            started_s = time.perf_counter()
            work(model, number)
            seconds = time.perf_counter() - started_s
            print(f"round {number} {setting:<18}{seconds:.3f} s", file=sys.stderr, flush=True)
            if number >= 2:
                found[setting].append(seconds)
    return found


def _fill(conn: Any) -> None:
    """Wait until nothing more is dealt."""
    dealt, since_s = -1, time.monotonic()
    while time.monotonic() - since_s < QUIET_S:
        now = conn.privacy.stats().pool.dealt_rows
        if now != dealt:
            dealt, since_s = now, time.monotonic()
        time.sleep(0.05)


def _show(work: str, seconds: dict[str, list[float]]) -> None:
    print(f"\n{work}")
    for setting, times in seconds.items():
        ratios = [mine / plain for mine, plain in zip(times, seconds["none"], strict=True)]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        print(f"  {setting:<18}{statistics.median(times):7.3f} s   {middle:5.2f} times ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    sys.exit(main())
