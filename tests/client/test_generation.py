"""generate() between other things, token for token as locally; its modes are in tests/conformance/generation.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from symbiosis.connection import Connection
from tests.client.conftest import FAMILIES, Served, adapt, train

NEW = {"max_new_tokens": 6, "min_new_tokens": 6}


@pytest.fixture
def pair(served: Served, connection: Connection) -> tuple[Any, Any]:
    config = served.config("lora")
    return adapt(connection.wrap(served.model()), config, 0.2), adapt(served.model(), config, 0.2)


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    torch.manual_seed(17)
    mask = torch.ones_like(ids) if mask is None else mask
    generated: torch.Tensor = model.generate(input_ids=ids, attention_mask=mask, **{**NEW, **options})
    return generated


@pytest.mark.parametrize("served", FAMILIES, indirect=True)
def test_left_padding(pair: tuple[Any, Any], tokens: Any) -> None:
    ids, mask = tokens(3, 7), torch.ones(3, 7, dtype=torch.long)
    for row, padding in ((0, 4), (2, 2)):
        ids[row, :padding], mask[row, :padding] = 0, 0

    for options in ({"do_sample": False}, {"num_beams": 2}):
        remote, local = (generate(model, ids, mask, **options) for model in pair)
        assert torch.equal(remote, local)
    alone = generate(pair[0], ids[:1, 4:], do_sample=False)
    assert torch.equal(generate(pair[0], ids, mask, do_sample=False)[0, 7:], alone[0, 3:])


def test_inside_inference_mode(pair: tuple[Any, Any], tokens: Any) -> None:
    with torch.inference_mode():
        remote = generate(pair[0], tokens(2, 4), do_sample=False)
    assert torch.equal(remote, generate(pair[1], tokens(2, 4), do_sample=False))


def test_the_model_may_train_between_generations(pair: tuple[Any, Any], tokens: Any) -> None:
    generated = []
    for model in pair:
        first = generate(model, tokens(1, 4), do_sample=False)
        losses = train(model, tokens(), steps=3, lr=0.05)
        generated.append((first.tolist(), generate(model, tokens(1, 4), do_sample=False).tolist(), losses))

    assert generated[0][:2] == generated[1][:2]
    assert generated[0][2] == pytest.approx(generated[1][2], abs=1e-4)
