"""Shared fixtures: tiny random models, and a real server on a free port.

The models are small enough that loading, wrapping and a step take milliseconds, and their widths are all
different, so that a mixed-up dimension cannot pass unnoticed. Use `perturb` on adapters: at initialisation
LoRA's B is zero, which hides every error in A.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

# No test may ask a model hub; a config without a local file would otherwise try.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A product of these sizes gains nothing from a second thread, and loses a lot when the cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import transformers
from torch import nn

from symbiosis.config import ServerOptions
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.server import Server

ModelFactory = Callable[..., nn.Module]

VOCAB = 96
SHARED = {"vocab_size": VOCAB, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GATED = {
    **SHARED,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,  # q is 48 wide and k, v 24: no base matrix of Llama is square
}


def seeded(build: Callable[[], Any], seed: int) -> nn.Module:
    """A random model in eval mode, the same one for the same seed, without disturbing anybody's random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().eval()
        with torch.no_grad():  # transformers starts biases at 0 and norms at 1, which would hide errors in them
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.config.name_or_path = f"tiny-{model.config.model_type}"
    return model


@pytest.fixture(scope="session")
def tiny_llama() -> ModelFactory:
    """tiny_llama(seed=0, tied=False, **config): a Llama of two layers, d 32, MLP 56."""

    def build(seed: int = 0, *, tied: bool = False, **config: Any) -> nn.Module:
        settings = transformers.LlamaConfig(**{**GATED, "tie_word_embeddings": tied, **config})
        return seeded(lambda: transformers.LlamaForCausalLM(settings), seed)

    return build


@pytest.fixture(scope="session")
def tiny_qwen2() -> ModelFactory:
    """tiny_qwen2(seed=0, tied=True, **config): as Llama, with biases on q, k and v."""

    def build(seed: int = 0, *, tied: bool = True, **config: Any) -> nn.Module:
        known = {k: v for k, v in GATED.items() if k != "head_dim"}
        settings = transformers.Qwen2Config(**{**known, "tie_word_embeddings": tied, **config})
        return seeded(lambda: transformers.Qwen2ForCausalLM(settings), seed)

    return build


@pytest.fixture(scope="session")
def tiny_gemma2() -> ModelFactory:
    """tiny_gemma2(seed=0, **config): soft-capped logits, a scaled embedding, norms around the MLP, a tied head."""

    def build(seed: int = 0, **config: Any) -> nn.Module:
        settings = transformers.Gemma2Config(**{**GATED, "sliding_window": 16, **config})
        return seeded(lambda: transformers.Gemma2ForCausalLM(settings), seed)

    return build


@pytest.fixture(scope="session")
def tiny_gpt2() -> ModelFactory:
    """tiny_gpt2(seed=0, **config): Conv1D layers with biases, a tied head."""

    def build(seed: int = 0, **config: Any) -> nn.Module:
        known = {k: v for k, v in SHARED.items() if k != "max_position_embeddings"}
        settings = transformers.GPT2Config(
            **{**known, "n_positions": 64, "n_embd": 32, "n_inner": 56, "n_layer": 2, "n_head": 4, **config}
        )
        return seeded(lambda: transformers.GPT2LMHeadModel(settings), seed)

    return build


@pytest.fixture(scope="session")
def perturb() -> Callable[..., nn.Module]:
    """perturb(model, scale=0.02): move every trainable parameter off its initial value, the same way each time."""

    def move(model: nn.Module, scale: float = 0.02) -> nn.Module:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter))
        return model

    return move


@pytest.fixture(scope="session")
def tokens() -> Callable[..., torch.Tensor]:
    """tokens(batch=2, length=9, seed=0): random token ids [batch, length], none of them special."""

    def draw(batch: int = 2, length: int = 9, seed: int = 0) -> torch.Tensor:
        return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))

    return draw


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    """start_server(model, **options): a real server on a free port; all are closed after the test."""
    with contextlib.ExitStack() as stack:

        def start(model: nn.Module | BaseModel, **options: Any) -> Server:
            base = model if isinstance(model, BaseModel) else BaseModel(model)
            settings = ServerOptions(**{"model": base.name, "port": 0, "drain_timeout_s": 2.0, **options})
            return stack.enter_context(Server(base, settings))

        yield start


@pytest.fixture(scope="module")
def llama_server(tiny_llama: ModelFactory) -> Iterator[Server]:
    """One server of `tiny_llama()` for all tests of a file; they must not close it."""
    base = BaseModel(tiny_llama())
    with Server(base, ServerOptions(model=base.name, port=0, drain_timeout_s=2.0)) as server:
        yield server
