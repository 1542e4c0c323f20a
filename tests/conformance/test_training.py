"""Every loop of the table, remote against local."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import symbiosis
from tests.conformance.harness import Bench, params
from tests.conformance.modalities import llava
from tests.conformance.table import TRAINING
from tests.conformance.training import Training, check

SECTIONS = [section for module in TRAINING for section in module.SECTIONS]


@pytest.mark.parametrize("line", params(SECTIONS))
def test_loop(line: Training, bench: Bench, tmp_path: Path) -> None:
    check(line, bench, tmp_path)


# --- what users reported: the line that would fail, by its name ------------------------------------------------


def line_named(name: str) -> Training:
    return next(
        line for section in SECTIONS for line in section.rows if isinstance(line, Training) and line.name == name
    )


@pytest.mark.parametrize("form", ["Reentrant", "Not reentrant"])
def test_transformers_26334_checkpointing_enabled_after_the_adapter(form: str, bench: Bench, tmp_path: Path) -> None:
    """transformers #26334: enabled after the PeftModel was made, nothing required a gradient any more."""
    check(line_named(f"{form}, enabled after get_peft_model"), bench, tmp_path)


@pytest.mark.parametrize("form", ["Reentrant", "Not reentrant"])
def test_transformers_42489_trainer_checkpoints_a_peft_model(form: str, bench: Bench, tmp_path: Path) -> None:
    """transformers #42489: a PEFT model given to Trainer with gradient_checkpointing had no gradient."""
    check(line_named(f"{form}, by Trainer"), bench, tmp_path)


@pytest.mark.parametrize("name", ["TRL SFT", "TRL SFT, which makes the adapter"])
def test_trl_3926_the_adapter_is_not_frozen(name: str, bench: Bench, tmp_path: Path) -> None:
    """trl #3926: SFTTrainer prepared a ready PeftModel once more, and froze its adapter: nothing was trained."""
    check(line_named(name), bench, tmp_path)


def test_transformers_28972_a_model_from_the_meta_device_can_be_moved(bench: Bench) -> None:
    """transformers #28972: after meta weights were filled, some were left, and `.to(device)` had no data to copy."""
    base, url = bench.serve(llava)
    with torch.device("meta"):
        empty: Any = type(base)(base.config)
    with symbiosis.connect(url) as connection:
        model = connection.wrap(empty)

        assert not [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
        assert model.to("cpu") is model
        model.to(torch.float32)
