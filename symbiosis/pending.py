"""Pending steps: work of frozen modules that was put off, and the one call that then does it.

    Node       one step: what to do, with what, whether gradients are recorded
    run        a node and all that it waits for, as one segment (docs/protocol.md section 4)

One rule: a node is computed in the modes in which it was put off, whoever asks for it and when, and once. Its inputs
are those of then: if one was overwritten since, that is an error.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch

from symbiosis.flight.protocol import MAX_OUTPUTS, MAX_STEPS, Step
from symbiosis.segments import Segment, SegmentCall, SegmentRemote, input_gradients, overwritten


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
        if not self.has_seen(x):
            self._seen.append(weakref.ref(x))

    def has_seen(self, x: torch.Tensor) -> bool:
        return any(known() is x for known in self._seen)


class Node:
    """One step that was put off.

    Args:
        deferrals: of the model that it belongs to.
        step: what to do; its `args` are filled in when a segment is made of it.
        args: nodes or tensors [*lead, d] that it needs.
        shape: of its value, [*lead, width].
        local: computes the value from that of its only argument without a call (a norm).
        looked_at: told when the value was needed by something that cannot be put off, with `records`.

    Attributes:
        records: whether gradients were recorded when it was put off.
        roots: the tensors through which its gradient flows on; empty if it has none.
    """

    def __init__(
        self,
        deferrals: Deferrals,
        step: Step,
        args: Sequence[Node | torch.Tensor],
        shape: Sequence[int],
        local: Callable[[torch.Tensor], torch.Tensor] | None = None,
        looked_at: Callable[[bool], None] | None = None,
    ) -> None:
        self.deferrals = deferrals
        self.step = step
        self.records = torch.is_grad_enabled()
        self.args = tuple(_settled(arg) if _joins(arg, self.records) else value_of(arg) for arg in args)
        self.shape = torch.Size(shape)
        self.local = local
        self.looked_at = looked_at
        self.value: torch.Tensor | None = None
        self.value_version = 0
        self.origin: tuple[Any, int] = (None, 0)  # the node of autograd that the value came from, and its place there
        self.holder: weakref.ref[torch.Tensor] | None = None
        self.roots = (
            tuple({id(root): root for arg in self.args for root in _roots(arg)}.values()) if self.records else ()
        )
        self._versions = [0 if isinstance(arg, Node) else arg._version for arg in self.args]

    def check(self) -> None:
        """Refuse to compute from an input that was overwritten since.

        Raises:
            RuntimeError: an in-place operation changed it.
        """
        for arg, version in zip(self.args, self._versions, strict=True):
            now, then = (arg.value, arg.value_version) if isinstance(arg, Node) else (arg, version)
            if now is not None and now._version != then:
                raise RuntimeError(overwritten(self.step))

    def settle(self, value: torch.Tensor) -> None:
        """Take a value; what it was computed from is let go, unless it was computed here."""
        self.value, self.value_version, self.origin = value, value._version, (value.grad_fn, value.output_nr)
        self.args = self.args if self.local else ()

    def wanted(self) -> bool:
        """Whether somebody still holds the tensor that stands for the value."""
        return self.holder is not None and self.holder() is not None


def value_of(node: Node | torch.Tensor) -> torch.Tensor:
    """The value of a node, computed now if it was not before; a tensor is its own."""
    if isinstance(node, torch.Tensor):
        return node
    if node.value is None:
        with _modes_of(node):
            if node.local is not None:
                node.settle(node.local(value_of(node.args[0])))
            else:
                run(node)
    assert node.value is not None
    return node.value


def value_aside(node: Node | torch.Tensor) -> torch.Tensor:
    """The value without its gradient, for those who ask where autograd records nothing; nothing is settled."""
    if isinstance(node, torch.Tensor) or node.value is not None:
        return value_of(node).detach()
    if not node.roots:
        return value_of(node)
    with torch.no_grad():
        return node.local(value_aside(node.args[0])) if node.local else _segment(node, (), aside=True)[0][-1]


def gradients_of(node: Node, grad: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The roots of a node, and what of the gradient of its value goes straight to each of them.

    One root may be computed from another, as attention is from the residual stream: autograd, asked for the gradients
    of both, would count that path twice.
    """
    value = value_of(node)
    if node.value_version != value._version:
        raise RuntimeError("a deferred result was changed in place, and the gradient asked of what it was before")
    if node.local is not None:
        leaf = value_of(node.args[0]).detach().requires_grad_()
        with torch.enable_grad():
            (passed,) = torch.autograd.grad(node.local(leaf), leaf, grad)
        yield from _passed_on(node.args[0], passed)
        return
    segment, place = node.origin
    grads: list[torch.Tensor | None] = [None] * segment.count
    grads[place] = grad
    for source, own in zip(segment.call.sources, input_gradients(segment, grads), strict=True):
        if own is not None:
            yield from _passed_on(source, own)


