"""Every decoder of the wire, fed with bytes: the target of the fuzzer and of the corpus that it left."""

from __future__ import annotations

import pyarrow as pa

from symbiosis.errors import SymbiosisError
from symbiosis.flight import protocol

KINDS = (
    protocol.Open,
    protocol.Request,
    protocol.AnyReply,
    protocol.Hello,
    protocol.Manifest | protocol.Error,
    protocol.Health | protocol.Error,
    protocol.ServerStats | protocol.Error,
    protocol.Ticket,
    protocol.Chunk | protocol.Error,
)

SPEC = protocol.TensorSpec("F32", [1, 2])
# A valid header of each kind: what a mutation starts from.
GOOD = [
    protocol.Open(protocol=1, fingerprint="f", client="c"),
    protocol.Request(id=1, op="forward", modules=["a"], tensors=[SPEC], deadline_ms=5),
    protocol.Reply(id=1, tensors=[SPEC]),
    protocol.Error(id=1, code="X", message="m", retry_after_ms=3),
    protocol.Hello(protocol=1),
    protocol.Ticket(what="files"),
    protocol.Chunk(name="n", offset_bytes=0, total_bytes=1),
]


def split(data: bytes) -> tuple[bytes, bytes]:
    """Header and body: the first byte says how much of the rest is the header."""
    at = 1 + (data[0] * (len(data) - 1)) // 255
    return data[1:at], data[at:]


def _seed(header: protocol.Header, body: bytes) -> bytes:
    rest = protocol.encode_header(header) + body
    return next(data for i in range(256) if split(data := bytes([i]) + rest)[1] == body)


SEEDS = [_seed(header, bytes(8) if isinstance(header, protocol.Request | protocol.Reply) else b"") for header in GOOD]


def decode_everything(data: bytes) -> None:
    """The first byte splits the rest into a header and a body. Raises nothing but what is a finding."""
    if not data:
        return
    header, body = split(data)
    assert 0 <= protocol.peek_id(header) < 1 << 63
    for kind in KINDS:
        try:
            decoded = protocol.decode_header(header, kind)
        except SymbiosisError:
            continue
        encoded = protocol.encode_header(decoded)
        assert protocol.encode_header(protocol.decode_header(encoded, kind)) == encoded
        if isinstance(decoded, protocol.Request | protocol.Reply):
            _decode_body(body, decoded.tensors)
    _decode_ipc(data)


def _decode_body(body: bytes, specs: list[protocol.TensorSpec]) -> None:
    try:
        tensors = protocol.decode_body(protocol.batch_of(pa.py_buffer(body)), specs)
    except SymbiosisError:
        return
    assert [list(tensor.shape) for tensor in tensors] == [list(spec.shape) for spec in specs]


def _decode_ipc(data: bytes) -> None:
    """A record batch whose lengths and offsets are the peer's, as Flight hands it over."""
    size, offset, length = (int.from_bytes(data[i : i + 2], "little") for i in (0, 2, 4))
    values = pa.py_buffer(data[:size])
    try:
        column = pa.Array.from_buffers(pa.uint8(), length, [None, values], offset=offset)
        batch = pa.RecordBatch.from_arrays([column], schema=protocol.SCHEMA)
        found = protocol.body_of(batch)
    except (SymbiosisError, pa.ArrowException):
        return
    assert found.size == length
    assert offset + length <= values.size
