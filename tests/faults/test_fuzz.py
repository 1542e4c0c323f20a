"""What the fuzzer found stays found: its corpus, known-good headers and random bytes go through every decoder."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from symbiosis.flight import protocol
from tests.faults.decoders import GOOD, SEEDS, decode_everything
from tests.faults.fuzz import CORPUS


def test_the_corpus_of_the_fuzzer_passes() -> None:
    kept = sorted(CORPUS.iterdir())
    assert len(kept) >= len(SEEDS)
    for path in kept:
        decode_everything(path.read_bytes())


@given(st.binary(max_size=300))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    decode_everything(data)


@given(st.sampled_from(GOOD), st.integers(0, 10_000), st.integers(0, 255), st.binary(max_size=16))
def test_good_headers_with_one_byte_changed(header: protocol.Header, at: int, value: int, body: bytes) -> None:
    data = bytearray(protocol.encode_header(header))
    data[at % len(data)] = value
    for selector in (255, 128):
        decode_everything(bytes([selector]) + bytes(data) + body)
