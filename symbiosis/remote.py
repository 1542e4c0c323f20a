"""RemoteLinear and RemoteConv1D: frozen layers whose product is computed by the server.

    forward    y  = x Wᵀ   [N, d_in]  -> [N, d_out]     a call
    backward   dx = dy W   [N, d_out] -> [N, d_in]      a call, and only if x needs a gradient
                                                        (no dW: W is frozen; nothing is saved: W is constant)

One rule: a stand-in shows everything that the layer it replaces shows, its type, attributes, hooks and
bias, except its weight, which is hollow. It knows SharedInputs, and neither network, nor mode, nor UI.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from symbiosis.errors import InvalidInputError
from symbiosis.flight.protocol import Step
from symbiosis.hollow import HollowWeight, keep_out_of_checkpoints
from symbiosis.lazy import Unchanged, defer, deferring, fits
from symbiosis.sharing import Layer, SharedInputs


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
    _bias_unchanged: Unchanged
    lazy: bool
    dtype: torch.dtype

    def _stand_for(self, like: nn.Module, layer: Layer, shape: Sequence[int], shared: SharedInputs, keep: bool) -> None:
        nn.Module.__init__(self)
        # Hook dictionaries are shared, so that handles given out earlier still remove their hooks. A
        # `forward` put on the instance would compute with the old weight.
        self.__dict__.update({key: value for key, value in like.__dict__.items() if key != "forward"})
        self._parameters = dict(like._parameters)
        # Neither the stand-in's child nor moved, saved or listed with it.
        self.__dict__.update(layer=layer, original=like if keep else None, _shared=shared, lazy=shared.lazy)
        weight: Any = like.weight
        device = "cpu" if weight.device.type == "meta" else weight.device
        self.weight = HollowWeight(shape, weight.dtype, device, layer.name)
        self.__dict__["dtype"] = weight.dtype  # asking the weight costs a detour through its trap
        keep_out_of_checkpoints(self)
        self.remember()

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
        if self.lazy and self._may_defer(x):
            return self._defer(x)
        y = self._shared.forward(self.layer, x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    # Dynamo must not trace into a network call; this is what torch.compiler.disable sets, without
    # importing all of dynamo (seconds) to set it.
    forward._torchdynamo_disable = True  # type: ignore[attr-defined]

    def remember(self) -> None:
        """Take the bias as it is for the server's, which adds its own to deferred results."""
        biases = [] if self.bias is None or self.bias.is_meta else [self.bias]
        self.__dict__["_bias_unchanged"] = Unchanged(biases)

    def _may_defer(self, x: torch.Tensor) -> bool:
        if self.training or not deferring() or x.is_inference() or not fits(x):
            return False
        return self.bias is None or self._bias_unchanged([self.bias])

    def _defer(self, x: torch.Tensor) -> torch.Tensor:
        """A result that is looked at for itself, as q is by attention, is not put off again."""
        deferrals, name, width = self._shared.deferrals, (self.layer.name,), self.layer.d_out
        y = defer(deferrals, Step("linears", name, ()), x, width, looked_at=self._be_eager)
        return y if self.bias is None else defer(deferrals, Step("bias", name, ()), y, width, looked_at=self._be_eager)

    def _be_eager(self) -> None:
        self.__dict__["lazy"] = False

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
            original.weight.requires_grad_(False)  # type: ignore[operator,union-attr]
        return original.train(self.training)


class RemoteLinear(RemoteMixin, nn.Linear):
    """An nn.Linear whose weight [d_out, d_in] is on the server."""

    def __init__(self, name: str, shared: SharedInputs, like: nn.Linear, *, keep: bool = False) -> None:
        layer = Layer(name, like.in_features, like.out_features)
        self._stand_for(like, layer, (layer.d_out, layer.d_in), shared, keep)


class RemoteConv1D(RemoteMixin, Conv1D):
    """GPT-2's Conv1D, whose weight [d_in, d_out] is on the server; it stays a Conv1D for peft's fan_in_fan_out."""

    def __init__(self, name: str, shared: SharedInputs, like: Conv1D, *, keep: bool = False) -> None:
        layer = Layer(name, like.nx, like.nf)
        self._stand_for(like, layer, (layer.d_in, layer.d_out), shared, keep)
