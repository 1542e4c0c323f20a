"""Rows of models that see or hear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests.conformance.architectures import DECODER, LOUD, SLOW, UNTIED, WIDE, tiny
from tests.conformance.encoders import BART, BERT
from tests.conformance.harness import Batch, Row, Section
from tests.conftest import seeded

VIT = {
    "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4, "num_labels": 3, **LOUD,
}  # fmt: skip


def image_batch(model: Any) -> Batch:
    """Two random images, each with a label."""
    size = model.config.image_size
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def image_row(name: str, prefix: str, calls: tuple[int, int], row: Any, /, **settings: Any) -> Row:
    build = tiny(f"{prefix}ForImageClassification", **settings)
    return Row(name, build, batch=image_batch, prompt=None, calls=calls, **row)


def patches(path: str, **more: str) -> dict[str, Any]:
    """What stays local of a vision tower: the convolution that makes patches."""
    return {"local": {**more, path: "weight: no linear"}}


VISION = (
    image_row(
        "ViT",
        "ViT",
        (7, 4),
        patches(
            "vit.embeddings.patch_embeddings.projection",
            **{"vit.embeddings": "cls_token, position_embeddings: no linear"},
        ),
        **VIT,
    ),
    image_row(
        "DINOv2",
        "Dinov2",
        (7, 4),
        patches(
            "dinov2.embeddings.patch_embeddings.projection",
            **{"dinov2.embeddings": "cls_token, mask_token, position_embeddings: no linear"},
        ),
        **VIT,
    ),
    image_row(
        "BEiT",
        "Beit",
        (17, 7),
        patches("beit.embeddings.patch_embeddings.projection", **{"beit.embeddings": "cls_token: no linear"}),
        **VIT,
    ),
    image_row(
        "Swin",
        "Swin",
        (15, 8),
        patches(
            "swin.embeddings.patch_embeddings.projection",
            **{
                "swin.encoder.layers.*.blocks.*.attention.relative_position_bias": "relative_position_bias_table: "
                "no linear"
            },
        ),
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        window_size=4,
        num_labels=3,
    ),
)

IMAGE = 95  # the token that stands for a patch


def image_text(patches: int) -> torch.Tensor:
    """Text with the tokens of one image in it, [1, 8 + patches]."""
    ids = torch.randint(3, 90, (1, 8), generator=torch.Generator().manual_seed(0))
    return torch.cat([ids[:, :3], torch.full((1, patches), IMAGE), ids[:, 3:]], dim=1)


def llava_batch(model: Any) -> Batch:
    ids = image_text(16)
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "labels": ids}


def qwen_vl_batch(model: Any) -> Batch:
    """An image of 4 by 4 patches, which the merger makes 4 tokens of."""
    ids = image_text(4)
    ids = torch.cat([ids[:, :3], torch.tensor([[93]]), ids[:, 3:]], dim=1)
    patches = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1))
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (ids == IMAGE).int(),
    }  # fmt: skip


def unlabelled(batch: Callable[[Any], Batch]) -> Callable[[Any], Batch]:
    """The same as a prompt."""
    return lambda model: {key: value for key, value in batch(model).items() if key != "labels"}


def llava() -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VIT, projection_dim=32),
        text_config=transformers.LlamaConfig(**DECODER, **UNTIED),
        image_token_index=IMAGE, vision_feature_layer=-1, vision_feature_select_strategy="default", image_seq_length=16,
    )  # fmt: skip
    return seeded(lambda: transformers.LlavaForConditionalGeneration(config), seed=3)


ROPE = {"rope_type": "default", "rope_theta": 1e4}


def qwen2_vl() -> nn.Module:
    config = transformers.Qwen2VLConfig(
        text_config={**DECODER, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4},
        image_token_id=IMAGE, video_token_id=94, vision_start_token_id=93, vision_end_token_id=92,
    )  # fmt: skip
    return seeded(lambda: transformers.Qwen2VLForConditionalGeneration(config), seed=3)


def idefics3() -> nn.Module:
    config = transformers.Idefics3Config(
        vision_config={**VIT}, text_config=transformers.LlamaConfig(**DECODER), image_token_id=IMAGE, scale_factor=2,
        pad_token_id=0,
    )  # fmt: skip
    return seeded(lambda: transformers.Idefics3ForConditionalGeneration(config), seed=3)


def idefics_batch(model: Any) -> Batch:
    ids = image_text(4)
    pixels = torch.randn(1, 1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "labels": ids}


def paligemma() -> nn.Module:
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**VIT, vision_use_head=False),
        text_config=transformers.GemmaConfig(**WIDE), image_token_index=IMAGE, projection_dim=32, hidden_size=32,
    )  # fmt: skip
    return seeded(lambda: transformers.PaliGemmaForConditionalGeneration(config), seed=3)


def paligemma_batch(model: Any) -> Batch:
    batch = llava_batch(model)
    return batch | {"token_type_ids": torch.zeros_like(batch["input_ids"])}


def image_text_row(name: str, build: Any, batch: Any, calls: tuple[int, int], path: str, **more: Any) -> Row:
    return Row(name, build, batch=batch, prompt=unlabelled(batch), calls=calls, **patches(path), **more)


MULTIMODAL = (
    image_text_row("LLaVA", llava, llava_batch, (17, 8), "model.vision_tower.embeddings.patch_embedding"),
    image_text_row("Qwen2-VL", qwen2_vl, qwen_vl_batch, (12, 9), "model.visual.patch_embed.proj"),
    image_text_row(
        "Idefics3, SmolVLM", idefics3, idefics_batch, (35, 8), "model.vision_model.embeddings.patch_embedding", **SLOW
    ),
    image_text_row(
        "PaliGemma", paligemma, paligemma_batch, (33, 6), "model.vision_tower.embeddings.patch_embedding", **SLOW
    ),
)


def speech_batch(model: Any) -> Batch:
    """Two spectrograms [8 bands, 32 frames], and what was said."""
    features = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    return {
        "input_features": features,
        "labels": torch.randint(3, 96, (2, 6), generator=torch.Generator().manual_seed(1)),
    }


def speech_prompt(model: Any) -> Batch:
    return {"input_features": speech_batch(model)["input_features"][:1]}


def waves(model: Any) -> Batch:
    """Two waveforms, each with a label."""
    wave = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
    return {"input_values": wave, "labels": torch.tensor([0, 1])}


WHISPER = {
    **{k: v for k, v in BART.items() if k not in ("forced_eos_token_id", "max_position_embeddings")},
    "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "begin_suppress_tokens": None,
    "suppress_tokens": None,
}  # fmt: skip
WAV2VEC = {
    **{k: v for k, v in BERT.items() if k != "max_position_embeddings"}, "conv_dim": (16, 16), "conv_stride": (5, 4),
    "conv_kernel": (10, 3), "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0,
    "classifier_proj_size": 16, "num_labels": 3,
}  # fmt: skip
CONVOLUTIONS = {f"model.encoder.conv{number}": "weight: no linear" for number in (1, 2)}
SPEECH = (
    Row(
        "Whisper",
        tiny("WhisperForConditionalGeneration", **WHISPER),
        batch=speech_batch,
        prompt=speech_prompt,
        calls=(26, 14),
        local=CONVOLUTIONS,
    ),
    Row(
        "wav2vec 2.0",
        tiny("Wav2Vec2ForSequenceClassification", **WAV2VEC),
        batch=waves,
        prompt=None,
        calls=(8, 5),
        local={
            "wav2vec2.feature_extractor.conv_layers.*.conv": "weight: no linear",
            "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight": "original0, original1: no linear",
        },
    ),
)

SECTIONS = (
    Section("Vision", VISION),
    Section("Vision and language", MULTIMODAL),
    Section("Speech", SPEECH),
)
