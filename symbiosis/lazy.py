"""Deferred results: calls that are not made until their value is looked at, and then made together.

Between two attentions of a decoder nothing of a frozen layer's work needs the client: o_proj, add, norm,
MLP, add, norm, q/k/v. Without gradients to record, these modules hand out `Deferred` tensors instead of
calling; adding two of them, or norming one, defers too. The first operation of another kind, such as the
next attention's use of q, sends what has been put off as one *segment* (docs/protocol.md section 4).

One rule: a Deferred is a tensor to everybody. Whatever is not understood here gets the real value, so an
unknown architecture, a hook or an adapter in between makes more calls, never another result. The steps are
those the model itself takes: no table of families says what lies between two attentions.

Rejected: replacing the `forward` of decoder layers family by family. It goes stale with each release of
transformers, and hides that a layer was changed.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from symbiosis.flight.protocol import MAX_STEPS, MAX_TENSORS, Step

ADDS = (torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.add)
ADDS_IN_PLACE = (torch.Tensor.add_, torch.Tensor.__iadd__)
SCALES = (torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.mul)
DROPOUTS = (functional.dropout, torch.dropout)
# Questions about a tensor that its stand-in answers itself.
QUESTIONS = {
    *("size", "dim", "ndimension", "numel", "element_size", "is_inference", "is_floating_point", "is_complex"),
    *("get_device", "__hash__", "__len__", "is_contiguous", "is_signed"),
}


class SegmentRemote(Protocol):
    """Where segments are computed."""

    def segment(
        self, steps: Sequence[Step], outputs: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run steps on inputs [N, d]; the chosen values, each [N, d]."""


class Deferrals(threading.local):
    """What the deferred results of one model have in common: who will compute them, and the residual stream.

    Only the residual stream may be added to a deferred result: the server has seen it, as the input of a
    layer, or normed. The output of an adapter is neither sent nor taken for it. State is per thread.
    """

    def __init__(self, remote: SegmentRemote) -> None:
        self.remote = remote
        self._seen: deque[weakref.ref[torch.Tensor]] = deque(maxlen=16)

    def __deepcopy__(self, memo: dict[int, Any]) -> Deferrals:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a model with remote layers cannot be pickled: it holds a live connection")

    def saw(self, x: torch.Tensor) -> None:
        """Remember an input of a norm or of remote layers."""
        if not any(known() is x for known in self._seen):
            self._seen.append(weakref.ref(x))

    def is_residual(self, x: torch.Tensor) -> bool:
        return isinstance(x, Deferred) or any(known() is x for known in self._seen)


class Node:
    """One step that was put off.

    Args:
        deferrals: of the model that it belongs to.
        step: what to do; its `args` are filled in when a segment is made of it.
        args: nodes or tensors [..., d] that it needs.
        width: the last dimension of its value.
        local: computes the value from that of its only argument without a call (a norm).
        looked_at: told when the value was needed by something that cannot be put off.
    """

    def __init__(
        self,
        deferrals: Deferrals,
        step: Step,
        args: Sequence[Node | torch.Tensor],
        width: int,
        local: Callable[[torch.Tensor], torch.Tensor] | None = None,
        looked_at: Callable[[], None] | None = None,
    ) -> None:
        self.deferrals = deferrals
        self.step = step
        self.args = tuple(_settled(arg) for arg in args)
        self.width = width
        self.local = local
        self.looked_at = looked_at
        self.value: torch.Tensor | None = None
        self.value_version = 0
        self.holder: weakref.ref[Deferred] | None = None
        self._versions = [0 if isinstance(arg, Node) else arg._version for arg in self.args]

    def check(self) -> None:
        """Refuse to compute from an input that was overwritten since.

        Raises:
            RuntimeError: an in-place operation changed it.
        """
        for arg, version in zip(self.args, self._versions, strict=True):
            now, then = (arg.value, arg.value_version) if isinstance(arg, Node) else (arg, version)
            if now is not None and now._version != then:
                raise RuntimeError(
                    f"an input of {self.step.do} {', '.join(self.step.modules)} was changed in place before its value "
                    "was used; wrap(model, granularity='linear') does not put calls off"
                )

    def settle(self, value: torch.Tensor) -> None:
        """Take a value; what it was computed from is let go."""
        self.value, self.value_version, self.args = value, value._version, ()

    def wanted(self) -> bool:
        """Whether somebody still holds the tensor that stands for the value."""
        return self.holder is not None and self.holder() is not None


