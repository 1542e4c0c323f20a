"""Wrapping: which frozen modules of a model go remote, and the swap; and unwrapping.

    plan -> check -> swap

One rule: everything is checked before anything is changed. A model that is refused is left as it was;
one that is accepted is the same object, with the same module names and types.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from symbiosis.adapters import (
    base_modules,
    base_of,
    canonical_name,
    changed_by_adapter,
    is_wrapper,
    refuse_weight_readers,
)
from symbiosis.block import RemoteBlock, RemoteExperts
from symbiosis.errors import ConfigError, ModelMismatchError, UnsupportedMethodError
from symbiosis.flight.fingerprint import hash_tensors
from symbiosis.flight.protocol import DTYPES, TAGS, Manifest, ModuleInfo
from symbiosis.lazy import Laziness
from symbiosis.norm import RemoteNorm
from symbiosis.plan import Entry, Granularity, Place, Plan
from symbiosis.remote import RemoteMixin, stand_in_class
from symbiosis.sharing import Remote, SharedInputs

PLAN_ATTRIBUTE = "_symbiosis_plan"
EXPERTS = "experts"
Renaming = Callable[[str], str]


def wrap(
    model: nn.Module,
    manifest: Manifest,
    remote: Remote,
    *,
    granularity: Granularity = "auto",
    lm_head: Place = "auto",
    local: Sequence[str] = (),
    keep_weights: bool = False,
    verify: bool = True,
    reveals: bool = False,
) -> Plan:
    """Make the frozen base modules of a model remote, in place.

    Args:
        model: a transformers model or PeftModel, with weights or on the meta device.
        manifest: what the server serves.
        remote: what computes it.
        granularity: as in `Connection.wrap`.
        lm_head: where the output head runs; "auto" is local if it is tied to the embedding.
        local: names or glob patterns of modules to keep on the client.
        keep_weights: keep the replaced modules, so that `unwrap` can put them back.
        verify: compare the hashes of weights that are there; shapes are always compared.
        reveals: whether the server may see values of adapters.

    Raises:
        ModelMismatchError: the model is not the server's; the message names the first difference.
        UnsupportedMethodError: an adapter that needs base weights, or a model that is wrapped already.
        ConfigError: a bad option.
    """
    if granularity not in get_args(Granularity):
        raise ConfigError(f"granularity={granularity!r}; expected one of {', '.join(get_args(Granularity))}")
    if plan_of(model) is not None:
        raise UnsupportedMethodError("this model is wrapped already; load a fresh one, or unwrap it first")
    base = base_of(model)
    trained = base is not model  # with adapters in place, a weight that requires grad is trained on purpose
    infos = _matching_infos(base, manifest)
    entries = list(_entries(base, infos, lm_head, local, trained, granularity))
    if not any(entry.where != "local" for entry in entries):
        raise ModelMismatchError(_no_module_message(base, manifest, entries))
    refuse_weight_readers(model, {base.get_submodule(e.path) for e in entries if e.where == "remote"}, reveals)
    if has_meta(base):
        _check_skeleton(base, entries, manifest, keep_weights)
    entries = list(_checked(base, entries, infos, manifest, verify))
    plan = Plan(
        entries,
        SharedInputs(remote, lazy=granularity in ("auto", "segment"), reveals=reveals),
        granularity,
        keep_weights,
    )
    _swap(base, plan, infos)
    if plan.shared.lazy:
        _swap_norms(base, infos, plan.shared)
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
    if not plan.keeps_weights:
        raise UnsupportedMethodError(
            "the base weights of this model were freed when it was wrapped; wrap(model, keep_weights=True) keeps them, "
            "or load the model again"
        )
    for replaced in _replaced_forwards(base):
        replaced.restore()
    _replace(base, lambda module: module.restored() if isinstance(module, RemoteMixin) else module)
    delattr(base, PLAN_ATTRIBUTE)


def has_meta(model: nn.Module) -> bool:
    """Whether a parameter or buffer has no storage yet."""
    return any(t.is_meta for _, module in base_modules(model) for t in _own_tensors(module))


def remember_values(model: nn.Module) -> None:
    """Take the client's parameters, which have just been filled, for the server's."""
    base = base_of(model)
    for module in (*_replaced_forwards(base), *base.modules()):
        if isinstance(module, (RemoteBlock, RemoteNorm, RemoteMixin)):
            module.remember()


def renaming(base: nn.Module, names: Iterable[str]) -> Renaming:
    """How the server's names become the client's.

    A model of the same family can have another head, and so another prefix (`model.`, `transformer.`)
    or none: the prefix under which most names agree is taken.
    """
    paths = {canonical_name(path) for path, _ in base.named_modules()}
    prefix = getattr(base, "base_model_prefix", "")
    candidates: list[Renaming] = [lambda name: name]
    if prefix:
        candidates.append(lambda name: f"{prefix}.{name}")
        candidates.append(lambda name: name.removeprefix(f"{prefix}."))
    known = list(names)
    return max(candidates, key=lambda rename: sum(rename(name) in paths for name in known))


# --- planning ---------------------------------------------------------------------------------------


def _matching_infos(base: nn.Module, manifest: Manifest) -> dict[str, ModuleInfo]:
    """The server's modules under the client's names."""
    rename = renaming(base, (info.name for info in manifest.modules))
    return {rename(info.name): info for info in manifest.modules}


def _entries(
    base: nn.Module,
    infos: Mapping[str, ModuleInfo],
    lm_head: Place,
    local: Sequence[str],
    trained: bool,
    granularity: Granularity,
) -> Iterator[Entry]:
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None  # type: ignore[operator]
    gone: set[nn.Module] = set()  # inside of blocks that only the server can compute
    by_weight: dict[int, ModuleInfo] = {}
    for path, module in base_modules(base):
        if is_wrapper(module):  # what peft put around a layer, which may pass for one
            continue
        name = canonical_name(path)
        info = infos.get(name)
        if isinstance(module, (nn.Linear, Conv1D)):  # peft's layer_replication: other names for the same weights
            info = by_weight.get(id(module.weight)) if info is None else by_weight.setdefault(id(module.weight), info)
        asked = any(fnmatch.fnmatch(name, pattern) for pattern in local)
        if isinstance(module, (nn.Linear, Conv1D)):
            reason = _stays(module, info, asked, trained)
            if not reason and info is not None and (module is head or info.tied):
                reason = _head_stays(info, lm_head)
            yield Entry(path, name, "local" if reason else "remote", reason or "frozen linear", info)
        elif info is not None and info.kind in ("block", "experts"):
            required = info.kind == "experts" or _required(name, module, infos)
            if asked:
                yield Entry(path, name, "local", "asked for by local=", info)
            elif required or granularity != "linear":
                gone.update(module.modules() if required else ())
                yield Entry(path, name, "block", EXPERTS if required else "frozen block in one call", info)
        if not isinstance(module, (nn.Linear, Conv1D, nn.Embedding)) and module not in gone and _matrices(module):
            yield Entry(path, name, "local", f"{', '.join(_matrices(module))}: no linear")


def _stays(module: nn.Module, info: ModuleInfo | None, asked: bool, trained: bool) -> str:
    """Why a linear stays on the client; empty if it can go."""
    if info is None:
        return "not served"
    if asked:
        return "asked for by local="
    # Of an architecture's own class the server has found out that it computes what nn.Linear does.
    if type(module) not in (nn.Linear, Conv1D) and not type(module).__module__.startswith("transformers.models."):
        return f"{type(module).__name__} may compute something else"
    if trained and module.weight.requires_grad:
        return "trained here"
    return ""


def _head_stays(info: ModuleInfo, lm_head: Place) -> str:
    if lm_head == "local":
        return "lm_head='local'"
    return "tied to the embedding, which is here" if info.tied and lm_head == "auto" else ""


def _required(name: str, block: nn.Module, infos: Mapping[str, ModuleInfo]) -> bool:
    """Whether only the server can compute a block: it owns matrices, and is not made of experts and their router."""
    inside = (other for other, info in infos.items() if info.kind == "experts" and other.startswith(f"{name}."))
    return _has_own_matrices(block) and next(inside, None) is None


def _has_own_matrices(block: nn.Module) -> bool:
    """Whether a block holds matrices that belong to no linear, such as fused experts."""
    return any(_matrices(module) for _, module in base_modules(block) if not isinstance(module, (nn.Linear, Conv1D)))


def _matrices(module: nn.Module) -> list[str]:
    return [key for key, parameter in module._parameters.items() if parameter is not None and parameter.dim() > 1]


def _no_module_message(base: nn.Module, manifest: Manifest, entries: Iterable[Entry]) -> str:
    mine = next((entry.name for entry in entries), "none")
    theirs = manifest.modules[0].name if manifest.modules else "none"
    return (
        f"no linear of this {type(base).__name__} is served by {manifest.model} ({manifest.architecture}): the first "
        f"here is {mine!r}, the first there {theirs!r}. Load the model that the server serves"
    )


# --- checking ---------------------------------------------------------------------------------------


def _check_skeleton(base: nn.Module, entries: Iterable[Entry], manifest: Manifest, keep_weights: bool) -> None:
    """A model without weights has no hashes: what else says which model it is must agree."""
    if keep_weights:
        raise ConfigError("keep_weights=True, but this model is on the meta device and has no weights to keep")
    mine = getattr(getattr(base, "config", None), "model_type", "")
    theirs = json.loads(manifest.config).get("model_type", "")
    if mine != theirs:
        raise ModelMismatchError(f"this model is a {mine!r}; the server's {manifest.model} is a {theirs!r}")
    published = {info.name for info in manifest.parameters}
    for entry in entries:
        if entry.where != "local" or entry.info is None or entry.info.tied:
            continue
        module = base.get_submodule(entry.path)
        if any(p.is_meta for p in module.parameters()) and f"{entry.info.name}.weight" not in published:
            raise ConfigError(
                f"{entry.name} is to stay here ({entry.reason}), but this model has no weights yet, and the server "
                "keeps that one; leave it remote, or wrap a model that has its weights"
            )


def _checked(
    base: nn.Module, entries: Iterable[Entry], infos: Mapping[str, ModuleInfo], manifest: Manifest, verify: bool
) -> Iterator[Entry]:
    """The entries that stand: a block with trained biases goes by its linears, which are entries of their own."""
    changed = ""
    for entry in entries:
        if entry.where == "local" or entry.info is None or _is_same(base, entry, infos, manifest, verify):
            yield entry
        elif entry.where == "block" and entry.reason != EXPERTS:
            continue
        elif entry.path == entry.name:  # no adapter is on it
            raise _other_values(entry, manifest)
        else:
            changed = changed or entry.name
    if changed:
        raise changed_by_adapter(changed)


def _is_same(base: nn.Module, entry: Entry, infos: Mapping[str, ModuleInfo], manifest: Manifest, verify: bool) -> bool:
    """Whether what an entry is made of is the server's, as far as it is to be verified and is there."""
    module = base.get_submodule(entry.path)
    tensors = [_canonical_weight(module)] if entry.where == "remote" else _block_parameters(module)
    if entry.where == "remote":
        _check_shape(entry, tuple(tensors[0].shape), manifest)
    elif not _same_vectors(module, entry.name, infos):
        return False
    return not verify or any(tensor.is_meta for tensor in tensors) or _same_values(entry, tensors, manifest)


