"""The demo's split shares no question, its labels cover answers only, and a seed fixes every order."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch

from symbiosis.errors import ConfigError, MissingExtraError
from symbiosis.integrations import demo_data
from symbiosis.integrations.demo_data import IGNORED_LABEL, Example, Pair

installed = pytest.mark.skipif(
    importlib.util.find_spec("chatterbot_corpus") is None, reason="needs chatterbot-corpus (extra [demo])"
)


class CharTokenizer:
    """One token per character, in a chat template of the usual shape; ids are code points."""

    def apply_chat_template(
        self, chat: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        assert not tokenize
        text = "".join(f"<{turn['role']}>{turn['content']}<end>\n" for turn in chat)
        return text + ("<assistant>" if add_generation_prompt else "")

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(char) for char in text]}


def corpus(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "talk.yml").write_text(text)
    return folder


def examples(count: int) -> list[Example]:
    return [Example([index] * (index % 5 + 2), [IGNORED_LABEL] + [index] * (index % 5 + 1)) for index in range(count)]


def test_a_pair_is_the_first_two_turns_and_counts_once(tmp_path: Path) -> None:
    greeting = "- - Hi\n  - |\n    Hello\n    there\n  - And more\n"
    same, other = "- - Hi\n  - Hello there\n", "- - Year?\n  - 1963\n"
    folder = corpus(tmp_path / "c", f"conversations:\n{greeting}{same}{other}")
    assert demo_data.load_pairs(folder) == [Pair("Hi", "Hello there"), Pair("Year?", "1963")]


def test_a_folder_without_conversations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds none"):
        demo_data.load_pairs(corpus(tmp_path / "c", "categories: [ai]\n"))


@pytest.mark.parametrize("hidden", ["chatterbot_corpus"])
def test_a_missing_corpus_names_the_command(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install chatterbot-corpus==1\.3\.3"):
        demo_data.load_pairs()


def test_questions_are_equal_whatever_their_case_punctuation_and_spacing() -> None:
    spellings = ["What's AI?", "what’s  ai", "WHATS AI", " what's\nai?! "]
    assert len({Pair(text, "").key for text in spellings}) == 1
    assert Pair("What is AI", "").key != Pair("What is A", "").key


def test_split_keeps_all_pairs_of_a_question_together() -> None:
    pairs = [Pair(f"Question {i // 2}{'?' * (i % 2)}", f"answer {i}") for i in range(40)]
    training, held_out = demo_data.split_pairs(pairs, 0.25)
    assert len(held_out) == 10
    assert sorted(training + held_out, key=pairs.index) == pairs
    assert not {p.key for p in training} & {p.key for p in held_out}


def test_split_is_fixed_by_its_seed() -> None:
    pairs = [Pair(f"Question {i}", "answer") for i in range(40)]
    assert demo_data.split_pairs(pairs, 0.3, seed=1) == demo_data.split_pairs(pairs, 0.3, seed=1)
    assert demo_data.split_pairs(pairs, 0.3, seed=1) != demo_data.split_pairs(pairs, 0.3, seed=2)


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0])
def test_a_split_with_an_empty_side_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="both sides"):
        demo_data.split_pairs([Pair("a", ""), Pair("b", "")], share)


@installed
def test_the_real_corpus_is_split_without_a_shared_question() -> None:
    pairs = demo_data.load_pairs()
    training, held_out = demo_data.split_pairs(pairs, 0.15)
    assert len(pairs) == len(set(pairs)) > 800
    assert len(held_out) > 100
    assert not {p.key for p in training} & {p.key for p in held_out}


def test_only_the_answer_and_its_end_have_labels() -> None:
    example = demo_data.encode(Pair("How?", "So."), CharTokenizer())
    text = "".join(map(chr, example.input_ids))
    assert text == "<user>How?<end>\n<assistant>So.<end>"
    labelled = [chr(label) for label in example.labels if label != IGNORED_LABEL]
    assert "".join(labelled) == "So.<end>"
    assert len(example.labels) == len(example.input_ids)


def test_pairs_that_are_too_long_are_left_out() -> None:
    pairs = [Pair("How?", "So."), Pair("How?", "So" + "o" * 50)]
    assert len(demo_data.encode_all(pairs, CharTokenizer(), max_tokens=40)) == 1


def test_padding_is_masked_and_has_no_label() -> None:
    batch = demo_data.pad([Example([1, 2, 3], [IGNORED_LABEL, 2, 3]), Example([4], [4])], pad_token_id=9)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED_LABEL, 2, 3], [4, IGNORED_LABEL, IGNORED_LABEL]]


def test_a_pass_over_the_training_data_sees_each_example_once() -> None:
    batches = demo_data.training_batches(examples(10), 4, pad_token_id=99)
    seen = [int(row[0]) for batch in itertools.islice(batches, 3) for row in batch["input_ids"]]
    assert sorted(seen) == list(range(10))


def test_training_order_is_fixed_by_its_seed() -> None:
    def order(seed: int) -> list[torch.Tensor]:
        batches = demo_data.training_batches(examples(30), 4, pad_token_id=99, seed=seed)
        return [batch["input_ids"] for batch in itertools.islice(batches, 12)]

    assert all(map(torch.equal, order(0), order(0)))
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(order(0), order(1), strict=True))


def test_held_out_batches_hold_each_example_once_and_little_padding() -> None:
    batches = demo_data.held_out_batches(examples(10), 4, pad_token_id=99)
    assert sorted(int(row[0]) for batch in batches for row in batch["input_ids"]) == list(range(10))
    assert sum(int((batch["attention_mask"] == 0).sum()) for batch in batches) < 10


def test_a_sample_is_fixed_and_never_larger_than_what_there_is() -> None:
    assert demo_data.sample(examples(20), 5) == demo_data.sample(examples(20), 5)
    assert len(demo_data.sample(examples(3), 5)) == 3
