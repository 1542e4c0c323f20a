"""Expression: what can be computed with a frozen weight that is not here.

A frozen weight W is two functions of activations, x -> x Wᵀ and y -> y W, and so is all that is built of it by
products, sums and scaling:

    F.linear(x, s * (W + B A) @ R)   =   s * (x Rᵀ Wᵀ + x Rᵀ Aᵀ Bᵀ)        one call; no value of W is needed

So a layer that adapts its weight instead of its output (HRA, SHiRA, a LoRA written by hand, a parametrization)
works as it is written. Two more things are known of W: the norms of its rows and columns, which the server
publishes; with them ||W + B A|| (DoRA) takes one call more.

One rule: a matrix of adapter values goes to the server only if `reveals` says so. Activations go there anyway;
the rows of A, sent by themselves, would show the adapter. What is as wide as W itself is never computed: that
would be reading W out.

Rejected: a branch per peft method, each with its own way around the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from symbiosis.advice import refusal
from symbiosis.errors import UnsupportedMethodError


class Operator(Protocol):
    """A frozen weight [d_out, d_in] that is somewhere else."""

    name: str
    reveals: bool  # whether adapter values may be sent as if they were activations

    @property
    def shape(self) -> tuple[int, int]: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., d_in] -> [..., d_out], differentiable."""

    def grad_input(self, y: torch.Tensor) -> torch.Tensor:
        """[..., d_out] -> [..., d_in], differentiable."""

    def norms(self, dim: int) -> torch.Tensor:
        """Over dim 1: of the rows, [d_out]; over dim 0: of the columns, [d_in]."""

    def inner(self, delta: torch.Tensor) -> torch.Tensor:
        """<D_o, W_o> for each row o of a D [d_out, d_in] of low rank; [d_out]."""


# --- what an expression is made of ------------------------------------------------------------------


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
        flat = torch.sparse.mm(value, x.reshape(-1, x.shape[-1]).t()).t()  # [N, out]
        return flat.reshape(*x.shape[:-1], value.shape[0])

    def transposed(self) -> Dense:
        return Dense(self.value.t())


@dataclass(frozen=True)
class Diagonal:
    """diag(vector), or a multiple of the identity where the vector has one element."""

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


Node = Weight | Dense | Diagonal | Product | Sum


def _leaves(node: Node) -> Iterator[Weight | Dense | Diagonal]:
    if isinstance(node, Product):
        yield from (*_leaves(node.first), *_leaves(node.second))
    elif isinstance(node, Sum):
        for term in node.terms:
            yield from _leaves(term)
    else:
        yield node


def _mapped(node: Node, change: Callable[[torch.Tensor], torch.Tensor]) -> Node:
    """The same expression with every tensor that is here changed."""
    if isinstance(node, Dense):
        return Dense(change(node.value))
    if isinstance(node, Diagonal):
        return Diagonal(change(node.vector), node.size)
    if isinstance(node, Product):
        return Product(_mapped(node.first, change), _mapped(node.second, change))
    return Sum(tuple(_mapped(term, change) for term in node.terms)) if isinstance(node, Sum) else node


# --- the tensor that stands for it --------------------------------------------------------------------