def _settled(arg: Node | torch.Tensor) -> Node | torch.Tensor:
    return arg.value if isinstance(arg, Node) and arg.value is not None else arg


class Deferred(torch.Tensor):
    """A tensor whose value is computed when it is looked at."""

    node: Node

    @staticmethod
    def __new__(cls, node: Node, like: torch.Tensor) -> Deferred:
        shape = (*like.shape[:-1], node.width)
        deferred: Deferred = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        deferred.node = node
        node.holder = weakref.ref(deferred)
        return deferred

    def __init__(self, node: Node, like: torch.Tensor) -> None:
        super().__init__()

    def become(self, other: Deferred) -> Deferred:
        """Stand for another value from now on. What was computed from this one before keeps the old one."""
        self.node.holder = None
        self.node = other.node
        self.node.holder = weakref.ref(self)
        return self

    @classmethod
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
        args, kwargs = pytree.tree_map_only(Deferred, _look, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Operations of C++ that do not ask `__torch_function__` get the value here."""
        args, kwargs = pytree.tree_map_only(Deferred, _look, (args, kwargs or {}))
        return func(*args, **kwargs)


def _put_off(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result of an operation that can be put off; None if it cannot."""
    if func in DROPOUTS:
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return args[0] if args and not training and isinstance(args[0], Deferred) else None
    if len(args) != 2 or kwargs:
        return None
    if func in ADDS_IN_PLACE and isinstance(args[0], Deferred) and args[0].node.value is None:
        total = _put_off(torch.add, args, kwargs)
        return args[0].become(total) if isinstance(total, Deferred) else None
    if func in ADDS and _same_place(*args):
        deferrals = next(arg.node.deferrals for arg in args if isinstance(arg, Deferred))
        if not all(map(deferrals.is_residual, args)):
            return None
        nodes = [arg.node if isinstance(arg, Deferred) else arg for arg in args]
        return Deferred(Node(deferrals, Step("add", (), ()), nodes, args[0].shape[-1]), args[0])
    if func in SCALES and isinstance(args[0], Deferred) and isinstance(args[1], float):
        node = args[0].node
        return Deferred(Node(node.deferrals, Step("scale", (), (), args[1]), [node], node.width), args[0])
    return None


def _same_place(a: Any, b: Any) -> bool:
    """Whether two tensors can be added on the server: neither broadcast nor cast, nor free to change unseen."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return alike and not a.is_inference() and not b.is_inference()


def _asks(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in ("data", "T", "mT", "H", "mH", "real")
    return name in QUESTIONS


def deferring() -> bool:
    """Whether results may be put off just now: nothing records gradients, casts, or hides in-place changes."""
    return not (
        torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
    )


def defer(
    deferrals: Deferrals,
    step: Step,
    x: torch.Tensor,
    width: int,
    local: Callable[[torch.Tensor], torch.Tensor] | None = None,
    looked_at: Callable[[], None] | None = None,
) -> Deferred:
    """Put off one step on x [..., d]; a tensor [..., width]."""
    return Deferred(Node(deferrals, step, [x.node if isinstance(x, Deferred) else x], width, local, looked_at), x)


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """The value of a tensor that may be deferred; everything else is returned as it is."""
    if not isinstance(tensor, Deferred):
        return tensor
    node = tensor.node
    if node.value is None:
        if node.local is not None:
            (arg,) = node.args
            node.settle(node.local(_value_of_node(arg, tensor.shape[:-1])))
        else:
            _run([node], (), tensor.shape[:-1])
    assert node.value is not None
    return node.value


def linears_of(tensor: Deferred, names: tuple[str, ...]) -> torch.Tensor:
    """Products of a deferred tensor with several weights, in the call that it was waiting for; [N, sum d_out]."""
    return _run([tensor.node], names, tensor.shape[:-1])


def _look(tensor: Deferred) -> torch.Tensor:
    node = tensor.node
    # To look at a norm is to look at the product that it norms: k, where attention norms it.
    args = [arg for arg in node.args if isinstance(arg, Node)] if node.local else []
    for looked in (node, *(arg for arg in args if arg.value is None and arg.step.do in ("linears", "bias"))):
        if looked.looked_at is not None:
            looked.looked_at()
    return value_of(tensor)


def _value_of_node(node: Node | torch.Tensor, lead: Sequence[int]) -> torch.Tensor:
    if isinstance(node, Node):
        if node.value is None:
            _run([node], (), lead)
        assert node.value is not None
        return node.value
    return node


def _run(targets: Sequence[Node], linears: tuple[str, ...], lead: Sequence[int]) -> torch.Tensor:
    """Send what a node was waiting for as one segment, with the values that are still held.

    Returns:
        The last value, [N, d]: the products with `linears` if any are named, else the target's.
    """
    order = list(dict.fromkeys(_pending(targets)))
    inputs = _inputs(order)
    places: dict[int, int] = {id(value): place for place, value in enumerate(inputs)}
    steps = []
    for node in order:
        node.check()
        steps.append(_with_args(node.step, [places[id(_settled(arg))] for arg in node.args]))
        places[id(node)] = len(inputs) + len(steps) - 1
    if linears:
        steps.append(Step("linears", linears, (places[id(targets[0])],)))
    kept = _kept(order, targets[0], bool(linears))
    outputs = [*(places[id(node)] for node in kept), *([len(inputs) + len(steps) - 1] if linears else [])]
    for value in inputs:
        targets[0].deferrals.saw(value)
    flat = [value.reshape(-1, value.shape[-1]) for value in inputs]  # each [N, d]
    results = targets[0].deferrals.remote.segment(steps, outputs, flat)
    for node, value in zip(kept, results, strict=False):
        node.settle(value.view(*lead, node.width))
    return results[-1]


def _pending(nodes: Sequence[Node]) -> Iterator[Node]:
    """The nodes without a value that others need, arguments first."""
    for node in nodes:
        yield from _pending([arg for arg in map(_settled, node.args) if isinstance(arg, Node)])
        yield node


def _inputs(order: Sequence[Node]) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for node in order:
        for arg in map(_settled, node.args):
            if not isinstance(arg, Node):
                found.setdefault(id(arg), arg)
    return list(found.values())


def _kept(order: Sequence[Node], target: Node, has_linears: bool) -> list[Node]:
    """Whose values to send back: the target's, and those still held that cannot be computed here."""
    wanted: dict[int, Node] = {}
    for node in order:
        if node.local is not None and (node.wanted() or node is target):
            wanted.update((id(arg), arg) for arg in node.args if isinstance(arg, Node))
        elif node.wanted():
            wanted[id(node)] = node
    if not has_linears:
        wanted.pop(id(target), None)
    kept = [node for node in wanted.values() if node.value is None][-(MAX_TENSORS - 1) :]
    return kept if has_linears else [*kept, target]


def _with_args(step: Step, args: list[int]) -> Step:
    return Step(step.do, step.modules, tuple(args), step.factor)


def fits(tensor: torch.Tensor) -> bool:
    """Whether a deferred tensor can still be put off further: segments have a longest length."""
    return not isinstance(tensor, Deferred) or len(dict.fromkeys(_pending([tensor.node]))) < MAX_STEPS - 2
