"""Hashes of base weights, by which client and server agree that they hold the same model.

One rule: a hash depends on the values and on the published dtype only (docs/protocol.md section 7),
not on storage layout, device, quantisation or the dtype that either side happened to load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from symbiosis.flight.protocol import DTYPES

HASH_ROWS_BYTES = 32 << 20  # how much of a weight is cast and hashed at a time


def hash_tensors(tensors: Iterable[torch.Tensor], dtype: torch.dtype) -> str:
    """SHA-256 over the row-major values of the tensors, cast to dtype, in hex."""
    digest = hashlib.sha256()
    for tensor in tensors:
        rows = tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1)  # [rows, rest]
        step = max(1, HASH_ROWS_BYTES // max(1, rows.shape[1] * dtype.itemsize))
        for block in rows.split(step):
            values = block.to(device="cpu", dtype=dtype).contiguous()
            digest.update(values.view(torch.uint8).numpy())
    return digest.hexdigest()


def module_hashes(tensors: list[torch.Tensor]) -> dict[str, str]:
    """The hash of one module under each published dtype."""
    return {tag: hash_tensors(tensors, dtype) for tag, dtype in DTYPES.items()}


def served_fingerprint(fingerprint: str, quantized: str) -> str:
    """What results depend on: the weights' fingerprint, and how a server keeps them, if that changes their values."""
    return hashlib.sha256(f"{fingerprint} {quantized}\n".encode()).hexdigest() if quantized else fingerprint


def model_fingerprint(hashes: Mapping[str, str]) -> str:
    """One hash over `name hash` lines, sorted by name."""
    lines = "".join(f"{name} {value}\n" for name, value in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
