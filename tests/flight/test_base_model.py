from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from symbiosis.errors import InvalidInputError, UnknownModuleError
from symbiosis.flight.base_model import BaseModel, Block

# fp32, the same products in another grouping: the rounding of sums of up to 72 terms.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
Factory = Callable[..., Any]
LAYER = "model.layers.0"
QKV = tuple(f"{LAYER}.self_attn.{name}_proj" for name in "qkv")
SMALL = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.fixture(scope="module")
def llama(tiny_llama: Factory) -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def base(llama: Any) -> BaseModel:
    return BaseModel(llama)


@pytest.fixture(scope="module")
def gpt2(tiny_gpt2: Factory) -> Any:
    return tiny_gpt2()


@pytest.fixture(scope="module")
def bert() -> Any:
    config = transformers.BertConfig(
        **SMALL, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=56
    )
    return transformers.BertForMaskedLM(config)


@pytest.fixture(scope="module")
def t5() -> Any:
    config = transformers.T5Config(**SMALL, d_model=32, d_kv=12, d_ff=56, num_layers=1, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


@pytest.fixture(scope="module")
def mixtral() -> Any:
    config = transformers.MixtralConfig(
        **SMALL,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return transformers.MixtralForCausalLM(config)


def run(base: BaseModel, op: str, modules: tuple[str, ...], *tensors: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return base.run(op, modules, tensors)


# --- products ----------------------------------------------------------------------------------------------------


def test_forward_of_a_group_is_each_linear_side_by_side(base: BaseModel, llama: Any) -> None:
    x = torch.randn(5, 32)

    y = run(base, "forward", QKV, x)

    attention = llama.model.layers[0].self_attn
    expected = torch.cat([attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)], 1)
    torch.testing.assert_close(y, expected, **TOLERANCE)


def test_grad_input_of_a_group_is_what_autograd_gives(base: BaseModel, llama: Any) -> None:
    x, dy = torch.randn(5, 32, requires_grad=True), torch.randn(5, 96)
    attention = llama.model.layers[0].self_attn
    torch.cat([attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)], 1).backward(dy)

    torch.testing.assert_close(run(base, "grad_input", QKV, dy), x.grad, **TOLERANCE)


def test_linears_are_computed_without_their_bias(tiny_qwen2: Factory) -> None:
    model = tiny_qwen2()
    q_proj = model.model.layers[0].self_attn.q_proj
    x = torch.randn(5, 32)

    y = run(BaseModel(model), "forward", QKV[:1], x)

    assert q_proj.bias.abs().max() > 0.01
    torch.testing.assert_close(y, q_proj(x) - q_proj.bias, **TOLERANCE)


@pytest.mark.parametrize("name", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"])
def test_conv1d_is_served_in_the_orientation_of_a_linear(name: str, gpt2: Any) -> None:
    base = BaseModel(gpt2)
    conv = gpt2.transformer.h[0].get_submodule(name)
    full = f"transformer.h.0.{name}"
    x = torch.randn(5, conv.weight.shape[0], requires_grad=True)
    y = conv(x) - conv.bias
    dy = torch.randn_like(y)
    y.backward(dy)

    served = base.linears[full]
    assert (served.d_in, served.d_out, served.kind) == (conv.nx, conv.nf, "conv1d")
    torch.testing.assert_close(run(base, "forward", (full,), x), y.detach(), **TOLERANCE)
    torch.testing.assert_close(run(base, "grad_input", (full,), dy), x.grad, **TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_block_gives_what_its_module_gives_and_the_gradient_of_autograd(
    family: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(family).eval()
    base = BaseModel(model)
    (name, block) = next(iter(base.blocks.items()))
    x, dy = torch.randn(5, block.d_in, requires_grad=True), torch.randn(5, block.d_out)
    y = model.get_submodule(name)(x[None])[0]
    y.backward(dy)

    torch.testing.assert_close(run(base, "forward", (name,), x.detach()), y.detach(), **TOLERANCE)
    torch.testing.assert_close(run(base, "grad_input", (name,), x.detach(), dy), x.grad, **TOLERANCE)


def test_computing_leaves_the_inputs_and_no_graph_behind(base: BaseModel) -> None:
    x, dy = torch.randn(3, 32), torch.randn(3, 32)
    copies = x.clone(), dy.clone()

    dx = run(base, "grad_input", (f"{LAYER}.mlp",), x, dy)

    assert not dx.requires_grad
    assert not x.requires_grad
    torch.testing.assert_close((x, dy), copies, rtol=0, atol=0)


# --- what is served ----------------------------------------------------------------------------------------------


def test_llama_serves_each_linear_and_its_mlps(base: BaseModel) -> None:
    assert len(base.linears) == 2 * 7 + 1
    assert list(base.blocks) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert (base.linears[QKV[0]].d_in, base.linears[QKV[0]].d_out) == (32, 48)


def test_gpt2_serves_its_mlps(gpt2: Any) -> None:
    assert list(BaseModel(gpt2).blocks) == ["transformer.h.0.mlp", "transformer.h.1.mlp"]


def test_a_mixture_of_experts_is_one_block(mixtral: Any) -> None:
    base = BaseModel(mixtral)

    assert list(base.blocks) == ["model.layers.0.mlp"]
    assert not any("mlp" in name for name in base.linears)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5", "mixtral"])
def test_attention_is_never_a_block(family: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(family)

    for name in BaseModel(model).blocks:
        inside = [child for child, _ in model.get_submodule(name).named_modules()]
        assert not any("attn" in child.lower() or "attention" in child.lower() for child in [name, *inside])


def test_a_bert_layer_is_no_block_although_it_treats_permuted_tokens_alike(bert: Any) -> None:
    blocks = BaseModel(bert).blocks

    assert not any(name.startswith("bert.encoder") for name in blocks)


class Mixed(nn.Module):
    """Two matrices, and a little of the mean over all tokens, which permuting tokens does not show."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.strength = strength

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.relu(self.first(x)))
        return y + self.strength * x.mean(dim=1, keepdim=True)


class Odd(nn.Module):
    """Two matrices that are called with a mask, or answer with a pair: not a function of one activation."""

    def __init__(self, pair: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.pair = pair

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        if self.pair:
            return self.second(self.first(x)), None
        if mask is None:
            raise ValueError("a mask is needed")
        return self.second(self.first(x)) * mask


@pytest.mark.parametrize(
    ("module", "served"),
    [(Mixed(0.0), True), (Mixed(1e-4), False), (Odd(True), False), (Odd(False), False)],
    ids=["token by token", "a weak mean over tokens", "answers with a pair", "needs a mask"],
)
def test_only_what_treats_each_token_on_its_own_is_a_block(
    module: nn.Module, served: bool, tiny_llama: Factory
) -> None:
    model = tiny_llama(num_hidden_layers=1)
    model.model.layers[0].mlp = module

    base = BaseModel(model)

    assert ("model.layers.0.mlp" in base.blocks) == served
    assert "model.layers.0.mlp.first" in base.linears


def test_a_subclass_of_linear_is_not_served_as_a_linear(tiny_llama: Factory) -> None:
    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = tiny_llama(num_hidden_layers=1)
    model.model.layers[0].self_attn.o_proj = Doubling(48, 32, bias=False)

    base = BaseModel(model)

    assert f"{LAYER}.self_attn.o_proj" not in base.modules
    assert f"{LAYER}.self_attn.o_proj.weight" in base.parameters  # the client computes it


@pytest.mark.parametrize(("tied", "published"), [(True, False), (False, False)])
def test_a_tied_head_is_told_apart(tied: bool, published: bool, tiny_llama: Factory) -> None:
    base = BaseModel(tiny_llama(tied=tied))
    infos = {info.name: info for info in base.module_infos()}

    assert infos["lm_head"].tied == tied
    assert not any(info.tied for name, info in infos.items() if name != "lm_head")
    assert ("lm_head.weight" in base.parameters) == published
    assert "model.embed_tokens.weight" in base.parameters


def test_module_infos_say_what_is_needed_to_call(gpt2: Any) -> None:
    infos = {info.name: info for info in BaseModel(gpt2).module_infos()}

    c_attn, mlp = infos["transformer.h.0.attn.c_attn"], infos["transformer.h.0.mlp"]
    assert (c_attn.kind, c_attn.d_in, c_attn.d_out, c_attn.parameters) == ("conv1d", 32, 96, 32 * 96)
    assert (mlp.kind, mlp.d_in, mlp.d_out, mlp.parameters) == ("block", 32, 32, 2 * 32 * 56 + 32 + 56)
    assert set(mlp.hashes) == {"F32", "F16", "BF16"}
    assert infos["lm_head"].tied


# --- what is published -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5", "mixtral"])
def test_no_served_weight_is_published(family: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(family)
    base = BaseModel(model)
    embeddings = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    published = {tensor.untyped_storage().data_ptr() for tensor in base.parameters.values()} - embeddings

    for name, linear in base.linears.items():
        assert linear.weight.untyped_storage().data_ptr() not in published, name


def test_routers_are_published_and_experts_are_not(mixtral: Any) -> None:
    published = [name for name in BaseModel(mixtral).parameters if "mlp" in name]

    assert published == ["model.layers.0.mlp.gate.weight"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_a_client_gets_every_parameter_that_is_no_linear_weight(family: str, request: pytest.FixtureRequest) -> None:
    # Norms and biases also from inside of blocks: at the granularity of linears they are the client's.
    model = request.getfixturevalue(family)
    base = BaseModel(model)
    held_back = {f"{name}.weight" for name in base.linears}
    reachable = {tensor.data_ptr() for tensor in base.parameters.values()}

    missing = [name for name, p in model.named_parameters() if name not in held_back and p.data_ptr() not in reachable]

    assert missing == []


def test_a_tied_tensor_is_published_once(gpt2: Any) -> None:
    pointers = [tensor.data_ptr() for tensor in BaseModel(gpt2).parameters.values()]

    assert len(set(pointers)) == len(pointers)


def test_parameter_infos_describe_the_parameters(base: BaseModel) -> None:
    for info in base.parameter_infos():
        tensor = base.parameters[info.name]
        assert (info.shape, info.nbytes) == (list(tensor.shape), tensor.nbytes)


def test_files_are_plain_names_of_known_kinds(base: BaseModel) -> None:
    files = base.files()

    assert "generation_config.json" in files
    assert all("/" not in name and name.endswith((".json", ".txt", ".model", ".jinja")) for name in files)


def test_a_model_without_tokenizer_and_generation_config_has_no_files(bert: Any) -> None:
    base = BaseModel(bert)
    base.generation_config = None

    assert base.files() == {}


# --- the model it was made from ----------------------------------------------------------------------------------


def test_weights_are_shared_not_copied(tiny_llama: Factory) -> None:
    model = tiny_llama()
    base = BaseModel(model)

    assert base.linears["lm_head"].weight.data_ptr() == model.lm_head.weight.data_ptr()
    assert base.base_bytes == sum(p.nbytes for p in model.parameters())


def test_a_tied_weight_counts_once(tiny_llama: Factory) -> None:
    model = tiny_llama(tied=True)

    assert BaseModel(model).base_bytes == sum(p.nbytes for p in model.parameters())  # parameters() gives it once


def test_the_model_given_is_not_changed(tiny_llama: Factory) -> None:
    model = tiny_llama().train()
    flags = {name: p.requires_grad for name, p in model.named_parameters()}

    base = BaseModel(model)

    assert model.training
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert all(isinstance(m, nn.Module) and not m.training for b in base.blocks.values() for m in b.module.modules())


def drop_modules(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = nn.Identity()
        layer.mlp.up_proj = nn.Identity()
        layer.mlp = nn.Identity()


def empty_weights(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.empty(0))


def to_other_dtype(model: Any) -> None:
    model.to(torch.bfloat16)


def assign_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = torch.zeros(1)


def replace_forward(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = lambda x: x
        layer.mlp.act_fn = nn.Identity()


def add_hooks(model: Any) -> None:
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: None)
        module.register_forward_pre_hook(lambda module, args: (args[0] * 0,))


def set_to_train(model: Any) -> None:
    model.train().requires_grad_(True)


@pytest.mark.parametrize(
    "change",
    [drop_modules, empty_weights, to_other_dtype, assign_data, replace_forward, add_hooks, set_to_train],
    ids=lambda change: change.__name__,
)
def test_what_is_done_to_the_model_later_changes_nothing(
    change: Callable[[Any], None], base: BaseModel, tiny_llama: Factory
) -> None:
    pristine, model = base, tiny_llama()
    base = BaseModel(model)
    x, dy = torch.randn(4, 32), torch.randn(4, 32)

    change(model)

    assert base.modules.keys() == pristine.modules.keys()
    for name, module in base.modules.items():
        tensors = (torch.ones(4, module.d_in),)
        assert torch.equal(run(base, "forward", (name,), *tensors), run(pristine, "forward", (name,), *tensors)), name
    mlp = (f"{LAYER}.mlp",)
    assert torch.equal(run(base, "grad_input", mlp, x, dy), run(pristine, "grad_input", mlp, x, dy))


def test_a_model_in_training_mode_is_served_without_dropout(tiny_gpt2: Factory) -> None:
    model = tiny_gpt2(resid_pdrop=0.9).train()
    base = BaseModel(model)
    x = torch.randn(4, 32)
    name = ("transformer.h.0.mlp",)

    first = run(base, "forward", name, x)

    assert torch.equal(first, run(base, "forward", name, x))
    torch.testing.assert_close(first, model.transformer.h[0].mlp.eval()(x), **TOLERANCE)


# --- checks ------------------------------------------------------------------------------------------------------


def test_checks_give_the_widths_of_input_and_output(base: BaseModel) -> None:
    assert base.check("forward", QKV, [[7, 32]]) == (32, 96)
    assert base.check("grad_input", QKV, [[7, 96]]) == (96, 32)
    assert base.check("grad_input", [f"{LAYER}.mlp"], [[0, 32], [0, 32]]) == (32, 32)


def test_an_unknown_name_is_refused_with_where_to_look(base: BaseModel) -> None:
    with pytest.raises(UnknownModuleError, match=r"does not serve 'nope'.*manifest"):
        base.check("forward", ["nope"], [[1, 32]])


def test_a_wrong_shape_is_refused_with_both_shapes(base: BaseModel) -> None:
    with pytest.raises(InvalidInputError, match=r"got tensors of shape \[\[2, 33\]\], expected \[\[2, 32\]\]"):
        base.check("forward", QKV[:1], [[2, 33]])


# --- hashes ------------------------------------------------------------------------------------------------------


def test_known_hashes_are_taken_and_nothing_is_hashed(llama: Any, base: BaseModel) -> None:
    hashed: list[str] = []
    known = copy.deepcopy(base.hashes)

    again = BaseModel(llama, hashes=known, progress=lambda names: [hashed.append(n) or n for n in names])

    assert again.fingerprint == base.fingerprint
    assert hashed == []


@pytest.mark.parametrize("lost", ["lm_head", "model.layers.0.mlp"])
def test_hashes_that_do_not_name_all_modules_are_not_taken(lost: str, llama: Any, base: BaseModel) -> None:
    known = {name: {"F32": "0", "F16": "0", "BF16": "0"} for name in base.hashes if name != lost}

    assert BaseModel(llama, hashes=known).fingerprint == base.fingerprint


def test_names_come_from_the_model_unless_given(llama: Any) -> None:
    assert BaseModel(llama).name == "tiny-llama"
    assert BaseModel(llama, name="mine", revision="abc").name == "mine"
    assert BaseModel(llama).architecture == "LlamaForCausalLM"


def test_every_block_is_a_block(base: BaseModel) -> None:
    assert all(isinstance(block, Block) for block in base.blocks.values())
