"""The plan: which frozen modules of a model go remote and at which granularity; swap, unwrap, report.

One rule: everything is checked before anything is changed. A model that is refused is left as it was;
one that is accepted is the same object, with the same module names and types.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from symbiosis.adapters import base_of, canonical_name, refuse_weight_readers
from symbiosis.errors import ConfigError, ModelMismatchError, UnsupportedMethodError
from symbiosis.flight.fingerprint import hash_tensors
from symbiosis.flight.protocol import DTYPES, TAGS, Manifest, ModuleInfo
from symbiosis.hollow import HollowWeight
from symbiosis.remote import Remote, RemoteBlock, RemoteConv1D, RemoteLinear, RemoteMixin, SharedInputs
from symbiosis.tables import html_table

Granularity = Literal["linear", "module"]
Place = Literal["auto", "local", "remote"]
PLAN_ATTRIBUTE = "_symbiosis_plan"


@dataclass(frozen=True)
class Entry:
    """One module of the client's model: its path there, its name on the server, where it runs and why."""

    path: str
    name: str
    where: Literal["remote", "block", "local"]
    reason: str
    info: ModuleInfo | None = None


@dataclass
class Plan:
    """What runs where. `groups` (who shares calls) is learnt in the first forward pass."""

    entries: list[Entry]
    shared: SharedInputs
    granularity: Granularity
    kept: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def remote(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.where != "local"]

    @property
    def local(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.where == "local"]

    @property
    def parameters_remote(self) -> int:
        return sum(entry.info.parameters for entry in self.entries if entry.where == "remote" and entry.info)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(where, module, how many, why), with layer numbers folded to `*`."""
        folded = Counter((e.where, _folded(e.name), e.reason) for e in self.entries)
        return [(where, name, str(count), reason) for (where, name, reason), count in folded.items()]

    def __str__(self) -> str:
        lines = [f"{where:<7}{count:>4} x {name:<44}{reason}" for where, name, count, reason in self.rows()]
        shares = sorted({" + ".join(_folded(n).rpartition(".")[2] for n in group) for group in self.shared.groups})
        if shares:
            lines.append("one call each: " + ", ".join(shares))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_table(self.rows(), head=("where", "module", "count", "why"))


def wrap(
    model: nn.Module,
    manifest: Manifest,
    remote: Remote,
    *,
    granularity: Granularity = "linear",
    lm_head: Place = "auto",
    local: Sequence[str] = (),
    keep_weights: bool = False,
    verify: bool = True,
) -> Plan:
    """Make the frozen base modules of a model remote, in place.

    Args:
        model: a transformers model or PeftModel, with weights or on the meta device.
        manifest: what the server serves.
        remote: what computes it.
        granularity: "linear": a call per linear, or per linears that share an input; "module": blocks
            without adapters inside (MLPs) in one call, recomputed in the backward pass.
        lm_head: where the output head runs; "auto" is local if it is tied to the embedding.
        local: names or glob patterns of modules to keep on the client.
        keep_weights: keep the replaced modules, so that `unwrap` can put them back.
        verify: compare the hashes of weights that are there; shapes are always compared.

    Raises:
        ModelMismatchError: the model is not the server's; the message names the first difference.
        UnsupportedMethodError: an adapter that needs base weights, or a model that is wrapped already.
        ConfigError: a bad option.
    """
    if granularity not in ("linear", "module"):
        raise ConfigError(f"granularity={granularity!r}; expected 'linear' or 'module'")
    if plan_of(model) is not None:
        raise UnsupportedMethodError("this model is wrapped already; load a fresh one, or unwrap it first")
    refuse_weight_readers(model)
    base = base_of(model)
    infos = _matching_infos(base, manifest)
    trained = base is not model  # with adapters in place, a weight that requires grad is trained on purpose
    entries = list(_entries(base, infos, lm_head, local, trained, granularity))
    if not any(entry.where != "local" for entry in entries):
        raise ModelMismatchError(_no_module_message(base, manifest, entries))
    if verify:
        _verify(base, entries, manifest)
    plan = Plan(entries, SharedInputs(remote), granularity)
    _swap(base, plan, remote, keep_weights)
    # On the model itself, so that it lives and is copied with it; object.__setattr__: it is no module.
    object.__setattr__(base, PLAN_ATTRIBUTE, plan)
    return plan


def plan_of(model: nn.Module) -> Plan | None:
    """The plan of a wrapped model, or None."""
    return getattr(base_of(model), PLAN_ATTRIBUTE, None)


def unwrap(model: nn.Module) -> None:
    """Put the replaced modules back, where `wrap` kept them.

    Raises:
        UnsupportedMethodError: the model is not wrapped, or its weights were freed.
    """
    base = base_of(model)
    plan = plan_of(model)
    if plan is None:
        raise UnsupportedMethodError("this model is not wrapped")
    if not plan.kept:
        raise UnsupportedMethodError(
            "the base weights of this model were freed when it was wrapped; wrap(model, keep_weights=True) keeps them, "
            "or load the model again"
        )
    for path, original in plan.kept.items():
        _place_module(base, _current_path(base, path), original)
    for entry in plan.entries:
        if entry.where == "block":
            del base.get_submodule(entry.path).forward
    delattr(base, PLAN_ATTRIBUTE)


# --- planning ---------------------------------------------------------------------------------------


def _matching_infos(base: nn.Module, manifest: Manifest) -> dict[str, ModuleInfo]:
    """The server's modules under the client's names.

    A model of the same family can have another head, and so another prefix (`model.`, `transformer.`)
    or none: the prefix under which most names agree is taken.
    """
    paths = {canonical_name(path) for path, _ in base.named_modules()}
    names = [info.name for info in manifest.modules]
    prefix = getattr(base, "base_model_prefix", "")
    candidates: list[Callable[[str], str]] = [lambda name: name]
    if prefix:
        candidates.append(lambda name: f"{prefix}.{name}")
        candidates.append(lambda name: name.removeprefix(f"{prefix}."))
    best = max(candidates, key=lambda rename: sum(rename(name) in paths for name in names))
    return {best(info.name): info for info in manifest.modules}


def _entries(
    base: nn.Module,
    infos: Mapping[str, ModuleInfo],
    lm_head: Place,
    local: Sequence[str],
    trained: bool,
    granularity: Granularity,
) -> Iterator[Entry]:
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None  # type: ignore[operator]
    for path, module in base.named_modules():
        name = canonical_name(path)
        info = infos.get(name)
        if isinstance(module, (nn.Linear, Conv1D)):
            reason = _stays(module, info, name, local, trained)
            if not reason and info is not None and (module is head or info.tied):
                reason = _head_stays(info, lm_head)
            if reason:
                yield Entry(path, name, "local", reason, info)
            else:
                yield Entry(path, name, "remote", "frozen linear", info)
        elif info is not None and info.kind == "block" and _is_base_module(module):
            required = _has_own_weights(module)
            if any(fnmatch.fnmatch(name, pattern) for pattern in local):
                yield Entry(path, name, "local", "asked for by local=", info)
            elif required or granularity == "module":
                yield Entry(path, name, "block", "experts" if required else "frozen block in one call", info)


def _stays(module: nn.Module, info: ModuleInfo | None, name: str, local: Sequence[str], trained: bool) -> str:
    """Why a linear stays on the client; empty if it can go."""
    if info is None:
        return "not served"
    if any(fnmatch.fnmatch(name, pattern) for pattern in local):
        return "asked for by local="
    if trained and module.weight.requires_grad:
        return "trained here"
    return ""


def _head_stays(info: ModuleInfo, lm_head: Place) -> str:
    if lm_head == "local":
        return "lm_head='local'"
    return "tied to the embedding, which is here" if info.tied and lm_head == "auto" else ""


def _is_base_module(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("peft.")


def _has_own_weights(module: nn.Module) -> bool:
    """Whether a block holds matrices that belong to no linear, such as fused experts."""
    return any(
        parameter.dim() >= 2
        for child in module.modules()
        if not isinstance(child, (nn.Linear, Conv1D)) and _is_base_module(child)
        for parameter in child._parameters.values()
        if parameter is not None
    )


def _no_module_message(base: nn.Module, manifest: Manifest, entries: Iterable[Entry]) -> str:
    mine = next((entry.name for entry in entries), "none")
    theirs = manifest.modules[0].name if manifest.modules else "none"
    return (
        f"no linear of this {type(base).__name__} is served by {manifest.model} ({manifest.architecture}): the first "
        f"here is {mine!r}, the first there {theirs!r}. Load the model that the server serves"
    )


# --- checking ---------------------------------------------------------------------------------------


def _verify(base: nn.Module, entries: Iterable[Entry], manifest: Manifest) -> None:
    for entry in entries:
        if entry.where == "remote" and entry.info is not None:
            module = base.get_submodule(entry.path)
            weight = _canonical_weight(module)
            _verify_shape(entry, tuple(weight.shape), manifest)
            if weight.device.type != "meta":
                _verify_hash(entry, weight, manifest)


def _canonical_weight(module: nn.Module) -> torch.Tensor:
    """[d_out, d_in]"""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return weight.t() if isinstance(module, Conv1D) else weight


def _verify_shape(entry: Entry, shape: tuple[int, ...], manifest: Manifest) -> None:
    assert entry.info is not None
    expected = (entry.info.d_out, entry.info.d_in)
    if shape != expected:
        raise ModelMismatchError(
            f"{entry.name} is {list(shape)} here and {list(expected)} in the server's {manifest.model} "
            f"({manifest.architecture}); load the model that the server serves"
        )


def _verify_hash(entry: Entry, weight: torch.Tensor, manifest: Manifest) -> None:
    """One equal hash is a match: in the client's dtype or in the server's (docs/protocol.md section 7)."""
    assert entry.info is not None
    for tag in dict.fromkeys((TAGS.get(weight.dtype, "F32"), manifest.dtype)):
        if hash_tensors([weight], DTYPES[tag]) == entry.info.hashes.get(tag):
            return
    raise ModelMismatchError(
        f"{entry.name} has other values here than in the server's {manifest.model}"
        f"{' at revision ' + manifest.revision if manifest.revision else ''}; its shape is the same. Load the same "
        "revision, without merged adapters and without quantisation"
    )


# --- swapping ---------------------------------------------------------------------------------------


def _swap(base: nn.Module, plan: Plan, remote: Remote, keep_weights: bool) -> None:
    for entry in plan.entries:
        if entry.where != "remote":
            continue
        original = base.get_submodule(entry.path)
        stand_in: RemoteMixin
        if isinstance(original, Conv1D):
            stand_in = RemoteConv1D(entry.info.name if entry.info else entry.name, plan.shared, original)
        else:
            stand_in = RemoteLinear(entry.info.name if entry.info else entry.name, plan.shared, original)  # type: ignore[arg-type]
        _place_module(base, entry.path, stand_in)
        if keep_weights:
            plan.kept[entry.path] = original
    for entry in plan.entries:
        if entry.where == "block" and entry.info is not None:
            _swap_block(base.get_submodule(entry.path), entry.info.name, remote)


def _swap_block(module: nn.Module, name: str, remote: Remote) -> None:
    required = _has_own_weights(module)
    for child in module.modules() if required else ():
        for key, parameter in list(child._parameters.items()):
            if parameter is not None and parameter.dim() >= 2 and not isinstance(parameter, HollowWeight):
                child._parameters[key] = HollowWeight(parameter.shape, parameter.dtype, "cpu", f"{name}.{key}")
    module.forward = RemoteBlock(name, remote, module, required=required)


def _place_module(base: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(base.get_submodule(parent), leaf, module)


def _current_path(base: nn.Module, path: str) -> str:
    """Where a module is now: adapters added after `wrap` moved it to `.base_layer`."""
    while isinstance(inner := getattr(base.get_submodule(path), "base_layer", None), nn.Module):
        path += ".base_layer"
        if isinstance(inner, RemoteMixin):
            break
    return path


def _folded(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
