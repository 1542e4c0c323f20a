"""Exact masks on a real model: how far integer weights are off, and that losses and text are the unmasked ones.

Run with `-s` for the figures of docs/security.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.flight import ring
from symbiosis.privacy.exact import in_whole_numbers
from tests.client.conftest import adapt, difference, greedy, train
from tests.privacy.conftest import Pair
from tests.privacy.test_masking_demo import CONFIGS, TEXTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def ids(demo_tokenizer: Any) -> torch.Tensor:
    encoded: torch.Tensor = demo_tokenizer(TEXTS, return_tensors="pt", padding=True).input_ids
    return encoded


def test_products_are_closer_than_those_of_float32(demo_pair: Pair, ids: torch.Tensor) -> None:
    """Beside products in double precision; the head, as tall as the vocabulary, has the fewest bits for a weight."""
    errors: dict[str, list[tuple[float, float]]] = {}

    def compare(layer: Any, args: Any, output: torch.Tensor, kind: str) -> None:
        x, weight = args[0].flatten(0, -2), layer.weight.detach()
        whole, steps = in_whole_numbers(x.double())
        k = ring.exponent_of(weight)
        y = ring.forward(whole, [weight], [k]).double() * steps * 2.0**-k
        exact = x.double() @ weight.double().t()
        errors.setdefault(kind, []).append((difference(y, exact), difference(output.flatten(0, -2), exact)))

    model = demo_pair.model()
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            kind = name.rpartition(".")[2]
            layer.register_forward_hook(lambda *call, kind=kind: compare(*call, kind))
    with torch.no_grad():
        model(input_ids=ids)

    for kind, found in errors.items():
        worst, plain = (max(pair[i] for pair in found) for i in (0, 1))
        print(f"\n{kind:<10} exact {worst:.1e}, float32 {plain:.1e}", end="")
        assert worst < (1e-4 if kind == "lm_head" else plain)


@pytest.mark.parametrize("method", CONFIGS)
def test_twenty_exactly_masked_steps(demo_pair: Pair, ids: torch.Tensor, method: str) -> None:
    with symbiosis.connect(demo_pair.server.url, privacy=demo_pair.masking(mode="exact")) as conn:
        remote = adapt(conn.wrap(demo_pair.model()), CONFIGS[method], scale=0.01)
        local = adapt(demo_pair.model(), CONFIGS[method], scale=0.01)
        there, here = train(remote, ids, lr=1e-3), train(local, ids, lr=1e-3)
        apart = max(abs(a - b) for a, b in zip(there, here, strict=True))

        print(f"\n{method}: losses {apart:.1e} apart")
        assert here[0] - here[-1] > 0.02
        assert apart <= 1e-3


def test_sixty_four_tokens_of_text(demo_pair: Pair, ids: torch.Tensor) -> None:
    with symbiosis.connect(demo_pair.server.url, privacy=demo_pair.masking(mode="exact")) as conn:
        remote = conn.wrap(demo_pair.model(), lm_head="remote")

        assert torch.equal(greedy(remote, ids[:1], 64), greedy(demo_pair.base, ids[:1], 64))
