"""Deferred results: calls that are not made until their value is looked at, and then made together.

Between two attentions of a decoder nothing of a frozen layer's work needs the client: o_proj, add, norm,
MLP, add, norm, q/k/v. These modules hand out `Deferred` tensors instead of calling; adding two of them, or norming
one, defers too. The first operation of another kind, such as the next attention's use of q, or an adapter's of the
normed residual, runs what is `pending` as one segment. With gradients, that segment is one node of autograd.

One rule: a Deferred is a tensor to everybody. Whatever is not understood here gets the real value, so an
unknown architecture, a hook or an adapter in between makes more calls, never another result. The steps are
those the model itself takes: no table of families says what lies between two attentions.

Rejected: replacing the `forward` of decoder layers family by family. It goes stale with each release of
transformers, and hides that a layer was changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils import _pytree as pytree

from symbiosis import pending
from symbiosis.flight.protocol import Step
from symbiosis.pending import Deferrals, Node

ADDS = (torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.add)
ADDS_IN_PLACE = (torch.Tensor.add_, torch.Tensor.__iadd__)
SCALES = (torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.mul)
DROPOUTS = (functional.dropout, torch.dropout)
# Questions about a tensor that its stand-in answers itself.
QUESTIONS = {
    *("size", "dim", "ndimension", "numel", "element_size", "is_floating_point", "is_complex"),
    *("get_device", "__hash__", "__len__", "is_contiguous", "is_signed"),
}
# Attributes that only the value has.
VALUES = {
    *("data", "T", "mT", "H", "mH", "real", "grad", "grad_fn", "is_leaf", "output_nr", "retains_grad"),
    *("_base", "_grad", "_backward_hooks", "_post_accumulate_grad_hooks"),
}


class Deferred(torch.Tensor):
    """A tensor whose value is computed when it is looked at.

    What a layer asks dozens of times is answered by plain properties: torch's own go through `__torch_function__`.
    """

    node: Node
    _dtype: torch.dtype
    _device: torch.device
    _became: int  # how often it was changed in place without a value

    @staticmethod
    def __new__(cls, node: Node, dtype: torch.dtype, device: torch.device) -> Deferred:
        deferred: Deferred = torch.Tensor._make_wrapper_subclass(cls, node.shape, dtype=dtype, device=device)
        deferred.node, deferred._dtype, deferred._device, deferred._became = node, dtype, device, 0
        node.holder = weakref.ref(deferred)
        return deferred

    def __init__(self, *_: object) -> None:
        super().__init__()

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.node.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    @property
    def _version(self) -> int:  # type: ignore[override]
        """Changes in place, of this tensor or of its value."""
        value = self.node.value
        return self._became + (0 if value is None else value._version - self.node.value_version)

    def is_inference(self) -> bool:
        return False  # nothing is put off in inference mode

    @property
    def is_pending(self) -> bool:
        """Whether more can be put off on top of it, here and now."""
        return self.node.value is None and self.node.records == torch.is_grad_enabled() and deferring()

    def become(self, other: Deferred) -> Deferred:
        """Stand for another value from now on. What was computed from this one before keeps the old one."""
        self.node.holder = None
        self.node = other.node
        self.node.holder = weakref.ref(self)
        self._became += 1
        return self

    # Dynamo would trace into calls and clocks; stand-ins are opaque to it as well.
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        put_off = _put_off(func, args, kwargs)
        if put_off is not None:
            return put_off
        if _asks(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*map(_looked, args), **{name: _looked(arg) for name, arg in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Operations of C++ that do not ask `__torch_function__` get the value here; autograd has seen them before."""
        args, kwargs = pytree.tree_map_only(Deferred, lambda late: pending.value_aside(late.node), (args, kwargs or {}))
        return func(*args, **kwargs)


