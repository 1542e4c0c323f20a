"""Rows: results of calls, [N, d], as the tensors that a layer returns, [..., d], and gradients back.

One rule: what is returned is contiguous and no view, like the result of a local layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def flat(x: torch.Tensor) -> torch.Tensor:
    """[..., d] -> [N, d]"""
    return x.reshape(-1, x.shape[-1])


def split_rows(y: torch.Tensor, widths: Sequence[int], lead: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """[N, sum d_out] -> one [*lead, d_out] for each width."""
    if len(widths) == 1:
        return (owned(y, (*lead, widths[0])),)
    # Contiguous like local results, for callers that .view() them.
    return tuple(owned(part.contiguous(), (*lead, part.shape[1])) for part in y.split(list(widths), dim=1))


def joined_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Several [..., d_out] -> [N, sum d_out]"""
    rows = [flat(part) for part in parts]
    return torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]


def owned(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor in another shape, over the same memory but no view of it.

    Autograd forbids in-place work on views that a Function returns, and local layers allow it.
    """
    strides, step = [0] * len(shape), 1
    for place in range(len(shape) - 1, -1, -1):
        strides[place] = step
        step *= max(1, shape[place])
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, tuple(strides))
