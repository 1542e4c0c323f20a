"""What a client does: training steps, prefill, decode, and the check that both sides do the same.

One rule: this file does not know whether the model it drives is local or wrapped. Each piece of work
yields Units, whose times are `time.monotonic()` readings, comparable between the processes of a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Unit:
    """One training step, one prefill or one token: when it began and ended, and the tokens it is worth."""

    started_s: float
    ended_s: float
    tokens: int
    loss: float | None = None


class Trainer:
    """AdamW steps on one fixed batch of random token ids."""

    def __init__(self, model: nn.Module, sequences: int, length: int, vocabulary: int, seed: int) -> None:
        self._model = model
        generator = torch.Generator().manual_seed(seed)
        self._ids = torch.randint(0, vocabulary, (sequences, length), generator=generator)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=LEARNING_RATE)
        self._steps = 0

    def step(self) -> Iterator[Unit]:
        started_s = time.monotonic()
        self._model.train()
        self._steps += 1
        loss = self._loss()
        loss.backward()
        self._optimizer.step()
        self._after_step()
        self._optimizer.zero_grad()
        yield Unit(started_s, time.monotonic(), self._ids.numel(), loss.item())

    def gradients(self) -> tuple[float, list[float]]:
        """Loss, and the norm of every trainable parameter's gradient; nothing is changed."""
        self._model.train()
        loss = self._loss()
        loss.backward()
        norms = [0.0 if p.grad is None else p.grad.float().norm().item() for p in self._trained]
        self._optimizer.zero_grad()
        return loss.item(), norms

    def _loss(self) -> torch.Tensor:
        torch.manual_seed(self._steps)  # dropout draws the same on both sides
        loss: torch.Tensor = self._model(input_ids=self._ids, labels=self._ids).loss
        return loss

    def _after_step(self) -> None:
        update = getattr(getattr(self._model, "base_model", None), "update_and_allocate", None)
        if callable(update):  # AdaLoRA counts its steps
            update(self._steps)


class Generator:
    """Greedy `generate()` from a fixed prompt, again and again."""

    def __init__(self, model: Any, prompt_tokens: int, new_tokens: int, vocabulary: int, seed: int) -> None:
        self._model = model
        self._new_tokens = new_tokens
        generator = torch.Generator().manual_seed(seed)
        self._prompt = torch.randint(0, vocabulary, (1, prompt_tokens), generator=generator)

    def tokens(self) -> Iterator[Unit]:
        """A unit per token; the first one holds the prefill."""
        clock = _Clock()
        self.text(clock)
        yield from (Unit(a, b, 1) for a, b in zip(clock.readings, clock.readings[1:], strict=False))

    def text(self, clock: _Clock | None = None, new_tokens: int = 0) -> list[int]:
        """The new tokens of one greedy continuation."""
        self._model.eval()
        count = new_tokens or self._new_tokens
        output = self._model.generate(
            input_ids=self._prompt,
            attention_mask=torch.ones_like(self._prompt),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
        return list(map(int, output[0, -count:]))

    def decode(self) -> Iterator[Unit]:
        """A unit per token after the first."""
        units = self.tokens()
        next(units)
        yield from units

    def prefill(self) -> Iterator[Unit]:
        """A unit per prompt: the time to its first token."""
        started_s = time.monotonic()
        self.text(new_tokens=1)
        yield Unit(started_s, time.monotonic(), self._prompt.shape[1])


class _Clock:
    """A streamer that only notes when it was called; `generate` gives it the prompt first."""

    def __init__(self) -> None:
        self.readings: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.readings.append(time.monotonic())

    def end(self) -> None:
        """Nothing is buffered."""


def repeat(work: Callable[[], Iterator[Unit]], count: int) -> list[Unit]:
    """A number of repetitions, all units."""
    return [unit for _ in range(count) for unit in work()]


def until(work: Callable[[], Iterator[Unit]], start_at_s: float, stop_at_s: float) -> list[Unit]:
    """Repeat from one moment to another; what is under way at the end is finished."""
    time.sleep(max(0.0, start_at_s - time.monotonic()))
    units: list[Unit] = []
    while time.monotonic() < stop_at_s:
        units.extend(work())
    return units
