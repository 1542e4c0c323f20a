"""Frozen weights in fewer bits: what is kept in a weight's place, and the values that it stands for.

    int8   torch: a row's largest value / 127.5 is the step of the row      integers and steps as torchao makes them
    int4   bitsandbytes: NF4, sixteen levels, one scale for 64 weights      as QLoRA does (arXiv 2305.14314)

One rule: weights only. A weight is written out for the product that needs it and forgotten again, the same values
forward and back, so that a quantised linear is still linear in its input, on every device.

Tensors of torchao were tried and dropped: forward they scale the product, back they need a method of their own, their
int4 has no product on CPUs, and peft warns wherever the package is installed. Memory is what is saved, not time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn import functional

from symbiosis.errors import MissingExtraError

Width = Literal["int8", "int4"]

INT8_HALF_RANGE = 127.5  # of -128 to 127, as torchao counts
INT4_BLOCK = 64  # weights of one scale; what bitsandbytes and QLoRA take


class Quantized(Protocol):
    """A weight [d_out, d_in] in fewer bits. Of a tensor's interface it has what products need."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight that was quantised."""

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int:
        """What it takes, scales included."""

    def numel(self) -> int: ...

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """The values that it stands for, [d_out, d_in]."""


Weight = torch.Tensor | Quantized


@dataclass(frozen=True)
class Int8:
    """Integers of 8 bits, and a scale for each row."""

    integers: torch.Tensor  # [d_out, d_in], int8
    scale: torch.Tensor  # [d_out, 1], float32
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8:
        rows = weight.float()
        largest = rows.abs().amax(dim=1, keepdim=True)  # [d_out, 1]
        scale = (largest / INT8_HALF_RANGE).clamp_min(torch.finfo(torch.float32).eps)
        integers = rows.mul(1 / scale).round_().clamp_(-128, 127).to(torch.int8)
        return cls(integers.contiguous(), scale, weight.dtype)

    @property
    def shape(self) -> torch.Size:
        return self.integers.shape

    @property
    def device(self) -> torch.device:
        return self.integers.device

    @property
    def nbytes(self) -> int:
        return self.integers.nbytes + self.scale.nbytes

    def numel(self) -> int:
        return self.integers.numel()

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.integers * self.scale).to(dtype)  # [d_out, d_in] * [d_out, 1], the same float32 for every dtype


@dataclass(frozen=True)
class Int4:
    """NF4 of bitsandbytes: two weights a byte.

    It is given rows of one block: where rows end within a block, 0.50 writes out wrong values on CPUs with AVX-512.
    """

    packed: torch.Tensor  # [numel / 2, 1], uint8
    state: Any  # bitsandbytes.functional.QuantState
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int4:
        blocks = functional.pad(weight.reshape(-1), (0, -weight.numel() % INT4_BLOCK)).view(-1, INT4_BLOCK)
        packed, state = _bitsandbytes().quantize_4bit(blocks, blocksize=INT4_BLOCK, quant_type="nf4")
        return cls(packed, state, weight.shape, weight.dtype)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + int(self.state.absmax.nbytes)

    def numel(self) -> int:
        return self.shape.numel()

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        blocks: torch.Tensor = _bitsandbytes().dequantize_4bit(self.packed, self.state)
        return blocks.view(-1)[: self.numel()].view(self.shape).to(dtype)


def quantize(weight: torch.Tensor, width: Width) -> Quantized:
    """A weight [d_out, d_in] in so many bits, on its device.

    Raises:
        MissingExtraError: int4 without bitsandbytes.
    """
    return Int8.of(weight) if width == "int8" else Int4.of(weight)


def hide_weight(layer: nn.Module, device: torch.device) -> None:
    """Drop a layer's own weight. Whoever asks finds its shape and dtype there, and no number for values."""
    old: Any = layer.weight
    layer.weight = nn.Parameter(old.new_full((1, 1), torch.nan, device=device).expand(old.shape), requires_grad=False)


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes: next to none for a hidden weight."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes.functional as nf4  # seconds, and for int4 only
    except ImportError as error:
        raise MissingExtraError(
            "quantize=int4 needs the package bitsandbytes, which is not installed (quantize=int8 needs none); "
            "run: pip install 'symbiosis-flight[quantize]'"
        ) from error
    return nf4
