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
from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from peft.utils.save_and_load import get_peft_model_state_dict, load_peft_weights
from torch import nn

from symbiosis._version import __version__
from symbiosis.adapters import base_modules, base_of, canonical_name
from symbiosis.errors import ConfigError, ModelMismatchError, SymbiosisError
from symbiosis.flight.protocol import Manifest
from symbiosis.provenance import CONFIG, RECORD, Base, read_json


def save(model: Any, folder: Path, manifest: Manifest, adapter_name: str) -> Path:
    """Write an adapter and the record of its base; returns the folder that holds both.

    Raises:
        ConfigError: not a PeftModel, or none of its adapters has this name.
    """
    config = _adapters(model).get(adapter_name)
    if config is None:
        raise ConfigError(f"no adapter {adapter_name!r} in this model; it has {', '.join(_adapters(model))}")
    served = Base.served(manifest)
    config.base_model_name_or_path = config.base_model_name_or_path or served.name or None
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
        ConfigError: there is no adapter in the folder, or none that can be read, or the model has one of this name.
        ModelMismatchError: the model has not the layers that the adapter is for, or the folder lacks tensors of the
            adapter, or holds others, or others in size.
    """
    _check_folder(folder)
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
    with _undone_on_failure(model, adapter_name, f"{folder}, made for {recorded}, on {served}"):
        loaded = model if taken else _without_weights(model, folder, adapter_name, trainable)
        loaded.load_adapter(str(folder), adapter_name=adapter_name, is_trainable=trainable)
        if misfit := _misfit(loaded, folder, adapter_name):
            raise ValueError(misfit)
    return loaded


def _check_folder(folder: Path) -> None:
    """What peft would look for on a model hub, or fail on without a word about the folder."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"there is no adapter in {folder}: it has no {CONFIG}")
    kind = read_json(folder / CONFIG).get("peft_type")
    if kind not in [known.value for known in peft.PeftType]:
        raise ConfigError(
            f"{folder / CONFIG} has peft_type {kind!r}, which peft {peft.__version__} does not know; if a newer peft "
            "wrote it, install that one"
        )
    if not any((folder / name).is_file() for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)):
        raise ConfigError(
            f"the adapter in {folder} has no values: neither {SAFETENSORS_WEIGHTS_NAME} nor {WEIGHTS_NAME}"
        )


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
def _undone_on_failure(model: Any, adapter_name: str, what: str) -> Iterator[None]:
    """Whatever goes wrong, take off what was put on; what does not fit is a ModelMismatchError."""
    children = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items()]
    base, had_adapters = base_of(model), isinstance(model, peft.PeftModel)
    try:
        yield
    except BaseException as error:
        if had_adapters and adapter_name in model.peft_config:
            model.delete_adapter(adapter_name)
        for parent, name, child in children:
            parent._modules[name] = child
        if not had_adapters:
            vars(base).pop("peft_config", None)
        if isinstance(error, SymbiosisError) or not isinstance(error, Exception):
            raise
        raise ModelMismatchError(f"cannot load the adapter in {what}: {error}") from error


def _misfit(model: Any, folder: Path, adapter_name: str) -> str:
    """What a folder holds beside what saving this adapter would write, or lacks of it; empty if nothing."""
    found = set(load_peft_weights(str(folder), device="cpu"))
    wanted, allowed = (
        set(get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=embeddings))
        for embeddings in (False, True)
    )
    for word, keys in (("lacks", wanted - found), ("has the unexpected", found - allowed)):
        if keys:
            return f"it {word} {len(keys)} tensors, first {', '.join(sorted(keys)[:3])}"
    return ""


def _is_resized(base: nn.Module, manifest: Manifest) -> bool:
    """Whether the client's vocabulary has another size than the server's."""
    published = {info.name: info.shape for info in manifest.parameters}
    for path, module in base_modules(base):
        shape = published.get(f"{canonical_name(path)}.weight")
        if isinstance(module, nn.Embedding) and shape is not None and list(module.weight.shape) != list(shape):
            return True
    return False
