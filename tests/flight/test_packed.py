"""Weights laid out for oneDNN: the same values and the same results, in every kind of call."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import symbiosis
from symbiosis.errors import ConfigError
from symbiosis.flight import gemm
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.packed import Packed
from tests.client.conftest import adapt, assert_same_step, greedy, remote_layers, run_step

Q = "model.layers.0.self_attn.q_proj"


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(96, 64), (33, 65), (1, 7)])
def test_the_layout_holds_the_same_values(shape: tuple[int, int]) -> None:
    weight = numbers(*shape)
    for layout in (Packed.of(weight), Packed.of(weight.t().contiguous().t())):
        torch.testing.assert_close(layout.to(torch.float32), weight, rtol=0, atol=0)
        assert (layout.shape, layout.dtype, layout.device) == (weight.shape, weight.dtype, weight.device)
        assert (layout.numel(), layout.nbytes) == (weight.numel(), weight.nbytes)


@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_are_those_of_the_weights(tokens: int, dtype: torch.dtype) -> None:
    weights = [numbers(24, 32) / 5, numbers(8, 32) / 5]
    layouts = [Packed.of(weight) for weight in weights]
    x, grad = numbers(tokens, 32).to(dtype), numbers(tokens, 32).to(dtype)
    torch.testing.assert_close(gemm.forward(x, layouts), gemm.forward(x, weights))
    torch.testing.assert_close(gemm.grad_input(grad, layouts), gemm.grad_input(grad, weights), rtol=0, atol=0)


def test_rows_with_gaps_between_them_are_read_right() -> None:
    weight, x = numbers(24, 32) / 5, numbers(6, 64)[:, ::2]
    torch.testing.assert_close(gemm.forward(x, [Packed.of(weight)]), x @ weight.t())


def test_a_base_laid_out_is_the_same_base(tiny_llama: Any) -> None:
    whole, packed = BaseModel(tiny_llama()), BaseModel(tiny_llama(), prepack=True)
    assert packed.served_fingerprint == whole.served_fingerprint
    # In the weights' place, not beside them: what is left of each is one number.
    assert packed.base_bytes - whole.base_bytes <= 4 * len(packed.linears)
    assert isinstance(packed.linears[Q].weight, Packed)
    for (name, theirs), (_, ours) in zip(whole.weight_norms(), packed.weight_norms(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("granularity", ["segment", "module", "linear"])
def test_training_and_text_are_those_of_the_local_model(
    tiny_llama: Any, start_server: Any, tokens: Any, granularity: Any
) -> None:
    server = start_server(tiny_llama(), prepack=True)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with symbiosis.connect(server.url) as conn:
        local = adapt(tiny_llama(), copy.deepcopy(config))
        remote = adapt(conn.wrap(tiny_llama(), granularity=granularity), config)
        assert remote_layers(remote)
        for _ in range(3):  # what travels in one call is learnt from step to step
            assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))
        assert torch.equal(greedy(remote, tokens(1, 5)), greedy(local, tokens(1, 5)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": torch.bfloat16}, "only float32 weights on a CPU are laid out anew, and these are bfloat16 on cpu"),
        ({"quantized": "int8"}, "quantize=int8 and prepack"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(tiny_llama: Any, options: Any, said: str) -> None:
    dtype = options.pop("dtype", torch.float32)
    with pytest.raises(ConfigError, match=said):
        BaseModel(tiny_llama().to(dtype), prepack=True, **options)


def test_a_model_without_linears_is_refused() -> None:
    class Bare(nn.Module):
        config = transformers.LlamaConfig()

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

    with pytest.raises(ConfigError, match="prepack: Bare has no linear for it"):
        BaseModel(Bare(), prepack=True)


def test_a_build_without_onednn_is_refused(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="built without oneDNN"):
        BaseModel(tiny_llama(), prepack=True)
