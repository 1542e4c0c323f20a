"""The PEFT methods of the compatibility table: every tuner that the installed peft lists, and the options of LoRA.

One rule: the list comes from peft. A method that nobody has written a row for shows up as not tried.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import peft
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.lora.arrow import create_arrow_model
from peft.tuners.lora.config import (
    ArrowConfig,
    BdLoraConfig,
    CordaConfig,
    KasaConfig,
    MontecloraConfig,
    VeloraConfig,
)
from peft.tuners.lora.loraga import preprocess_loraga
from peft.utils.hotswap import hotswap_adapter
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from tests.conformance.architectures import DECODER, UNTIED, tiny
from tests.conformance.harness import Adapt, Batch, Row, Section, adapter, perturb, prompt, text_batch

Config = Callable[[], peft.PeftConfig]

# Biases on every linear, so that methods that train or read them show it; q is square, k and v are not.
llama = tiny("LlamaForCausalLM", **DECODER, **UNTIED, attention_bias=True, mlp_bias=True)
gpt2 = tiny(
    "GPT2LMHeadModel", vocab_size=96, n_positions=64, n_embd=32, n_inner=56, n_layer=2, n_head=4,
    bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.15,
)  # fmt: skip
tied = tiny("Qwen2ForCausalLM", **DECODER, tie_word_embeddings=True)

WRAP_FIRST, PEFT_FIRST = ("wrap first",), ("peft first",)
BOTH = ("wrap first", "peft first")
QV = ["q_proj", "v_proj"]
CAUSAL = {"task_type": "CAUSAL_LM"}
REVEAL = {"reveal_adapter": True}
SHOWS = "needs `reveal_adapter=True`: the server sees "
ONCE = "reads the weights when it is made: make it where they are, then `wrap`"
SEEN = 27  # a token of text_batch and of no special meaning


def row(name: str, adapt: Adapt, build: Any = llama, orders: tuple[str, ...] = BOTH, **settings: Any) -> Row:
    return Row(name, build, adapt, orders=orders, **settings)


def tuner(kind: str, **settings: Any) -> Adapt:
    """The method of this peft type, on q_proj and v_proj unless told otherwise."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[kind]]
    return adapter(lambda: config(**{**CAUSAL, **settings}))


def on(kind: str, **settings: Any) -> Adapt:
    return tuner(kind, target_modules=list(QV), **settings)


def lora(**settings: Any) -> Adapt:
    return adapter(lambda: peft.LoraConfig(**{"r": 4, "target_modules": list(QV), **CAUSAL, **settings}))


def with_tasks(make: Callable[[Any], Batch]) -> Callable[[Any], Batch]:
    """The same, each sequence of another task."""

    def batch(model: Any) -> Batch:
        made = make(model)
        return {**made, "task_ids": torch.arange(len(made["input_ids"]))}

    return batch


