"""What an Expression is made of: frozen weights that are elsewhere, matrices that are here, products and sums.

One rule: a matrix M [out, in] is what it does: `apply` maps x [..., in] to x Mᵀ [..., out], and `transposed` is a
matrix again. None is computed for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch.nn import functional

from symbiosis.advice import refusal
from symbiosis.errors import UnsupportedMethodError
from symbiosis.remembered import Remembered


class Operator(Protocol):
    """A frozen weight [d_out, d_in] that is somewhere else."""

    name: str
    inner_products: Remembered

    @property
    def reveals(self) -> bool:
        """Whether adapter values may be sent as if they were activations."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., d_in] -> [..., d_out], differentiable."""

    def grad_input(self, y: torch.Tensor) -> torch.Tensor:
        """[..., d_out] -> [..., d_in], differentiable."""

    def aside(self) -> AbstractContextManager[None]:
        """Around calls on what is no activation: they say nothing about which layers share an input."""

    def norms(self, dim: int) -> torch.Tensor:
        """Over dim 1: of the rows, [d_out]; over dim 0: of the columns, [d_in]."""


@dataclass(frozen=True)
class Weight:
    """The frozen weight, or its transpose."""

    operator: Operator
    flipped: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        d_out, d_in = self.operator.shape
        return (d_in, d_out) if self.flipped else (d_out, d_in)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self.operator.grad_input(x) if self.flipped else self.operator.forward(x)

    def transposed(self) -> Weight:
        return Weight(self.operator, not self.flipped)


@dataclass(frozen=True)
class Dense:
    """A matrix that is here, dense or sparse."""

    value: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return (self.value.shape[0], self.value.shape[1])

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        value = self.value.to(x.dtype)
        if not value.is_sparse:
            return functional.linear(x, value)
        flat: torch.Tensor = torch.sparse.mm(value, x.reshape(-1, x.shape[-1]).t()).t()  # [N, out]
        return flat.reshape(*x.shape[:-1], value.shape[0])

    def transposed(self) -> Dense:
        return Dense(self.value.t())


@dataclass(frozen=True)
class Diagonal:
    """diag(vector), or a multiple of the identity where the vector is a scalar."""

    vector: torch.Tensor
    size: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.size, self.size)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.vector.to(x.dtype)

    def transposed(self) -> Diagonal:
        return self


@dataclass(frozen=True)
class Select:
    """Rows start to stop of the identity: of a product, the part that somebody asked for."""

    start: int
    stop: int
    size: int
    flipped: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        picked = self.stop - self.start
        return (self.size, picked) if self.flipped else (picked, self.size)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        if self.flipped:
            return functional.pad(x, (self.start, self.size - self.stop))
        return x[..., self.start : self.stop]

    def transposed(self) -> Select:
        return Select(self.start, self.stop, self.size, not self.flipped)


@dataclass(frozen=True)
class Product:
    """first @ second"""

    first: Node
    second: Node

    @property
    def shape(self) -> tuple[int, int]:
        return (self.first.shape[0], self.second.shape[1])

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self.first.apply(self.second.apply(x))

    def transposed(self) -> Product:
        return Product(self.second.transposed(), self.first.transposed())


@dataclass(frozen=True)
class Sum:
    """The sum of its terms, all of one shape."""

    terms: tuple[Node, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.terms[0].shape

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]: x @ selfᵀ, as of every node."""
        return reduce(torch.add, (term.apply(x) for term in self.terms))

    def transposed(self) -> Sum:
        return Sum(tuple(term.transposed() for term in self.terms))


Node = Weight | Dense | Diagonal | Select | Product | Sum


def leaves(node: Node) -> Iterator[Weight | Dense | Diagonal | Select]:
    """The matrices that a matrix is made of."""
    if isinstance(node, Product):
        yield from (*leaves(node.first), *leaves(node.second))
    elif isinstance(node, Sum):
        for term in node.terms:
            yield from leaves(term)
    else:
        yield node


def mapped(node: Node, change: Callable[[torch.Tensor], torch.Tensor]) -> Node:
    """The same expression with every tensor that is here changed."""
    if isinstance(node, Dense):
        return Dense(change(node.value))
    if isinstance(node, Diagonal):
        return Diagonal(change(node.vector), node.size)
    if isinstance(node, Product):
        return Product(mapped(node.first, change), mapped(node.second, change))
    return Sum(tuple(mapped(term, change) for term in node.terms)) if isinstance(node, Sum) else node


def terms_of(node: Node) -> tuple[Node, ...]:
    """What a matrix is the sum of."""
    return node.terms if isinstance(node, Sum) else (node,)


def check_reveals(node: Node, operation: str) -> None:
    """Before matrices that are here are sent by themselves.

    Raises:
        UnsupportedMethodError: the server may not see them.
    """
    if all(leaf.operator.reveals for leaf in leaves(node) if isinstance(leaf, Weight)):
        return
    raise UnsupportedMethodError(
        f"{refusal(operation, name_of(node))}. What is asked for can be computed by the server, but only from values "
        "of the adapter, which it would then see: symbiosis.connect(url, reveal_adapter=True) allows that"
    )


def name_of(node: Node) -> str:
    """The module of the frozen weight in it."""
    return next((leaf.operator.name for leaf in leaves(node) if isinstance(leaf, Weight)), "")
