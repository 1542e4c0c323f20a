"""Rows with one client: training step, prefill, decode, traffic, and the cost of a call.

One rule: local and wrapped alternate, A B A B, each at its own best number of threads, on processes that are
both loaded and idle while the other runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.bench import Bench, Setting, seconds
from benchmarks.processes import Client, Server
from benchmarks.results import Row, Spread, paired, percentile

LINEAR = "linear"
CALL_BYTES = (0, 1 << 14, 1 << 17, 1 << 20, 1 << 24)
PREFILL_TOKENS = 512
TARGETS = {"train": "<= 1.10 in bfloat16", "decode": ">= 1.0 in bfloat16, aim 1.5"}


class Pair:
    """A server with one wrapped client, and local processes to compare with."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.server: Server = bench.server()
        self.wrapped: Client = bench.clients("wrapped", 1)[0]
        # Spinning OpenMP threads help a lone process and ruin two: both are tried.
        self._locals = {policy: bench.clients("local", 1, policy)[0] for policy in ("PASSIVE", "")}
        bench.load([self.wrapped], self.server.url)
        for client in self._locals.values():
            bench.load([client], str(bench.options.base.folder))
        self.local = self._locals["PASSIVE"]
        self.equal = bench.check(self.local, self.wrapped)
        self.plan = self.wrapped.ask("plan")
        bench.say(f"results equal: {self.equal}")

    def clients(self) -> list[Client]:
        return [self.wrapped, *self._locals.values()]

    def local_settings(self) -> list[Setting]:
        """One thread; all cores, with and without spinning."""
        cores = self.bench.options.cores
        passive, spinning = self._locals["PASSIVE"], self._locals[""]
        found = [Setting(passive, 1, "1 thread")]
        if cores > 1:
            found.append(Setting(passive, cores, f"{cores} threads, passive"))
            found.append(Setting(spinning, cores, f"{cores} threads"))
        return found

    def wrapped_settings(self) -> list[Setting]:
        counts = sorted({1, self.bench.options.cores})
        return [Setting(self.wrapped, count, f"client {count} thread{'s' * (count > 1)}") for count in counts]

    def measure(self, name: str, work: str, what: str, repetitions: int, higher: bool) -> Row:
        """Rounds of both sides alternately, after each has found its best setting."""
        bench, rounds = self.bench, self.bench.options.rounds
        local = bench.best(self.local_settings(), work, repetitions)
        wrapped = bench.best(self.wrapped_settings(), work, repetitions)
        bench.say(f"{name}: local {local.text}; wrapped {wrapped.text}")
        figures: dict[str, list[float]] = {"local": [], "wrapped": []}
        took: dict[str, list[float]] = {"local": [], "wrapped": []}
        stats_before = self.wrapped.ask("stats")
        for _ in range(rounds):
            for side, setting in (("local", local), ("wrapped", wrapped)):
                units = setting.client.ask("repeat", work=work, count=repetitions)["units"]
                took[side] += seconds(units)
                tokens = sum(unit[2] for unit in units)
                figures[side].append(tokens / sum(seconds(units)) if higher else statistics.median(seconds(units)))
        spreads = paired(figures["local"], figures["wrapped"])
        row = Row(name, what, "tokens/s" if higher else "s", higher, *spreads, target=TARGETS.get(name, ""))
        row.equal, row.plan = self.equal, self.plan["plan"]
        row.settings = {"local": local.text, "wrapped": f"server {self._server_threads()} threads, {wrapped.text}"}
        row.extra = {
            "local_p95_s": percentile(took["local"], 0.95),
            "wrapped_p95_s": percentile(took["wrapped"], 0.95),
            "split": _split(stats_before, self.wrapped.ask("stats"), took["wrapped"]),
            "transport": self.plan["transport"],
        }
        return row

    def _server_threads(self) -> int:
        return self.bench.options.server_threads or self.bench.options.cores


def train(pair: Pair) -> Iterator[Row]:
    sequences, length = pair.bench.options.train_shape
    pair.bench.prepare(pair.clients(), (sequences, length))
    yield pair.measure("train", "train", f"LoRA q,v step {sequences}x{length}", 1, higher=False)


def prefill(pair: Pair) -> Iterator[Row]:
    pair.bench.prepare(pair.clients(), (1, 8), prompt=PREFILL_TOKENS)
    yield pair.measure("prefill", "prefill", f"time to first token, prompt of {PREFILL_TOKENS}", 1, higher=False)


