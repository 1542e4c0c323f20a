"""The trainer's logs arrive as steps, and training with the callback is training without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import symbiosis
from symbiosis.flight.server import Server
from symbiosis.integrations.trainer import DashboardCallback
from symbiosis.telemetry import StepEvent


def trained(conn: Any, folder: Path, ids: torch.Tensor, callbacks: list[Any]) -> list[float]:
    torch.manual_seed(0)
    model = peft.get_peft_model(conn.load_model(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    args = transformers.TrainingArguments(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        include_num_input_tokens_seen=True,
        dataloader_pin_memory=False,
        save_strategy="no",
    )
    trainer = transformers.Trainer(model, args, train_dataset=rows, callbacks=callbacks)  # type: ignore[arg-type]
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_steps_arrive_and_nothing_changes(
    start_server: Callable[..., Server], tiny_llama: Callable[..., nn.Module], tokens: Any, tmp_path: Path
) -> None:
    with symbiosis.connect(start_server(tiny_llama()).url) as conn:
        events: list[Any] = []
        conn.bus.subscribe(events.append)
        ids = tokens(6, 5)
        without = trained(conn, tmp_path, ids, [])
        assert not [event for event in events if isinstance(event, StepEvent)]
        losses = trained(conn, tmp_path, ids, [DashboardCallback(conn)])

    steps = [event for event in events if isinstance(event, StepEvent)]
    assert losses == without
    assert [(event.step, event.steps, event.tokens) for event in steps] == [(1, 3, 10), (2, 3, 10), (3, 3, 10)]
    assert [event.loss for event in steps] == pytest.approx(losses)
    assert all(event.learning_rate for event in steps)
