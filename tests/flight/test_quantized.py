"""A base in fewer bits: clients compute what the same quantised model computes locally, and notice nothing else.

The local model has the same integers and scales: each linear's weight is replaced by the values they stand for.
What bitsandbytes and torchao make themselves is compared where they are installed: see CONTRIBUTING.md.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import symbiosis
from symbiosis.config import Masking
from symbiosis.errors import ConfigError, MissingExtraError, ModelMismatchError
from symbiosis.flight import gemm
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.quantized import Int8, quantize
from tests.client.conftest import (
    adapt,
    assert_same_step,
    difference,
    greedy,
    quantized_locally,
    remote_layers,
    run_step,
)

# The same values multiplied in products of other shapes: as tests/client/conftest.py.
TOLERANCE = 1e-5
NF4_OF_ITS_RANGE = 0.1  # relative error of a weight of normal numbers in NF4; measured 0.093
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(params=["int8", "int4"])
def width(request: pytest.FixtureRequest) -> Any:
    if request.param == "int4":
        pytest.importorskip("bitsandbytes", reason="int4 needs the extra `quantize`")
    return request.param


def lora(**options: Any) -> Any:
    targets = ["q_proj", "v_proj", "down_proj"]
    return peft.LoraConfig(**{"r": 4, "target_modules": targets, "task_type": "CAUSAL_LM", **options})


# --- what is kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_in_int8_is_within_half_a_step_of_itself(dtype: torch.dtype) -> None:
    weight = torch.randn(24, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] = 0

    kept = Int8.of(weight)

    far = (kept.to(torch.float64) - weight.double()).abs()
    # Of the largest value of a row itself: 127.5 rounds to 128, and only -128 is there; half a step as well.
    assert (far <= kept.scale.double() * 0.5001).all()
    assert kept.to(dtype).dtype == dtype
    assert (kept.to(dtype)[3] == 0).all()
    assert (kept.shape, kept.dtype, kept.numel()) == (weight.shape, dtype, weight.numel())
    assert kept.nbytes == weight.numel() + 4 * 24


def test_products_are_those_of_the_values(width: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    base = BaseModel(model, quantized=width)
    values = quantized_locally(model, width).get_submodule(Q).weight
    x, grad = torch.randn(5, 32), torch.randn(5, 48)

    assert difference(base.run("forward", [Q], [x]), x @ values.t()) <= 1e-6
    assert difference(base.run("grad_input", [Q], [grad]), grad @ values) <= 1e-6
    assert difference(values, model.get_submodule(Q).weight) > 1e-3, "nothing was quantised"
    assert model.get_submodule(Q).weight.isfinite().all(), "the caller's model was changed"


def test_int8_is_linear_in_its_input(tiny_llama: Any) -> None:
    """Which is why masks may be put on it: activations are never rounded to fewer bits."""
    base = BaseModel(tiny_llama().double(), quantized="int8")
    x, mask = torch.randn(5, 32).double(), 1e3 * torch.randn(5, 32).double()

    whole = base.run("forward", [Q], [x + mask]) - base.run("forward", [Q], [mask])

    assert difference(whole, base.run("forward", [Q], [x])) <= 1e-11


def test_int8_of_torchao_is_the_same() -> None:
    """Integers and scales, to the bit, of a float32 weight."""
    quantization = pytest.importorskip("torchao.quantization", reason="compared where torchao is installed")
    layer = nn.Linear(32, 56, bias=False)
    ours = Int8.of(layer.weight.detach())
    holder: Any = nn.Sequential(layer)

    quantization.quantize_(holder, quantization.Int8WeightOnlyConfig())

    assert torch.equal(ours.integers, holder[0].weight.qdata)
    assert torch.equal(ours.scale, holder[0].weight.scale)


def test_int4_of_bitsandbytes_is_the_same() -> None:
    """Forward and back, as its own layer computes them."""
    bnb = pytest.importorskip("bitsandbytes", reason="int4 needs the extra `quantize`")
    weight = torch.randn(56, 64, generator=torch.Generator().manual_seed(0))
    layer = bnb.nn.Linear4bit(64, 56, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    layer.weight = bnb.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4", compress_statistics=False)
    layer = layer.to("cpu")
    x = torch.randn(5, 64, requires_grad=True)
    y = layer(x)
    y.backward(torch.ones_like(y))

    ours = quantize(weight, "int4")

    assert difference(gemm.forward(x.detach(), [ours]), y) <= 1e-6
    assert difference(gemm.grad_input(torch.ones_like(y), [ours]), x.grad) <= 1e-6
    assert ours.nbytes == weight.numel() // 2 + 4 * weight.numel() // 64
    assert difference(ours.to(torch.float32), weight) <= NF4_OF_ITS_RANGE


@pytest.mark.parametrize("width", [32, 50, 64, 96, 100])
def test_int4_of_any_width(width: int) -> None:
    """Each weight is a level of NF4 times the largest of its block of 64, wherever rows end."""
    pytest.importorskip("bitsandbytes", reason="int4 needs the extra `quantize`")
    weight = torch.randn(7, width, generator=torch.Generator().manual_seed(0))
    ours: Any = quantize(weight, "int4")

    levels = torch.stack([ours.packed.view(-1) >> 4, ours.packed.view(-1) & 15], dim=1).view(-1).long()
    expected = (ours.state.code[levels].view(-1, 64) * ours.state.absmax.view(-1, 1)).view(-1)[: weight.numel()]
    assert torch.equal(ours.to(torch.float32), expected.view(weight.shape))
    assert difference(expected.view(weight.shape), weight) <= NF4_OF_ITS_RANGE


def test_memory_falls(tiny_llama: Any, width: Any) -> None:
    """Of what is served; embeddings, norms and the head stay as they are."""
    model = tiny_llama(hidden_size=64, intermediate_size=512)
    plain, small = BaseModel(model), BaseModel(model, quantized=width)
    linears = sum(4 * linear.parameters for name, linear in plain.linears.items() if name != "lm_head")

    left = small.base_bytes - (plain.base_bytes - linears)

    assert left < linears * {"int8": 0.28, "int4": 0.16}[width]  # a quarter, an eighth, and the scales


def test_whole_weights_are_not_held(tiny_llama: Any) -> None:
    import gc
    import weakref

    model = tiny_llama()
    storages = [weakref.ref(module.weight) for module in model.modules() if isinstance(module, nn.Linear)]
    base = BaseModel(model, quantized="int8")
    whole = {module.weight.data_ptr() for module in model.modules() if isinstance(module, nn.Linear)}
    whole.discard(model.lm_head.weight.data_ptr())
    del model
    gc.collect()

    assert not [ref for ref in storages if ref() is not None]
    held = {o.data_ptr() for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter) and o.numel() >= 32 * 24}
    assert base.linears
    assert not held & whole


# --- clients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["auto", "segment", "module", "linear"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_training_and_text_are_those_of_the_local_quantized_model(
    request: pytest.FixtureRequest, tokens: Any, width: Any, family: str, granularity: Any
) -> None:
    model = request.getfixturevalue(f"tiny_{family}")(seed=3)
    config = (
        lora(target_modules=["c_attn"], fan_in_fan_out=True) if family == "gpt2" else lora(target_modules=["q_proj"])
    )
    local = adapt(quantized_locally(model, width), config)
    expected = run_step(local, tokens())
    with (
        symbiosis.serve(copy.deepcopy(model), port=0, quantize=width, drain_timeout_s=2.0) as server,
        symbiosis.connect(server.url) as connection,
    ):
        remote = adapt(connection.wrap(copy.deepcopy(model), granularity=granularity), config)
        for _ in range(3):  # what travels in one call is learnt from step to step
            assert_same_step(run_step(remote, tokens()), expected)
        text = greedy(remote, tokens(1, 5))
        assert connection.stats().calls
        assert remote_layers(remote)
        assert connection.manifest.quantized == width

    assert torch.equal(text, greedy(local, tokens(1, 5)))
    full = run_step(adapt(copy.deepcopy(model), config), tokens())
    # 7e-4 of GPT-2 in int8, whose residual stream is mostly embedding; 1e-2 and more of the others
    assert difference(full.logits, expected.logits) > 30 * TOLERANCE, "nothing was quantised"


def test_row_norms_of_dora_are_those_of_the_values(tiny_llama: Any, width: Any) -> None:
    model = tiny_llama()
    values = quantized_locally(model, width).get_submodule(Q).weight

    norms = dict(BaseModel(model, quantized=width).weight_norms())[Q]

    torch.testing.assert_close(norms[32:], values.norm(dim=1))
    torch.testing.assert_close(norms[:32], values.norm(dim=0))


def test_masks_may_be_put_on_a_quantized_base(tiny_llama: Any, tokens: Any) -> None:
    """Weights only are quantised: what a mask adds comes off again, to the digit."""
    model = tiny_llama(seed=3)
    expected = run_step(adapt(quantized_locally(model, "int8"), lora()), tokens())
    with (
        symbiosis.serve(copy.deepcopy(model), port=0, quantize="int8", drain_timeout_s=2.0) as server,
        symbiosis.serve(copy.deepcopy(model), port=0, quantize="int8", drain_timeout_s=2.0) as dealer,
        symbiosis.connect(server.url, privacy=Masking(dealer=dealer.url, verify=True)) as connection,
    ):
        remote = adapt(connection.wrap(copy.deepcopy(model)), lora())
        for _ in range(2):
            assert_same_step(run_step(remote, tokens()), expected)


def test_servers_that_quantize_differently_are_not_one_base(tiny_llama: Any) -> None:
    """As replicas, and as dealer of masks: their products differ, though their fingerprints do not."""
    model = tiny_llama()
    with (
        symbiosis.serve(copy.deepcopy(model), port=0, quantize="int8", drain_timeout_s=2.0) as small,
        symbiosis.serve(copy.deepcopy(model), port=0, drain_timeout_s=2.0) as whole,
    ):
        assert small.base.fingerprint == whole.base.fingerprint
        assert small.base.served_fingerprint != whole.base.served_fingerprint
        with pytest.raises(ModelMismatchError, match=r"linears in int8 .* same --quantize"):
            symbiosis.connect([small.url, whole.url])
        with pytest.raises(ModelMismatchError, match=r"linears in int8 .*dtype and --quantize"):
            symbiosis.connect(small.url, privacy=Masking(dealer=whole.url))


# --- the model -------------------------------------------------------------------------------------------------


def test_a_quantized_base_is_the_same_base(tiny_llama: Any) -> None:
    model = tiny_llama()
    plain, small = BaseModel(model), BaseModel(model, quantized="int8")

    assert small.fingerprint == plain.fingerprint
    assert small.module_infos() == plain.module_infos()
    assert small.parameter_infos() == plain.parameter_infos()
    assert (small.dtype, small.device) == (plain.dtype, plain.device)


def test_heads_are_not_quantized(tiny_llama: Any, tiny_qwen2: Any) -> None:
    for model in (tiny_llama(), tiny_qwen2()):  # an untied one, and one that is the embedding
        base = BaseModel(model, quantized="int8")

        assert [n for n, linear in base.linears.items() if isinstance(linear.weight, torch.Tensor)] == ["lm_head"]


def test_a_block_that_asks_for_the_dtype_of_a_weight_is_told() -> None:
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=56, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    base = BaseModel(transformers.T5ForConditionalGeneration(config).eval(), quantized="int8")

    assert any(isinstance(layer, Int8) for layer in (linear.weight for linear in base.linears.values()))
    name = next(iter(base.blocks))
    assert base.run("forward", [name], [torch.randn(3, 32)]).isfinite().all()


class ReadsWeights(nn.Module):
    """An MLP that multiplies with the weight of a layer itself."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.up_proj, self.down_proj = inner.up_proj, inner.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(nn.functional.linear(x, self.up_proj.weight))
        return y


def test_a_block_that_reads_the_values_of_a_weight_is_refused(tiny_llama: Any) -> None:
    model = tiny_llama()
    model.model.layers[0].mlp = ReadsWeights(model.model.layers[0].mlp)
    assert "model.layers.0.mlp" in BaseModel(model).blocks

    with pytest.raises(ConfigError, match=r"quantize=int8: model\.layers\.0\.mlp of Llama.* reads the weights"):
        BaseModel(model, quantized="int8")


def test_a_model_without_linears_is_refused() -> None:
    class Bare(nn.Module):
        config = transformers.LlamaConfig()

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

    with pytest.raises(ConfigError, match="quantize=int8: Bare has no linear"):
        BaseModel(Bare(), quantized="int8")


def test_without_bitsandbytes_the_extra_is_named(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)

    with pytest.raises(MissingExtraError, match=r"quantize=int8 needs none.*symbiosis-flight\[quantize\]"):
        BaseModel(tiny_llama(), quantized="int4")
