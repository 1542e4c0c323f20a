"""What the demo prints at its end, from what the clients found out.

One rule: pure functions from numbers to lines; every figure says what it is of and in which unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from symbiosis.integrations.demo_events import Result

NAMES = {"lora": "LoRA", "ia3": "IA3"}
PARTS = ("local", "serialise", "network", "queue", "compute")
LEGEND = """\
local: in the client (attention, norms, adapter, loss, optimizer); serialise: tensors to bytes and back;
network: between the two; queue: waiting for the server's turn; compute: frozen layers, on the server."""


@dataclass(frozen=True)
class Outcome:
    """All that the demo found out.

    Attributes:
        results: one per client.
        questions: what the models were asked.
        local_answers: adapter folder -> answers of plain transformers and PEFT on the local base.
        wall_s: the whole demo.
    """

    results: Sequence[Result]
    questions: Sequence[str]
    local_answers: Mapping[str, Sequence[str]]
    wall_s: float

    def same_locally(self, result: Result) -> bool:
        """The adapter gave the same greedy answers without symbiosis."""
        return list(self.local_answers.get(result.adapter_dir, ())) == result.after.answers

    @property
    def overlap_s(self) -> float:
        """How long all clients trained at the same time."""
        starts, ends = [r.started_s for r in self.results], [r.ended_s for r in self.results]
        return max(0.0, min(ends) - max(starts))


def report(outcome: Outcome) -> str:
    """The whole text."""
    sections = (losses, answers, adapters, memory, times)
    return "\n\n".join("\n".join(section(outcome)) for section in sections)


def losses(outcome: Outcome) -> list[str]:
    """Held-out loss before and after, one row per client."""
    first = outcome.results[0]
    head = f"Loss per answer token on {first.held_out_pairs} held-out pairs; no training pair asks their questions"
    rows = [
        (NAMES[r.method], f"{r.before.loss:.3f}", f"{r.after.loss:.3f}", f"{100 * r.change:+.1f}%")
        for r in outcome.results
    ]
    return [head, *_table([("", "before", "after", "change"), *rows])]


def answers(outcome: Outcome) -> list[str]:
    """What the base and each adapter answer to each question."""
    lines = ["Answers to two held-out questions (greedy)"]
    for index, question in enumerate(outcome.questions):
        lines.append(f"  {question}")
        said = [("base", outcome.results[0].before.answers[index])]
        said += [(NAMES[r.method], r.after.answers[index]) for r in outcome.results]
        lines += [f"    {name:<5} {' '.join(text.split())}" for name, text in said]
    return lines


def adapters(outcome: Outcome) -> list[str]:
    """Where each adapter is, and whether it does the same without us."""
    head = "Saved as ordinary PEFT folders; loaded with transformers and PEFT alone, on the local base, they give"
    verdicts = {True: "the same answers", False: "OTHER ANSWERS"}
    rows = [(NAMES[r.method], r.adapter_dir, verdicts[outcome.same_locally(r)]) for r in outcome.results]
    wrong = [
        f"    {NAMES[r.method]} alone: {list(outcome.local_answers.get(r.adapter_dir, ()))}"
        for r in outcome.results
        if not outcome.same_locally(r)
    ]
    return [head, *_table(rows, left=3), *wrong]


def memory(outcome: Outcome) -> list[str]:
    """Each client's memory beside the base's."""
    base = outcome.results[0].base_bytes
    rows = [("", "model loaded", "peak in training"), ("base", f"{base / 1e6:,.0f} MB", "")]
    rows += [
        (NAMES[r.method], f"{r.loaded_bytes / 1e6:,.0f} MB", f"{r.peak_bytes / 1e6:,.0f} MB") for r in outcome.results
    ]
    return [
        "Memory (clients: above what importing torch, transformers and PEFT takes)",
        *_table(rows),
        "  The base is held once, by the server. A client holds embeddings, norms and its adapter; what training adds",
        "  is activations and logits of its own batch, as much as with a local model.",
    ]


def times(outcome: Outcome) -> list[str]:
    """Where a training step's time went."""
    head = (
        f"Where a training step's time went, in ms (mean of {outcome.results[0].steps} steps; "
        f"both clients trained at once for {outcome.overlap_s:.0f} s)"
    )
    rows: list[tuple[str, ...]] = [("", "step", *PARTS, "requests per batch")]
    for r in outcome.results:
        parts = [1e3 * getattr(r.stats, f"{part}_s") / r.steps for part in PARTS]
        step = 1e3 * r.stats.wall_s / r.steps
        rows.append((NAMES[r.method], *(f"{ms:,.0f}" for ms in (step, *parts)), f"{r.stats.mean_batch:.2f}"))
    return [head, *_table(rows), *(f"  {line}" for line in LEGEND.splitlines())]


def _table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows in columns as wide as their widest cell; the first `left` columns are aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines
