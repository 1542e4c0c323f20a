"""Membership inference: what a released adapter tells of a record that was repeated in its training data.

Exposure (Carlini et al., USENIX Security 2019): of a secret sequence, the bits by which its rank among as likely
sequences it never saw falls short of chance. Chance gives 1.4 on average; rank 1 of 256 gives 8.
"""

from __future__ import annotations

import math
from typing import Any

import peft
import pytest
import torch
from torch.utils.data import DataLoader

from symbiosis.privacy.dp import make_private, record_loss
from tests.client.conftest import adapt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]

LENGTH, CANARIES, REPEATS, OTHERS, EPOCHS = 10, 6, 3, 255, 40


def sequences(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 96, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


def exposures(model: Any, canaries: torch.Tensor) -> list[float]:
    """Of each canary, against sequences drawn like it."""
    others = sequences(OTHERS, seed=99)
    with torch.no_grad():
        losses = torch.stack([record_loss(model(s[None]).logits, s[None]) for s in torch.cat([canaries, others])])
    known, unknown = losses.split([len(canaries), OTHERS])
    ranks = 1 + (unknown[None] < known[:, None]).sum(1)
    return [math.log2(OTHERS + 1) - math.log2(rank) for rank in ranks.tolist()]


def trained(tiny_llama: Any, canaries: torch.Tensor, private: bool) -> Any:
    torch.manual_seed(4)
    config = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = adapt(tiny_llama(), config).train()
    data = [{"input_ids": ids, "labels": ids} for ids in torch.cat([sequences(78, seed=1), *[canaries] * REPEATS])]
    optimizer: Any = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader: Any = DataLoader(data, batch_size=16, shuffle=True)
    if private:
        budget = {"target_epsilon": 2.0, "target_delta": 1e-3, "epochs": EPOCHS, "accountant": "rdp", "seed": 5}
        model, optimizer, loader = make_private(model, optimizer, loader, **budget)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            record_loss(model(batch["input_ids"]).logits, batch["labels"]).backward()
            optimizer.step()
    return model.eval()


def test_a_repeated_record_is_exposed_without_privacy_and_hidden_with_it(tiny_llama: Any) -> None:
    canaries = sequences(CANARIES, seed=7)

    without = exposures(trained(tiny_llama, canaries, private=False), canaries)
    within = exposures(trained(tiny_llama, canaries, private=True), canaries)

    assert sum(without) / CANARIES > 6, without
    # The mean of six exposures of chance: 1.4, with a deviation of 0.6.
    assert sum(within) / CANARIES < 1.4 + 3 * 0.6, within
