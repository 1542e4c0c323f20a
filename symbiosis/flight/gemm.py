"""Products with frozen weights, laid out and typed for how they are used here.

One rule: the two products and nothing else; results have the dtype of the input. What is best depends on
the machine, so it is asked once, not assumed.

PyTorch multiplies bfloat16 on a CPU without AVX512 or AMX in a plain loop: 512 tokens by a 2816x1024 weight
take 315 ms forward and 4.4 s backward, against 49 ms in float32 with the weight cast each time (2 cores,
docs/performance.md). Up to a few tokens the loop wins, since it reads half the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

FEW_TOKENS = 4  # up to here a bfloat16 product in the plain loop beats casting the weight


def multiplies_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this device has instructions for products in a dtype."""
    if device.type != "cpu" or dtype in (torch.float32, torch.float64):
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def forward(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """[N, d_in] @ each [d_out, d_in]ᵀ -> [N, sum d_out], in the dtype of x, which may be wider than the weights'"""
    wide = x.shape[0] > FEW_TOKENS and not multiplies_natively(x.dtype, x.device)
    inputs = x.float() if wide else x
    widths = [weight.shape[0] for weight in weights]
    y = inputs.new_empty(x.shape[0], sum(widths))
    for weight, part in zip(weights, y.split(widths, dim=1), strict=True):
        torch.mm(inputs, weight.to(inputs.dtype).t(), out=part)
    return y.to(x.dtype)


def grad_input(grad_output: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """[N, sum d_out], split by weight, each @ [d_out, d_in] -> summed [N, d_in]"""
    wide = not multiplies_natively(grad_output.dtype, grad_output.device)
    inputs = grad_output.float() if wide else grad_output
    parts = inputs.split([weight.shape[0] for weight in weights], dim=1)
    total: torch.Tensor = parts[0] @ weights[0].to(inputs.dtype)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total.addmm_(part, weight.to(inputs.dtype))
    return total.to(grad_output.dtype)


class _Product(torch.autograd.Function):
    """forward and grad_input as one differentiable operation; the weight gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return forward(x.reshape(-1, x.shape[-1]), [weight]).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        flat = grad_input(grad.reshape(-1, grad.shape[-1]), [ctx.weight])
        return flat.view(*grad.shape[:-1], ctx.weight.shape[1]), None


def use_in(module: nn.Module) -> None:
    """Let the linears inside a frozen module use these products, where the machine's own are slow."""
    for child in module.modules():
        if type(child) is nn.Linear and not multiplies_natively(child.weight.dtype, child.weight.device):
            child.__dict__["forward"] = _Forward(child)


class _Forward:
    """Replaces the forward of a frozen nn.Linear on its instance."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        linear = self._linear
        if x.dtype != linear.weight.dtype:
            return functional.linear(x, linear.weight, linear.bias)
        y: torch.Tensor = _Product.apply(x, linear.weight)  # type: ignore[no-untyped-call]
        bias: torch.Tensor | None = linear.bias
        return y if bias is None else y + bias
