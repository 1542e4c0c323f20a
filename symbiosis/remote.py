"""RemoteLinear and friends: frozen layers whose product is computed by the server.

    forward    y  = x Wᵀ   [N, d_in]  -> [N, d_out]     a call
    backward   dx = dy W   [N, d_out] -> [N, d_in]      a call, and only if x needs a gradient
                                                        (no dW: W is frozen; nothing is saved: W is constant)

A stand-in has the name, the type, the attributes and the bias of the layer it replaces; its weight is
hollow. It knows a `Remote`, something with one method, and neither network, nor mode, nor UI.

Layers that are given the very same tensor (q, k, v; gate, up) share one call each way. Which ones do
is learnt by watching: when k is called with the tensor that q was just called with, the next call of
either fetches both. Nothing is assumed about an architecture, and an adapter that changes one layer's
input (OFT) ends the sharing by itself. A result fetched for a sibling is handed out only for the same
tensor object, unchanged, in the same thread and `Moment`, once; otherwise a real call is made.

Rejected: grouping by name lists (wrong for the next architecture), and one autograd node per layer with
results cached across calls (its gradients would have to be joined by hand; autograd joins them at one
node with several outputs).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from symbiosis.errors import InvalidInputError, UnsupportedMethodError
from symbiosis.flight.protocol import MAX_MODULES_PER_CALL
from symbiosis.hollow import HollowWeight


class Remote(Protocol):
    """Where base layers are computed."""

    def call(self, op: str, modules: Sequence[str], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run one operation of docs/protocol.md section 4; [N, ...] in, [N, ...] out, same dtype and device."""


class _Linears(torch.autograd.Function):
    """Several linears of one input as one node: autograd hands their gradients to one backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, remote: Remote, names: tuple[str, ...], widths: tuple[int, ...]
    ) -> tuple[torch.Tensor, ...]:
        ctx.remote, ctx.names, ctx.widths, ctx.shape = remote, names, widths, x.shape
        ctx.set_materialize_grads(False)
        y = remote.call("forward", names, [x.reshape(-1, x.shape[-1])])  # [..., d_in] -> [N, sum d_out]
        shape = x.shape[:-1]
        if len(widths) == 1:
            return (_owned(y, (*shape, widths[0])),)
        # Contiguous like local results, for callers that .view() them.
        return tuple(_owned(part.contiguous(), (*shape, part.shape[1])) for part in y.split(widths, dim=1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        asked = [(name, grad) for name, grad in zip(ctx.names, grads, strict=True) if grad is not None]
        if not asked:
            return None, None, None, None
        flat = [grad.reshape(-1, grad.shape[-1]) for _, grad in asked]  # each [N, d_out_i]
        grad_output = torch.cat(flat, dim=1) if len(flat) > 1 else flat[0]
        grad_input = ctx.remote.call("grad_input", [name for name, _ in asked], [grad_output])
        return grad_input.view(ctx.shape), None, None, None


class _Block(torch.autograd.Function):
    """A whole frozen sub-module; its backward sends the input again and the server recomputes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, remote: Remote, name: str) -> torch.Tensor:
        ctx.remote, ctx.name = remote, name
        ctx.save_for_backward(x)
        y = remote.call("forward", [name], [x.reshape(-1, x.shape[-1])])  # [..., d_in] -> [N, d_out]
        return _owned(y, (*x.shape[:-1], y.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        (x,) = ctx.saved_tensors
        flat = [x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])]
        return ctx.remote.call("grad_input", [ctx.name], flat).view(x.shape), None, None


