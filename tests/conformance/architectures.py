"""Rows of decoders: each a tiny random model of its own class.

One rule: a row is data. What an architecture needs is said here or found out by the mechanism; the package
has no branch for any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from tests.conformance.harness import Row, Section, lora
from tests.conftest import GATED, SHARED, seeded

LOUD = {"initializer_range": 0.15}  # the usual 0.02 leaves attention nearly uniform at this width, and so untested
UNTIED = {"tie_word_embeddings": False}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {k: v for k, v in GATED.items() if k != "head_dim"} | LOUD
HEADED = DECODER | {"head_dim": 8}
WIDE = GATED | LOUD  # heads of 12: q is wider than the model
HEADS = {k: v for k, v in DECODER.items() if k != "num_key_value_heads"}
GPT = {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_inner": 56, "n_layer": 2, "n_head": 4, **SPECIAL, **LOUD}
OPT = {**SHARED, "hidden_size": 32, "ffn_dim": 56, "num_hidden_layers": 2, "num_attention_heads": 4, "init_std": 0.15}
WINDOW = {"sliding_window": 4}
SLOW = {"slow": True}


def tiny(model: str, config: str = "", /, **settings: Any) -> Callable[[], nn.Module]:
    """A random model of this class, from its config class."""

    def build() -> nn.Module:
        model_class = getattr(transformers, model)
        config_class = getattr(transformers, config) if config else model_class.config_class
        return seeded(lambda: model_class(config_class(**settings)), seed=3)

    return build


def causal(
    name: str, prefix: str, calls: tuple[int, int], adapt: Any = None, /, row: Any = None, **settings: Any
) -> Row:
    """A row of `<prefix>ForCausalLM` with LoRA on q_proj and v_proj, unless told."""
    return Row(name, tiny(f"{prefix}ForCausalLM", **settings), adapt or lora(), calls=calls, **(row or {}))


fused = lora("query_key_value")
DECODERS = (
    causal("Llama", "Llama", (7, 4), **DECODER, **UNTIED),
    causal("Llama, tied head", "Llama", (5, 3), **WIDE, tie_word_embeddings=True),
    causal("Llama, biases", "Llama", (7, 4), **DECODER, **UNTIED, attention_bias=True, mlp_bias=True),
    causal("Mistral", "Mistral", (7, 4), **DECODER, **UNTIED, **WINDOW),
    causal("Ministral", "Ministral", (17, 4), row=SLOW, **WIDE, **UNTIED, **WINDOW),
    causal("Qwen2", "Qwen2", (5, 3), **DECODER, tie_word_embeddings=True),
    causal("Qwen3", "Qwen3", (5, 3), **WIDE, tie_word_embeddings=True),
    causal("Gemma", "Gemma", (5, 3), **WIDE),
    causal("Gemma 2", "Gemma2", (5, 3), **WIDE, **WINDOW),
    causal("Gemma 3, text", "Gemma3", (5, 3), **WIDE, **WINDOW, layer_types=["sliding_attention", "full_attention"]),
    causal("Phi", "Phi", (7, 4), **DECODER, **UNTIED),
    causal("Phi-3", "Phi3", (7, 4), lora("qkv_proj"), **DECODER, **UNTIED),
    Row("GPT-2", tiny("GPT2LMHeadModel", **GPT), lora("c_attn", fan_in_fan_out=True), calls=(5, 3)),
    causal("GPTBigCode", "GPTBigCode", (15, 3), lora("c_attn"), row=SLOW, **GPT),
    causal(
        "GPT-Neo",
        "GPTNeo",
        (5, 3),
        **SHARED,
        **LOUD,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        intermediate_size=56,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    causal("GPT-NeoX", "GPTNeoX", (7, 4), fused, **HEADS, **UNTIED),
    causal("GPT-J", "GPTJ", (7, 4), **GPT, rotary_dim=4, **UNTIED),
    causal("CodeGen", "CodeGen", (14, 4), lora("qkv_proj"), row=SLOW, **GPT, n_ctx=64, rotary_dim=4, **UNTIED),
    causal("OPT", "OPT", (15, 8), **OPT, word_embed_proj_dim=32),
    causal(
        "OPT, projected embeddings",
        "OPT",
        (18, 10),
        row=SLOW,
        **OPT,
        word_embed_proj_dim=24,
        do_layer_norm_before=False,
    ),
    causal(
        "XGLM",
        "XGLM",
        (15, 5),
        row=SLOW,
        **SHARED,
        d_model=32,
        ffn_dim=56,
        num_layers=2,
        attention_heads=4,
        init_std=0.15,
    ),
    causal("BioGPT", "BioGpt", (15, 5), row=SLOW, **HEADS),
    causal("Falcon", "Falcon", (12, 3), fused, **HEADS, ffn_hidden_size=56, new_decoder_architecture=False),
    causal(
        "Falcon, new decoder",
        "Falcon",
        (12, 3),
        fused,
        row=SLOW,
        **HEADS,
        ffn_hidden_size=56,
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    causal("BLOOM", "Bloom", (9, 5), fused, vocab_size=96, hidden_size=32, n_layer=2, n_head=4, **SPECIAL, **LOUD),
    causal(
        "Granite",
        "Granite",
        (7, 4),
        **DECODER,
        attention_multiplier=0.5,
        residual_multiplier=0.5,
        embedding_multiplier=2.0,
        logits_scaling=2.0,
    ),
    causal("SmolLM3", "SmolLM3", (5, 3), **DECODER, no_rope_layers=[1, 0]),
    causal("OLMo", "Olmo", (17, 4), row=SLOW, **DECODER, **UNTIED),
    causal("OLMo 2", "Olmo2", (7, 4), **DECODER, **UNTIED),
    causal("OLMo 3", "Olmo3", (17, 4), row=SLOW, **DECODER, **UNTIED, **WINDOW),
    causal("Cohere", "Cohere", (5, 3), **DECODER),
    causal("Cohere 2", "Cohere2", (12, 3), row=SLOW, **DECODER, **WINDOW),
    causal("StableLM", "StableLm", (7, 4), **DECODER, **UNTIED),
    causal(
        "StableLM, parallel",
        "StableLm",
        (14, 4),
        row=SLOW,
        **DECODER,
        **UNTIED,
        use_parallel_residual=True,
        qk_layernorm=True,
    ),
    causal(
        "MPT", "Mpt", (9, 5), lora("Wqkv"), vocab_size=96, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, **LOUD
    ),
    causal("StarCoder2", "Starcoder2", (5, 3), **DECODER, **WINDOW),
    causal("Nemotron", "Nemotron", (7, 4), **DECODER, **UNTIED),
    causal("GLM-4", "Glm4", (17, 4), row=SLOW, **HEADED, **UNTIED),
    causal("EXAONE 4", "Exaone4", (17, 4), row=SLOW, **DECODER, **UNTIED, **WINDOW),
    causal("Seed-OSS", "SeedOss", (17, 4), row=SLOW, **WIDE, **UNTIED),
    causal("Apertus", "Apertus", (17, 4), row=SLOW, **DECODER, **UNTIED),
    causal("Persimmon", "Persimmon", (17, 4), fused, row=SLOW, **HEADS, **UNTIED),
    causal("HunYuan", "HunYuanDenseV1", (17, 4), row=SLOW, **HEADED),
    causal("nanochat", "NanoChat", (17, 4), row=SLOW, **DECODER, **UNTIED),
)

LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
GATE = {"local": {"model.layers.*.mlp.gate": "weight: no linear"}}
MOE = (
    causal("Mixtral", "Mixtral", (7, 4), row=GATE, **DECODER, **UNTIED, **LOCAL),
    causal(
        "Mixtral, router logits and loss",
        "Mixtral",
        (13, 7),
        row=GATE,
        **DECODER,
        **UNTIED,
        **LOCAL,
        output_router_logits=True,
    ),
    causal("Qwen3-MoE", "Qwen3Moe", (7, 4), row=GATE, **WIDE, **UNTIED, **EXPERTS),
    causal(
        "Qwen2-MoE", "Qwen2Moe", (7, 4), row=GATE, **DECODER, **UNTIED, **EXPERTS, shared_expert_intermediate_size=40
    ),
    causal("OLMoE", "Olmoe", (7, 4), row=GATE, **DECODER, **UNTIED, num_experts=4, num_experts_per_tok=2),
    causal(
        "Phi-3.5-MoE",
        "Phimoe",
        (13, 4),
        row={"local": {"model.layers.*.mlp.router": "not served"}, **SLOW},
        **DECODER,
        **UNTIED,
        **LOCAL,
    ),
    causal(
        "GPT-OSS",
        "GptOss",
        (13, 7),
        row={"local": {"model.layers.*.mlp.router": "weight: no linear"}},
        **WIDE,
        **UNTIED,
        **LOCAL,
        **WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    causal(
        "DeepSeek-V3",
        "DeepseekV3",
        (13, 8),
        lora("q_b_proj", "kv_b_proj"),
        row=GATE,
        **HEADS,
        **UNTIED,
        **ROUTED,
        num_key_value_heads=4,
        n_group=2,
        topk_group=1,
        q_lora_rank=20,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    causal("GLM-4-MoE", "Glm4Moe", (15, 4), row=GATE | SLOW, **HEADED, **UNTIED, **ROUTED),
    causal(
        "GraniteMoE",
        "GraniteMoe",
        (13, 4),
        row={"local": {"model.layers.*.block_sparse_moe.router": "weight: no linear"}, **SLOW},
        **DECODER,
        **UNTIED,
        **LOCAL,
    ),
    causal(
        "Llama 4, text",
        "Llama4",
        (17, 7),
        row={
            "local": {
                "model.layers.*.feed_forward.experts": "gate_up_proj, down_proj: no linear",
                "model.layers.*.feed_forward.router": "not served",
            },
            "note": "its experts take one input for all, which cannot be told apart by tokens; they are downloaded",
            **SLOW,
        },
        **HEADED,
        **UNTIED,
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size_mlp=40,
        interleave_moe_layer_step=2,
        attention_chunk_size=16,
    ),
)

MAMBA = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, **SPECIAL, **LOUD}
JAMBA = {"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 8}
# Two of the three layers share one attention.
ZAMBA = {**HEADS, **UNTIED, "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


def convolution(path: str, **more: str) -> dict[str, Any]:
    """What stays local of a state-space layer, whose recurrence does: its convolution."""
    return {"local": {**more, path: "weight: no linear"}}


def zamba(*of_mixer: str) -> dict[str, Any]:
    """The same, for the mixers of both kinds of layers."""
    mixers = ("model.layers.*.mamba", "model.layers.*.mamba_decoder.mamba")
    kept = {mixer: f"{names}: no linear" for mixer in mixers for names in of_mixer}
    return {"local": kept | {f"{mixer}.conv1d": "weight: no linear" for mixer in mixers}}


MIXER = convolution("backbone.layers.*.mixer.conv1d", **{"backbone.layers.*.mixer": "A_log: no linear"})
STATE_SPACE = (
    causal("Mamba", "Mamba", (15, 8), lora("in_proj", "x_proj"), row=MIXER, **MAMBA, time_step_rank=4),
    causal(
        "Mamba 2",
        "Mamba2",
        (9, 5),
        lora("in_proj"),
        row=convolution("backbone.layers.*.mixer.conv1d"),
        **MAMBA,
        num_heads=4,
        head_dim=16,
        n_groups=1,
        chunk_size=8,
    ),
    causal(
        "Falcon-Mamba", "FalconMamba", (15, 8), lora("in_proj", "x_proj"), row=MIXER | SLOW, **MAMBA, time_step_rank=4
    ),
    causal(
        "Jamba",
        "Jamba",
        (8, 6),
        row=convolution(
            "model.layers.*.mamba.conv1d",
            **{"model.layers.*.mamba": "A_log: no linear", "model.layers.*.feed_forward.router": "weight: no linear"},
        ),
        **DECODER,
        **UNTIED,
        **JAMBA,
        num_experts=4,
        num_experts_per_tok=2,
        expert_layer_period=2,
        expert_layer_offset=1,
    ),
    causal(
        "Zamba",
        "Zamba",
        (19, 11),
        row=zamba("x_proj_weight, dt_proj_weight, dt_proj_bias, A_log, D"),
        **ZAMBA,
        n_mamba_heads=2,
        mamba_d_state=4,
        mamba_dt_rank=4,
        attention_hidden_size=64,
        attention_head_dim=16,
        num_key_value_heads=4,
    ),
    causal(
        "Zamba 2",
        "Zamba2",
        (35, 15),
        row=zamba() | SLOW,
        **ZAMBA,
        mamba_d_state=4,
        n_mamba_heads=4,
        mamba_headdim=16,
        mamba_ngroups=1,
        chunk_size=8,
        num_mem_blocks=1,
        use_mem_rope=True,
        adapter_rank=4,
    ),
    causal(
        "Bamba",
        "Bamba",
        (12, 4),
        row=convolution("model.layers.*.mamba.conv1d") | SLOW,
        **DECODER,
        **UNTIED,
        **BAMBA,
        attn_layer_indices=[1],
    ),
    causal(
        "Falcon-H1",
        "FalconH1",
        (23, 7),
        row=convolution("model.layers.*.mamba.conv1d") | SLOW,
        **DECODER,
        **UNTIED,
        **BAMBA,
        mamba_d_ssm=64,
    ),
    causal(
        "RecurrentGemma",
        "RecurrentGemma",
        (10, 3),
        row=convolution(
            "model.layers.*.temporal_block.conv_1d",
            **{
                "model.layers.*.temporal_block.rg_lru": "input_gate_weight, input_gate_bias, recurrent_gate_weight, "
                "recurrent_gate_bias: no linear"
            },
        )
        | SLOW,
        **DECODER,
        lru_width=32,
        attention_window_size=8,
        block_types=["recurrent", "attention"],
        conv1d_width=4,
    ),
    causal(
        "Qwen3-Next",
        "Qwen3Next",
        (6, 4),
        row=convolution("model.layers.*.linear_attn.conv1d", **GATE["local"]),
        **WIDE,
        **UNTIED,
        **EXPERTS,
        **DELTA,
        shared_expert_intermediate_size=24,
    ),
    causal(
        "LFM2",
        "Lfm2",
        (4, 3),
        row=convolution("model.layers.*.conv.conv"),
        **DECODER,
        layer_types=["conv", "full_attention"],
        conv_L_cache=3,
    ),
)

SECTIONS = (
    Section("Decoders", DECODERS),
    Section("Mixtures of experts", MOE),
    Section("State-space models and hybrids", STATE_SPACE),
)
