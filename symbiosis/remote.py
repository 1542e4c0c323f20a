"""RemoteLinear and RemoteConv1D: frozen layers whose product is computed by the server.

    forward    y  = x Wᵀ   [N, d_in]  -> [N, d_out]     a call
    backward   dx = dy W   [N, d_out] -> [N, d_in]      a call, and only if x needs a gradient
                                                        (no dW: W is frozen; nothing is saved: W is constant)

One rule: a stand-in shows everything that the layer it replaces shows, its type, attributes, hooks and
bias, except its weight, which is hollow. It computes with `self.weight`, whatever that is just now: a
parametrization makes an Expression of it. It knows SharedInputs, and neither network, nor mode, nor UI.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from symbiosis.errors import InvalidInputError
from symbiosis.flight.protocol import Step
from symbiosis.hollow import HollowWeight, keep_out_of_checkpoints
from symbiosis.lazy import Laziness, defer, deferring, fits
from symbiosis.matrix import Weight
from symbiosis.remembered import Remembered
from symbiosis.rows import flat, owned
from symbiosis.sharing import Layer, Remote, SharedInputs
from symbiosis.unchanged import Unchanged


class _Transposed(torch.autograd.Function):
    """y -> y W, whose gradient is a forward."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, remote: Remote, name: str) -> torch.Tensor:
        ctx.remote, ctx.name = remote, name
        x = remote.call("grad_input", [name], [flat(y)])  # [..., d_out] -> [N, d_in]
        return owned(x, (*y.shape[:-1], x.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad_y = ctx.remote.call("forward", [ctx.name], [flat(grad)])  # -> [N, d_out]
        return grad_y.view(*grad.shape[:-1], grad_y.shape[1]), None, None


class RemoteOperator:
    """The weight of a remote layer, as an Expression uses it; shared by copies of the layer."""

    def __init__(self, layer: Layer, shared: SharedInputs) -> None:
        self.name = layer.name
        self.inner_products = Remembered()
        self._layer = layer
        self._shared = shared

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteOperator:
        return self

    @property
    def reveals(self) -> bool:
        return self._shared.reveals

    @property
    def shape(self) -> tuple[int, int]:
        return (self._layer.d_out, self._layer.d_in)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._shared.forward(self._layer, x)

    def grad_input(self, y: torch.Tensor) -> torch.Tensor:
        return _Transposed.apply(y, self._shared.remote, self.name)  # type: ignore[no-untyped-call, no-any-return]

    def aside(self) -> AbstractContextManager[None]:
        return self._shared.aside()

    def norms(self, dim: int) -> torch.Tensor:
        return self._shared.remote.weight_norms(self.name)[dim]


class RemoteMixin(nn.Module):
    """What RemoteLinear and RemoteConv1D have in common.

    Attributes:
        layer: its name on the server and its widths.
        original: the layer it replaced, where that was kept.
        lazy: whether results may be deferred (see `lazy`).
    """

    layer: Layer
    original: nn.Module | None
    weight: Any  # a HollowWeight
    bias: Any  # a parameter or None
    _shared: SharedInputs
    _values: Unchanged
    lazy: Laziness
    dtype: torch.dtype

    def _stand_for(self, like: nn.Module, layer: Layer, shared: SharedInputs, keep: bool) -> None:
        nn.Module.__init__(self)
        # Hook dictionaries are shared, so that handles given out earlier still remove their hooks. A
        # `forward` put on the instance would compute with the old weight.
        self.__dict__.update({key: value for key, value in like.__dict__.items() if key != "forward"})
        self._parameters = dict(like._parameters)
        # Neither the stand-in's child nor moved, saved or listed with it.
        self.__dict__.update(layer=layer, original=like if keep else None, _shared=shared, lazy=Laziness(shared.lazy))
        weight: Any = like.weight
        device = "cpu" if weight.device.type == "meta" else weight.device
        flipped = isinstance(self, Conv1D)
        node = Weight(RemoteOperator(layer, shared), flipped)
        self.weight = HollowWeight(node.shape, weight.dtype, device, layer.name, node)
        self.__dict__["dtype"] = weight.dtype  # asking the weight costs a detour through its trap
        keep_out_of_checkpoints(self)
        self.remember()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., d_in] -> [..., d_out]

        Raises:
            InvalidInputError: the last dimension of x is not d_in, or its dtype is not the layer's.
        """
        if x.shape[-1:] != (self.layer.d_in,):
            raise InvalidInputError(
                f"{self.layer.name} got an input of shape {tuple(x.shape)}, expected [..., {self.layer.d_in}]"
            )
        if x.dtype != self.dtype and not (torch.is_autocast_enabled(x.device.type) and x.is_floating_point()):
            raise InvalidInputError(
                f"{self.layer.name} got an input of {x.dtype}, expected {self.dtype}, the dtype of this "
                "model; cast the input, or use torch.autocast"
            )
        if type(self.weight) is not HollowWeight:
            return self._with_another_weight(x)
        if self.lazy and self._may_defer(x):
            return self._defer(x)
        y = self._shared.forward(self.layer, x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _with_another_weight(self, x: torch.Tensor) -> torch.Tensor:
        """A weight that was replaced, or that a parametrization computes, such as peft's target_parameters."""
        weight = self.weight.t() if isinstance(self, Conv1D) else self.weight
        return functional.linear(x, weight, self.bias)

    def remember(self) -> None:
        """Take the bias as it is for the server's, which adds its own to deferred results."""
        self.__dict__["_values"] = Unchanged(self._biases())

    def _biases(self) -> list[tuple[str, nn.Parameter]]:
        return [] if self.bias is None else [("bias", self.bias)]

    def _may_defer(self, x: torch.Tensor) -> bool:
        if not deferring(training=self.training) or x.is_inference() or not fits(x):
            return False
        if self.bias is not None and self.bias.requires_grad and torch.is_grad_enabled():
            return False
        return not self._values.changed(self._biases())

    def _defer(self, x: torch.Tensor) -> torch.Tensor:
        deferrals, name, width = self._shared.deferrals, (self.layer.name,), self.layer.d_out
        y = defer(deferrals, Step("linears", name, ()), x, width, looked_at=self.lazy.looked_at)
        return (
            y
            if self.bias is None
            else defer(deferrals, Step("bias", name, ()), y, width, looked_at=self.lazy.looked_at)
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.__dict__["dtype"] = self.weight.dtype
        return self

    def restored(self) -> nn.Module:
        """The layer that was replaced, as the stand-in is now: its device, dtype, mode and bias, and frozen or not."""
        assert self.original is not None
        original = self.original.to(self.weight.device, self.weight.dtype)
        original._parameters["bias"] = self._parameters["bias"]
        if self.weight.frozen:
            original.weight.requires_grad_(False)
        return original.train(self.training)


class RemoteLinear(RemoteMixin, nn.Linear):
    """An nn.Linear whose weight [d_out, d_in] is on the server."""

    def __init__(self, name: str, shared: SharedInputs, like: nn.Linear, *, keep: bool = False) -> None:
        layer = Layer(name, like.in_features, like.out_features)
        self._stand_for(like, layer, shared, keep)


class RemoteConv1D(RemoteMixin, Conv1D):
    """GPT-2's Conv1D, whose weight [d_in, d_out] is on the server; it stays a Conv1D for peft's fan_in_fan_out."""

    def __init__(self, name: str, shared: SharedInputs, like: Conv1D, *, keep: bool = False) -> None:
        layer = Layer(name, like.nx, like.nf)
        self._stand_for(like, layer, shared, keep)


@cache
def stand_in_class(kind: type[nn.Module]) -> Any:
    """The stand-in for layers of a class; of a subclass of nn.Linear it is one, too."""
    if issubclass(kind, Conv1D):
        return RemoteConv1D
    return RemoteLinear if kind is nn.Linear else type(f"Remote{kind.__name__}", (RemoteLinear, kind), {})
