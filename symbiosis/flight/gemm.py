"""Products with frozen weights, laid out and typed for how they are used here.

One rule: the two products and nothing else; results have the dtype of the input. What is best depends on
the machine, so it is asked once, not assumed.

PyTorch multiplies bfloat16 on a CPU without AVX512 or AMX in a plain loop: 512 tokens by a 2816x1024 weight
take 315 ms forward and 4.4 s backward, against 49 ms in float32 with the weight cast each time (2 cores,
docs/performance.md). Up to a few tokens the loop wins, since it reads half the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from symbiosis.flight.packed import Packed
from symbiosis.flight.quantized import Weight

FEW_TOKENS = 4  # up to here a bfloat16 product in the plain loop beats casting the weight


def multiplies_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this device has instructions for products in a dtype."""
    if device.type != "cpu" or dtype in (torch.float32, torch.float64):
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def forward(x: torch.Tensor, weights: Sequence[Weight]) -> torch.Tensor:
    """[N, d_in] @ each [d_out, d_in]ᵀ -> [N, sum d_out], in the dtype of x, which may be wider than the weights'"""
    wide = x.shape[0] > FEW_TOKENS and not multiplies_natively(x.dtype, x.device)
    inputs = x.float() if wide else x
    if len(weights) == 1:
        return _times(inputs, weights[0]).to(x.dtype)
    widths = [weight.shape[0] for weight in weights]
    y = inputs.new_empty(x.shape[0], sum(widths))
    for weight, part in zip(weights, y.split(widths, dim=1), strict=True):
        _times(inputs, weight, part)
    return y.to(x.dtype)


def _times(x: torch.Tensor, weight: Weight, out: torch.Tensor | None = None) -> torch.Tensor:
    """[N, d_in] @ [d_out, d_in]ᵀ -> [N, d_out]"""
    if isinstance(weight, Packed) and x.dtype == weight.dtype:
        y = weight.product(x)
        return y if out is None else out.copy_(y)
    transposed = weight.to(x.dtype).t()
    return torch.mm(x, transposed) if out is None else torch.mm(x, transposed, out=out)


def grad_input(grad_output: torch.Tensor, weights: Sequence[Weight]) -> torch.Tensor:
    """[N, sum d_out], split by weight, each @ [d_out, d_in] -> summed [N, d_in]"""
    wide = not multiplies_natively(grad_output.dtype, grad_output.device)
    inputs = grad_output.float() if wide else grad_output
    parts = inputs.split([weight.shape[0] for weight in weights], dim=1)
    total: torch.Tensor = parts[0] @ weights[0].to(inputs.dtype)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total.addmm_(part, weight.to(inputs.dtype))
    return total.to(grad_output.dtype)


class Tape:
    """Products in the order in which they are computed: recorded in a forward, and played when it is repeated.

    A gradient needs what lies between the products, which is cheap, again; the products themselves are not.

    Args:
        tokens: rows of a product that belongs to all tokens; others, as those of single experts, cannot be told apart.
        products: what was recorded, to be played; None to record.
    """

    def __init__(self, tokens: int, products: Sequence[torch.Tensor] | None = None) -> None:
        self._tokens = tokens
        self._played = None if products is None else iter(products)
        self._recorded: list[tuple[torch.Tensor, torch.Tensor]] = []  # [N, d], and as it was handed out
        self._whole = True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Products of this thread go by the tape."""
        token = _tape.set(self)
        try:
            yield
        finally:
            _tape.reset(token)

    def product(self, x: torch.Tensor, weights: Sequence[Weight]) -> torch.Tensor:
        """[..., d_in] -> [..., sum d_out]"""
        y = next(self._played) if self._played is not None else forward(x.reshape(-1, x.shape[-1]), weights)
        shaped = _shaped(y, x)
        if self._played is None:
            self._whole &= y.shape[0] == self._tokens
            self._recorded.append((y, shaped))
        return shaped

    def recorded(self) -> list[torch.Tensor] | None:
        """The products, each [tokens, d]; None if they would not repeat the forward, row by row."""
        unchanged = all(shaped._version == 0 for _, shaped in self._recorded)
        return [y for y, _ in self._recorded] if self._whole and unchanged else None


def _shaped(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[N, d] in the shape of x. No view, for activations that work in place, as they may on what nn.Linear gives."""
    return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1]))  # type: ignore[no-any-return]


_tape: ContextVar[Tape | None] = ContextVar("tape", default=None)


def _product(x: torch.Tensor, weights: Sequence[Weight]) -> torch.Tensor:
    tape = _tape.get()
    return tape.product(x, weights) if tape else _shaped(forward(x.reshape(-1, x.shape[-1]), weights), x)


class _Product(torch.autograd.Function):
    """forward and grad_input as one differentiable operation; the weights get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: Weight) -> torch.Tensor:
        ctx.weights = weights
        return _product(x, weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat = grad_input(grad.reshape(-1, grad.shape[-1]), ctx.weights)
        return flat.view(*grad.shape[:-1], flat.shape[1]), *[None for _ in ctx.weights]


class _Unneeded(torch.autograd.Function):
    """A product of which only the gradient is asked."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: Weight) -> torch.Tensor:
        ctx.weights = weights
        return x.new_empty(1, 1).expand(x.shape[0], sum(weight.shape[0] for weight in weights))

    backward = _Product.backward


def product(x: torch.Tensor, weights: Sequence[Weight]) -> torch.Tensor:
    """As `forward`, and differentiable."""
    if not torch.is_grad_enabled():
        return _product(x, weights)  # a Function costs as much as a small product
    return _Product.apply(x, *weights)  # type: ignore[no-untyped-call, no-any-return]


def unneeded(x: torch.Tensor, weights: Sequence[Weight]) -> torch.Tensor:
    """A stand-in for a product of which only the gradient is asked."""
    return _Unneeded.apply(x, *weights)  # type: ignore[no-untyped-call, no-any-return]


def use_in(layer: nn.Module, weight: Weight) -> None:
    """Let a frozen linear inside a block use these products; weight [d_out, d_in], whatever the layer's own layout."""
    layer.__dict__["forward"] = _Forward(layer, weight)


class _Forward:
    """Replaces the forward of a frozen linear on its instance."""

    def __init__(self, layer: nn.Module, weight: Weight) -> None:
        self._layer = layer
        self._weight = weight
        self._own_forward = type(layer).forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self._weight.dtype:
            return self._own_forward(self._layer, x)  # type: ignore[no-any-return]
        y = product(x, [self._weight])
        bias: Any = self._layer.bias
        return y if bias is None else y + bias
