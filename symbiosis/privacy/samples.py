"""What must hold of per-sample gradients before a private step; and methods that are known to break it.

One rule: nothing here trusts the hooks that made them. There must be one gradient for each record, and their mean
must be the gradient that autograd found by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from symbiosis.errors import ConfigError, PrivacyCheckError, UnsupportedMethodError

TOLERANCE = 2e-2  # of a mean of per-sample gradients against autograd's; bfloat16 keeps 8 bits
USE_INSTEAD = "use LoRA or rsLoRA on linears, or prefix tuning"
# By peft's name for it: why not, as found out by comparing with gradients of one record at a time.
REFUSED = {
    "PROMPT_TUNING": "its per-sample gradients are wrong: one embedding serves the whole batch",
    "P_TUNING": "its per-sample gradients are wrong: one embedding serves the whole batch",
    "MULTITASK_PROMPT_TUNING": "its per-sample gradients are wrong: one embedding serves the whole batch",
    "CPT": "its per-sample gradients are wrong: one embedding serves the whole batch",
    "ADAPTION_PROMPT": "it has no per-sample gradients",
    "IA3": "it has no per-sample gradients: its vectors are no module with an input of its own",
    "ADALORA": "it has no per-sample gradients, and its ranks are chosen by the records without a bound",
    "LOHA": "it has no per-sample gradients: its factors are multiplied before they meet a record",
    "LOKR": "it has no per-sample gradients: its factors are multiplied before they meet a record",
    "VERA": "it has no per-sample gradients: its vectors are no module with an input of its own",
}


def check_samples(model: nn.Module, records: int) -> None:
    """Every trained parameter has a gradient for each record, and their mean is the gradient.

    A common factor is allowed, since a trainer may have clipped the gradient.

    Raises:
        PrivacyCheckError: it does not.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for name, parameter in trained:
        samples = getattr(parameter, "grad_sample", None)
        if not isinstance(samples, torch.Tensor):
            raise PrivacyCheckError(
                f"{name} has {'several batches of' if samples else 'no'} per-sample gradients, expected those of one "
                "batch: call step() after each backward pass, and train only what each record's gradient can be "
                f"found of; {USE_INSTEAD}"
            )
        if samples.shape[1:] != parameter.shape:
            raise PrivacyCheckError(f"{name} has per-sample gradients of shape {list(samples.shape)}")
        if len(samples) != records:
            raise PrivacyCheckError(
                f"{name} has {len(samples)} per-sample gradients, of a batch of {records} records; {USE_INSTEAD}"
            )
        if parameter.grad is not None:
            pairs.append((name, samples.mean(0), parameter.grad))
    _check_means(pairs)


def _check_means(pairs: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    factors: dict[str, float] = {}
    for name, mean, grad in pairs:
        norm, found = mean.norm().item(), grad.norm().item()
        if norm == found == 0:
            continue
        cosine = (mean.flatten() @ grad.flatten().to(mean)).item() / max(norm * found, 1e-300)
        if not cosine >= 1 - TOLERANCE**2:
            raise PrivacyCheckError(
                f"the per-sample gradients of {name} do not add up to its gradient (cosine {cosine:.3f}): call "
                f"zero_grad() after each step; {USE_INSTEAD}"
            )
        factors[name] = found / norm
    if factors and max(factors.values()) > (1 + TOLERANCE) * min(factors.values()):
        odd = max(factors, key=lambda name: factors[name])
        raise PrivacyCheckError(
            f"the per-sample gradients of {odd} are of another size than its gradient, by a factor of "
            f"{factors[odd] / min(factors.values()):.3g} against others; {USE_INSTEAD}"
        )


def refuse_methods(model: Any) -> None:
    """Refuse by name what has no right per-sample gradients.

    Raises:
        UnsupportedMethodError: such a method, or gradient checkpointing.
    """
    for adapter, config in dict(getattr(model, "peft_config", None) or {}).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind in REFUSED:
            raise UnsupportedMethodError(f"DP-SGD of {kind} (adapter {adapter!r}): {REFUSED[kind]}; {USE_INSTEAD}")
        if getattr(config, "trainable_token_indices", None):
            raise UnsupportedMethodError(
                f"DP-SGD of trainable tokens (adapter {adapter!r}): they have no per-sample gradients; {USE_INSTEAD}"
            )
        if getattr(config, "use_dora", False):
            raise UnsupportedMethodError(
                f"DP-SGD of DoRA (adapter {adapter!r}): its magnitudes have no per-sample gradients; {USE_INSTEAD}"
            )
    for name, module in model.named_modules():
        if len(getattr(module, "lora_embedding_A", ())):
            raise UnsupportedMethodError(
                f"DP-SGD of LoRA on the embedding {name}: it has no per-sample gradients; {USE_INSTEAD}"
            )
        if getattr(module, "gradient_checkpointing", False):
            raise UnsupportedMethodError(
                f"DP-SGD with gradient checkpointing ({name}): hooks see the recomputed forward twice, and per-sample "
                "gradients are lost; turn it off, and use smaller batches"
            )


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer must move what the model computes with: moving a model after that makes other parameters."""
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    moved = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if not trained:
        raise ConfigError("no parameter of this model requires a gradient; add an adapter first")
    if strangers := moved - trained.keys():
        raise ConfigError(
            f"the optimizer has {len(strangers)} trained parameters that are not the model's (opacus issue 820): make "
            "it after the adapter was added and the model was moved to its device"
        )
    if missing := [name for key, name in trained.items() if key not in moved]:
        raise ConfigError(f"{len(missing)} trained parameters are not the optimizer's, first {missing[0]}")