@contextmanager
def quiet() -> Iterator[None]:
    """What peft warns of in these methods, on a local model as well."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Position ids are not supported|Unsupported layer type|Failed to load the CUDA"
        )
        warnings.filterwarnings("ignore", "Model has .tie_word_embeddings=True")
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        warnings.filterwarnings("ignore", "Setting boft_n_butterfly_factor")
        warnings.filterwarnings(
            "ignore", "Sparse invariant checks|.past_key_values. is deprecated|Both .past_key_values. and"
        )
        yield


QUIET = {"context": quiet}
TASKS: dict[str, Any] = {"batch": with_tasks(text_batch), "prompt": with_tasks(prompt)}


def made_late(name: str, kind: str, message: str, **settings: Any) -> tuple[Row, ...]:
    """A method that reads weights when it is made, and no more after that."""
    adapt = on(kind, **settings)
    return (
        row(name, adapt, orders=PEFT_FIRST, note=ONCE, **QUIET),
        row(f"{name}, made on a wrapped model", adapt, orders=WRAP_FIRST, refused=f"{message}.*Instead", **QUIET),
    )


def xlora(model: nn.Module) -> Any:
    """A mixture of two LoRA adapters, which it loads from folders."""
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(11)
        saved = {}
        for name in ("0", "1"):
            expert = lora()(llama())
            expert.save_pretrained(f"{folder}/{name}")
            saved[name] = f"{folder}/{name}"
        model.config.use_cache = False
        config = peft.XLoraConfig(
            **CAUSAL, hidden_size=32, xlora_depth=1, adapters=saved, enable_softmax=True, use_trainable_adapters=True
        )
        mixture = peft.get_peft_model(model, config)
        perturb(mixture)
    return mixture


# --- every tuner --------------------------------------------------------------------------------------

IA3_LAYERS = {"target_modules": [*QV, "down_proj"], "feedforward_modules": ["down_proj"]}
CPT = {"cpt_token_ids": [4, 5, 6, 7], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]}
TUNERS: dict[str, tuple[Row, ...]] = {
    "ADALORA": (row("AdaLoRA", on("ADALORA", init_r=4, target_r=2, total_step=100)),),
    "ADAMSS": (Row("AdaMSS", untried="needs scikit-learn, which is not installed"),),
    "ADAPTION_PROMPT": (row("Adaption prompt", tuner("ADAPTION_PROMPT", adapter_len=4, adapter_layers=2)),),
    "BEFT": (row("BEFT", on("BEFT")),),
    "BOFT": (row("BOFT", on("BOFT", boft_block_size=4), **QUIET),),
    "C3A": (row("C3A", on("C3A", block_size=8)),),
    "CARTRIDGE": (row("Cartridge", tuner("CARTRIDGE", num_virtual_tokens=4), **QUIET),),
    "CPT": (row("CPT", tuner("CPT", **CPT), **QUIET),),
    "DEFT": (
        row("DEFT", on("DEFT", r=4, init_weights=False)),
        row("DEFT, identity at first", on("DEFT", r=4), orders=PEFT_FIRST, note=ONCE),
        row(
            "DEFT, identity at first, made on a wrapped model",
            on("DEFT", r=4),
            orders=WRAP_FIRST,
            options=REVEAL,
            note=SHOWS + "the projection at its start",
        ),
    ),
    "DELORA": (row("DeLoRA", on("DELORA", r=4)),),
    "FOURIERFT": (row("FourierFT", on("FOURIERFT", n_frequency=20)),),
    "FROD": made_late("FRoD", "FROD", "frod needs the values", progressbar=False),
    "GLORA": (
        row(
            "GLoRA, vectors",
            on("GLORA", r=4, config_A_B="vector", config_C="none", config_D_E="vector"),
            orders=PEFT_FIRST,
            options=REVEAL,
            note=SHOWS + "C; peft takes no subclass of nn.Linear: `wrap` after it",
        ),
        row("GLoRA, low rank", on("GLORA", r=4), orders=PEFT_FIRST, refused="glora needs the values .*Instead"),
    ),
    "GRALORA": (row("GraLoRA", on("GRALORA", r=4, gralora_k=2, hybrid_r=2)),),
    "HIRA": (row("HiRA", on("HIRA", r=4), refused="hira needs the values .*Instead"),),
    "HRA": (row("HRA", on("HRA", r=4)), row("HRA, orthogonal", on("HRA", r=4, apply_GS=True))),
    "IA3": (row("IA3", tuner("IA3", **IA3_LAYERS)),),
    "LILY": (row("LiLY", on("LILY", r=4, stride_A=1, num_B=2)),),
    "LN_TUNING": (row("LN tuning", tuner("LN_TUNING"), **QUIET),),
    "LOHA": (row("LoHa", on("LOHA", r=4)),),
    "LOKR": (row("LoKr", on("LOKR", r=4)), row("LoKr, both factors low rank", on("LOKR", r=1, decompose_both=True))),
    "LORA": (row("LoRA", lora(), note="its options are below"),),
    "MISS": (
        row("MiSS", on("MISS", r=4)),
        row("MiSS, mini", on("MISS", r=4, mini_r=8, init_weights="mini")),
        row("MiSS, bat", on("MISS", r=4, init_weights="bat"), refused="miss needs the values .*Instead"),
    ),
    "MULTITASK_PROMPT_TUNING": (
        row(
            "Multitask prompt tuning",
            tuner("MULTITASK_PROMPT_TUNING", num_virtual_tokens=4, num_tasks=2, num_ranks=1),
            **TASKS,
            **QUIET,
        ),
    ),
    "OFT": (
        row("OFT", on("OFT", oft_block_size=4, r=0)),
        row("COFT", on("OFT", oft_block_size=4, r=0, coft=True, eps=0.1)),
    ),
    "OSF": made_late("OSF", "OSF", "osf needs the values", effective_rank=8),
    "PEANUT": (
        row("PEANuT", on("PEANUT", r=4), options=REVEAL, note=SHOWS + "A"),
        row("PEANuT, hidden", on("PEANUT", r=4), refused="peanut needs the values .*reveal_adapter=True"),
    ),
    "POLY": (row("Poly", on("POLY", r=2, n_tasks=2, n_skills=2), **TASKS),),
    "PREFIX_TUNING": (row("Prefix tuning", tuner("PREFIX_TUNING", num_virtual_tokens=4), **QUIET),),
    "PROMPT_TUNING": (row("Prompt tuning", tuner("PROMPT_TUNING", num_virtual_tokens=4), **QUIET),),
    "PSOFT": made_late("PSOFT", "PSOFT", "psoft needs the values", r=4),
    "PVERA": (row("PVeRA", on("PVERA", r=4)),),
    "P_TUNING": (row("P-tuning", tuner("P_TUNING", num_virtual_tokens=4, encoder_hidden_size=16), **QUIET),),
    "RANDLORA": (row("RandLoRA", on("RANDLORA", r=4)),),
    "ROAD": (row("RoAd", on("ROAD", group_size=8)),),
    "SHADOW": (row("Shadow", tuner("SHADOW"), no_gradient=("layers.1.shadow_update",), **QUIET),),
    "SHIRA": (row("SHiRA", on("SHIRA", r=2, random_seed=3)),),
    "SUPERTUNING": (
        row("Supertuning", on("SUPERTUNING", sparsity=0.5), refused="supertuning needs the values .*Instead"),
    ),
    "TINYLORA": made_late("TinyLoRA", "TINYLORA", "tinylora needs the values", r=2, u=8),
    "TRAINABLE_TOKENS": (row("Trainable tokens", tuner("TRAINABLE_TOKENS", token_indices=[5, SEEN])),),
    "UNILORA": (row("UniLoRA", on("UNILORA", r=8, theta_d_length=512)),),
    "VBLORA": (row("VB-LoRA", on("VBLORA", r=2, num_vectors=8, vector_length=8, topk=2)),),
    "VERA": (row("VeRA", on("VERA", r=4)),),
    "WAVEFT": (row("WaveFT", on("WAVEFT", n_frequency=20)),),
    "XLORA": (row("X-LoRA", xlora, prompt=None, note="without generate(): X-LoRA works without a cache"),),
}


def every_tuner() -> Iterator[Row]:
    for kind in sorted(kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING):
        yield from TUNERS.get(kind, (Row(kind, untried="new in this version of peft"),))


# --- LoRA -----------------------------------------------------------------------------------------------


def trains_everything(adapt: Adapt) -> Adapt:
    """The same, with what it loaded for inference trained."""

    def train(model: nn.Module) -> Any:
        adapted = adapt(model)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.requires_grad_(True)
        return adapted

    return train


def saved_lora(folder: str, number: int, **settings: Any) -> str:
    """A folder with a LoRA adapter in it, another one for each number."""
    expert = lora(**settings)(llama())
    torch.manual_seed(number)
    perturb(expert)
    path = f"{folder}/{number}"
    expert.save_pretrained(path)
    return path


def arrow(model: nn.Module) -> Any:
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        paths = [saved_lora(folder, number) for number in (1, 2)]
        return create_arrow_model(model, paths, ArrowConfig(top_k=1, rng_seed=0))


def eva(model: Any) -> Any:
    """Initialised from the activations of two batches."""
    config = peft.LoraConfig(
        r=4, target_modules=QV, init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0), **CAUSAL
    )
    batch = {k: v for k, v in text_batch(model).items() if k != "labels"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        adapted = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
        peft.initialize_lora_eva_weights(adapted, [batch, batch], show_progress_bar=False)
        perturb(adapted)
    return adapted


def corda(model: Any) -> Any:
    config = peft.LoraConfig(
        r=4,
        target_modules=QV,
        init_lora_weights="corda",
        corda_config=CordaConfig(corda_method="kpm"),
        **CAUSAL,
    )
    # peft imports `attr` here without asking for it to be installed; the standard library's class does as well.
    with mock.patch.dict(sys.modules, {"attr": dataclasses}):
        from peft.tuners.lora.corda import preprocess_corda
    preprocess_corda(model, config, run_model=lambda: model(**prompt(model)))
    return peft.get_peft_model(model, config)


def lora_ga(model: Any) -> Any:
    config = peft.LoraConfig(
        r=4, target_modules=QV, init_lora_weights="lora_ga", lora_ga_config=peft.LoraGAConfig(), **CAUSAL
    )
    preprocess_loraga(model, config, train_step=lambda: model(**text_batch(model)).loss.backward())
    return peft.get_peft_model(model, config)


def lora_plus(model: Any) -> torch.optim.Optimizer:
    return create_loraplus_optimizer(model, torch.optim.AdamW, lr=2e-3, loraplus_lr_ratio=4.0)


EVERYWHERE = ["q_proj", "down_proj", "lm_head", "embed_tokens"]
DORA = {"use_dora": True, "lora_dropout": 0.3}
INVOCATION = [SEEN]
REPLICATION = [(0, 2), (1, 2)]
LORA = (
    row("rsLoRA", lora(use_rslora=True), orders=WRAP_FIRST),
    row("LoRA+", lora(), orders=WRAP_FIRST, optimizer=lora_plus),
    row('bias="all"', lora(bias="all")),
    row('bias="lora_only"', lora(bias="lora_only"), orders=WRAP_FIRST),
    row("lora_bias", lora(lora_bias=True), orders=WRAP_FIRST),
    row("Dropout", lora(lora_dropout=0.3)),
    row(
        "rank_pattern, alpha_pattern", lora(rank_pattern={"v_proj": 2}, alpha_pattern={"q_proj": 16}), orders=WRAP_FIRST
    ),
    row("All linears", lora(target_modules="all-linear")),
    row("layers_to_transform", lora(layers_to_transform=[1]), orders=WRAP_FIRST),
    row("lm_head", lora(target_modules=[*QV, "lm_head"])),
    row("Tied lm_head", lora(target_modules=[*QV, "lm_head"]), tied, **QUIET),
    row("Embedding", lora(target_modules=[*QV, "embed_tokens"]), orders=WRAP_FIRST),
    row("GPT-2, Conv1D", lora(target_modules=["c_attn", "mlp.c_proj"], fan_in_fan_out=True), gpt2),
    row("target_parameters", lora(target_modules=[], target_parameters=["q_proj.weight", "down_proj.weight"])),
    row("modules_to_save, norm and embedding", lora(modules_to_save=["norm", "embed_tokens"])),
    row("modules_to_save, lm_head", lora(modules_to_save=["lm_head"]), orders=PEFT_FIRST, note="trained, so it stays"),
    row(
        "modules_to_save, lm_head, on a wrapped model",
        lora(modules_to_save=["lm_head"]),
        orders=WRAP_FIRST,
        refused=r"modules_to_save .* lm_head.*Instead.*wrap\(local=",
    ),
    row("trainable_token_indices", lora(trainable_token_indices=[5, SEEN]), orders=WRAP_FIRST),
    row("trainable_token_indices, tied head", lora(trainable_token_indices=[5, SEEN]), tied),
    row("layer_replication", lora(layer_replication=REPLICATION)),
    row('init_lora_weights="gaussian"', lora(init_lora_weights="gaussian"), orders=WRAP_FIRST),
    row('init_lora_weights="orthogonal"', lora(init_lora_weights="orthogonal"), orders=WRAP_FIRST),
    row("EVA", eva, tolerance=10, note="its start is an SVD of activations, which are 1e-7 apart: tolerances are 10x"),
    row("DoRA", lora(use_dora=True), options=REVEAL, note=SHOWS + "the row space of A"),
    row("DoRA, dropout", lora(**DORA), options=REVEAL, note="as above"),
    row(
        "DoRA, random start",
        lora(use_dora=True, init_lora_weights=False),
        options=REVEAL,
        note="as above",
        orders=WRAP_FIRST,
    ),
    row("DoRA, lm_head and embedding too", lora(use_dora=True, target_modules=EVERYWHERE), options=REVEAL),
    row("DoRA, GPT-2", lora(**DORA, target_modules=["c_attn"], fan_in_fan_out=True), gpt2, options=REVEAL),
    row("DoRA, hidden", lora(use_dora=True), refused=r"DoRA.*Instead.*reveal_adapter=True"),
    row("aLoRA", lora(alora_invocation_tokens=INVOCATION), prompt=None, **QUIET, orders=WRAP_FIRST),
    row("BD-LoRA", lora(use_bdlora=BdLoraConfig(["q_proj"], ["v_proj"], nblocks=2)), orders=WRAP_FIRST),
    row("VeLoRA", lora(velora_config=VeloraConfig(num_groups=2)), orders=WRAP_FIRST),
    row(
        "MonteCLoRA",
        lora(monteclora_config=MontecloraConfig(num_samples=2)),
        no_gradient=("monteclora",),
        orders=WRAP_FIRST,
    ),
    row("Arrow", trains_everything(arrow), prompt=None, no_gradient=("arrow_router",), orders=WRAP_FIRST),
    row("PiSSA", lora(init_lora_weights="pissa"), refused=r"PiSSA.*Instead"),
    row("PiSSA, fast", lora(init_lora_weights="pissa_niter_4"), refused=r"PiSSA.*Instead"),
    row("OLoRA", lora(init_lora_weights="olora"), refused=r"OLoRA.*Instead"),
    row("CorDA", corda, refused=r"CorDA.*Instead"),
    row("LoRA-GA", lora_ga, refused=r"LoRA-GA.*Instead", **QUIET),
    row("KaSA", lora(kasa_config=KasaConfig()), refused=r"KaSA.*Instead"),
    row("MiCA", lora(init_lora_weights="mica"), orders=PEFT_FIRST, note=ONCE),
    row(
        "MiCA, made on a wrapped model",
        lora(init_lora_weights="mica"),
        orders=WRAP_FIRST,
        refused=r"MiCA.*Instead.*conn\.wrap",
    ),
    Row("LoftQ", untried="peft needs bitsandbytes and a GPU for it; its refusal has a test of its own"),
    Row("QALoRA", untried="peft has it for GPTQ-quantised layers only"),
)


# --- several adapters -----------------------------------------------------------------------------------


def two(then: Callable[[Any], object], **second: Any) -> Adapt:
    """Two LoRA adapters with values of their own, of which `then` makes something."""

    def adapt(model: nn.Module) -> Any:
        with torch.random.fork_rng(devices=[]):
            adapted = lora()(model)
            torch.manual_seed(12)
            settings = {"r": 4, "target_modules": [*QV, "o_proj"], **CAUSAL, **second}
            adapted.add_adapter("other", peft.LoraConfig(**settings))
            with torch.no_grad():
                for name, parameter in adapted.named_parameters():
                    if ".other." in name:
                        parameter.copy_(0.1 * torch.randn_like(parameter))
            then(adapted)
        return adapted

    return adapt


def weighted(kind: str, **settings: Any) -> Adapt:
    def combine(model: Any) -> None:
        model.add_weighted_adapter(["default", "other"], [0.7, 0.4], "mixture", combination_type=kind, **settings)
        model.set_adapter("mixture")

    return two(combine, target_modules=QV)


def mixed_batch(make: Callable[[Any], Batch]) -> Callable[[Any], Batch]:
    def batch(model: Any) -> Batch:
        made = make(model)
        return {**made, "adapter_names": ["other", "__base__"][: len(made["input_ids"])]}

    return batch


def hotswapped(model: nn.Module) -> Any:
    """An adapter whose values were replaced by those in a folder."""
    adapted = lora()(model)
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        hotswap_adapter(adapted, saved_lora(folder, 2), "default")
    return adapted


def mixed_kinds(model: nn.Module) -> Any:
    """LoRA and LoHa at once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=QV), "first", mixed=True)
        adapted.add_adapter("second", peft.LoHaConfig(r=4, target_modules=["q_proj", "down_proj"]))
        adapted.set_adapter(["first", "second"])
        perturb(adapted)
    return adapted


