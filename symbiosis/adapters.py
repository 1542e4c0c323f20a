"""The little that must know peft: canonical names of wrapped layers, and refusals by name.

One rule: what cannot work without base weights is refused before anything is changed, with the name
of the method and what to use instead. Whatever slips through meets the trap of a HollowWeight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from symbiosis.errors import UnsupportedMethodError

# Layers that peft puts around a base layer, as they appear in module paths.
WRAPPERS = frozenset(("base_layer", "original_module"))
USE_INSTEAD = "use LoRA, rsLoRA, IA3 or another method that works on activations (docs/compatibility.md)"
READS_AT_INIT = {"pissa": "PiSSA", "olora": "OLoRA", "loftq": "LoftQ", "corda": "CorDA", "lora_ga": "LoRA-GA"}


def base_of(model: nn.Module) -> nn.Module:
    """The transformers model inside a PeftModel; any other model is its own base."""
    if not hasattr(model, "peft_config"):
        return model
    inner = getattr(model, "get_base_model", None)
    if callable(inner):
        return inner()  # type: ignore[no-any-return]
    tuner: Any = model._modules.get("base_model")  # a PeftMixedModel
    return tuner.model if hasattr(tuner, "inject_adapter") else model


def canonical_name(path: str) -> str:
    """A module path without what peft put into it: `q_proj.base_layer` is `q_proj`."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def is_wrapper(module: nn.Module) -> bool:
    """Whether this is something that peft put around a base layer."""
    return not WRAPPERS.isdisjoint(module._modules)


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`named_modules()` without adapters: of what peft put around a layer, only the layer."""
    seen: set[nn.Module] = set()
    pending = [("", model)]
    while pending:
        path, module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        yield path, module
        inside = [
            (f"{path}.{name}" if path else name, child)
            for name, child in module._modules.items()
            if child is not None and (name in WRAPPERS or not is_wrapper(module))
        ]
        pending.extend(reversed(inside))


def refuse_weight_readers(model: nn.Module, remote: Collection[nn.Module], reveals: bool = False) -> None:
    """Refuse adapters that are already there and need the base weights of layers that are to go.

    Args:
        model: a PeftModel; any other passes.
        remote: the base layers that are to go.
        reveals: whether the server may see values of adapters.

    Raises:
        UnsupportedMethodError: an initialisation that changed the base weights, a merged adapter, or DoRA where the
            adapter is not to be revealed.
    """
    for adapter, config in _configs(model):
        init = str(getattr(config, "init_lora_weights", "")).lower()
        for word, method in READS_AT_INIT.items():
            if init.startswith(word):
                raise UnsupportedMethodError(
                    f"adapter {adapter!r} was initialised with {method}, which changed the base weights; the server "
                    f"has the original ones. Instead, {USE_INSTEAD}"
                )
    for name, module in model.named_modules():
        base_layer = getattr(module, "get_base_layer", None)
        if callable(base_layer) and base_layer() in remote:
            _refuse_layer(name, module, reveals)


def _refuse_layer(name: str, module: nn.Module, reveals: bool) -> None:
    if not reveals and _uses_dora(module):
        raise UnsupportedMethodError(
            f"{name} uses DoRA, which needs the norms of base weights plus adapter in every step. The server can "
            "compute them, but only from values of the adapter, which it would then see. Instead, use LoRA or rsLoRA "
            "(use_dora=False), or allow that: symbiosis.connect(url, reveal_adapter=True)"
        )
    if getattr(module, "merged_adapters", None):
        raise UnsupportedMethodError(
            f"{name} has merged adapters {module.merged_adapters}, so its base weight is not the server's; "
            "call model.unmerge_adapter() before wrap()"
        )


def changed_by_adapter(name: str) -> UnsupportedMethodError:
    """The refusal of a base weight that is another than the server's, where those without adapters are the same."""
    return UnsupportedMethodError(
        f"the base weight of {name} is not the server's, and an adapter is on it: making the adapter changed it, as "
        "PiSSA, OLoRA, LoRA-GA or KaSA do, or it was merged. The server computes with the original. Instead, "
        f"{USE_INSTEAD}"
    )


def _uses_dora(module: nn.Module) -> bool:
    used = getattr(module, "use_dora", None)
    return isinstance(used, dict) and any(used.values())


def _configs(model: nn.Module) -> Iterator[tuple[str, object]]:
    configs = getattr(model, "peft_config", None)
    if isinstance(configs, dict):
        yield from configs.items()
