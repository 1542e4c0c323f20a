"""The architectures of the compatibility table, each a tiny random model of its own class.

One rule: a row is data. What an architecture needs is said here or found out by the mechanism; the package
has no branch for any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests.conformance.harness import Batch, Row, Section, lora, text_batch
from tests.conftest import GATED, SHARED, seeded

LOUD = {"initializer_range": 0.15}  # the usual 0.02 leaves attention nearly uniform at this width, and so untested
TIED = {"lm_head": "tied to the embedding, which is here"}
UNTIED = {"tie_word_embeddings": False}
DECODER = {k: v for k, v in GATED.items() if k != "head_dim"} | LOUD
HEADS = {k: v for k, v in DECODER.items() if k != "num_key_value_heads"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def tiny(model: str, config: str = "", /, **settings: Any) -> Callable[[], nn.Module]:
    """A random model of this class, from its config class."""

    def build() -> nn.Module:
        model_class = getattr(transformers, model)
        config_class = getattr(transformers, config) if config else model_class.config_class
        return seeded(lambda: model_class(config_class(**settings)), seed=3)

    return build


def causal(name: str, prefix: str, adapt: Any = None, /, row: dict[str, Any] | None = None, **settings: Any) -> Row:
    """A row of `<prefix>ForCausalLM` with LoRA on q_proj and v_proj, unless told."""
    return Row(name, tiny(f"{prefix}ForCausalLM", **settings), adapt or lora(), **(row or {}))


DECODERS = (
    causal("Llama", "Llama", **DECODER, **UNTIED),
    causal("Llama, tied head", "Llama", **GATED, **LOUD, tie_word_embeddings=True),
    causal("Llama, biases", "Llama", **DECODER, **UNTIED, attention_bias=True, mlp_bias=True),
    causal("Mistral, sliding window", "Mistral", **DECODER, **UNTIED, sliding_window=4),
    causal("Qwen2", "Qwen2", **DECODER, tie_word_embeddings=True),
    causal("Qwen3", "Qwen3", **GATED, **LOUD, tie_word_embeddings=True),
    causal("Gemma", "Gemma", **GATED, **LOUD),
    causal("Gemma 2", "Gemma2", **GATED, **LOUD, sliding_window=4),
    causal(
        "Gemma 3, text",
        "Gemma3",
        **GATED,
        **LOUD,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    causal("Phi", "Phi", **DECODER, **UNTIED),
    causal("Phi-3", "Phi3", lora("qkv_proj"), **DECODER, **UNTIED),
    causal(
        "GPT-Neo",
        "GPTNeo",
        **SHARED,
        **LOUD,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        intermediate_size=56,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    causal("GPT-NeoX", "GPTNeoX", lora("query_key_value"), **HEADS, **UNTIED),
    causal(
        "GPT-J",
        "GPTJ",
        vocab_size=96,
        n_positions=64,
        n_embd=32,
        n_inner=56,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **UNTIED,
        **LOUD,
    ),
    causal(
        "OPT",
        "OPT",
        **SHARED,
        hidden_size=32,
        ffn_dim=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        init_std=0.15,
    ),
    causal(
        "OPT, projected embeddings",
        "OPT",
        **SHARED,
        hidden_size=32,
        ffn_dim=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=24,
        do_layer_norm_before=False,
        init_std=0.15,
    ),
    causal("Falcon", "Falcon", lora("query_key_value"), **HEADS, ffn_hidden_size=56, new_decoder_architecture=False),
    causal(
        "Falcon, new decoder",
        "Falcon",
        lora("query_key_value"),
        **HEADS,
        ffn_hidden_size=56,
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    causal(
        "BLOOM",
        "Bloom",
        lora("query_key_value"),
        vocab_size=96,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **LOUD,
    ),
    causal(
        "Granite",
        "Granite",
        **DECODER,
        attention_multiplier=0.5,
        residual_multiplier=0.5,
        embedding_multiplier=2.0,
        logits_scaling=2.0,
    ),
    causal("SmolLM3", "SmolLM3", **DECODER, no_rope_layers=[1, 0]),
    causal("OLMo", "Olmo", **DECODER, **UNTIED),
    causal("OLMo 2", "Olmo2", **DECODER, **UNTIED),
    causal("OLMo 3", "Olmo3", **DECODER, **UNTIED, sliding_window=4),
    causal("Cohere", "Cohere", **DECODER),
    causal("Cohere 2", "Cohere2", **DECODER, sliding_window=4),
    causal("StableLM", "StableLm", **DECODER, **UNTIED),
    causal("StableLM, parallel", "StableLm", **DECODER, **UNTIED, use_parallel_residual=True, qk_layernorm=True),
    causal("MPT", "Mpt", lora("Wqkv"), vocab_size=96, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, **LOUD),
    causal("StarCoder2", "Starcoder2", **DECODER, sliding_window=4),
    causal("Nemotron", "Nemotron", **DECODER, **UNTIED),
    causal("GLM-4", "Glm4", **DECODER, **UNTIED, head_dim=8),
    causal("EXAONE 4", "Exaone4", **DECODER, **UNTIED, sliding_window=4),
    causal(
        "CodeGen",
        "CodeGen",
        lora("qkv_proj"),
        vocab_size=96,
        n_positions=64,
        n_ctx=64,
        n_embd=32,
        n_inner=56,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **UNTIED,
        **LOUD,
    ),
    causal(
        "GPTBigCode",
        "GPTBigCode",
        lora("c_attn"),
        vocab_size=96,
        n_positions=64,
        n_embd=32,
        n_inner=56,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **LOUD,
    ),
    Row(
        "GPT-2",
        tiny(
            "GPT2LMHeadModel",
            vocab_size=96,
            n_positions=64,
            n_embd=32,
            n_inner=56,
            n_layer=2,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **LOUD,
        ),
        lora("c_attn", fan_in_fan_out=True),
    ),
    causal("XGLM", "XGLM", **SHARED, d_model=32, ffn_dim=56, num_layers=2, attention_heads=4, init_std=0.15),
    causal("BioGPT", "BioGpt", **HEADS),
    causal("SeedOss", "SeedOss", **GATED, **LOUD, **UNTIED),
    causal("Apertus", "Apertus", **DECODER, **UNTIED),
    causal("Persimmon", "Persimmon", lora("query_key_value"), **HEADS, **UNTIED),
    causal("Ministral", "Ministral", **GATED, **LOUD, **UNTIED, sliding_window=4),
    causal("HunYuan", "HunYuanDenseV1", **DECODER, head_dim=8),
    causal("nanochat", "NanoChat", **DECODER, **UNTIED),
)

MOE = (
    causal("Mixtral", "Mixtral", **DECODER, **UNTIED, num_local_experts=4, num_experts_per_tok=2),
    causal(
        "Mixtral, router logits",
        "Mixtral",
        **DECODER,
        **UNTIED,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    ),
    causal("Qwen3-MoE", "Qwen3Moe", **GATED, **LOUD, **UNTIED, **EXPERTS),
    causal("Qwen2-MoE", "Qwen2Moe", **DECODER, **UNTIED, **EXPERTS, shared_expert_intermediate_size=40),
    causal("OLMoE", "Olmoe", **DECODER, **UNTIED, num_experts=4, num_experts_per_tok=2),
    causal("PhiMoE", "Phimoe", **DECODER, **UNTIED, num_local_experts=4, num_experts_per_tok=2),
    causal(
        "GPT-OSS", "GptOss", **GATED, **LOUD, **UNTIED, num_local_experts=4, num_experts_per_tok=2, sliding_window=4
    ),
    causal(
        "DeepSeek-V3",
        "DeepseekV3",
        lora("q_b_proj", "kv_b_proj"),
        **HEADS,
        **UNTIED,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        q_lora_rank=20,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    causal("GraniteMoE", "GraniteMoe", **DECODER, **UNTIED, num_local_experts=4, num_experts_per_tok=2),
    causal(
        "Llama 4, text",
        "Llama4",
        **DECODER,
        **UNTIED,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size_mlp=40,
        interleave_moe_layer_step=2,
        attention_chunk_size=16,
    ),
    causal(
        "GLM-4-MoE",
        "Glm4Moe",
        **DECODER,
        **UNTIED,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
    ),
)
STATE_SPACE = (
    Row(
        "Mamba",
        tiny(
            "MambaForCausalLM",
            vocab_size=96,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=4,
            time_step_rank=4,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **LOUD,
        ),
        lora("in_proj", "x_proj"),
    ),
    Row(
        "Mamba 2",
        tiny(
            "Mamba2ForCausalLM",
            vocab_size=96,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=4,
            num_heads=4,
            head_dim=16,
            n_groups=1,
            chunk_size=8,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **LOUD,
        ),
        lora("in_proj"),
    ),
    Row(
        "Falcon-Mamba",
        tiny(
            "FalconMambaForCausalLM",
            vocab_size=96,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=4,
            time_step_rank=4,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **LOUD,
        ),
        lora("in_proj", "x_proj"),
    ),
    causal(
        "Jamba",
        "Jamba",
        **DECODER,
        **UNTIED,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    Row("Zamba", untried="no tiny config of it has been found that transformers 5.24 builds"),
    Row("Zamba 2", untried="no tiny config of it has been found that transformers 5.24 builds"),
    causal(
        "Bamba",
        "Bamba",
        **DECODER,
        **UNTIED,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=4,
        mamba_chunk_size=8,
    ),
    causal(
        "Falcon-H1",
        "FalconH1",
        **DECODER,
        **UNTIED,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=4,
        mamba_chunk_size=8,
    ),
    causal(
        "RecurrentGemma",
        "RecurrentGemma",
        **DECODER,
        lru_width=32,
        attention_window_size=8,
        block_types=["recurrent", "attention"],
        conv1d_width=4,
    ),
    causal(
        "Qwen3-Next",
        "Qwen3Next",
        **GATED,
        **LOUD,
        **UNTIED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    causal("LFM2", "Lfm2", **DECODER, layer_types=["conv", "full_attention"], conv_L_cache=3),
)
BERT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    **LOUD,
}


def encoder(name: str, model: str, adapt: Any = None, /, row: dict[str, Any] | None = None, **settings: Any) -> Row:
    return Row(name, tiny(model, **settings), adapt or lora("query", "value"), **{"prompt": None, **(row or {})})


def labelled(*labels: int) -> Callable[[Any], Batch]:
    """The text, and labels for the sequences."""

    def batch(model: Any) -> Batch:
        return text_batch(model) | {"labels": torch.tensor(labels)}

    return batch


ENCODERS = (
    encoder("BERT, masked tokens", "BertForMaskedLM", **BERT),
    encoder("RoBERTa, masked tokens", "RobertaForMaskedLM", **{**BERT, "pad_token_id": 1}),
    encoder(
        "DistilBERT, masked tokens",
        "DistilBertForMaskedLM",
        lora("q_lin", "v_lin"),
        vocab_size=96,
        dim=32,
        hidden_dim=56,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=64,
        **LOUD,
    ),
    encoder(
        "ModernBERT, masked tokens",
        "ModernBertForMaskedLM",
        lora("Wqkv"),
        **BERT,
        global_attn_every_n_layers=2,
        local_attention=8,
        cls_token_id=1,
        sep_token_id=2,
    ),
    encoder("ELECTRA, discriminator", "ElectraForPreTraining", **BERT, embedding_size=24),
    encoder("ELECTRA, generator", "ElectraForMaskedLM", **BERT, embedding_size=24),
    encoder("ALBERT, masked tokens", "AlbertForMaskedLM", **BERT, embedding_size=24),
    encoder(
        "DeBERTa-v2, masked tokens",
        "DebertaV2ForMaskedLM",
        lora("query_proj", "value_proj"),
        **BERT,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
    ),
    encoder("MPNet", "MPNetForMaskedLM", lora("q", "v"), **{**BERT, "pad_token_id": 1}),
    encoder("XLM-RoBERTa", "XLMRobertaForMaskedLM", **{**BERT, "pad_token_id": 1}),
    encoder("ERNIE", "ErnieForMaskedLM", **BERT),
)
T5 = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 56,
    "num_layers": 2,
    "num_heads": 4,
    "initializer_factor": 1.0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 56,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "init_std": 0.15,
}
ENCODER_DECODERS = (
    Row("T5", tiny("T5ForConditionalGeneration", **T5), lora("q", "v")),
    Row(
        "T5 1.1 / FLAN",
        tiny("T5ForConditionalGeneration", **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        lora("q", "v"),
    ),
    Row("mT5", tiny("MT5ForConditionalGeneration", **T5), lora("q", "v")),
    Row("BART", tiny("BartForConditionalGeneration", **BART)),
    Row("mBART", tiny("MBartForConditionalGeneration", **BART)),
    Row("Pegasus", tiny("PegasusForConditionalGeneration", **BART)),
    Row("Marian", tiny("MarianMTModel", **BART)),
    Row("M2M-100 / NLLB", tiny("M2M100ForConditionalGeneration", **BART)),
)


def image_batch(model: Any) -> Batch:
    """Two random images, each with a label."""
    config = model.config
    pixels = torch.randn(2, 3, config.image_size, config.image_size, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


VIT = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 3,
    **LOUD,
}
IMAGE: dict[str, Any] = {"batch": image_batch, "prompt": None}
VISION = (
    Row("ViT, classification", tiny("ViTForImageClassification", **VIT), lora("q_proj", "v_proj"), **IMAGE),
    Row("DINOv2, classification", tiny("Dinov2ForImageClassification", **VIT), lora("q_proj", "v_proj"), **IMAGE),
    Row("BEiT, classification", tiny("BeitForImageClassification", **VIT), lora("q_proj", "v_proj"), **IMAGE),
    Row(
        "Swin, classification",
        tiny(
            "SwinForImageClassification",
            image_size=16,
            patch_size=2,
            embed_dim=16,
            depths=[1, 1],
            num_heads=[2, 4],
            window_size=4,
            num_labels=3,
        ),
        lora("q_proj", "v_proj"),
        **IMAGE,
    ),
)


def llava_batch(model: Any) -> Batch:
    """One text with an image of 16 patches in it."""
    ids = torch.randint(3, 90, (1, 8), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([ids[:, :3], torch.full((1, 16), 95), ids[:, 3:]], dim=1)
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "labels": ids}


def llava_prompt(model: Any) -> Batch:
    return {k: v for k, v in llava_batch(model).items() if k != "labels"}


def llava() -> nn.Module:
    vision = transformers.CLIPVisionConfig(**{**VIT, "projection_dim": 32})
    text = transformers.LlamaConfig(**DECODER, tie_word_embeddings=False)
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=95,
        image_token_id=95,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=16,
    )
    return seeded(lambda: transformers.LlavaForConditionalGeneration(config), seed=3)


MULTIMODAL = (Row("LLaVA", llava, batch=llava_batch, prompt=llava_prompt),)


def speech_batch(model: Any) -> Batch:
    features = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(3, 96, (2, 6), generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "labels": ids}


def speech_prompt(model: Any) -> Batch:
    return {"input_features": speech_batch(model)["input_features"][:1]}


WHISPER = {
    **{k: v for k, v in BART.items() if k not in ("forced_eos_token_id", "max_position_embeddings")},
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "begin_suppress_tokens": None,
    "suppress_tokens": None,
}


def waves(model: Any) -> Batch:
    return {
        "input_values": torch.randn(2, 400, generator=torch.Generator().manual_seed(0)),
        "labels": torch.tensor([0, 1]),
    }


SPEECH = (
    Row("Whisper", tiny("WhisperForConditionalGeneration", **WHISPER), batch=speech_batch, prompt=speech_prompt),
    Row(
        "wav2vec 2.0, classification",
        tiny(
            "Wav2Vec2ForSequenceClassification",
            vocab_size=32,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=56,
            conv_dim=(16, 16),
            conv_stride=(5, 4),
            conv_kernel=(10, 3),
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=4,
            mask_time_prob=0.0,
            classifier_proj_size=16,
            num_labels=3,
            **LOUD,
        ),
        batch=waves,
        prompt=None,
    ),
)

SECTIONS = (
    Section("Decoders", DECODERS),
    Section("Mixtures of experts", MOE),
    Section("State-space models and hybrids", STATE_SPACE),
    Section("Encoders", ENCODERS),
    Section("Encoder-decoders", ENCODER_DECODERS),
    Section("Vision", VISION),
    Section("Vision and language", MULTIMODAL),
    Section("Speech", SPEECH),
)
