"""Masks drawn from a seed: the bits that the specification says, and what their distribution promises."""

from __future__ import annotations

import struct

import pytest
import torch

from symbiosis.privacy.draws import DOUBLE, RING, SINGLE, Grid, draw, fresh_seed

SEED = bytes(range(32))


def chacha20(key: bytes, blocks: int) -> bytes:
    """RFC 8439 section 2.3, with a nonce of zeros, written from the specification."""

    def turn(s: list[int], a: int, b: int, c: int, d: int) -> None:
        for into, other, mixed, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[into] = (s[into] + s[other]) & 0xFFFFFFFF
            s[mixed] ^= s[into]
            s[mixed] = ((s[mixed] << by) | (s[mixed] >> (32 - by))) & 0xFFFFFFFF

    stream = b""
    for counter in range(blocks):
        start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *struct.unpack("<8I", key), counter, 0, 0, 0]
        state = list(start)
        for _ in range(10):
            for column in range(4):
                turn(state, column, column + 4, column + 8, column + 12)
            for i in range(4):
                turn(state, i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12)
        stream += struct.pack("<16I", *((a + b) & 0xFFFFFFFF for a, b in zip(state, start, strict=True)))
    return stream


def test_the_keystream_of_this_test_is_the_published_one() -> None:
    # RFC 8439, appendix A.1, test vector 1: key, nonce and counter of zeros.
    assert chacha20(bytes(32), 1)[:8].hex() == "76b8e0ada0f13d90"


GRIDS = pytest.mark.parametrize("grid", [SINGLE, DOUBLE], ids=["single", "double"])


@GRIDS
def test_a_mask_is_what_the_specification_says(grid: Grid) -> None:
    shift, middle = (10, 2**23 - 2) if grid is SINGLE else (0, 2**33 - 2)
    rows, width = 5, 7  # 560 bytes: rows do not begin where blocks do
    words = struct.unpack(f"<{4 * rows * width}I", chacha20(SEED, 9)[: 16 * rows * width])

    mask = draw(SEED, rows, width, grid)

    for row in range(rows):
        for column in range(width):
            terms = [words[4 * width * row + width * term + column] >> shift for term in range(4)]
            assert mask[row, column].item() == sum(terms) - middle


def test_long_draws_go_on_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw(SEED, 100, 24, DOUBLE)
    monkeypatch.setattr("symbiosis.privacy.draws.WORDS_AT_ONCE", 4 * 24 * 7)

    assert torch.equal(draw(SEED, 100, 24, DOUBLE), whole)
    assert torch.equal(draw(SEED, 3, 24, DOUBLE), whole[:3])


@GRIDS
def test_masks_are_whole_centred_and_bell_shaped(grid: Grid) -> None:
    drawn = draw(fresh_seed(), 1000, 500, grid)
    mask, sigma = drawn.double(), grid.sigma

    assert drawn.dtype == grid.dtype
    assert torch.equal(mask, mask.round())
    assert mask.abs().max() <= grid.largest < 2 / torch.finfo(grid.dtype).eps / 2
    # 500,000 elements: the mean is within 5 of its standard errors, the deviation within 0.5%.
    assert abs(mask.mean().item()) < 5 * sigma / 500_000**0.5
    assert mask.std().item() == pytest.approx(sigma, rel=5e-3)
    # A sum of four uniforms has an excess kurtosis of -0.3, a Gaussian of 0, a uniform of -1.2.
    assert ((mask / sigma) ** 4).mean().item() == pytest.approx(2.7, abs=0.03)


def test_rows_columns_and_seeds_are_independent() -> None:
    first, second = (draw(fresh_seed(), 200, 300, DOUBLE) for _ in range(2))

    for a, b in ((first, second), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1])):
        correlation = (a * b).mean().item() / DOUBLE.sigma**2
        assert abs(correlation) < 5 / a.numel() ** 0.5


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_an_empty_mask(shape: tuple[int, int]) -> None:
    assert draw(SEED, *shape, SINGLE).shape == shape


def test_a_mask_of_the_ring_is_the_keystream_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = struct.unpack("<35q", chacha20(SEED, 5)[: 8 * 35])

    assert draw(SEED, 5, 7, RING).flatten().tolist() == list(expected)
    monkeypatch.setattr("symbiosis.privacy.draws.WORDS_AT_ONCE", 9)
    assert draw(SEED, 5, 7, RING).flatten().tolist() == list(expected)
