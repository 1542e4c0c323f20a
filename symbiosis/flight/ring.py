"""Products in the integers modulo 2^64 with a frozen weight, through exact products in double precision.

    whole   round(W 2^k), the integer weight              k the largest for which no row or column adds up to more
                                                          than 2^31, magnitudes summed
    x       = l0 + 2^22 l1 + 2^44 l2   (mod 2^64)         limbs: l0, l1 in [0, 2^22), l2 in [-2^19, 2^19)
    x Wᵀ    = P0 + 2^22 P1 + 2^44 P2   (mod 2^64)         P_i = l_i wholeᵀ, |P_i| < 2^22 2^31 = 2^53

One rule: every number on the way is an integer below 2^53, so float64 holds it exactly, in whatever order a library
adds and whether it fuses or not. So two servers of one weight give the same bits.

Why sums and not the largest weight: 17 bits of a weight are what the largest element leaves at d_in 8192; the sum of
magnitudes, which is what bounds a product, leaves some three bits more. k is found by sums of integers below 2^53,
so it is the same on every machine, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from symbiosis.errors import InvalidInputError, RemoteComputeError
from symbiosis.flight.quantized import Weight

LIMB_BITS = 22
SUM_BITS = 31  # of the magnitudes of a row or column of an integer weight; with a limb, those of float64
LIMBS = 3
HIGHEST_EXPONENT = 900  # of 2: float64 ends at 1023
SELF_TEST_WIDTH = 257


def exponent_of(weight: Weight) -> int:
    """k for a weight [d_out, d_in]; 0 where it is all zeros.

    Raises:
        InvalidInputError: a value that is not finite, or too small for integers.
    """
    values = weight.to(torch.float64)
    largest = max((values.abs().sum(dim).max().item() for dim in (0, 1)), default=0.0)
    if largest == 0.0:
        return 0
    guess = SUM_BITS - math.frexp(largest)[1] + 2 if math.isfinite(largest) else HIGHEST_EXPONENT + 1
    if guess > HIGHEST_EXPONENT:
        raise InvalidInputError(f"this weight has no integer form: a row or column of it adds up to {largest}")
    while not _fits(integer_weight(values, guess)):  # two or three tries: each halves the sum
        guess -= 1
    return guess


def integer_weight(weight: Weight, exponent: int) -> torch.Tensor:
    """round(W 2^k), ties to even, as float64."""
    return (weight.to(torch.float64) * math.ldexp(1.0, exponent)).round_()


def forward(x: torch.Tensor, weights: Sequence[Weight], exponents: Sequence[int]) -> torch.Tensor:
    """int64 [N, d_in] @ each [d_out, d_in]ᵀ -> int64 [N, sum d_out], modulo 2^64"""
    limbs = _limbs(x)
    pairs = zip(weights, exponents, strict=True)
    return torch.cat([_joined(limbs @ integer_weight(w, k).t()) for w, k in pairs], dim=1)


def grad_input(grad_output: torch.Tensor, weights: Sequence[Weight], exponents: Sequence[int]) -> torch.Tensor:
    """int64 [N, sum d_out], split by weight, each @ [d_out, d_in] -> summed int64 [N, d_in], modulo 2^64"""
    parts = grad_output.split([weight.shape[0] for weight in weights], dim=1)
    products = [
        _joined(_limbs(part) @ integer_weight(w, k)) for part, w, k in zip(parts, weights, exponents, strict=True)
    ]
    return torch.stack(products).sum(0)


def check_device(device: torch.device) -> None:
    """Multiply numbers at the limit; double precision that is made of something else would not be exact.

    Raises:
        RemoteComputeError: a product is not what integers give.
    """
    width = SELF_TEST_WIDTH
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(1 << 63), (1 << 63) - 1, (4, width), generator=generator)
    x[0], x[1], x[2] = -1, (1 << 63) - 1, -(1 << 63)  # full limbs, and the highest limb at both its ends
    share = (1 << SUM_BITS) // width
    whole = torch.randint(-share, share + 1, (3, width), generator=generator)
    whole[0] = share
    found = forward(x.to(device), [whole.double().to(device)], [0]).cpu()
    for row, values in enumerate(x.tolist()):
        for column, weights in enumerate(whole.tolist()):
            expected = sum(a * b for a, b in zip(values, weights, strict=True))
            if (expected - int(found[row, column])) % (1 << 64):
                raise RemoteComputeError(
                    f"products in double precision on {device} are not exact here, so this server cannot compute in "
                    "integers; use mode='dealer', or a server on a CPU"
                )


def _limbs(x: torch.Tensor) -> torch.Tensor:
    """[N, d] -> [3, N, d] in float64: the lower limbs from 0 up, the highest with its sign."""
    mask = (1 << LIMB_BITS) - 1
    low, middle = x & mask, (x >> LIMB_BITS) & mask
    return torch.stack([low, middle, x >> 2 * LIMB_BITS]).double()


def _joined(products: torch.Tensor) -> torch.Tensor:
    """[3, N, d] of whole numbers -> int64 [N, d]; what is above 2^64 falls off."""
    low, middle, high = products.to(torch.int64)
    joined: torch.Tensor = low + (middle << LIMB_BITS) + (high << 2 * LIMB_BITS)
    return joined


def _fits(whole: torch.Tensor) -> bool:
    return all(whole.abs().sum(dim).max().item() <= 1 << SUM_BITS for dim in (0, 1))
