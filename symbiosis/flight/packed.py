"""Frozen float32 weights in the layout that oneDNN multiplies from, laid out once instead of in every product.

    tokens     1          4          16         64         512          time of torch.mm / time from the layout
    forward    1.0-1.25   2.2-2.6    1.7-2.5    1.4-1.6    1.15-1.3     1 thread, AVX2, weights of 1024 to 2816 wide

One rule: the same values. `to` gives back the weight bit by bit; results differ by the order of sums.

The layout replaces the weight, so it costs no memory; a gradient writes the weight out again, 0.2 to 2.5 ms each.
The operations are PyTorch's own for frozen graphs (torch._inductor.mkldnn_lowerings) and internal to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from symbiosis.errors import ConfigError

TOKENS = 512  # for which the layout is chosen; measured as good for fewer


@dataclass(frozen=True)
class Packed:
    """A weight [d_out, d_in] laid out for `product`. Of a tensor's interface it has what products need."""

    blocks: torch.Tensor  # [d_out, d_in], in oneDNN's own order

    @classmethod
    def of(cls, weight: torch.Tensor) -> Packed:
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TOKENS))

    @property
    def shape(self) -> torch.Size:
        return self.blocks.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks.dtype

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def nbytes(self) -> int:
        """Of the values; oneDNN rounds odd widths up to whole blocks, which PyTorch does not tell."""
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        return self.shape.numel()

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, [d_out, d_in], written out."""
        return self.blocks.to_dense().to(dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[N, d_in] -> [N, d_out], in float32."""
        return torch.ops.mkldnn._linear_pointwise(x, self.blocks, None, "none", [], "")  # type: ignore[no-any-return]


def check_can_pack(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse what `Packed` cannot hold.

    Raises:
        ConfigError: weights of this dtype, this device or this build of PyTorch cannot be laid out.
    """
    if dtype != torch.float32 or device.type != "cpu":
        held = f"{str(dtype).removeprefix('torch.')} on {device}"
        raise ConfigError(
            f"prepack: only float32 weights on a CPU are laid out anew, and these are {held};"
            " leave the option out, or add --dtype float32 --device cpu"
        )
    available = torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
    if not available:
        raise ConfigError(
            f"prepack: this PyTorch ({torch.__version__}) is built without oneDNN's linear; leave the option out"
        )
