"""The work that faults must not change: training a small adapter, and one call with a known answer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import peft
import torch

from symbiosis.connection import Connection
from tests.faults.nursery import SIZES, tiny_model

# Of one run against another on the same numbers. Products may be computed in batches of other shapes.
TOLERANCE = 1e-6


@dataclass
class Run:
    """What a training run gave."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def percentile_s(self, percent: float) -> float:
        return percentile(self.step_s, percent)


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def adapted(model: Any, seed: int = 1) -> Any:
    """The model with the same LoRA adapter each time, none of it zero."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    with_adapter = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in with_adapter.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
    return with_adapter


def train(model: Any, steps: int | Callable[[int], bool], seed: int = 2) -> Run:
    """AdamW on random tokens, new ones each step; `steps` is a number, or says whether to go on."""
    run = Run()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    go_on = steps if callable(steps) else lambda done: done < steps
    while go_on(len(run.losses)):
        started_s = time.monotonic()
        ids = torch.randint(3, SIZES["vocab_size"], (2, 12), generator=generator)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        run.losses.append(loss.item())
        run.step_s.append(time.monotonic() - started_s)
    return run


def train_locally(steps: int) -> list[float]:
    """The losses that nothing disturbs."""
    return train(adapted(tiny_model()), steps).losses


def train_remotely(conn: Connection, steps: int | Callable[[int], bool]) -> Run:
    return train(adapted(conn.load_model()), steps)


def largest_difference(losses: list[float], expected: list[float]) -> float:
    """Relative, of the step that differs most; a missing step is infinitely different."""
    if len(losses) != len(expected):
        return float("inf")
    return max((abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)), default=0.0)


class AtRandomCalls:
    """Does something during calls drawn at random; subscribe it to `conn.bus`.

    It acts up to 5 ms after a call has ended: in the next one, be that of a forward or a backward pass.
    """

    def __init__(self, act: Callable[[], None], times: int, of_calls: int, seed: int = 3) -> None:
        self._act = act
        self._random = random.Random(seed)
        self._planned = set(self._random.sample(range(1, of_calls), times))
        self._calls = 0
        self.threads: list[threading.Thread] = []

    def __call__(self, event: object) -> None:
        self._calls += 1
        if self._calls in self._planned:
            self.threads.append(threading.Timer(self._random.uniform(0, 0.005), self._act))
            self.threads[-1].start()