def _same_vectors(block: nn.Module, name: str, infos: Mapping[str, ModuleInfo]) -> bool:
    """Whether the biases and norms in a block, which the client may have trained, are the server's."""
    known = ((module, infos.get(canonical_name(f"{name}.{path}"))) for path, module in base_modules(block))
    held = [(_vectors(module), info.bias or info.hashes) for module, info in known if info is not None]
    return all(_agrees(vectors, hashes) for vectors, hashes in held if vectors)


def _vectors(module: nn.Module) -> list[torch.Tensor]:
    """What a client holds of a linear or a norm, in the order of the names."""
    if next(module.children(), None) is not None:
        return []
    return [parameter for _, parameter in sorted(module.named_parameters()) if parameter.dim() == 1]


def _canonical_weight(module: nn.Module) -> torch.Tensor:
    """[d_out, d_in]"""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return weight.t() if isinstance(module, Conv1D) else weight


def _block_parameters(block: nn.Module) -> list[torch.Tensor]:
    """All of a block's base parameters, in the order of their names, as the server hashes them."""
    named = {
        f"{canonical_name(path)}.{key}".removeprefix("."): parameter
        for path, module in base_modules(block)
        for key, parameter in module._parameters.items()
        if parameter is not None
    }
    # A parameter with two names counts once, under the first.
    return list({id(parameter): parameter for _, parameter in sorted(named.items())}.values())