def both_active(model: Any) -> None:
    model.base_model.set_adapter(["default", "other"])


def deleted(model: Any) -> None:
    model.set_adapter("other")
    model.delete_adapter("default")


def against_itself(model: nn.Module) -> Any:
    """Trained not to stray from what the same model says without its adapter, as DPO and KL penalties do."""
    adapted = lora()(model)
    with_adapter = adapted.forward

    def forward(**batch: Any) -> Any:
        output = with_adapter(**batch)
        with torch.no_grad(), adapted.disable_adapter():
            reference = with_adapter(**batch).logits
        output.loss = output.loss + (output.logits - reference).pow(2).mean()
        return output

    adapted.forward = forward
    return adapted


SEVERAL = (
    row("disable_adapter", against_itself, note="in each step, for a reference of the same model"),
    row("set_adapter", two(lambda model: model.set_adapter("other")), orders=WRAP_FIRST),
    row("Two at once", two(both_active)),
    row("delete_adapter", two(deleted), orders=WRAP_FIRST),
    row("LoRA and LoHa (mixed=True)", mixed_kinds),
    row(
        "A batch of several adapters (adapter_names)",
        two(both_active),
        batch=mixed_batch(text_batch),
        prompt=mixed_batch(prompt),
        no_gradient=(".default.",),
        trains=False,
        note="gradients too, but peft refuses it in training mode",
    ),
    *(row(f"add_weighted_adapter, {kind}", weighted(kind), orders=WRAP_FIRST) for kind in ("linear", "cat")),
    row(
        "add_weighted_adapter, svd",
        weighted("svd", svd_rank=4),
        orders=WRAP_FIRST,
        tolerance=10,
        note="of adapters: no base weight",
    ),
    row("add_weighted_adapter, ties", weighted("ties", density=0.5), orders=WRAP_FIRST),
    row("hotswap_adapter", hotswapped, orders=WRAP_FIRST),
)


