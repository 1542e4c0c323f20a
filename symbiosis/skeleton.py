"""A transformers model of the server's architecture that never holds base weights.

One rule: memory. Parameters are built without storage, base layers become stand-ins at once, and what
the client may hold arrives in chunks, straight into its place; nothing large exists twice.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from symbiosis.adapters import base_modules, canonical_name
from symbiosis.errors import ModelMismatchError, ProtocolError
from symbiosis.flight.protocol import FILE_SUFFIXES, STORED_DTYPES, Manifest, ParameterInfo

ChunkData = tuple[str, int, int, memoryview]  # name, offset_bytes, total_bytes, content


def build(manifest: Manifest, dtype: torch.dtype) -> nn.Module:
    """The server's architecture with parameters on meta and real buffers, in eval mode.

    Raises:
        ModelMismatchError: the installed transformers does not know the architecture.
    """
    model_class = getattr(transformers, manifest.architecture, None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise ModelMismatchError(
            f"transformers {transformers.__version__} has no model {manifest.architecture!r}, which the server serves; "
            "install the version that the server uses"
        )
    config_class: Any = model_class.config_class
    config = config_class.from_dict(json.loads(manifest.config, object_hook=_float))
    with _parameters_on_meta():
        model: Any = model_class._from_config(config, dtype=dtype)
    model.config._name_or_path = model.name_or_path = manifest.model  # recorded in adapters as their base
    frozen: nn.Module = model.eval()
    return frozen


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that this thread makes get no storage; buffers do: transformers computes and never loads them.

    accelerate's init_empty_weights does that to the modules of all threads.
    """
    thread = threading.get_ident()

    def empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(empty)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _float(found: dict[str, Any]) -> Any:
    """What transformers writes for a number that JSON lacks: {"__float__": "Infinity"}."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def fill(
    model: nn.Module, infos: Iterable[ParameterInfo], chunks: Iterable[ChunkData], rename: Callable[[str], str]
) -> None:
    """Give a model on meta what a client may hold, as it arrives.

    Args:
        model: the base model, whose base layers are stand-ins already; it may hold adapters.
        infos: what the server publishes.
        chunks: its content.
        rename: the server's name of a tensor to this model's.

    Raises:
        ProtocolError: chunks that do not fit what the manifest says.
        ModelMismatchError: something is still missing after the last chunk.
    """
    published = {info.name: info for info in infos}
    slots = dict(_slots(model))
    for name, content in _assembled(published, chunks):
        if (slot := slots.get(rename(name))) is not None:
            _assign(*slot, name, content)
    _restore_buffers(model)
    model.tie_weights()  # type: ignore[operator]
    missing = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if missing:
        raise ModelMismatchError(
            f"{len(missing)} tensors of this model have no values, and the server publishes none for them, first "
            f"{missing[0]!r}. What is yours (adapters, another head) must not be on the meta device: wrap the base "
            "first and add it after that. If it is the base's, the server's transformers version probably differs"
        )


def _slots(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """(name without adapters, (module, key)) of every parameter and buffer of the base."""
    for path, module in base_modules(model):
        for key in (*module._parameters, *module._buffers):
            yield canonical_name(f"{path}.{key}" if path else key), (module, key)


def _restore_buffers(model: nn.Module) -> None:
    """Buffers that transformers computes and never saves, from a twin: a model built on meta lacks them."""
    lacking = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if not lacking:
        return
    with _parameters_on_meta():
        twin = type(model)._from_config(model.config)  # type: ignore[attr-defined]
    computed = {canonical_name(name): buffer for name, buffer in twin.named_buffers()}
    for name in lacking:
        path, _, key = name.rpartition(".")
        if (value := computed.get(canonical_name(name))) is not None:
            model.get_submodule(path)._buffers[key] = value


def _assembled(published: dict[str, ParameterInfo], chunks: Iterable[ChunkData]) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors out of chunks in order; the only buffer is the tensor itself."""
    name, content, filled = "", torch.empty(0, dtype=torch.uint8), 0
    for chunk_name, offset, total, data in chunks:
        if offset == 0:
            info = published.get(chunk_name)
            if info is None or total != info.nbytes:
                raise ProtocolError(f"parameter {chunk_name!r} of {total:,} bytes is not in the manifest")
            name, content, filled = chunk_name, torch.empty(total, dtype=torch.uint8), 0
        if chunk_name != name or offset != filled or offset + len(data) > total:
            raise ProtocolError(f"chunk of {chunk_name!r} at {offset:,} is out of order")
        content.numpy()[offset : offset + len(data)] = data
        filled += len(data)
        if filled == total:
            info = published[name]
            yield name, content.view(STORED_DTYPES[info.dtype]).view(info.shape)
            content = torch.empty(0, dtype=torch.uint8)


def _assign(module: nn.Module, key: str, name: str, content: torch.Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer that has no values yet."""
    current = module._parameters.get(key, module._buffers.get(key))
    if current is None or not current.is_meta:
        return
    if current.shape != content.shape:
        raise ModelMismatchError(f"{name} is {list(current.shape)} here and {list(content.shape)} on the server")
    if content.is_floating_point():
        content = content.to(current.dtype)
    if key in module._buffers:
        module._buffers[key] = content
    else:
        module._parameters[key] = nn.Parameter(content, requires_grad=current.requires_grad)


def load_files(files: dict[str, bytes], what: Callable[[Path], Any]) -> Any:
    """Call `what` on a temporary folder that holds the files; their names are checked first.

    Raises:
        ProtocolError: a name that is no plain file name, or not of a known kind.
    """
    with tempfile.TemporaryDirectory(prefix="symbiosis-") as folder:
        for name, content in files.items():
            if Path(name).name != name or not name.endswith(FILE_SUFFIXES) or len(name) > 255:
                raise ProtocolError(f"the server sent a file named {name!r}, which is refused")
            (Path(folder) / name).write_bytes(content)
        return what(Path(folder))


def tokenizer_from(files: dict[str, bytes]) -> Any:
    """The tokenizer that the server published; code from a repository is never run."""
    return load_files(files, lambda folder: transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False))


def generation_config_from(files: dict[str, bytes]) -> Any:
    """The generation config that the server published, or None."""
    wanted = {name: content for name, content in files.items() if name == "generation_config.json"}
    if not wanted:
        return None
    with contextlib.suppress(OSError):
        return load_files(wanted, transformers.GenerationConfig.from_pretrained)
    return None