def _check_shape(entry: Entry, shape: tuple[int, ...], manifest: Manifest) -> None:
    assert entry.info is not None
    expected = (entry.info.d_out, entry.info.d_in)
    if shape != expected:
        raise ModelMismatchError(
            f"{entry.name} is {list(shape)} here and {list(expected)} in the server's {manifest.model} "
            f"({manifest.architecture}); load the model that the server serves"
        )


def _same_values(entry: Entry, tensors: list[torch.Tensor], manifest: Manifest) -> bool:
    """One equal hash is a match: in the client's dtype or in the server's (docs/protocol.md section 7)."""
    assert entry.info is not None
    tags = dict.fromkeys((TAGS.get(tensors[0].dtype, "F32"), manifest.dtype))
    return any(hash_tensors(tensors, DTYPES[tag]) == entry.info.hashes.get(tag) for tag in tags)


def _other_values(entry: Entry, manifest: Manifest) -> ModelMismatchError:
    return ModelMismatchError(
        f"{entry.name} has other values here than in the server's {manifest.model}"
        f"{' at revision ' + manifest.revision if manifest.revision else ''}; its shape is the same. Load the same "
        "revision, without merged adapters and without quantisation"
    )


# --- swapping ---------------------------------------------------------------------------------------


def _swap(base: nn.Module, plan: Plan, infos: Mapping[str, ModuleInfo]) -> None:
    widths = {info.d_out for info in infos.values() if info.kind == "norm"}
    stand_ins = {
        base.get_submodule(entry.path): _stand_in(base.get_submodule(entry.path), entry, plan, widths)
        for entry in plan.entries
        if entry.where == "remote"
    }
    _replace(base, lambda module: stand_ins.get(module, module))
    for entry in plan.entries:
        if entry.where == "block":
            module = base.get_submodule(entry.path)
            kind = RemoteExperts if entry.info and entry.info.kind == "experts" else RemoteBlock
            module.forward = kind(
                entry.remote_name,
                plan.shared,
                module,
                entry.info.d_out if entry.info else 0,
                required=entry.reason == EXPERTS,
                # Experts are computed again in any case, and whole they take one call.
                gradients_by_linears=plan.granularity == "auto" and not _has_own_matrices(module),
                keep=plan.keeps_weights,
            )


