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

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbiosis.advice import refusal
from symbiosis.errors import UnsupportedMethodError
from symbiosis.matrix import (
    Dense,
    Diagonal,
    Node,
    Product,
    Select,
    Sum,
    Weight,
    check_reveals,
    leaves,
    mapped,
    name_of,
    terms_of,
)
from symbiosis.row_norms import row_norms

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
        return f"Expression(shape={tuple(self.node.shape)}, of {name_of(self.node)}, held by the server)"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "as_expression") for kind in types):
            return NotImplemented  # its own handler turns it into an expression, and comes back
        kwargs = kwargs or {}
        operation = operation_of(func)
        rule = RULES.get(operation)
        if rule is not None and (result := rule(*args, **kwargs)) is not NotImplemented:
            return result
        if operation in QUESTIONS or operation.startswith("."):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Expression, lambda e: value_of(e, operation), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Operations of C++ that do not ask `__torch_function__` get the value here, if there is one."""
        values = pytree.tree_map_only(Expression, lambda e: value_of(e, str(func)), (args, kwargs or {}))
        return func(*values[0], **values[1])


def value_of(expression: Expression, operation: str) -> torch.Tensor:
    """The value of a matrix that is thinner than the weight, [out, in]; its own values are sent for that.

    Raises:
        UnsupportedMethodError: it is not thinner, or the server may not see adapter values.
    """
    node = expression.node
    weights = [leaf.operator for leaf in leaves(node) if isinstance(leaf, Weight)]
    whole = not any(isinstance(leaf, Select) for leaf in leaves(node))  # rows of W are no product with it
    if not whole or not all(min(node.shape) < min(operator.shape) for operator in weights):
        raise UnsupportedMethodError(refusal(operation, name_of(node)))
    check_reveals(node, operation)
    rows, columns = node.shape
    with weights[0].aside():
        if columns <= rows:
            return node.apply(_eye(columns, expression)).t()
        return node.transposed().apply(_eye(rows, expression))


def _eye(size: int, like: torch.Tensor) -> torch.Tensor:
    return torch.eye(size, dtype=like.dtype, device=like.device)


def operation_of(func: Any) -> str:
    """The name of a torch function; that of a property begins with a dot, and ends with = where it is set."""
    name: str = getattr(func, "__name__", str(func))
    if name not in ("__get__", "__set__", "__delete__"):
        return name
    return "." + getattr(getattr(func, "__self__", None), "__name__", "") + ("=" if name == "__set__" else "")


# --- rules: one per operation that keeps to what can be computed ----------------------------------------


def _like(expression: Expression, node: Node) -> Expression:
    return Expression(node, expression.dtype, expression.device)


def _node(value: torch.Tensor) -> Node:
    return value.node if isinstance(value, Expression) else Dense(value)


def _linear(input: Any, weight: Any, bias: torch.Tensor | None = None) -> Any:
    if not isinstance(weight, Expression) or isinstance(input, Expression):
        return NotImplemented
    kind = input.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
    y = weight.node.apply(input).to(dtype)
    return y if bias is None else y + bias.to(dtype)


def _matmul(input: Any, other: Any, *, out: Any = None) -> Any:
    """Of activations [batch, tokens, d] at once; of two matrices later: the product may be part of a weight."""
    if isinstance(other, Expression) and (input.dim() > 2 or out is not None):
        product = _linear(input, _transpose(other))
        return product if out is None or product is NotImplemented else out.copy_(product)
    if out is not None:
        return NotImplemented
    if isinstance(input, Expression) and other.dim() > 2:  # [d_out, d_in] @ [batch, d_in, tokens], as in Mamba
        return _linear(other.transpose(-1, -2), input).transpose(-1, -2)
    if input.dim() != 2 or other.dim() != 2:
        return NotImplemented
    known = input if isinstance(input, Expression) else other
    return _like(known, Product(_node(input), _node(other)))


def _addmm(
    input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1, out: Any = None, out_dtype: Any = None
) -> Any:
    """beta * input + alpha * mat1 @ mat2"""
    if not isinstance(mat2, Expression) or isinstance(input, Expression):
        return NotImplemented
    product = _linear(mat1, _transpose(mat2))
    if product is NotImplemented:
        return NotImplemented
    total = input * beta + product.to(out_dtype or product.dtype) * alpha
    return total if out is None else out.copy_(total)


def _addmm_in_place(input: Any, mat1: Any, mat2: Any, **kwargs: Any) -> Any:
    return _addmm(input, mat1, mat2, **kwargs, out=input)


def _getitem(expression: Any, index: Any) -> Any:
    """Some of the rows, as losses that go through a large vocabulary by parts ask for them."""
    if not (isinstance(expression, Expression) and isinstance(index, slice) and index.step in (None, 1)):
        return NotImplemented
    size = expression.node.shape[0]
    start, stop, _ = index.indices(size)
    if (start, stop) == (0, size):
        return _same(expression)
    return _like(expression, Product(Select(start, max(start, stop), size), expression.node))


def _index_copy(input: Any, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
    """Rows replaced by others, as trained tokens are in a tied head: diag(kept) W + S R, S [out, k] says where."""
    if not isinstance(input, Expression) or isinstance(source, Expression) or dim % 2:
        return NotImplemented
    rows, replaced = input.node.shape[0], len(index)
    kept = source.new_ones(rows).index_fill(0, index, 0)
    places = torch.stack([index, torch.arange(replaced, device=index.device)])
    where = torch.sparse_coo_tensor(places, source.new_ones(replaced), (rows, replaced), check_invariants=False)
    return _like(input, Sum((Product(Diagonal(kept, rows), input.node), Product(Dense(where), Dense(source)))))


def _transpose(expression: Expression, dim0: int = 0, dim1: int = 1) -> Any:
    return expression if dim0 % 2 == dim1 % 2 else _like(expression, expression.node.transposed())


def _add(input: Any, other: Any, *, alpha: float = 1) -> Any:
    known, added = (input, other) if isinstance(input, Expression) else (other, input)
    wide = _spread(added, known)
    if wide is None:
        return NotImplemented
    first, second = (known.node, wide) if known is input else (wide, known.node)
    return _like(known, Sum((*terms_of(first), *terms_of(_scaled(second, alpha)))))


def _sub(input: Any, other: Any, *, alpha: float = 1) -> Any:
    return _add(input, other, alpha=-alpha)


def _spread(value: Any, like: Expression) -> Node | None:
    """A matrix, column, row or scalar as a node of the shape of an expression; None where it does not fit."""
    rows, columns = like.node.shape
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(float(value), dtype=like.dtype, device=like.device)
    if value.shape == (rows, columns):
        return _node(value)
    ones = torch.ones(1, 1, dtype=value.dtype, device=value.device)
    if value.numel() == 1 or value.shape == (rows, 1):
        return Product(Dense(value.reshape(-1, 1).expand(rows, 1)), Dense(ones.expand(1, columns)))
    if value.shape in ((columns,), (1, columns)):
        return Product(Dense(ones.expand(rows, 1)), Dense(value.reshape(1, -1)))
    return None


def _mul(input: Any, other: Any) -> Any:
    """Times a scalar, a column [out, 1] or a row [in]; what is as large as the weight makes no product of calls."""
    known, factor = (input, other) if isinstance(input, Expression) else (other, input)
    node = known.node
    if not isinstance(factor, torch.Tensor) or factor.numel() == 1:
        return _like(known, _scaled(node, factor))
    if isinstance(factor, Expression):
        return NotImplemented
    if factor.shape == (node.shape[0], 1):
        return _like(known, Product(Diagonal(factor.reshape(-1), node.shape[0]), node))
    if factor.shape in ((node.shape[1],), (1, node.shape[1])):
        return _like(known, Product(node, Diagonal(factor.reshape(-1), node.shape[1])))
    return NotImplemented


def _div(input: Any, other: Any) -> Any:
    return NotImplemented if isinstance(other, Expression) else _mul(input, 1 / other)


def _scaled(node: Node, factor: Any) -> Node:
    if not isinstance(factor, torch.Tensor) and factor == 1:
        return node
    if isinstance(node, Dense):
        return Dense(node.value * factor)
    vector = factor.reshape(()) if isinstance(factor, torch.Tensor) else torch.tensor(float(factor))
    return Product(Diagonal(vector, node.shape[0]), node)


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
    like = torch.empty(0, dtype=expression.dtype, device=expression.device).to(*args, **kwargs)
    return Expression(mapped(expression.node, lambda t: t.to(like)), like.dtype, like.device)


def _same(expression: Expression, *args: Any, **kwargs: Any) -> Expression:
    return _like(expression, expression.node)


def _detached(expression: Expression) -> Expression:
    return _like(expression, mapped(expression.node, torch.Tensor.detach))


def _norm(expression: Any, *args: Any, dim: Any = None, **kwargs: Any) -> Any:
    """The Euclidean norm of each row (dim=1) or column (dim=0)."""
    order = kwargs.pop("p", kwargs.pop("ord", args[0] if args else 2))
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    if order not in (2, None, "fro") or len(dims) != 1 or any(kwargs.values()) or len(args) > 1:
        return NotImplemented
    return row_norms(expression.node if dims[0] % 2 else expression.node.transposed()).to(expression.dtype)


# Questions about a tensor that its stand-in answers itself.
QUESTIONS = frozenset(
    [
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_inference", "is_floating_point"),
        *("is_complex", "get_device", "__hash__", "__len__", "is_contiguous", "is_signed", "requires_grad_"),
    ]
)
RULES: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "__matmul__"), _matmul),
    "__rmatmul__": lambda other, input: _matmul(input, other),
    "addmm": _addmm,
    "index_copy": _index_copy,
    "addmm_": _addmm_in_place,
    "__getitem__": _getitem,
    **dict.fromkeys(("t", "transpose", "swapaxes", ".T", ".mT"), _transpose),
    **dict.fromkeys(("add", "__add__", "__radd__"), _add),
    **dict.fromkeys(("sub", "__sub__", "subtract"), _sub),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply"), _mul),
    **dict.fromkeys(("div", "__truediv__", "true_divide"), _div),
    **dict.fromkeys(("neg", "__neg__"), lambda expression: _mul(expression, -1)),
    **dict.fromkeys(("add_", "__iadd__"), _in_place(_add)),
    **dict.fromkeys(("sub_", "__isub__"), _in_place(_sub)),
    **dict.fromkeys(("mul_", "__imul__"), _in_place(_mul)),
    "to": _cast,
    "type_as": _cast,
    "float": lambda expression: _cast(expression, torch.float32),
    "half": lambda expression: _cast(expression, torch.float16),
    "bfloat16": lambda expression: _cast(expression, torch.bfloat16),
    **dict.fromkeys(("clone", "contiguous"), _same),
    **dict.fromkeys(("detach", ".data"), _detached),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), _norm),
}