def decode(pair: Pair) -> Iterator[Row]:
    pair.bench.prepare(pair.clients(), (1, 8))
    yield pair.measure("decode", "decode", "greedy generate(), batch 1, prefill excluded", 1, higher=True)


def traffic(pair: Pair) -> Iterator[Row]:
    """Calls and bytes per token of the chosen granularity, and beside it those of one call per shared input."""
    bench, plain = pair.bench, pair.bench.clients("wrapped", 1)[0]
    bench.load([plain], pair.server.url, granularity=LINEAR)
    shapes = {"train": f"training {_times(bench)}", "decode": "decode, batch 1"}
    for work, what in shapes.items():
        sides = {"chosen": pair.wrapped, LINEAR: plain}
        bench.prepare(list(sides.values()), bench.options.train_shape)
        found = {side: _per_layer(client, work, bench) for side, client in sides.items()}
        ratio = found["chosen"]["bytes"] / found[LINEAR]["bytes"]
        row = Row("traffic", f"{what}: bytes per token and layer, against granularity='{LINEAR}'", "bytes")
        row.local, row.wrapped = Spread.of([found[LINEAR]["bytes"]]), Spread.of([found["chosen"]["bytes"]])
        row.ratio, row.plan, row.extra = Spread.of([ratio]), pair.plan["plan"], found
        row.target = "1 call per layer and direction, <= 0.35 of the bytes" if work == "train" else ""
        row.settings = {"granularity": bench.options.granularity}
        yield row
    bench.stage.end([plain])


def _times(bench: Bench) -> str:
    return "x".join(map(str, bench.options.train_shape))


def _per_layer(client: Client, work: str, bench: Bench) -> dict[str, Any]:
    """Calls per layer, direction and unit; bytes per layer and token. The output head is not part of a layer."""
    client.ask("repeat", work=work, count=2)  # who shares calls is learnt in the first pass
    options = bench.options
    answer = client.ask("traffic", work=work, count=1)
    counts, layers = answer["counts"], answer["layers"]
    sequences, length = options.train_shape
    units = 1 if work == "train" else options.new_tokens
    tokens = sequences * length if work == "train" else options.prompt_tokens + options.new_tokens - 1
    backward = counts.get("grad_input.calls", 0) + counts.get("segment_grad.calls", 0)
    calls = sum(value for key, value in counts.items() if key.endswith(".calls") and not key.startswith("head."))
    directions = {
        way: sum(v for k, v in counts.items() if k.endswith(way) and not k.startswith("head.")) / layers / tokens
        for way in ("bytes_out", "bytes_in")
    }
    return {
        "forward_calls": (calls - backward) / layers / units,
        "backward_calls": backward / layers / units,
        **directions,
        "bytes": sum(directions.values()),
        "counts": counts,
    }


def calls(pair: Pair) -> Iterator[Row]:
    """What a call costs beyond the GEMM, by size."""
    pair.wrapped.ask("threads", count=1)
    for nbytes in CALL_BYTES:
        answer = pair.wrapped.ask("calls", nbytes=nbytes, seconds=1.0 if pair.bench.options.quick else 3.0)
        beyond = [a - b for a, b in zip(answer["elapsed_s"], answer["compute_s"], strict=True)]
        sent = answer["bytes_out"][0] + answer["bytes_in"][0]
        tokens = answer["tokens"]
        row = Row("call", f"{tokens} token{'s' * (tokens > 1)}, {sent / 2:,.0f} bytes each way, beyond the GEMM", "us")
        row.wrapped = Spread.of([1e6 * value for value in beyond])
        parts = ("serialise_s", "network_s", "queue_s", "compute_s")
        row.extra = {f"{part.removesuffix('_s')}_us": 1e6 * statistics.median(answer[part]) for part in parts}
        row.extra["gb_per_s"] = sent / statistics.median(beyond) / 1e9
        row.extra["transport"] = pair.plan["transport"]
        row.target = _call_target(tokens, nbytes)
        yield row


def _call_target(tokens: int, nbytes: int) -> str:
    if tokens == 1:
        return "<= 60 us in shared memory, <= 250 us over Flight"
    return ">= 5 GB/s" if nbytes == CALL_BYTES[-1] else ""


def _split(before: dict[str, Any], after: dict[str, Any], took: list[float]) -> dict[str, float]:
    """Seconds per unit by where they went, on the wrapped side; `local_s` is what lies outside calls."""
    parts = ("serialise_s", "network_s", "queue_s", "compute_s")
    split = {part: (after[part] - before[part]) / len(took) for part in parts}
    return {"local_s": statistics.mean(took) - sum(split.values()), **split}
