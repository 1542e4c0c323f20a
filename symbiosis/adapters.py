"""The little that must know peft: canonical names of wrapped layers, and refusals by name.

One rule: what cannot work without base weights is refused before anything is changed, with the name
of the method and what to use instead. Whatever slips through meets the trap of a HollowWeight.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from symbiosis.errors import UnsupportedMethodError

# Layers that peft puts around a base layer, as they appear in module paths.
WRAPPERS = frozenset(("base_layer", "original_module"))
USE_INSTEAD = "use LoRA, rsLoRA, IA3 or another method that works on activations (docs/compatibility.md)"
READS_AT_INIT = {"pissa": "PiSSA", "olora": "OLoRA", "loftq": "LoftQ", "corda": "CorDA", "lora_ga": "LoRA-GA"}


def base_of(model: nn.Module) -> nn.Module:
    """The transformers model inside a PeftModel; any other model is its own base."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) and hasattr(model, "peft_config") else model


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


def refuse_weight_readers(model: nn.Module) -> None:
    """Refuse adapters that are already there and need base weights.

    Raises:
        UnsupportedMethodError: DoRA, an initialisation that changed the base weights, a merged adapter.
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
        if any(getattr(module, "use_dora", {}).values() if isinstance(getattr(module, "use_dora", None), dict) else ()):
            raise UnsupportedMethodError(
                f"{name} uses DoRA, which reads the norms of the base weights in every step. Instead, {USE_INSTEAD}"
            )
        if getattr(module, "merged_adapters", None):
            raise UnsupportedMethodError(
                f"{name} has merged adapters {module.merged_adapters}, so its base weight is not the server's; "
                "call model.unmerge_adapter() before wrap()"
            )


def _configs(model: nn.Module) -> Iterator[tuple[str, object]]:
    configs = getattr(model, "peft_config", None)
    if isinstance(configs, dict):
        yield from configs.items()
