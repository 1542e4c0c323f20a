"""RemoteBlock: a whole frozen sub-module (an MLP, a mixture of experts) in one call; RemoteExperts: experts alone.

One rule: the block is computed whole only while nothing of the client's is inside. An adapter, a hook, a
module put in by hand, a trained or changed parameter, or active dropout, added at any time, sends the
call through the module's own forward, and so through its remote linears and experts.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from symbiosis.adapters import base_modules, is_wrapper
from symbiosis.errors import UnsupportedMethodError
from symbiosis.flight.protocol import Step
from symbiosis.hollow import HollowWeight, keep_out_of_checkpoints
from symbiosis.lazy import Laziness, defer, deferring, fits, value_of
from symbiosis.rows import flat, owned
from symbiosis.sharing import Remote, SharedInputs
from symbiosis.unchanged import Unchanged


class _Block(torch.autograd.Function):
    """A whole frozen sub-module; its backward sends the input again and the server recomputes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, remote: Remote, name: str) -> torch.Tensor:
        ctx.remote, ctx.name = remote, name
        ctx.save_for_backward(x)
        y = remote.call("forward", [name], [flat(x)])  # [..., d_in] -> [N, d_out]
        return owned(y, (*x.shape[:-1], y.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        (x,) = ctx.saved_tensors
        return ctx.remote.call("grad_input", [ctx.name], [flat(x), flat(grad)]).view(x.shape), None, None


class RemoteBlock:
    """Replaces the `forward` of a frozen sub-module on its instance; names and types stay.

    Args:
        name: the block's name on the server.
        shared: what computes it, and whether results may be deferred.
        module: the sub-module, whose linears are remote layers already.
        width: last dimension of its output.
        gradients_by_linears: not alone where a gradient will be asked for: recomputing costs more GEMMs.
        required: the block has no other way (matrices that are no linears); its weights become hollow.
        keep: keep those weights, so that `restore` can put them back.
    """

    def __init__(
        self,
        name: str,
        shared: SharedInputs,
        module: nn.Module,
        width: int,
        *,
        required: bool,
        gradients_by_linears: bool = False,
        keep: bool = False,
    ) -> None:
        self.name = name
        self.lazy = Laziness(shared.lazy)
        self.gradients_by_linears = gradients_by_linears
        self._width = width
        self.required = required
        self._remote = shared.remote
        self._deferrals = shared.deferrals
        self._module = module
        self._own_forward = type(module).forward
        self._kept: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._structure = _structure(_inside(module))
        if required:
            self._hollow_out(keep)
        self.remember()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        lazily = self.lazy and deferring(training=self._module.training) and not x.is_inference() and fits(x)
        by_linears = self.gradients_by_linears and not self.required and torch.is_grad_enabled() and x.requires_grad
        if by_linears and not lazily:
            return self._own_forward(self._module, x, *args, **kwargs)
        reason = self.reason_against() if not (args or kwargs) else "it was called with more than its input"
        if reason and self.required:
            self._refuse(reason)
        if reason:
            return self._own_forward(self._module, x, *args, **kwargs)
        if lazily:
            return defer(self._deferrals, Step("call", (self.name,), ()), x, self._width, looked_at=self.lazy.looked_at)
        return self._call(value_of(x))

    def _call(self, x: torch.Tensor) -> Any:
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        return _Block.apply(x, self._remote, self.name)  # type: ignore[no-untyped-call]

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedMethodError(
            f"block {self.name} is computed whole on the server, but {reason}; remove that, or use "
            "wrap(local=[...]) to keep the block here"
        )

    def reason_against(self) -> str:
        """Why the block cannot be computed whole just now; empty if it can."""
        inside = _inside(self._module)
        for name, module in inside:
            if name and _has_hooks(module):
                return f"{name} has hooks"
            if module.training and _drops(module):
                return f"{name or 'it'} has active dropout"
            if is_wrapper(module):
                return f"{name} has an adapter"
        if _structure(inside) != self._structure:
            return "its modules are not those that were there when it was wrapped"
        return self._changed_parameter(_held(inside))

    def remember(self) -> None:
        """Take the values of the parameters that the client holds (biases) for those of the server."""
        self._values = Unchanged(_held(_inside(self._module)))

    def restore(self) -> None:
        """Undo all that was done to the module."""
        del self._module.forward
        for module, key, parameter in self._kept:
            module._parameters[key] = parameter

    def _changed_parameter(self, held: list[tuple[str, nn.Parameter]]) -> str:
        for name, parameter in held:
            if parameter.requires_grad and torch.is_grad_enabled():
                return f"{name} may be trained here"
        name = self._values.changed(held)
        return f"{name} has another value than on the server" if name else ""

    def _hollow_out(self, keep: bool) -> None:
        for path, child in base_modules(self._module):
            matrices = {k: p for k, p in child._parameters.items() if p is not None and p.dim() >= 2}
            for key, parameter in matrices.items():
                if isinstance(parameter, HollowWeight):
                    continue
                if keep:
                    self._kept.append((child, key, parameter))
                name = ".".join(filter(None, (self.name, path, key)))
                child._parameters[key] = HollowWeight(parameter.shape, parameter.dtype, "cpu", name)
            if matrices:
                keep_out_of_checkpoints(child)


class RemoteExperts(RemoteBlock):
    """Experts without their router, which is small and runs here: its logits, losses and adapters are the client's.

    The choice travels beside the tokens, as a weight for each expert: [..., d] and [..., number of experts].
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if reason := self.reason_against():
            self._refuse(reason)
        given = inspect.signature(self._own_forward).bind(self._module, *args, **kwargs).arguments
        _, x, index, weights = given.values()  # [..., d], [..., chosen], [..., chosen]
        x = value_of(x)
        # One more than there are experts: some routers write that number for "none".
        dense = weights.new_zeros(*weights.shape[:-1], self._experts + 1).scatter(-1, index, weights)
        return self._call(torch.cat([x, dense[..., :-1].to(x.dtype)], dim=-1))

    @property
    def _experts(self) -> int:
        """How many there are: the first dimension of their matrices."""
        return next(p.ds_shape[0] for p in self._module.parameters() if isinstance(p, HollowWeight))


def _inside(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """What `named_modules` gives, in another order and ten times as fast: it is asked for every layer and token."""
    found, seen = [("", module)], {id(module)}
    for path, parent in found:  # which grows meanwhile
        for name, child in parent._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append((f"{path}.{name}" if path else name, child))
    return found


def _held(inside: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Parameter]]:
    """Parameters that are here."""
    return [
        (f"{path}.{key}" if path else key, parameter)
        for path, module in inside
        for key, parameter in module._parameters.items()
        if parameter is not None and not isinstance(parameter, HollowWeight)
    ]


def _structure(inside: list[tuple[str, nn.Module]]) -> list[tuple[str, str]]:
    return [(name, type(child).__name__) for name, child in inside]


def _drops(module: nn.Module) -> bool:
    """Dropout as a module, or as a rate that the module hands to F.dropout."""
    return any("drop" in key and isinstance(rate, float) and rate > 0 for key, rate in _rates(module))


def _rates(module: nn.Module) -> list[tuple[str, object]]:
    return [("dropout", module.p)] if isinstance(module, nn.modules.dropout._DropoutNd) else list(vars(module).items())


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