# --- by hand --------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """Houlsby's adapter around a module that stays where it is."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.down, self.up = nn.Linear(width, 4), nn.Linear(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y + self.up(functional.silu(self.down(y)))


class LoraByHand(nn.Module):
    """LoRA as the paper writes it: x (W + B A)ᵀ."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.A = nn.Parameter(torch.randn(4, layer.in_features) / 8)
        self.B = nn.Parameter(torch.randn(layer.out_features, 4) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.layer.weight + 0.5 * self.B @ self.A, self.layer.bias)


class SparseDelta(nn.Module):
    """RoSA's sparse half as a parametrization: W + a delta under a fixed mask."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.randn(shape) / 8)
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.rand(shape) < 0.1)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.delta * self.mask


def frozen(change: Callable[[Any], None]) -> Adapt:
    """A frozen model that was changed by hand."""

    def adapt(model: nn.Module) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            model.requires_grad_(False)
            change(model)
        return model

    return adapt


def with_bottlenecks(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp = Bottleneck(layer.mlp, 32)


def with_lora_by_hand(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoraByHand(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoraByHand(layer.self_attn.v_proj)


def with_parametrization(model: Any) -> None:
    for layer in model.model.layers:
        projection = layer.self_attn.q_proj
        parametrize.register_parametrization(projection, "weight", SparseDelta(projection.weight.shape))


def with_hook(model: Any) -> None:
    """A module beside the network, called by a hook on the output of each MLP."""
    for layer in model.model.layers:
        layer.side = nn.Linear(32, 32)
        layer.mlp.register_forward_hook(lambda _, args, y, side=layer.side: y + side(args[0]))


def with_biases(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.requires_grad_(True)


HAND = (
    row("Bottleneck around an MLP", frozen(with_bottlenecks), orders=WRAP_FIRST, note="`wrap` before it: names change"),
    row("LoRA as F.linear(x, W + B A)", frozen(with_lora_by_hand), orders=WRAP_FIRST, note="as above"),
    row("Sparse delta as a parametrization", frozen(with_parametrization), orders=WRAP_FIRST, note="as above"),
    row("A module called by a hook", frozen(with_hook)),
    row("BitFit: biases only", frozen(with_biases)),
)

SECTIONS = (
    Section("PEFT methods", tuple(every_tuner())),
    Section("LoRA and its options", LORA),
    Section("Several adapters", SEVERAL),
    Section("By hand", HAND),
)
