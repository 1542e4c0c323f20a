"""The PEFT methods of the compatibility table: every tuner that the installed peft lists, and the options of LoRA.

One rule: the list comes from peft. A method that nobody has written a row for shows up as not tried.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn

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
    "LORA": (
        row("LoRA", lora()),
        row("rsLoRA", lora(use_rslora=True)),
        row("LoRA, all linears", lora(target_modules="all-linear")),
        row("LoRA, bias trained", lora(lora_bias=True)),
        row("LoRA, rank and alpha patterns", lora(rank_pattern={"v_proj": 2}, alpha_pattern={"q_proj": 16})),
        row("LoRA, one layer", lora(layers_to_transform=[1])),
        row("LoRA, norms saved too", lora(modules_to_save=["norm"])),
        row("DoRA", lora(use_dora=True), options=REVEAL, note=f"{SHOWS}A"),
        row("DoRA, without leave", lora(use_dora=True), refused="DoRA.*Instead"),
        row("PiSSA", lora(init_lora_weights="pissa"), refused="PiSSA.*Instead"),
        row("OLoRA", lora(init_lora_weights="olora"), refused="OLoRA.*Instead"),
    ),
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


SECTIONS = (Section("PEFT methods", tuple(every_tuner())),)
