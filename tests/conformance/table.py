"""Writes docs/compatibility.md from the rows: `python -m tests.conformance.table`.

One rule: the table says what the rows declare, and each row is a test that fails when its declaration is not true.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from tests.conformance import adapters, architectures
from tests.conformance.harness import Row, Section

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
PACKAGES = ("transformers", "peft", "torch")

INTRO = """\
# Compatibility

Each line is a test (`tests/conformance`, run by `make conformance`): a tiny random model in float32, wrapped and
adapted, against the same model without us. Outputs and loss agree to a relative 1e-5, the gradient of every trained
parameter to 1e-4, five steps of AdamW follow the same losses, and greedy generation gives the same tokens. The line
also proves that calls were made and that the client holds no base weight. Where a line says that something stays
local, that is all that does, besides embeddings, norms, biases and a tied head.

Tolerances are not zero because a product's rounding depends on what it is batched with (about 1e-7 a layer in
float32). In bfloat16 a layer with a bias rounds once more than a local one; a checkpoint loaded in bfloat16 on one
side and float32 on the other agrees to bfloat16's 3 digits.

`works`: as above. `refused`: a named error says why and what to do instead. `not tried`: nobody has; it may work.

Made with {versions}. {counts}
"""


def render() -> str:
    """The whole document."""
    sections = [*architectures.SECTIONS, *adapters.SECTIONS]
    versions = ", ".join(f"{package} {version(package).partition('+')[0]}" for package in PACKAGES)
    rows = [row for section in sections for row in section.rows]
    verdicts = [_verdict(row) for row in rows]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("works", "refused", "not tried")) + "."
    parts = [INTRO.format(versions=versions, counts=counts), *("\n".join(_section(section)) for section in sections)]
    return "\n".join(parts)


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}\n"
    if section.intro:
        yield f"{section.intro}\n"
    yield "| | | calls of a step / of a pass without gradients | notes |"
    yield "|---|---|---|---|"
    for row in section.rows:
        calls = f"{row.calls[0]} / {row.calls[1]}" if row.calls else ""
        yield f"| {row.name} | {_verdict(row)} | {calls} | {_notes(row)} |"
    yield ""


def _verdict(row: Row) -> str:
    if row.untried:
        return "not tried"
    return "refused" if row.refused else "works"


def _notes(row: Row) -> str:
    local = [f"`{name}` stays local ({reason})" for name, reason in (row.local or {}).items()]
    return "; ".join(filter(None, [row.note, row.untried, *local])).replace("|", "\\|")


if __name__ == "__main__":
    DOCUMENT.write_text(render())