class Expression(torch.Tensor):
    """A matrix that is computed only when it is applied to something."""

    node: Node

    @staticmethod
    def __new__(cls, node: Node, dtype: torch.dtype, device: torch.device) -> Expression:
        made: Expression = torch.Tensor._make_wrapper_subclass(cls, node.shape, dtype=dtype, device=device)
        made.node = node
        return made

    def __init__(self, node: Node, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Expression(shape={tuple(self.node.shape)}, of {_name(self.node)}, held by the server)"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(getattr(func, "__name__", ""))
        if rule is not None and (result := rule(*args, **kwargs)) is not NotImplemented:
            return result
        if _only_asks(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        operation = getattr(func, "__name__", str(func))
        args, kwargs = pytree.tree_map_only(Expression, lambda e: value_of(e, operation), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Operations of C++ that do not ask `__torch_function__` get the value here, if there is one."""
        values = pytree.tree_map_only(Expression, lambda e: value_of(e, str(func)), (args, kwargs or {}))
        return func(*values[0], **values[1])


def expression_of(operator: Operator, flipped: bool, dtype: torch.dtype, device: torch.device) -> Expression:
    """The weight itself, as an expression; flipped where it is stored as [d_in, d_out]."""
    return Expression(Weight(operator, flipped), dtype, device)


def value_of(expression: Expression, operation: str) -> torch.Tensor:
    """The value of a matrix that is thinner than the weight, [out, in]; its own values are sent for that.

    Raises:
        UnsupportedMethodError: it is not thinner, or the server may not see adapter values.
    """
    node = expression.node
    weights = [leaf.operator for leaf in _leaves(node) if isinstance(leaf, Weight)]
    if not all(min(node.shape) < min(operator.shape) for operator in weights):
        raise UnsupportedMethodError(refusal(operation, _name(node)))
    _check_reveals(node, operation)
    rows, columns = node.shape
    if columns <= rows:
        return node.apply(_eye(columns, expression)).t()
    return node.transposed().apply(_eye(rows, expression))


def _eye(size: int, like: torch.Tensor) -> torch.Tensor:
    return torch.eye(size, dtype=like.dtype, device=like.device)


def _check_reveals(node: Node, operation: str) -> None:
    if all(leaf.operator.reveals for leaf in _leaves(node) if isinstance(leaf, Weight)):
        return
    raise UnsupportedMethodError(
        f"{refusal(operation, _name(node))}. What is asked for can be computed by the server, but only from values of "
        "the adapter, which it would then see: symbiosis.connect(url, reveal_adapter=True) allows that"
    )


def _name(node: Node) -> str:
    return next((leaf.operator.name for leaf in _leaves(node) if isinstance(leaf, Weight)), "")


def _only_asks(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in QUESTIONS or name in ("__get__", "__set__")


# --- rules: one per operation that keeps to what can be computed ----------------------------------------


def _like(expression: Expression, node: Node) -> Expression:
    return Expression(node, expression.dtype, expression.device)


def _node(value: torch.Tensor) -> Node:
    return value.node if isinstance(value, Expression) else Dense(value)


def _linear(x: Any, weight: Any, bias: torch.Tensor | None = None) -> Any:
    if not isinstance(weight, Expression) or isinstance(x, Expression):
        return NotImplemented
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    y = weight.node.apply(x).to(dtype)
    return y if bias is None else y + bias.to(dtype)


def _matmul(first: Any, second: Any) -> Any:
    if second.dim() == 1:
        return _linear(second, first)
    if isinstance(second, Expression) and first.dim() != 2:  # activations [..., d] or [d]
        return _linear(first, _transpose(second))
    if second.dim() != 2:
        return NotImplemented
    known = first if isinstance(first, Expression) else second
    return _like(known, Product(_node(first), _node(second)))


def _transpose(expression: Expression, *dims: int) -> Any:
    return expression if dims and dims[0] % 2 == dims[1] % 2 else _like(expression, expression.node.transposed())


def _add(first: Any, second: Any, *, alpha: float = 1) -> Any:
    if not (_is_matrix(first) and _is_matrix(second) and first.shape == second.shape):
        return NotImplemented
    known = first if isinstance(first, Expression) else second
    return _like(known, Sum((_node(first), _scaled(_node(second), alpha))))


def _sub(first: Any, second: Any, *, alpha: float = 1) -> Any:
    return _add(first, second, alpha=-alpha)


def _mul(first: Any, second: Any) -> Any:
    known, factor = (first, second) if isinstance(first, Expression) else (second, first)
    return _scale(known, factor)


def _div(first: Any, second: Any) -> Any:
    return NotImplemented if isinstance(second, Expression) else _scale(first, 1 / second)


def _scale(expression: Expression, factor: Any) -> Any:
    """Times a scalar, a column [out, 1] or a row [in] or [1, in]; whatever is as large as the weight is not linear in x."""
    node = expression.node
    if not isinstance(factor, torch.Tensor) or factor.numel() == 1:
        return _like(expression, _scaled(node, factor))
    if isinstance(factor, Expression) or factor.dim() > 2:
        return NotImplemented
    if factor.shape == (node.shape[0], 1):
        return _like(expression, Product(Diagonal(factor.reshape(-1), node.shape[0]), node))
    if factor.shape in ((node.shape[1],), (1, node.shape[1])):
        return _like(expression, Product(node, Diagonal(factor.reshape(-1), node.shape[1])))
    return NotImplemented


def _scaled(node: Node, factor: Any) -> Node:
    if not isinstance(factor, torch.Tensor) and factor == 1:
        return node
    if isinstance(node, Dense):
        return Dense(node.value * factor)
    vector = factor.reshape(1) if isinstance(factor, torch.Tensor) else torch.tensor([factor])
    return Product(Diagonal(vector, node.shape[0]), node)


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2


def _in_place(rule: Callable[..., Any]) -> Callable[..., Any]:
    def change(expression: Any, *args: Any, **kwargs: Any) -> Any:
        result = rule(expression, *args, **kwargs) if isinstance(expression, Expression) else NotImplemented
        if result is NotImplemented:
            return result
        expression.node = result.node
        return expression

    return change


def _cast(expression: Any, *args: Any, **kwargs: Any) -> Any:
    """Whatever `.to()` says of dtype and device, said of the parts that are here."""
    if not isinstance(expression, Expression):
        return NotImplemented
    empty = torch.empty(0, dtype=expression.dtype, device=expression.device).to(*args, **kwargs)
    return Expression(_mapped(expression.node, lambda t: t.to(empty)), empty.dtype, empty.device)


def _detach(expression: Expression) -> Expression:
    return _like(expression, _mapped(expression.node, torch.Tensor.detach))


def _same(expression: Expression, *args: Any, **kwargs: Any) -> Expression:
    return _like(expression, expression.node)


def _norm(expression: Any, *args: Any, dim: Any = None, **kwargs: Any) -> Any:
    """The Euclidean norm of each row (dim=1) or column (dim=0)."""
    order = kwargs.pop("p", kwargs.pop("ord", args[0] if args else 2))
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    if order not in (2, None, "fro") or len(dims) != 1 or any(kwargs.values()) or len(args) > 1:
        return NotImplemented
    return row_norms(expression.node if dims[0] % 2 else expression.node.transposed()).to(expression.dtype)


def row_norms(node: Node) -> torch.Tensor:
    """||W_o + D_o|| = sqrt(||W_o||² + 2 <D_o, W_o> + ||D_o||²) for each row o; without a gradient, as DoRA wants it.

    Raises:
        UnsupportedMethodError: neither a weight nor the sum of one and a matrix that is here.
    """
    terms = node.terms if isinstance(node, Sum) else (node,)
    weights = [term for term in terms if isinstance(term, Weight)]
    deltas = [term for term in terms if isinstance(term, Dense)]
    if len(weights) != 1 or len(deltas) + 1 != len(terms):
        raise UnsupportedMethodError(refusal("norm", _name(node)))
    (weight,) = weights
    norms = weight.operator.norms(0 if weight.flipped else 1)
    if not deltas:
        return norms
    _check_reveals(node, "norm")
    with torch.no_grad():
        delta = reduce(torch.add, (term.value.to_dense() for term in deltas))
        squares = norms.double().square() + 2 * _inner(weight, delta).double() + delta.double().square().sum(1)
        return squares.clamp_min(0).sqrt()


def _inner(weight: Weight, delta: torch.Tensor) -> torch.Tensor:
    if weight.flipped:
        raise UnsupportedMethodError(refusal("norm", weight.operator.name))
    return weight.operator.inner(delta)
