"""The adapters under test: peft methods by short name, the same on both sides.

One rule: an adapter is perturbed with a seeded generator, parameter by parameter, so that two processes hold
the same values and no method starts as the identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

QV = ["q_proj", "v_proj"]
QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*QKVO, "gate_proj", "up_proj", "down_proj"]
TASK = {"task_type": "CAUSAL_LM"}

# Twenty different ways to fine-tune one base, for the row `adapters`.
TWENTY = (
    *("lora", "lora-r2", "lora-r32", "lora-all", "lora-dropout", "rslora", "lora-plus-bias", "ia3", "ia3-all", "adalora"),
    *("vera", "loha", "lokr", "oft", "boft", "fourierft", "c3a", "prompt", "prefix", "p-tuning"),
)


def config(method: str) -> Any:
    """The peft config of a method.

    Raises:
        KeyError: an unknown name.
    """
    import peft

    makers: dict[str, Any] = {
        "lora": lambda: peft.LoraConfig(r=8, target_modules=QV, **TASK),
        "lora-r2": lambda: peft.LoraConfig(r=2, target_modules=QKVO, **TASK),
        "lora-r32": lambda: peft.LoraConfig(r=32, target_modules=QV, **TASK),
        "lora-all": lambda: peft.LoraConfig(r=8, target_modules=ALL, **TASK),
        "lora-dropout": lambda: peft.LoraConfig(r=8, target_modules=QV, lora_dropout=0.1, **TASK),
        "rslora": lambda: peft.LoraConfig(r=16, target_modules=QV, use_rslora=True, **TASK),
        "lora-plus-bias": lambda: peft.LoraConfig(r=8, target_modules=QV, lora_bias=True, **TASK),
        "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[], **TASK),
        "ia3-all": lambda: peft.IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **TASK
        ),
        "adalora": lambda: peft.AdaLoraConfig(init_r=6, target_r=4, total_step=1000, target_modules=QV, **TASK),
        "vera": lambda: peft.VeraConfig(r=64, target_modules=["q_proj", "o_proj"], **TASK),
        "loha": lambda: peft.LoHaConfig(r=4, target_modules=QV, **TASK),
        "lokr": lambda: peft.LoKrConfig(r=4, target_modules=QV, **TASK),
        "oft": lambda: peft.OFTConfig(r=0, oft_block_size=32, target_modules=QV, **TASK),
        "boft": lambda: peft.BOFTConfig(boft_block_size=16, target_modules=QV, **TASK),
        "fourierft": lambda: peft.FourierFTConfig(n_frequency=500, target_modules=QV, **TASK),
        "c3a": lambda: peft.C3AConfig(block_size=64, target_modules=QV, **TASK),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=8, **TASK),
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=8, **TASK),
        "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=8, encoder_hidden_size=128, **TASK),
    }
    return makers[method]()


def attach(model: nn.Module, method: str, seed: int) -> nn.Module:
    """The model with a perturbed adapter of that method."""
    import peft

    torch.manual_seed(seed)
    adapted: nn.Module = peft.get_peft_model(model, config(method))  # type: ignore[arg-type]
    perturb(adapted, seed)
    return adapted


def perturb(model: nn.Module, seed: int) -> None:
    """Add small seeded noise to every trainable parameter."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
