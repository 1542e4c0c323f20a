"""A transformers model of the server's architecture that never holds base weights.

One rule: memory. Parameters are built without storage, base layers become stand-ins at once, and what
the client may hold arrives in chunks, straight into its place; nothing large exists twice.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn

from symbiosis.errors import ModelMismatchError, ProtocolError
from symbiosis.flight.protocol import FILE_SUFFIXES, STORED_DTYPES, Manifest, ParameterInfo
from symbiosis.hollow import HollowWeight

ChunkData = tuple[str, int, int, memoryview]  # name, offset_bytes, total_bytes, content


def build(manifest: Manifest, dtype: torch.dtype) -> nn.Module:
    """The server's architecture with parameters on meta and real buffers, in eval mode.

    Buffers are real because transformers computes them (rotary frequencies) and never loads them.

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
    config = config_class.from_dict(json.loads(manifest.config))
    with init_empty_weights(include_buffers=False):
        model: Any = model_class._from_config(config, dtype=dtype)
    model.config._name_or_path = manifest.model  # recorded in adapters as their base
    frozen: nn.Module = model.eval()
    return frozen


def fill(model: nn.Module, infos: Iterable[ParameterInfo], chunks: Iterable[ChunkData]) -> None:
    """Give a model on meta what a client may hold, as it arrives.

    Raises:
        ProtocolError: chunks that do not fit what the manifest says.
        ModelMismatchError: something is still missing after the last chunk.
    """
    published = {info.name: info for info in infos}
    for name, content in _assembled(published, chunks):
        _assign(model, name, content)
    model.tie_weights()  # type: ignore[operator]
    missing = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.device.type == "meta"]
    if missing:
        raise ModelMismatchError(
            f"the server neither serves nor publishes {len(missing)} tensors of this model, first {missing[0]!r}; "
            "its transformers version probably differs"
        )


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


def _assign(model: nn.Module, name: str, content: torch.Tensor) -> None:
    """Put a tensor where the model has a parameter or buffer of that name; elsewhere it is not needed."""
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return
    current = module._parameters.get(leaf)
    if current is None:
        if leaf in module._buffers:
            module._buffers[leaf] = content
        return
    if isinstance(current, HollowWeight):
        return
    if current.shape != content.shape:
        raise ModelMismatchError(f"{name} is {list(current.shape)} here and {list(content.shape)} on the server")
    dtype = current.dtype if content.is_floating_point() else content.dtype
    module._parameters[leaf] = nn.Parameter(content.to(dtype), requires_grad=current.requires_grad)


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