def _passed_on(source: Node | torch.Tensor, grad: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(source, Node):
        yield from gradients_of(source, grad)
    elif source.requires_grad:
        yield source, grad


def run(target: Node, linears: Sequence[str] = (), widths: Sequence[int] = ()) -> tuple[torch.Tensor, ...]:
    """Send what a node was waiting for as one segment, with the values that are still held.

    Args:
        target: the node.
        linears: names of linears to multiply its value with, in the same call.
        widths: their output widths.

    Returns:
        The products with `linears`, [*lead, d_out] each; without them the target's value, [*lead, d].
    """
    with _modes_of(target):
        results, kept = _segment(target, linears, widths)
    for node, value in zip(kept, results, strict=False):
        node.settle(value)
    return results[len(kept) :] if linears else results[-1:]


def fits(node: Node) -> bool:
    """Whether a node can be put off further: segments have a longest length, and a most of inputs."""
    order = _pending(node)
    return len(order) < MAX_STEPS - 2 and len(_inputs(order)) < MAX_OUTPUTS


def _segment(
    target: Node, linears: Sequence[str], widths: Sequence[int] = (), *, aside: bool = False
) -> tuple[tuple[torch.Tensor, ...], list[Node]]:
    """Make a segment of all that a node waits for, and call it; its results, and the nodes that the first belong to."""
    order = _pending(target)
    sources = _inputs(order)
    inputs = [value_of(source) for source in sources]
    places: dict[int, int] = {id(value): place for place, value in enumerate(inputs)}
    steps = []
    for node in order:
        node.check()
        args = tuple(places[id(_settled(arg))] for arg in node.args)
        steps.append(Step(node.step.do, node.step.modules, args, node.step.factor))
        places[id(node)] = len(inputs) + len(steps) - 1
    if linears:
        steps.append(Step("linears", tuple(linears), (places[id(target)],)))
    kept = [target] if aside else _kept(order, target, bool(linears))
    outputs = [*(places[id(node)] for node in kept), *([len(inputs) + len(steps) - 1] if linears else [])]
    for value in inputs:
        target.deferrals.saw(value)
    shape, remote = target.shape[:-1], target.deferrals.remote
    call = SegmentCall(remote, tuple(steps), tuple(outputs), shape, tuple(widths), target.records, tuple(sources))
    return Segment.apply(call, *inputs), kept  # type: ignore[no-untyped-call]


def _pending(node: Node) -> list[Node]:
    """The nodes without a value that a node needs, arguments first, and the node."""
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        for arg in node.args:
            if isinstance(arg, Node) and arg.value is None and arg not in found:
                visit(arg)
        found[node] = None

    visit(node)
    return list(found)


def _inputs(order: Sequence[Node]) -> list[Node | torch.Tensor]:
    """What nodes need that is there: tensors, and nodes that have a value by now."""
    found: dict[int, Node | torch.Tensor] = {}
    for node in order:
        for arg in node.args:
            if not isinstance(_settled(arg), Node):
                found.setdefault(id(_settled(arg)), arg)
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
    kept = [node for node in wanted.values() if node.value is None][-(MAX_OUTPUTS - 1) :]
    return kept if has_linears else [*kept, target]


def _settled(arg: Node | torch.Tensor) -> Node | torch.Tensor:
    return arg.value if isinstance(arg, Node) and arg.value is not None else arg


def _joins(arg: Node | torch.Tensor, records: bool) -> bool:
    """Whether an argument can be part of the same segment: gradients flow through all of it, or through nothing."""
    return isinstance(arg, torch.Tensor) or arg.value is not None or arg.records == records


def _roots(arg: Node | torch.Tensor) -> tuple[torch.Tensor, ...]:
    if isinstance(arg, Node):
        return arg.roots
    return (arg,) if arg.requires_grad else ()


@contextmanager
def _modes_of(node: Node) -> Iterator[None]:
    """The modes in which a node was put off: nothing cast, and nobody's hooks on what autograd saves."""
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.set_grad_enabled(node.records))
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            for kind in ("cpu", "cuda"):
                modes.enter_context(torch.autocast(kind, enabled=False))
        if node.records and torch._C._autograd._top_saved_tensors_default_hooks(True):
            modes.enter_context(torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is))
        yield


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
