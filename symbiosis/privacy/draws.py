"""Masks drawn from a seed, the same bits on both sides (docs/protocol.md section 9).

    seed -> ChaCha20 keystream -> 32-bit words -> four terms, added -> whole numbers around zero

One rule: integers only. What a library calls a Gaussian differs in its last bits between two machines, and a
mask in floating point leaks: whoever knows which values are possible reads off the low bits of a sum what was
added to. A sum of whole numbers that fits the significand of its dtype has no other bits.

The sum of four uniform numbers is bell-shaped and ends at 3.46 standard deviations. What a shift of it gives
away is 1.039 times what a shift of a Gaussian of the same width does (its Fisher information).
"""

from __future__ import annotations

import math
import secrets
from typing import Any, NamedTuple

import numpy as np
import torch

from symbiosis.errors import MissingExtraError

SEED_BYTES = 32
TERMS = 4
WORDS_AT_ONCE = 1 << 20


class Grid(NamedTuple):
    """The whole numbers that masks of a dtype are drawn from: sums of four terms of so many bits."""

    dtype: torch.dtype
    term_bits: int

    @property
    def largest(self) -> int:
        """Of a mask, either way; twice as much still fits the significand."""
        return TERMS * ((1 << self.term_bits) - 1) // 2

    @property
    def sigma(self) -> float:
        """The standard deviation of a mask's elements."""
        return math.sqrt(TERMS * ((1 << 2 * self.term_bits) - 1) / 12)


SINGLE = Grid(torch.float32, 22)  # up to 2^23, sigma 2.4e6
DOUBLE = Grid(torch.float64, 32)  # up to 2^33, sigma 2.5e9
RING = Grid(torch.int64, 64)  # uniform over all of int64, so one term is enough: a sum modulo 2^64 shows nothing
BY_TAG = {"F32": SINGLE, "F64": DOUBLE, "Z64": RING}


def fresh_seed() -> bytes:
    """A seed that nobody else has."""
    return secrets.token_bytes(SEED_BYTES)


def draw(seed: bytes, rows: int, width: int, grid: Grid) -> torch.Tensor:
    """The mask of a seed: [rows, width], whole numbers in the dtype of the grid.

    Raises:
        MissingExtraError: the package cryptography is not installed.
    """
    stream = keystream(seed)
    mask = torch.empty(rows, width, dtype=grid.dtype)
    if grid.dtype == torch.int64:
        flat = mask.view(-1).numpy()
        for start in range(0, len(flat), WORDS_AT_ONCE):
            size = len(flat[start : start + WORDS_AT_ONCE])
            flat[start : start + size] = np.frombuffer(stream.update(bytes(8 * size)), dtype="<i8")
        return mask
    step = max(1, WORDS_AT_ONCE // (TERMS * max(1, width)))
    for start in range(0, rows, step):
        part = mask[start : start + step].numpy()
        words = np.frombuffer(stream.update(bytes(4 * TERMS * part.size)), dtype="<u4")
        terms = words.reshape(len(part), TERMS, width) >> (32 - grid.term_bits)  # [n, 4, width]
        part[:] = terms.sum(axis=1, dtype=np.int64) - grid.largest
    return mask


def keystream(seed: bytes) -> Any:
    """The ChaCha20 stream of a seed: `update(zeros)` gives as many bytes of it.

    Raises:
        MissingExtraError: the package cryptography is not installed.
    """
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "masks are drawn with the package cryptography, which is not installed; "
            "run: pip install 'symbiosis-flight[privacy]'"
        ) from error
    # 16 bytes: a block counter and a nonce, all zero. A seed is used for one mask only.
    return Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
