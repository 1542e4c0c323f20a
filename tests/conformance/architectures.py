"""The architectures of the compatibility table, each a tiny random model of its own class.

One rule: a row is data. What an architecture needs is said here or found out by the mechanism; the package
has no branch for any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from tests.conftest import GATED, SHARED, seeded
from tests.conformance.harness import Row, Section, lora

LOUD = {"initializer_range": 0.15}  # the usual 0.02 leaves attention nearly uniform at this width, and so untested
TIED = {"lm_head": "tied to the embedding, which is here"}
DECODER = {k: v for k, v in GATED.items() if k != "head_dim"} | LOUD


def tiny(model: str, config: str = "", /, **settings: Any) -> Callable[[], nn.Module]:
    """A random model of this class, from its config class."""

    def build() -> nn.Module:
        model_class = getattr(transformers, model)
        config_class = getattr(transformers, config) if config else model_class.config_class
        return seeded(lambda: model_class(config_class(**settings)), seed=3)

    return build


DECODERS = (
    Row("Llama", tiny("LlamaForCausalLM", **GATED, **LOUD, tie_word_embeddings=False), local={}),
    Row("GPT-2", tiny("GPT2LMHeadModel", vocab_size=96, n_positions=64, n_embd=32, n_inner=56, n_layer=2, n_head=4,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, **LOUD), lora("c_attn", fan_in_fan_out=True), local=TIED),
)

SECTIONS = (Section("Decoders", DECODERS),)
