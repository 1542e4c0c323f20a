"""Products modulo 2^64: what Python's own integers give, at the ends of the range, too."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.errors import InvalidInputError, ModelMismatchError, ProtocolError, RemoteComputeError
from symbiosis.flight import ring
from symbiosis.flight.base_model import BaseModel
from symbiosis.privacy.draws import RING, draw, fresh_seed

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
EXTREMES = [LOWEST, HIGHEST, -1, 0, (1 << 22) - 1, 1 << 22, (1 << 44) - 1, -(1 << 44), (1 << 63) - (1 << 44)]


def products(x: torch.Tensor, whole: torch.Tensor) -> list[list[int]]:
    """x [N, d] @ whole [d', d]ᵀ by Python's integers, as signed 64-bit numbers."""
    exact = [[sum(a * b for a, b in zip(r, w, strict=True)) for w in whole.tolist()] for r in x.tolist()]
    return [[(value + (1 << 63)) % (1 << 64) - (1 << 63) for value in row] for row in exact]


def as_heavy_as_can_be(rows: int, width: int) -> torch.Tensor:
    """Integer weights of which each row adds up to 2^31: all in one element, and spread evenly."""
    whole = torch.zeros(rows, width, dtype=torch.float64)
    for row in range(rows):
        whole[row, row::rows] = (-1.0) ** row * ((1 << ring.SUM_BITS) // len(range(row, width, rows)))
    whole[0] = 0
    whole[0, 0] = 1 << ring.SUM_BITS
    return whole


@pytest.mark.parametrize("fill", EXTREMES)
def test_rows_full_of_an_extreme_are_exact(fill: int) -> None:
    x = torch.full((2, 96), fill)
    whole = as_heavy_as_can_be(7, 96)

    assert ring.forward(x, [whole], [0]).tolist() == products(x, whole.long())


def test_every_limb_product_stays_below_two_to_the_53() -> None:
    """The bound that exactness rests on: full limbs against the heaviest rows, in the sum of magnitudes."""
    limbs = ring._limbs(torch.tensor([EXTREMES]))

    assert limbs.abs().max() <= (1 << ring.LIMB_BITS) - 1
    assert ((1 << ring.LIMB_BITS) - 1) * (1 << ring.SUM_BITS) < 1 << 53


@pytest.mark.parametrize("scale", [1e-20, 0.05, 3e7])
def test_random_rows_are_exact_both_ways(scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = [scale * torch.randn(width, 40, generator=generator) for width in (24, 9)]
    exponents = [ring.exponent_of(weight) for weight in weights]
    whole = torch.cat([ring.integer_weight(w, k) for w, k in zip(weights, exponents, strict=True)]).long()
    x, dy = (torch.randint(LOWEST, HIGHEST, (5, width), generator=generator) for width in (40, 33))

    assert ring.forward(x, weights, exponents).tolist() == products(x, whole)
    assert ring.grad_input(dy, weights, exponents).tolist() == products(dy, whole.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 5), (1, 700), (700, 1), (64, 64)])
def test_the_exponent_is_the_largest_that_fits(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    k = ring.exponent_of(weight)

    sums = [ring.integer_weight(weight, k + more).abs().sum(dim).max() for more in (0, 1) for dim in (0, 1)]
    assert max(sums[:2]) <= 1 << ring.SUM_BITS < max(sums[2:])


def test_weights_without_an_integer_form() -> None:
    assert ring.exponent_of(torch.zeros(3, 4)) == 0
    for bad in (
        torch.full((2, 2), torch.inf),
        torch.full((2, 2), torch.nan),
        torch.full((2, 2), 1e-300, dtype=torch.float64),
    ):
        with pytest.raises(InvalidInputError, match="has no integer form"):
            ring.exponent_of(bad)


def test_a_device_that_rounds_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ring.check_device(torch.device("cpu"))
    joined = ring._joined

    def with_fifty_bits(products: torch.Tensor) -> torch.Tensor:  # as where doubles are made of something else
        return joined((products / 8).round() * 8)

    monkeypatch.setattr(ring, "_joined", with_fifty_bits)
    with pytest.raises(RemoteComputeError, match="double precision on cpu are not exact"):
        ring.check_device(torch.device("cpu"))


# --- over the wire ----------------------------------------------------------------------------------

NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]


def integers(base: Any, names: Sequence[str], exponents: Sequence[int]) -> torch.Tensor:
    weights = [base.get_submodule(name).weight.detach() for name in names]
    return torch.cat([ring.integer_weight(w, k) for w, k in zip(weights, exponents, strict=True)]).long()


def test_a_server_computes_in_integers(tiny_llama: Any, start_server: Any) -> None:
    base = tiny_llama(seed=5)
    server = start_server(copy.deepcopy(base))
    with symbiosis.connect(server.url, max_message_bytes=4096) as conn:
        caller = conn._caller
        exponents = caller.exponents(NAMES)
        whole = integers(base, NAMES, exponents)
        x, dy = (torch.randint(LOWEST, HIGHEST, (20, width)) for width in (32, len(whole)))

        assert caller.whole("forward", NAMES, x).tolist() == products(x, whole)  # in several messages
        assert caller.whole("grad_input", NAMES, dy).tolist() == products(dy, whole.t())
        assert caller.whole("forward", NAMES, x[:0]).shape == (0, len(whole))
        seed = fresh_seed()
        effect = caller.effect("forward", NAMES, seed, 3, torch.int64)
        assert effect.tolist() == products(draw(seed, 3, 32, RING), whole)


def test_two_servers_of_one_checkpoint_have_the_same_integers(tiny_llama: Any) -> None:
    first, second = (BaseModel(tiny_llama(seed=6)) for _ in range(2))
    names = list(first.linears)

    assert first.exponents(names) == second.exponents(names)


def test_integers_are_for_linears_of_a_base_that_is_not_quantised(tiny_llama: Any, start_server: Any) -> None:
    server = start_server(tiny_llama(seed=5))
    with symbiosis.connect(server.url) as conn:
        x = torch.zeros(2, 32, dtype=torch.int64)
        with pytest.raises(InvalidInputError, match="Z64 is for linears only"):
            conn._caller.whole("forward", ["model.layers.0.mlp"], x)
        with pytest.raises(InvalidInputError, match="int64 cannot be sent"):  # not by mistake
            conn._caller.call("forward", NAMES[:1], [x])

    small = start_server(BaseModel(tiny_llama(seed=5), quantized="int8"))
    with symbiosis.connect(small.url) as conn, pytest.raises(InvalidInputError, match="kept in int8"):
        conn._caller.whole("forward", NAMES[:1], x)


def test_a_server_whose_integers_change_is_left(tiny_llama: Any, start_server: Any) -> None:
    server = start_server(tiny_llama(seed=5))
    with symbiosis.connect(server.url) as conn:
        conn._caller.exponents(NAMES)
        server.base._exponents[NAMES[0]] += 1

        with pytest.raises(ModelMismatchError, match="the server holds other weights"):
            conn._caller.whole("forward", NAMES, torch.zeros(1, 32, dtype=torch.int64))
        server.base._exponents[NAMES[0]] -= 1
        with pytest.raises(ProtocolError, match="0 exponents for 2 modules"):
            conn._caller._note(NAMES, [])
