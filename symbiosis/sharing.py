"""SharedInputs: layers that are given the very same tensor (q, k, v; gate, up) share one call each way.

Which ones do is learnt by watching: when k is called with the tensor that q was just called with, the
next call of either fetches both. Nothing is assumed about an architecture, and an adapter that changes
one layer's input (OFT) ends the sharing by itself. One rule: a result fetched for a sibling is handed
out only for the same tensor object, unchanged, in the same thread and `Moment`, once; otherwise a real
call is made.

Rejected: grouping by name lists (wrong for the next architecture), and one autograd node per layer with
results cached across calls (its gradients would have to be joined by hand; autograd joins them at one
node with several outputs).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import torch
from torch.autograd.function import once_differentiable

from symbiosis.flight.protocol import MAX_MODULES_PER_CALL
from symbiosis.lazy import Deferred, deferring, linears_of, value_of
from symbiosis.pending import Deferrals
from symbiosis.rows import flat, joined_rows, split_rows
from symbiosis.segments import SegmentRemote


class Remote(SegmentRemote, Protocol):
    """Where base layers are computed."""

    def call(self, op: str, modules: Sequence[str], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run one operation of docs/protocol.md section 4; [N, ...] in, [N, ...] out, same dtype and device."""

    def weight_norms(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Euclidean norms of the columns [d_in] and of the rows [d_out] of a weight [d_out, d_in], in float32."""


class Layer(NamedTuple):
    """What a call needs to know of a remote linear."""

    name: str
    d_in: int
    d_out: int


class _Linears(torch.autograd.Function):
    """Several linears of one input as one node: autograd hands their gradients to one backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, remote: Remote, names: tuple[str, ...], widths: tuple[int, ...]
    ) -> tuple[torch.Tensor, ...]:
        ctx.remote, ctx.names, ctx.widths, ctx.shape = remote, names, widths, x.shape
        ctx.set_materialize_grads(False)
        y = remote.call("forward", names, [flat(x)])  # [..., d_in] -> [N, sum d_out]
        return split_rows(y, widths, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        asked = [(name, grad) for name, grad in zip(ctx.names, grads, strict=True) if grad is not None]
        if not asked:
            return None, None, None, None
        grad_output = joined_rows([grad for _, grad in asked])  # [N, sum d_out]
        grad_input = ctx.remote.call("grad_input", [name for name, _ in asked], [grad_output])
        return grad_input.view(ctx.shape), None, None, None


class Moment(NamedTuple):
    """Under what circumstances a result was computed; autograd gives it another meaning in others."""

    grad_enabled: bool
    inference: bool
    graph_task: int  # >= 0 while a backward pass recomputes a checkpointed forward
    hooks: Any  # the saved-tensor hooks of the innermost checkpoint
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device_type: str) -> Moment:
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch._C._current_graph_task_id(),
            # Weak: a hook of a checkpoint keeps its inputs, and we outlive it.
            weakref.ref(hooks[0]) if hooks else None,
            torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None,
        )


class _Fetched:
    """Results of one call that are still to be collected, for one input."""

    def __init__(self, x: torch.Tensor, moment: Moment) -> None:
        self._x = weakref.ref(x)
        self._state = (x._version, x.requires_grad)
        self._moment = moment
        self.called: list[Layer] = []
        self.results: dict[str, torch.Tensor] = {}

    def is_for(self, x: torch.Tensor, moment: Moment) -> bool:
        return self._x() is x and self._state == (x._version, x.requires_grad) and self._moment == moment


class SharedInputs(threading.local):
    """Lets the layers of one model that are given the same tensor share a call. State is per thread.

    Copies of a model share this object: results are per thread, kept for one input only, and belong
    to a module's name, so they are right for either copy.

    Args:
        remote: where the layers are computed.
        lazy: whether they may defer their results (see `lazy`).
        reveals: whether values of adapters may be sent (see `expression`).
    """

    def __init__(self, remote: Remote, *, lazy: bool = False, reveals: bool = False) -> None:
        self.remote = remote
        self.lazy = lazy
        self.reveals = reveals
        self.deferrals = Deferrals(remote)
        self._groups: dict[str, tuple[Layer, ...]] = {}
        self._last: _Fetched | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInputs:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a model with remote layers cannot be pickled: it holds a live connection")

    def forward(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """x [..., d_in] -> x Wᵀ [..., d_out], without bias."""
        moment = Moment.now(x.device.type)
        cast_x = x.to(moment.autocast) if moment.autocast else x
        if x.is_inference():  # such tensors do not tell whether they were changed in place
            return self._fetch((layer,), cast_x)[0]
        last = self._last
        if last is None or not last.is_for(x, moment):
            self._forget(last)
            last = self._last = _Fetched(x, moment)
        if layer.name not in last.results:
            self._fetch_into(last, layer, cast_x)
        last.called.append(layer)
        return last.results.pop(layer.name)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For calls of other tensors in between, which shall neither end the sharing nor be learnt from."""
        last, self._last = self._last, None
        groups, self._groups = self._groups, {}
        try:
            yield
        finally:
            self._last, self._groups = last, groups

    def _fetch_into(self, last: _Fetched, layer: Layer, x: torch.Tensor) -> None:
        """Fetch a layer for an input: with its group if it comes first, else alone, and learn from that."""
        group = (layer,) if last.called else self._groups.get(layer.name, (layer,))
        if last.called:
            self._learn((*last.called, layer))
        last.results.update(zip((member.name for member in group), self._fetch(group, x), strict=True))

    def _fetch(self, layers: Sequence[Layer], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        names, widths = tuple(layer.name for layer in layers), tuple(layer.d_out for layer in layers)
        if isinstance(x, Deferred):
            if x.is_pending:
                return linears_of(x, names, widths)
            x = value_of(x)
        if deferring():
            self.deferrals.saw(x)
        return cast("tuple[torch.Tensor, ...]", _Linears.apply(x, self.remote, names, widths))  # type: ignore[no-untyped-call]

    def _learn(self, together: tuple[Layer, ...]) -> None:
        """These were given the same tensor: from now on they go in one call."""
        distinct = len(set(together)) == len(together)  # the same layer twice is no sibling
        if distinct and len(together) <= MAX_MODULES_PER_CALL and len({layer.d_in for layer in together}) == 1:
            self._groups.update((layer.name, together) for layer in together)

    def _forget(self, last: _Fetched | None) -> None:
        """What was fetched for a sibling and never collected was wasted: stop fetching it."""
        for name in last.results if last else ():
            for layer in self._groups.get(name, ()):
                self._groups.pop(layer.name, None)

    @property
    def groups(self) -> set[tuple[str, ...]]:
        """Names of the layers that share calls, as learnt so far by this thread."""
        return {tuple(layer.name for layer in group) for group in self._groups.values()}
