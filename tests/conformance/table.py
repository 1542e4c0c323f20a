"""docs/compatibility.md, from the rows: `python -m tests.conformance.table` prints it and writes it.

One rule: the table says what the rows declare, and each row is a test that fails when its declaration is not true.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from tests.conformance import (
    adapters,
    architectures,
    checkpointing,
    encoders,
    generation,
    loops,
    modalities,
    number_types,
    real_models,
    trainers,
)
from tests.conformance.harness import (
    GRADIENT_TOLERANCE,
    OUTPUT_TOLERANCE,
    TRAINING_STEPS,
    TRAINING_TOLERANCE,
    Line,
    Section,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
PACKAGES = ("transformers", "peft", "torch")
TRAINING = (loops, checkpointing, trainers, number_types)
MODULES = (architectures, encoders, modalities, real_models, adapters, generation, *TRAINING)
VERDICTS = ("works", "works, part local", "refused", "not tried")

INTRO = """\
# Compatibility

Each line is a test (`tests/conformance`, run by `make conformance`): a model, wrapped and adapted, against the same
model and adapter without us, both in float32. Models are random ones of two or three layers, with large weights;
*Real models* are what they say, and *Generation* and *Training* say how they are compared. This page is written from
what those tests declare, by `python -m tests.conformance.table`.

Made with {versions}. {counts}

| verdict | means |
|---|---|
| works | of the base, embeddings, a tied head, vectors (norms, biases) and attention are here, and nothing else |
| works, part local | so is what the notes name: matrices that are no linears, or layers that are not the server's |
| refused | a named error says why, and what to do instead |
| not tried | nobody has; it may work |

| what is compared | how close |
|---|---|
| loss, logits and every other output with gradients, and without them on the first pass and later | relative {output} |
| hidden states | relative {output} |
| the gradient of every trained parameter; none of them is zero | relative {gradient} |
| the losses of {steps} steps of AdamW, with dropout | relative {training} |
| greedy generation | the same tokens |

Architectures are compared wrapped before `get_peft_model`, wrapped after it, from `conn.load_model()` and on the meta
device; PEFT methods in the first two ways. Each time the client is searched for base weights. The distances are not
zero because the rounding of a product depends on what it is batched with: about 1e-7 a layer in float32. In bfloat16 a
layer with a bias rounds once more than a local one, and a checkpoint loaded as bfloat16 on one side and float32 on the
other agrees to bfloat16's three digits.

*Calls*: of a training step (forward and backward) / of a pass without gradients, of the whole model, with LoRA on q and
v or what stands for them. A Llama of two layers takes 4 without gradients: q, k, v of its first layer, one for each
layer, the head.
"""


def render() -> str:
    """The whole document."""
    sections = [section for module in MODULES for section in module.SECTIONS]
    found = Counter(verdict(row) for section in sections for row in section.rows)
    intro = INTRO.format(
        versions=", ".join(f"{package} {version(package).partition('+')[0]}" for package in PACKAGES),
        counts=", ".join(f"{found[word]} {word.replace(',', ' with a')}" for word in VERDICTS) + ".",
        output=_power(OUTPUT_TOLERANCE),
        gradient=_power(GRADIENT_TOLERANCE),
        training=_power(TRAINING_TOLERANCE),
        steps=TRAINING_STEPS,
    )
    return "\n".join([intro, *("\n".join(_section(section)) for section in sections)])


def verdict(row: Line) -> str:
    """What the table says of a row in a word or two."""
    if row.untried:
        return "not tried"
    if row.refused:
        return "refused"
    return "works, part local" if row.local else "works"


def _power(tolerance: float) -> str:
    return f"{tolerance:.0e}".replace("e-0", "e-")


def _section(section: Section) -> Iterator[str]:
    counted = any(row.calls for row in section.rows)
    head = ("", "", *(("calls",) if counted else ()), "notes")
    yield f"## {section.title}\n"
    if section.intro:
        yield f"{section.intro}\n"
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in section.rows:
        calls = (f"{row.calls[0]} / {row.calls[1]}" if row.calls else "",) if counted else ()
        yield f"| {' | '.join((row.name, verdict(row), *calls, _notes(row)))} |"
    yield ""


def _notes(row: Line) -> str:
    local = [f"`{name}` stays here ({reason})" for name, reason in row.local.items()]
    refusal = f'"{_readable(row.refused)}"' if row.refused else ""
    return "; ".join(filter(None, [row.note, row.untried, refusal, *local])).replace("|", "\\|")


def _readable(pattern: str) -> str:
    """A regular expression as the message it is found in."""
    return re.sub(r"\\(.)", r"\1", re.sub(r"\s*\.[*+]\??\s*", " ... ", pattern)).strip()


if __name__ == "__main__":
    text = render()
    DOCUMENT.write_text(text)
    print(text)
