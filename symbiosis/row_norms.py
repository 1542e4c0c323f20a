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
    norms = weights[0].operator.norms(0 if weights[0].flipped else 1)
    if not deltas:
        return norms
    check_reveals(node, "norm")
    delta = reduce(torch.add, (value.to_dense() for value in deltas))
    norms = norms.to(delta.device)
    with torch.no_grad():
        squares = norms.double().square() + delta.double().square().sum(1)
        memory = weights[0].operator.inner_products
        squares += 2 * memory.result(delta, lambda d: _inner(weights[0], d)).double()
        norms = squares.clamp_min(0).sqrt()
    if not delta.requires_grad:
        return norms
    return _NormsOnly.apply(delta, norms, name_of(node))  # type: ignore[no-untyped-call, no-any-return]


def _inner(weight: Weight, delta: torch.Tensor) -> torch.Tensor:
    """<D_o, W_o> for each row o."""
    basis = row_basis(delta)
    if basis is None:
        raise UnsupportedMethodError(refusal("norm of a sum with a matrix of high rank", weight.operator.name))
    if not len(basis):
        return delta.new_zeros(delta.shape[0])
    with weight.operator.aside():
        product = weight.apply(basis)  # [k, in] @ [in, out]
    # D = (D Vᵀ) V, so <D_o, W_o> = (D Vᵀ)_o (V Wᵀ)_o: [out, k] * [k, out]ᵀ
    return ((delta @ basis.t()) * product.t()).sum(1)


def row_basis(delta: torch.Tensor) -> torch.Tensor | None:
    """Orthonormal V [k, in] with D = D Vᵀ V, k the rank of D [out, in]; None if k is above half its size.

    A randomised range finder (Halko, Martinsson and Tropp 2011, algorithm 4.2) that doubles its guess of k, and a
    small decomposition that then takes away what it guessed too much.
    """
    rows, columns = delta.shape
    limit = min(rows, columns) // 2
    wide = delta.double()
    size, tolerance = wide.norm(), 4 * torch.finfo(delta.dtype).eps
    generator = torch.Generator(delta.device).manual_seed(0)
    guess = min(8, limit)
    while 0 < guess <= limit:
        probe = torch.randn(guess, rows, generator=generator, device=delta.device, dtype=wide.dtype)
        basis = torch.linalg.qr((probe @ wide).t()).Q.t()  # [guess, in]
        inside = wide @ basis.t()  # [out, guess]
        if (wide - inside @ basis).norm() <= tolerance * size:
            _, values, turn = torch.linalg.svd(inside, full_matrices=False)
            found: torch.Tensor = (turn[values > tolerance * size] @ basis).to(delta.dtype)
            return found
        guess = limit + 1 if guess == limit else min(guess * 2, limit)
    return None
