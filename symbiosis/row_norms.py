"""Norms of the rows of W + D, from those of W, which the server publishes, and a call: what DoRA needs.

    ||W_o + D_o||² = ||W_o||² + 2 <D_o, W_o> + ||D_o||²         D = s B A, of low rank

One rule: no gradient goes through. DoRA holds the norm constant, and the gradient would need the rows of W.

D is taken as it comes, whoever made it: its row space is found, and the products of W with a basis of that are
asked for. Rejected: to teach peft's DoRA layer to hand out A itself. That spares finding the basis, but is code
inside another package, for one method.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NoReturn

import torch

from symbiosis.advice import refusal
from symbiosis.errors import UnsupportedMethodError
from symbiosis.matrix import Dense, Node, Weight, check_reveals, name_of, terms_of

FIRST_GUESS = 12  # of the rank: a usual rank of 8, and some, for a random subspace may just miss it
ROUNDING = 16 * torch.finfo(torch.float32).eps
CHECKS = 4  # random products of D that must lie in the subspace found


class _NormsOnly(torch.autograd.Function):
    """Norms of rows, whose gradient would need the rows."""

    @staticmethod
    def forward(ctx: Any, delta: torch.Tensor, norms: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return norms

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise UnsupportedMethodError(refusal("the gradient of norm", ctx.name))


def row_norms(node: Node) -> torch.Tensor:
    """||W_o + D_o|| = sqrt(||W_o||² + 2 <D_o, W_o> + ||D_o||²) for each row o, from published ||W_o||.

    Raises:
        UnsupportedMethodError: neither a weight nor the sum of one and a matrix that is here.
    """
    terms = terms_of(node)
    weights = [term for term in terms if isinstance(term, Weight)]
    deltas = [term.value for term in terms if isinstance(term, Dense)]
    if len(weights) != 1 or len(deltas) + 1 != len(terms):
        raise UnsupportedMethodError(refusal("norm", name_of(node)))
    if not deltas:
        return _published(weights[0])
    check_reveals(node, "norm")
    delta = reduce(torch.add, (value.to_dense() for value in deltas))
    norms = _of_sum(weights[0], delta)
    if not delta.requires_grad:
        return norms
    return _NormsOnly.apply(delta, norms, name_of(node))  # type: ignore[no-untyped-call, no-any-return]


def _published(weight: Weight) -> torch.Tensor:
    return weight.operator.norms(0 if weight.flipped else 1)


@torch.no_grad()
def _of_sum(weight: Weight, delta: torch.Tensor) -> torch.Tensor:
    """[out], in double precision; delta [out, in]"""
    if delta.is_meta:  # an adapter that is to be loaded
        return torch.empty(delta.shape[0], device="meta")
    eps = torch.finfo(_precision(delta)).eps
    with torch.autocast(delta.device.type, enabled=False):
        inner = weight.operator.inner_products.result(delta, lambda d: _inner(weight, d, eps))
        own = torch.linalg.vector_norm(delta, dim=1, dtype=torch.float64)
    squares: torch.Tensor = _published(weight).to(own).square() + 2 * inner.double() + own.square()
    return squares.clamp_min(0).sqrt()


def _precision(delta: torch.Tensor) -> torch.dtype:
    """That of the products that D was made by; autocast hides it."""
    kind = delta.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else delta.dtype


def _inner(weight: Weight, delta: torch.Tensor, eps: float) -> torch.Tensor:
    """<D_o, W_o> for each row o of a D that was rounded to eps."""
    basis = row_basis(delta, eps)
    if basis is None:
        raise UnsupportedMethodError(refusal("norm of a sum with a matrix of high rank", weight.operator.name))
    if not len(basis):
        return delta.new_zeros(delta.shape[0])
    with weight.operator.aside():
        product = weight.apply(basis)  # [k, in] @ [in, out]
    # D = (D Vᵀ) V, so <D_o, W_o> = (D Vᵀ)_o (V Wᵀ)_o: [out, k] * [k, out]ᵀ
    return ((delta @ basis.t()) * product.t()).sum(1)


def row_basis(delta: torch.Tensor, eps: float = 0.0) -> torch.Tensor | None:
    """Orthonormal V [k, in] with D = D Vᵀ V up to eps, k the rank of D [out, in]; None if k is above half its size.

    A randomised range finder (Halko, Martinsson and Tropp 2011, algorithm 4.2) that doubles its guess of k, and a
    small decomposition that then takes away what it guessed too much.
    """
    rows, columns = delta.shape
    limit = min(rows, columns) // 2
    tolerance = max(ROUNDING, 2 * eps)
    wide = delta.float()
    generator = torch.Generator(delta.device).manual_seed(0)
    guess = min(FIRST_GUESS, limit)
    while 0 < guess <= limit:
        probe = torch.randn(guess + CHECKS, rows, generator=generator, device=delta.device)
        seen, checked = (probe @ wide).split([guess, CHECKS])  # [guess, in], [CHECKS, in]
        basis = torch.linalg.qr(seen.t()).Q.t()  # [guess, in]
        if (checked - (checked @ basis.t()) @ basis).norm() <= tolerance * checked.norm():
            _, values, turn = torch.linalg.svd(wide @ basis.t(), full_matrices=False)
            found: torch.Tensor = (turn[values > ROUNDING * values.max()] @ basis).to(delta.dtype)
            return found
        guess = limit + 1 if guess == limit else min(guess * 2, limit)
    return None