class _Promise(torch.autograd.Function):
    """A deferred tensor as a function of what it will be computed from.

    Most who use it ask `__torch_function__`, get the value, and never see this. Who does not ask (another autograd
    Function, as a reentrant checkpoint is, or the engine) has the right gradient all the same.
    """

    @staticmethod
    def forward(ctx: Any, node: Node, dtype: torch.dtype, device: torch.device, *roots: torch.Tensor) -> torch.Tensor:
        ctx.node, ctx.roots = node, roots
        return Deferred(node, dtype, device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        totals: dict[int, torch.Tensor] = {}
        for root, own in pending.gradients_of(ctx.node, grad):
            totals[id(root)] = totals[id(root)] + own if id(root) in totals else own
        return None, None, None, *(totals.get(id(root)) for root in ctx.roots)


def _promised(node: Node, like: torch.Tensor) -> Deferred:
    if node.roots:
        return _Promise.apply(node, like.dtype, like.device, *node.roots)  # type: ignore[no-untyped-call, no-any-return]
    return Deferred(node, like.dtype, like.device)


def _put_off(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result of an operation that can be put off; None if it cannot."""
    if func in DROPOUTS:
        return args[0] if args and isinstance(args[0], Deferred) and not _drops(args, kwargs) else None
    if len(args) != 2 or kwargs:
        return None
    late = [arg for arg in args if isinstance(arg, Deferred)]
    if func in ADDS and _same_place(*args) and deferring():
        deferrals = late[0].node.deferrals
        if not all(isinstance(arg, Deferred) or deferrals.has_seen(arg) for arg in args):
            return None
        node = Node(deferrals, Step("add", (), ()), [_node_of(arg) for arg in args], args[0].shape)
        return _promised(node, args[0]) if pending.fits(node) else None
    if func in ADDS_IN_PLACE and isinstance(args[0], Deferred) and args[0].is_pending and not torch.is_grad_enabled():
        total = _put_off(torch.add, args, kwargs)
        return args[0].become(total) if isinstance(total, Deferred) else None
    if func in SCALES and isinstance(args[0], Deferred) and isinstance(args[1], float) and deferring():
        before = args[0].node
        return _promised(Node(before.deferrals, Step("scale", (), (), args[1]), [before], before.shape), args[0])
    return None


def _drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a dropout's arguments (input, p, training) let it drop anything."""
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training and p)


def _node_of(arg: torch.Tensor) -> Node | torch.Tensor:
    return arg.node if isinstance(arg, Deferred) else arg


def _same_place(a: Any, b: Any) -> bool:
    """Whether two tensors can be added on the server: neither broadcast nor cast, nor free to change unseen."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return alike and not a.is_inference() and not b.is_inference()


def _asks(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in VALUES
    return name in QUESTIONS


def deferring(*, training: bool = False) -> bool:
    """Whether results may be put off just now: nothing casts, hides in-place changes, or will run this again.

    Args:
        training: whether the module that asks is in training mode. If it is and no gradient is recorded, a
            reentrant checkpoint may be around it, which takes results for its own before they are looked at.
    """
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return False
    if not torch.is_grad_enabled():
        return not training
    # Hooks on what autograd saves are a checkpoint's, which runs the layer again and has to find the same.
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is None and torch._C._current_graph_task_id() < 0


class Laziness:
    """Whether a module puts its results off: not where they are looked at for themselves, as q is by attention.

    Learnt with and without gradients apart: dropout looks in training, and nobody in generation.

    Args:
        ever: False for a module that has no reason to.
    """

    def __init__(self, ever: bool) -> None:
        self._ever = ever
        self._looked_at: set[bool] = set()

    def __bool__(self) -> bool:
        return self._ever and torch.is_grad_enabled() not in self._looked_at

    def looked_at(self, records: bool) -> None:
        """Learn that a result was needed at once."""
        self._looked_at.add(records)


def defer(
    deferrals: Deferrals,
    step: Step,
    x: torch.Tensor,
    width: int,
    local: Callable[[torch.Tensor], torch.Tensor] | None = None,
    looked_at: Callable[[bool], None] | None = None,
) -> Deferred:
    """Put off one step on x [..., d]; a tensor [..., width]."""
    return _promised(Node(deferrals, step, [_node_of(x)], (*x.shape[:-1], width), local, looked_at), x)


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """The value of a tensor that may be deferred; everything else is returned as it is."""
    return pending.value_of(tensor.node) if isinstance(tensor, Deferred) else tensor


def linears_of(tensor: Deferred, names: Sequence[str], widths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Products of a pending tensor with several weights, in the call that it was waiting for; [..., d_out] each."""
    return pending.run(tensor.node, names, widths)


def fits(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be put off further."""
    return not isinstance(tensor, Deferred) or pending.fits(tensor.node)


def _looked(arg: Any) -> Any:
    """An argument with the values of what is deferred, also inside of it."""
    if isinstance(arg, Deferred):
        return _look(arg)
    return pytree.tree_map_only(Deferred, _look, arg) if isinstance(arg, (list, tuple, dict)) else arg


def _look(tensor: Deferred) -> torch.Tensor:
    node = tensor.node
    # To look at a norm is to look at the product that it norms: k, where attention norms it.
    args = [arg for arg in node.args if isinstance(arg, Node)] if node.local else []
    for looked in (node, *(arg for arg in args if arg.value is None and arg.step.do in ("linears", "bias"))):
        if looked.looked_at is not None:
            looked.looked_at(looked.records)
    return value_of(tensor)
