"""transformers' Trainer under DP-SGD."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import symbiosis
from symbiosis.errors import ConfigError
from symbiosis.integrations.private_trainer import PrivacyCallback
from symbiosis.integrations.trainer import DashboardCallback
from symbiosis.privacy.dp import make_private
from tests.client.conftest import adapt

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


@pytest.fixture
def parts(tiny_llama: Any, tokens: Any) -> tuple[Any, Any, Any]:
    return parts_of(tiny_llama, tokens)


def parts_of(tiny_llama: Any, tokens: Any, **options: Any) -> tuple[Any, Any, Any]:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = adapt(tiny_llama(), config).train()
    data = [{"input_ids": ids, "labels": ids} for ids in tokens(batch=12)]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    budget = {"target_epsilon": 8.0, "target_delta": 1e-3, "epochs": 2, "accountant": "rdp"}
    return make_private(model, optimizer, DataLoader(data, batch_size=3), **budget, seed=3, **options)  # type: ignore[arg-type]


@pytest.fixture
def conn(start_server: Any, tiny_llama: Any) -> Iterator[symbiosis.Connection]:
    with symbiosis.connect(start_server(tiny_llama()).url) as connection:
        yield connection


def trainer_of(parts: tuple[Any, Any, Any], folder: Path, **options: Any) -> Trainer:
    model, optimizer, loader = parts
    settings = {"num_train_epochs": 2, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True}
    args = TrainingArguments(output_dir=str(folder), **{**settings, "disable_tqdm": True, **options})
    return Trainer(model, args, train_dataset=loader.dataset, optimizers=(optimizer, None))


def test_a_trainer_trains_privately_and_logs_epsilon(parts: Any, tmp_path: Path) -> None:
    _, optimizer, loader = parts
    trainer = trainer_of(parts, tmp_path)
    PrivacyCallback.attach(trainer, optimizer, loader)

    trainer.train()

    logged = [entry["epsilon"] for entry in trainer.state.log_history if "epsilon" in entry]
    assert optimizer.spent().steps == 8
    assert logged == sorted(logged)
    assert logged[-1] == pytest.approx(optimizer.spent().epsilon)
    assert 0 < logged[0] < logged[-1] <= 8.0


def test_what_would_break_the_accounting_is_refused(parts: Any, tmp_path: Path) -> None:
    model, optimizer, loader = parts
    trainer = trainer_of(parts, tmp_path, gradient_accumulation_steps=2)
    PrivacyCallback.attach(trainer, optimizer, loader)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=2"):
        trainer.train()

    trainer = trainer_of(parts, tmp_path)
    trainer.add_callback(PrivacyCallback(optimizer, loader))
    with pytest.raises(ConfigError, match="does not use the loader"):
        trainer.train()

    trainer = trainer_of((model, None, loader), tmp_path)
    PrivacyCallback.attach(trainer, optimizer, loader)
    with pytest.raises(ConfigError, match="does not use the optimizer"):
        trainer.train()
    assert optimizer.spent().steps == 0


def test_ghost_clipping_is_refused(tiny_llama: Any, tokens: Any, tmp_path: Path) -> None:
    ghost = parts_of(tiny_llama, tokens, clipping="ghost")
    trainer = trainer_of(ghost, tmp_path)
    PrivacyCallback.attach(trainer, ghost[1], ghost[2])

    with pytest.raises(ConfigError, match="the loss of ghost clipping is no tensor"):
        trainer.train()


def test_the_dashboard_s_callback_tells_epsilon_too(parts: Any, tmp_path: Path, conn: Any) -> None:
    _, optimizer, loader = parts
    trainer = trainer_of(parts, tmp_path)
    trainer.add_callback(DashboardCallback(conn))
    PrivacyCallback.attach(trainer, optimizer, loader)

    trainer.train()

    told = conn.stats().epsilon
    assert (told.spent, told.target) == (optimizer.spent().epsilon, 8.0)
    assert f"epsilon {told.spent:.3f} of 8, delta 0.001" in str(conn.dashboard())