def _owned(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor in another shape, over the same memory but no view of it.

    Autograd forbids in-place work on views that a Function returns, and local layers allow it.
    """
    strides = torch.empty(shape, device="meta").stride()
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, strides)


class Moment(NamedTuple):
    """Under what circumstances a result was computed; autograd gives it another meaning in others."""

    grad_enabled: bool
    graph_task: int  # >= 0 while a backward pass recomputes a checkpointed forward
    hooks: Any  # the saved-tensor hooks of the innermost checkpoint
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device_type: str) -> Moment:
        return cls(
            torch.is_grad_enabled(),
            torch._C._current_graph_task_id(),
            torch._C._autograd._top_saved_tensors_default_hooks(True),
            torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None,
        )


class Layer(NamedTuple):
    """What a call needs to know of a remote linear."""

    name: str
    d_in: int
    d_out: int


class _Fetched:
    """Results of one call that are still to be collected, for one input."""

    def __init__(self, x: torch.Tensor, moment: Moment) -> None:
        self._x = weakref.ref(x)
        self._version = x._version
        self._moment = moment
        self.called: list[Layer] = []
        self.results: dict[str, torch.Tensor] = {}

    def is_for(self, x: torch.Tensor, moment: Moment) -> bool:
        return self._x() is x and self._version == x._version and self._moment == moment


class SharedInputs(threading.local):
    """Lets the layers of one model that are given the same tensor share a call. State is per thread.

    Copies of a model share this object: results are per thread, kept for one input only, and belong
    to a module's name, so they are right for either copy.
    """

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
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

    def _fetch_into(self, last: _Fetched, layer: Layer, x: torch.Tensor) -> None:
        """Fetch a layer for an input: with its group if it comes first, else alone, and learn from that."""
        group = (layer,) if last.called else self._groups.get(layer.name, (layer,))
        if last.called:
            self._learn((*last.called, layer))
        last.results.update(zip((member.name for member in group), self._fetch(group, x), strict=True))

    def _fetch(self, layers: Sequence[Layer], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        names, widths = tuple(layer.name for layer in layers), tuple(layer.d_out for layer in layers)
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


class RemoteMixin(nn.Module):
    """What RemoteLinear and RemoteConv1D have in common."""

    layer: Layer
    weight: Any  # a HollowWeight
    bias: Any  # a parameter or None
    _shared: SharedInputs

    def _setup(self, layer: Layer, shared: SharedInputs, like: nn.Module, shape: Sequence[int]) -> None:
        nn.Module.__init__(self)
        weight = cast("torch.Tensor", like.weight)
        self.layer = layer
        self._shared = shared
        device = "cpu" if weight.device.type == "meta" else weight.device
        self.weight = HollowWeight(shape, weight.dtype, device, layer.name)
        self.register_parameter("bias", cast("nn.Parameter | None", like.bias))
        self.train(like.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., d_in] -> [..., d_out]

        Raises:
            InvalidInputError: the last dimension of x is not d_in, or its dtype is not the layer's.
        """
        if x.shape[-1:] != (self.layer.d_in,):
            raise InvalidInputError(
                f"{self.layer.name} got an input of shape {tuple(x.shape)}, expected [..., {self.layer.d_in}]"
            )
        if x.dtype != self.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise InvalidInputError(
                f"{self.layer.name} got an input of {x.dtype}, expected {self.weight.dtype}, the dtype of this "
                "model; cast the input, or use torch.autocast"
            )
        y = self._shared.forward(self.layer, x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    # Dynamo must not trace into a network call; this is what torch.compiler.disable sets, without
    # importing all of dynamo (seconds) to set it.
    forward._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Only what the client holds: a checkpoint never contains hollow weights."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "weight"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = prefix + "weight"
        if key in state_dict:
            raise UnsupportedMethodError(
                f"cannot load {key}: the base weight {self.layer.name} stays on the server. Load the checkpoint "
                "there, or load only adapter and client parameters here"
            )
        state_dict[key] = self.weight  # nothing to copy, and not missing
        super()._load_from_state_dict(state_dict, prefix, *args)
        del state_dict[key]


class RemoteLinear(RemoteMixin, nn.Linear):
    """An nn.Linear whose weight [d_out, d_in] is on the server."""

    def __init__(self, name: str, shared: SharedInputs, like: nn.Linear) -> None:
        self._setup(
            Layer(name, like.in_features, like.out_features), shared, like, (like.out_features, like.in_features)
        )
        self.in_features, self.out_features = like.in_features, like.out_features


class RemoteConv1D(RemoteMixin, Conv1D):
    """GPT-2's Conv1D, whose weight [d_in, d_out] is on the server; it stays a Conv1D for peft's fan_in_fan_out."""

    def __init__(self, name: str, shared: SharedInputs, like: Conv1D) -> None:
        self._setup(Layer(name, like.nx, like.nf), shared, like, (like.nx, like.nf))
        self.nx, self.nf = like.nx, like.nf


class RemoteBlock:
    """Replaces the `forward` of a frozen sub-module on its instance; names and types stay.

    One rule: the block is computed whole only while nothing of the client's is inside. An adapter, a
    hook, a trained parameter or active dropout, added at any time, sends the call through the module's own forward.

    Args:
        required: the block has no other way (experts that are not linears); its weights are hollow.
    """

    def __init__(self, name: str, remote: Remote, module: nn.Module, *, required: bool) -> None:
        self.name = name
        self._remote = remote
        self._module = module
        self._own_forward = type(module).forward
        self.required = required

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reason = self.reason_against() if not (args or kwargs) else "it was called with more than its input"
        if reason and self.required:
            raise UnsupportedMethodError(
                f"block {self.name} is computed whole on the server, but {reason}; remove that, or use "
                "wrap(local=[...]) to keep the block here"
            )
        if reason:
            return self._own_forward(self._module, x, *args, **kwargs)
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        return _Block.apply(x, self._remote, self.name)  # type: ignore[no-untyped-call]

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]

    def reason_against(self) -> str:
        """Why the block cannot be computed whole just now; empty if it can."""
        for name, module in self._module.named_modules():
            if name and (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks):
                return f"{name} has hooks"
            if isinstance(module, nn.Dropout) and module.training and module.p > 0:
                return f"{name} is active dropout"
            if any(p is not None and p.requires_grad for p in module._parameters.values()):
                return f"{name or 'it'} has parameters that are trained here"
            if hasattr(module, "base_layer"):
                return f"{name} has an adapter"
        return ""
