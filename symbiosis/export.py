"""Adapters to folders and back, with a record of the base that they were made for (see `provenance`).

One rule: what is loaded is what was saved. A tensor that is missing, unexpected or of another size is an error, and
the model is then as it was before.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peft
from peft.utils.save_and_load import get_peft_model_state_dict, load_peft_weights
from torch import nn

from symbiosis._version import __version__
from symbiosis.adapters import base_modules, base_of, canonical_name
from symbiosis.errors import ConfigError, ModelMismatchError
from symbiosis.flight.protocol import Manifest
from symbiosis.provenance import RECORD, Base


def save(model: Any, folder: Path, manifest: Manifest, adapter_name: str) -> Path:
    """Write an adapter and the record of its base; returns the folder that holds both.

    Raises:
        ConfigError: not a PeftModel, or none of its adapters has this name.
    """
    config = _adapters(model).get(adapter_name)
    if config is None:
        raise ConfigError(f"no adapter {adapter_name!r} in this model; it has {', '.join(_adapters(model))}")
    served = Base.served(manifest)
    config.revision = config.revision or served.revision or None
    # "auto" would ask the hub for a config to see whether the vocabulary was resized.
    resized = _is_resized(base_of(model), manifest)
    model.save_pretrained(str(folder), selected_adapters=[adapter_name], save_embedding_layers=resized)
    inside = folder if adapter_name == "default" else folder / adapter_name
    record = {"symbiosis": __version__, "base": asdict(served)}
    (inside / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return inside


def load(model: Any, folder: Path, manifest: Manifest, adapter_name: str, trainable: bool) -> Any:
    """Put a saved adapter on a wrapped model, or on a PeftModel of one, beside those that it has.

    Raises:
        ConfigError: there is no adapter in the folder, or the model has one of this name already.
        ModelMismatchError: the folder lacks tensors of the adapter, or holds others, or others in size.
    """
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"there is no adapter in {folder}: it has no adapter_config.json")
    taken = _adapters(model) if isinstance(model, peft.PeftModel) else {}
    if adapter_name in taken:
        raise ConfigError(f"the model has an adapter {adapter_name!r} already; give another adapter_name")
    served, recorded = Base.served(manifest), Base.recorded(folder)
    if recorded.is_other(served):
        warnings.warn(
            f"the adapter in {folder} was made for {recorded}, and this server serves {served}: expect other results, "
            "or connect to a server of its own base",
            stacklevel=3,
        )
    loaded = model if taken else _without_weights(model, folder, adapter_name, trainable)
    with _undone_on_failure(loaded, adapter_name, bool(taken), f"{folder}, made for {recorded}, on {served}"):
        loaded.load_adapter(str(folder), adapter_name=adapter_name, is_trainable=trainable)
        _check_keys(loaded, folder, adapter_name)
    return loaded


def _adapters(model: Any) -> dict[str, peft.PeftConfig]:
    if not isinstance(model, peft.PeftModel):
        raise ConfigError(
            f"a {type(model).__name__} has no adapters to save; peft.get_peft_model makes a model that has"
        )
    return model.peft_config


def _without_weights(model: nn.Module, folder: Path, adapter_name: str, trainable: bool) -> Any:
    """A PeftModel with the adapter that a folder describes, its values still to come."""
    config = peft.PeftConfig.from_pretrained(str(folder))
    config.inference_mode = not trainable
    kinds = peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING
    kind: Any = kinds.get(config.task_type, peft.PeftModel) if config.task_type else peft.PeftModel
    return kind(model, config, adapter_name=adapter_name)


@contextlib.contextmanager
def _undone_on_failure(model: Any, adapter_name: str, beside_others: bool, what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ModelMismatchError) as error:
        if beside_others:
            model.delete_adapter(adapter_name)
        elif not model.active_peft_config.is_prompt_learning:
            model.unload()
        raise ModelMismatchError(f"cannot load the adapter in {what}: {error}") from error


def _check_keys(model: Any, folder: Path, adapter_name: str) -> None:
    """What a folder holds must be what saving this adapter would write."""
    found = set(load_peft_weights(str(folder), device="cpu"))
    wanted, allowed = (
        set(get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=embeddings))
        for embeddings in (False, True)
    )
    for word, keys in (("lacks", wanted - found), ("has the unexpected", found - allowed)):
        if keys:
            shown = ", ".join(sorted(keys)[:3])
            raise ModelMismatchError(f"it {word} {len(keys)} tensors, first {shown}")


def _is_resized(base: nn.Module, manifest: Manifest) -> bool:
    """Whether the client's vocabulary has another size than the server's."""
    published = {info.name: info.shape for info in manifest.parameters}
    for path, module in base_modules(base):
        shape = published.get(f"{canonical_name(path)}.weight")
        if isinstance(module, nn.Embedding) and shape is not None and list(module.weight.shape) != list(shape):
            return True
    return False
