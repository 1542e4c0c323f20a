"""Masked training and generation on a real model: the unmasked losses and text."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

import symbiosis
from tests.client.conftest import adapt, greedy, train
from tests.privacy.conftest import Pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

QV = ["q_proj", "v_proj"]
CONFIGS = {
    "lora": peft.LoraConfig(r=8, target_modules=QV, task_type="CAUSAL_LM"),
    "ia3": peft.IA3Config(target_modules=[*QV, "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
}
TEXTS = ["The server holds the frozen base once, and", "Every client trains an adapter of its own: it"]


@pytest.fixture(scope="module")
def ids(demo_tokenizer: Any) -> torch.Tensor:
    encoded: torch.Tensor = demo_tokenizer(TEXTS, return_tensors="pt", padding=True).input_ids
    return encoded


@pytest.mark.parametrize("method", CONFIGS)
def test_twenty_masked_steps(demo_pair: Pair, ids: torch.Tensor, method: str) -> None:
    with symbiosis.connect(demo_pair.server.url, privacy=demo_pair.masking()) as conn:
        remote = adapt(conn.wrap(demo_pair.model()), CONFIGS[method], scale=0.01)
        local = adapt(demo_pair.model(), CONFIGS[method], scale=0.01)

        there, here = train(remote, ids, lr=1e-3), train(local, ids, lr=1e-3)

        assert here[0] - here[-1] > 0.02
        assert max(abs(a - b) for a, b in zip(there, here, strict=True)) <= 1e-3


def test_sixty_four_tokens_of_text(demo_pair: Pair, ids: torch.Tensor) -> None:
    with symbiosis.connect(demo_pair.server.url, privacy=demo_pair.masking()) as conn:
        remote = conn.wrap(demo_pair.model())

        assert torch.equal(greedy(remote, ids[:1], 64), greedy(demo_pair.base, ids[:1], 64))
