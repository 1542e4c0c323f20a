"""Real question-answer pairs for the demo, as chat batches whose loss counts answers only.

The text is the English part of the PyPI package `chatterbot-corpus` (BSD licence): 2,026 conversations whose
first two turns are a question and its answer. One of its files repeats ten questions a thousand times, so only
distinct pairs are used: repeats would make a held-out score look good for remembering.

One rule: a held-out pair shares no question with training, whatever its case, punctuation or spacing.
"""

from __future__ import annotations

import importlib.util
import random
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symbiosis.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    import torch

CORPUS_PACKAGE = "chatterbot-corpus"
CORPUS_VERSION = "1.3.3"
CORPUS_LICENSE = "BSD-3-Clause"
IGNORED_LABEL = -100  # what torch's cross_entropy, and so transformers, leaves out of the loss
POOL_BATCHES = 8  # so many batches are sorted by length together: less padding, still shuffled


@dataclass(frozen=True)
class Pair:
    """One question and one answer to it."""

    question: str
    answer: str

    @property
    def key(self) -> str:
        """The question without case, punctuation and white space: equal keys are the same question."""
        folded = unicodedata.normalize("NFKC", self.question).casefold()
        return "".join(char for char in folded if char.isalnum())


@dataclass(frozen=True)
class Example:
    """One pair as tokens: `labels` is `input_ids` with everything but the answer ignored. Both are [T]."""

    input_ids: list[int]
    labels: list[int]


def load_pairs(folder: Path | None = None) -> list[Pair]:
    """The distinct question-answer pairs of the English corpus, in a fixed order.

    Args:
        folder: a folder of corpus YAML files; None means the one of the installed package.

    Raises:
        MissingExtraError: the corpus package or pyyaml is not installed.
        ConfigError: the folder holds no conversation.
    """
    folder = folder or _corpus_folder()
    pairs = dict.fromkeys(pair for file in sorted(folder.glob("*.yml")) for pair in _read(file))
    if not pairs:
        raise ConfigError(
            f"the corpus folder must hold *.yml files with conversations; {folder} holds none. "
            f"Reinstall it: pip install --force-reinstall {CORPUS_PACKAGE}=={CORPUS_VERSION}"
        )
    return list(pairs)


def split_pairs(pairs: Sequence[Pair], held_out: float, seed: int = 0) -> tuple[list[Pair], list[Pair]]:
    """Split into (training, held-out) by question, so that no question is on both sides.

    Args:
        held_out: share of the distinct questions to hold out, between 0 and 1.
        seed: the same seed gives the same split.

    Raises:
        ConfigError: `held_out` leaves one side empty.
    """
    keys = sorted({pair.key for pair in pairs})
    count = round(len(keys) * held_out)
    if not 0 < count < len(keys):
        raise ConfigError(
            f"held_out must leave questions on both sides; got {held_out} of {len(keys)} questions. Try 0.2"
        )
    chosen = set(random.Random(seed).sample(keys, count))
    return [p for p in pairs if p.key not in chosen], [p for p in pairs if p.key in chosen]


def encode(pair: Pair, tokenizer: Any) -> Example:
    """Tokens of one pair in the tokenizer's chat template; only the answer and its end token have labels."""
    question = [{"role": "user", "content": pair.question}]
    answer = [{"role": "assistant", "content": pair.answer}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(question + answer, tokenize=False).rstrip("\n")
    # Two calls, as at generation time: the model sees the prompt's own tokens, never one merged over the seam.
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(text.removeprefix(prompt), add_special_tokens=False)["input_ids"]
    return Example(prompt_ids + answer_ids, [IGNORED_LABEL] * len(prompt_ids) + answer_ids)


def encode_all(pairs: Sequence[Pair], tokenizer: Any, max_tokens: int) -> list[Example]:
    """Encode every pair, leaving out those longer than `max_tokens` (a cut answer would teach not to end)."""
    examples = (encode(pair, tokenizer) for pair in pairs)
    return [example for example in examples if len(example.input_ids) <= max_tokens]


def sample(examples: Sequence[Example], count: int, seed: int = 0) -> list[Example]:
    """`count` of the examples, or all where there are fewer; the corpus is sorted by subject, so never the first."""
    return random.Random(seed).sample(examples, min(count, len(examples)))


def pad(examples: Sequence[Example], pad_token_id: int) -> dict[str, torch.Tensor]:
    """One batch padded on the right: `input_ids`, `attention_mask` and `labels`, each [B, T]."""
    import torch

    width = max(len(example.input_ids) for example in examples)

    def rows(values: Sequence[list[int]], filler: int) -> torch.Tensor:
        return torch.tensor([row + [filler] * (width - len(row)) for row in values])  # [B, T]

    return {
        "input_ids": rows([example.input_ids for example in examples], pad_token_id),
        "attention_mask": rows([[1] * len(example.input_ids) for example in examples], 0),
        "labels": rows([example.labels for example in examples], IGNORED_LABEL),
    }


def training_batches(
    examples: Sequence[Example], batch_size: int, pad_token_id: int, seed: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Padded batches without end, every example once per pass, in an order fixed by `seed`."""
    shuffler = random.Random(seed)
    while True:
        order = shuffler.sample(examples, len(examples))
        pool = POOL_BATCHES * batch_size
        chunks = [
            chunk
            for start in range(0, len(order), pool)
            for chunk in _by_length(order[start : start + pool], batch_size)
        ]
        for chunk in shuffler.sample(chunks, len(chunks)):
            yield pad(chunk, pad_token_id)


def held_out_batches(examples: Sequence[Example], batch_size: int, pad_token_id: int) -> list[dict[str, torch.Tensor]]:
    """Padded batches of every example once, sorted by length."""
    return [pad(chunk, pad_token_id) for chunk in _by_length(examples, batch_size)]


def _by_length(examples: Sequence[Example], batch_size: int) -> Iterator[Sequence[Example]]:
    ordered = sorted(examples, key=lambda example: len(example.input_ids))
    for start in range(0, len(ordered), batch_size):
        yield ordered[start : start + batch_size]


def _corpus_folder() -> Path:
    spec = importlib.util.find_spec("chatterbot_corpus")  # finds, never imports
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(location) / "data" / "english"
        if folder.is_dir():
            return folder
    raise MissingExtraError(
        f"the demo trains on the package {CORPUS_PACKAGE}, which is not installed. "
        f"Install it: pip install {CORPUS_PACKAGE}=={CORPUS_VERSION}"
    )


def _read(file: Path) -> Iterator[Pair]:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError(
            "the demo reads YAML with the package pyyaml, which is not installed. Install it: pip install pyyaml"
        ) from error
    content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    for turns in content.get("conversations", ()):
        # Where a conversation goes on, later turns are often more answers to the first: the first pair is safe.
        question, answer = (" ".join(str(turn).split()) for turn in turns[:2])
        yield Pair(question, answer)
