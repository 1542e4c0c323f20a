"""The adapters under test: peft methods by short name, the same on both sides.

One rule: an adapter is perturbed with a seeded generator, parameter by parameter, so that two processes hold
the same values and no method starts as the identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

QV = ["q_proj", "v_proj"]
KV = ["k_proj", "v_proj"]
QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*QKVO, "gate_proj", "up_proj", "down_proj"]
PROMPT = {"num_virtual_tokens": 8}

# Short name -> config class of peft, and what it is given.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 8, "target_modules": QV}),
    "lora-r2": ("LoraConfig", {"r": 2, "target_modules": QKVO}),
    "lora-r32": ("LoraConfig", {"r": 32, "target_modules": QV}),
    "lora-all": ("LoraConfig", {"r": 8, "target_modules": ALL}),
    "lora-dropout": ("LoraConfig", {"r": 8, "target_modules": QV, "lora_dropout": 0.1}),
    "lora-bias": ("LoraConfig", {"r": 8, "target_modules": QV, "lora_bias": True}),
    "rslora": ("LoraConfig", {"r": 16, "target_modules": QV, "use_rslora": True}),
    "ia3": ("IA3Config", {"target_modules": KV, "feedforward_modules": []}),
    "ia3-all": ("IA3Config", {"target_modules": [*KV, "down_proj"], "feedforward_modules": ["down_proj"]}),
    "adalora": ("AdaLoraConfig", {"init_r": 6, "target_r": 4, "tinit": 400, "total_step": 9999, "target_modules": QV}),
    "vera": ("VeraConfig", {"r": 64, "target_modules": ["q_proj", "o_proj"]}),
    "randlora": ("RandLoraConfig", {"r": 16, "target_modules": QV}),
    "road": ("RoadConfig", {"target_modules": QV}),
    "oft": ("OFTConfig", {"r": 0, "oft_block_size": 32, "target_modules": QV}),
    "boft": ("BOFTConfig", {"boft_block_size": 16, "target_modules": QV}),
    "fourierft": ("FourierFTConfig", {"n_frequency": 500, "target_modules": QV}),
    "c3a": ("C3AConfig", {"block_size": 64, "target_modules": QV}),
    "prompt": ("PromptTuningConfig", PROMPT),
    "prefix": ("PrefixTuningConfig", PROMPT),
    "p-tuning": ("PromptEncoderConfig", {**PROMPT, "encoder_hidden_size": 128}),
}
TWENTY = tuple(METHODS)  # for the row `adapters`


def config(method: str) -> Any:
    """The peft config of a method.

    Raises:
        KeyError: an unknown name.
    """
    import peft

    kind, fields = METHODS[method]
    return getattr(peft, kind)(task_type="CAUSAL_LM", **fields)


def attach(model: Any, method: str, seed: int) -> nn.Module:
    """The model with a perturbed adapter of that method."""
    import peft

    torch.manual_seed(seed)
    adapted: nn.Module = peft.get_peft_model(model, config(method))
    perturb(adapted, seed)
    return adapted


def perturb(model: nn.Module, seed: int) -> None:
    """Add small seeded noise to every trainable parameter."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