def _stand_in(original: Any, entry: Entry, plan: Plan, widths: Collection[int]) -> nn.Module:
    kind: Any = stand_in_class(type(original))  # type: ignore[arg-type]
    stand_in: RemoteMixin = kind(entry.remote_name, plan.shared, original, keep=plan.keeps_weights)
    # What cannot be part of a residual stream is looked at, and the client's own bias is not the server's.
    joins = entry.info is not None and entry.info.d_out in widths
    if not joins or not (original.bias is None or (entry.info and _agrees([original.bias], entry.info.bias))):
        stand_in.lazy = Laziness(ever=False)
    return stand_in


def _swap_norms(base: nn.Module, infos: Mapping[str, ModuleInfo], shared: SharedInputs) -> None:
    """Let norms that are the server's defer, too."""
    for path, module in base_modules(base):
        info = infos.get(canonical_name(path))
        if info is None or info.kind != "norm" or "forward" in module.__dict__ or _ends_model(base, path):
            continue
        if _agrees([p for _, p in sorted(module.named_parameters())], info.hashes):
            module.forward = RemoteNorm(info.name, module, info.d_in, shared.deferrals)


def _ends_model(base: nn.Module, path: str) -> bool:
    """A norm beside an embedding is the model's first or last; what it returns is looked at by its user."""
    siblings = base.get_submodule(path.rpartition(".")[0]).children()
    return any(isinstance(sibling, nn.Embedding) for sibling in siblings)


def _agrees(values: Sequence[torch.Tensor], hashes: Mapping[str, str]) -> bool:
    """Whether values are the server's, in one of the published dtypes; values on meta will be."""
    if any(value.is_meta for value in values):
        return True
    return any(hash_tensors(values, DTYPES[tag]) == wanted for tag, wanted in hashes.items())


def _replace(base: nn.Module, choose: Callable[[nn.Module], nn.Module]) -> None:
    """Put `choose(child)` in the place of each child, wherever it hangs: a module may hang in several places."""
    for parent in list(base.modules()):
        for name, child in parent._modules.items():
            if child is not None:
                parent._modules[name] = choose(child)


def _replaced_forwards(base: nn.Module) -> list[RemoteBlock | RemoteNorm]:
    forwards = [module.__dict__.get("forward") for module in base.modules()]
    return [forward for forward in forwards if isinstance(forward, (RemoteBlock, RemoteNorm))]


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
