"""THE wire: version, headers, dtype tags, limits, encode and decode. No sockets (docs/protocol.md).

One rule: everything that a peer sent is checked here, before any other module sees it, and the
answer to a bad frame is a ProtocolError that says which rule of the specification it breaks.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
import pyarrow as pa
import torch
from msgspec import Meta, Struct

from symbiosis.errors import InvalidInputError, ProtocolError

VERSION = 1
MAX_HEADER_BYTES = 65_536
MAX_MANIFEST_BYTES = 64 << 20
MAX_MODULES_PER_CALL = 16
MAX_NAME_CHARS = 512
MAX_TENSORS = 8  # a gradient of a segment: its inputs, and as many gradients as it has outputs
MAX_OUTPUTS = 4
MAX_STEPS = 32
MAX_MESSAGE_BYTES = 1 << 30  # hard ceiling: gRPC stops at 2 GiB
DEFAULT_MAX_MESSAGE_BYTES = 64 << 20
MAX_DEADLINE_MS = 3_600_000
CHUNK_BYTES = 4 << 20
ALIGNMENT_BYTES = 64
SEED_BYTES = 32
SAME_HOST_PREFIX = "symbiosis-"  # of the abstract Unix socket of the same-host plane

SCHEMA = pa.schema([("data", pa.uint8())])
DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TAGS: dict[torch.dtype, str] = {dtype: tag for tag, dtype in DTYPES.items()}
# Calls of linears may also be in double precision, as masks ask for (section 9).
CALL_TAGS: dict[torch.dtype, str] = {**TAGS, torch.float64: "F64"}
# Or in the integers modulo 2^64 (section 9). No tensor of a model is of those, so none is sent as such unless asked.
RING = "Z64"
CALL_DTYPES: dict[str, torch.dtype] = {**DTYPES, "F64": torch.float64, RING: torch.int64}
# Parameters and buffers of a model may also be integers or wider floats; calls never are.
STORED_DTYPES: dict[str, torch.dtype] = {
    **DTYPES,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
STORED_TAGS: dict[torch.dtype, str] = {dtype: tag for tag, dtype in STORED_DTYPES.items()}

FILE_SUFFIXES = (".json", ".txt", ".model", ".jinja")

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Op = Literal["forward", "grad_input", "segment", "segment_grad"]
CallId = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Dim = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Shape = Annotated[list[Dim], Meta(min_length=1, max_length=2)]


class Header(Struct, frozen=True, tag_field="type", tag=str.lower, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all headers: a MessagePack map told apart by `type`."""


class TensorSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Dtype tag and shape of one tensor in a body."""

    dtype: Literal["F32", "F16", "BF16", "F64", "Z64"]
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * CALL_DTYPES[self.dtype].itemsize


Tensors = Annotated[list[TensorSpec], Meta(max_length=MAX_TENSORS)]


class Open(Header, frozen=True, tag="open"):
    """Descriptor command of a stream."""

    protocol: int
    fingerprint: Annotated[str, Meta(max_length=64)] = ""
    client: Annotated[str, Meta(max_length=64)] = ""
    payload: Annotated[bytes, Meta(max_length=32)] = b""
    manifest: Annotated[bytes, Meta(max_length=32)] = b""


class Accept(Header, frozen=True, tag="accept"):
    """The server's first word on a sealed stream."""

    key: Annotated[bytes, Meta(min_length=32, max_length=32)]


class Step(Struct, frozen=True, array_like=True):
    """One step of a segment (section 4): what to do, with which modules, to which values."""

    do: Literal["linears", "bias", "call", "add", "scale"]
    modules: Annotated[tuple[Name, ...], Meta(max_length=MAX_MODULES_PER_CALL)]
    args: Annotated[tuple[int, ...], Meta(min_length=1, max_length=2)]
    factor: float = 1.0


class Request(Header, frozen=True, tag="request"):
    """One call: an op on one or more modules that share their input. With a `seed`, its tensor is drawn, not sent."""

    id: CallId
    op: Op
    modules: Annotated[list[Name], Meta(max_length=MAX_MODULES_PER_CALL)]
    tensors: Annotated[list[TensorSpec], Meta(min_length=1, max_length=MAX_TENSORS)]
    deadline_ms: Annotated[int, Meta(ge=1, le=MAX_DEADLINE_MS)]
    steps: Annotated[tuple[Step, ...], Meta(max_length=MAX_STEPS)] = ()
    outputs: Annotated[tuple[int, ...], Meta(max_length=MAX_OUTPUTS)] = ()
    wrt: Annotated[tuple[int, ...], Meta(max_length=MAX_OUTPUTS)] = ()
    keep: bool = False
    kept: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    seed: Annotated[bytes, Meta(min_length=SEED_BYTES, max_length=SEED_BYTES)] | None = None


class Reply(Header, frozen=True, tag="reply"):
    """The answer to a request, and what the server did for it; of Z64, how its modules' weights are integers."""

    id: int
    tensors: Tensors
    queue_us: int = 0
    compute_us: int = 0
    server_us: int = 0
    batch_requests: int = 1
    batch_tokens: int = 0
    exponents: Annotated[list[int], Meta(max_length=MAX_MODULES_PER_CALL)] = []


class Error(Header, frozen=True, tag="error"):
    """A failure, in band; never a traceback."""

    id: int
    code: str
    message: str
    retry_after_ms: int | None = None


class Hello(Header, frozen=True, tag="hello"):
    """Body of the `hello` action."""

    protocol: int


class ModuleInfo(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One servable module. `hashes` maps a dtype tag to the SHA-256 of the weights (section 7), `bias` likewise."""

    name: str
    kind: Literal["linear", "conv1d", "block", "experts", "norm"]
    d_in: int
    d_out: int
    parameters: int
    tied: bool
    hashes: dict[str, str]
    bias: dict[str, str] = {}


class ParameterInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter or buffer that a client may hold."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * STORED_DTYPES[self.dtype].itemsize


class Manifest(Header, frozen=True, tag="manifest"):
    """What the server serves, agreed at connect."""

    protocol: int
    server_version: str
    model: str
    revision: str
    architecture: str
    dtype: str
    config: str
    fingerprint: str
    max_message_bytes: int
    modules: list[ModuleInfo]
    parameters: list[ParameterInfo]
    files: list[str]
    base_bytes: int
    instance: str = ""
    quantized: str = ""  # how linears are kept; hashes and fingerprint are of the values before

    @property
    def kept_as(self) -> str:
        """dtype and bits, for people."""
        return f"{self.dtype}, linears in {self.quantized}" if self.quantized else self.dtype


class Health(Header, frozen=True, tag="health"):
    """Answer of the `health` action, after a real GEMM."""

    status: Literal["serving", "draining"]
    uptime_s: float
    gemm_us: int


class TenantStats(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one tenant did since the server's start.

    `extraction` is, of the module that it sent most to, the number of rows over the rows that determine its weights;
    `extracted_modules` is how many modules are past that.
    """

    tenant: str
    requests: int
    tokens: int
    bytes_in: int
    bytes_out: int
    refused: int = 0
    extraction: float = 0.0
    extracted_modules: int = 0


class ServerStats(Header, frozen=True, tag="server_stats"):
    """Counters of the server since its start."""

    uptime_s: float
    requests: int
    batches: int
    tokens: int
    errors: int
    queued: int
    clients: int
    compute_s: float
    mean_batch: float
    memory_bytes: int
    fingerprint: str = ""
    tenant: TenantStats | None = None  # of who asks; nobody is told about another tenant


class SameHost(Header, frozen=True, tag="same_host"):
    """Where a process on the server's machine finds it, and what lets it in, once (section 11)."""

    address: Annotated[str, Meta(max_length=100)]
    ticket: Annotated[bytes, Meta(min_length=32, max_length=32)]
    max_message_bytes: Annotated[int, Meta(ge=1)]


class Ticket(Header, frozen=True, tag="ticket"):
    """Ticket of a DoGet."""

    what: Literal["parameters", "files", "weight_norms"]


class Chunk(Header, frozen=True, tag="chunk"):
    """Header of one DoGet message: where its body belongs."""

    name: Name
    offset_bytes: Annotated[int, Meta(ge=0)]
    total_bytes: Annotated[int, Meta(ge=0)]


AnyReply = Reply | Error
H = TypeVar("H", bound=Struct)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Request, AnyReply, Open)
}


def encode_header(header: Header) -> bytes:
    """Header to MessagePack bytes."""
    return _encoder.encode(header)


def decode_header(data: Any, kind: Any) -> Any:
    """MessagePack bytes to a header of the given type (or union of types).

    Raises:
        ProtocolError: too long, not MessagePack, or not a header of that type.
    """
    view = memoryview(data) if data is not None else memoryview(b"")
    if view.nbytes > MAX_HEADER_BYTES and view.nbytes > (limit := _max_bytes(kind)):
        raise ProtocolError(f"header of {view.nbytes:,} bytes exceeds the limit of {limit:,}")
    try:
        decoder = _decoders.get(kind)
        return decoder.decode(view) if decoder else msgspec.msgpack.decode(view, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise ProtocolError(f"header is not a valid {name} (docs/protocol.md section 3): {error}") from None


def manifest_hash(manifest: Manifest) -> bytes:
    """What an Open header says of the manifest: of all that several servers of one model have in common."""
    common = msgspec.structs.replace(manifest, server_version="", max_message_bytes=0)
    return hashlib.sha256(encode_header(common)).digest()


def _max_bytes(kind: Any) -> int:
    # A manifest lists every module: 500 bytes each, so 200 of them are more than another header may have.
    return MAX_MANIFEST_BYTES if Manifest in (kind, *get_args(kind)) else MAX_HEADER_BYTES


def peek_id(data: Any) -> int:
    """The call id of a header that may otherwise be invalid; 0 if not even that can be read."""
    try:
        view = memoryview(data)
        fields = msgspec.msgpack.decode(view) if view.nbytes <= MAX_HEADER_BYTES else {}
        call_id = fields.get("id")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, AttributeError, TypeError):
        return 0
    return call_id if type(call_id) is int and 0 < call_id < 1 << 63 else 0  # a bool is an int, too


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The TensorSpec that describes a tensor.

    Raises:
        InvalidInputError: a dtype that has no tag on the wire.
    """
    tag = CALL_TAGS.get(tensor.dtype)
    if tag is None:
        raise InvalidInputError(
            f"tensor of dtype {tensor.dtype} cannot be sent; expected one of {', '.join(map(str, CALL_TAGS))}. "
            "Cast it, e.g. with .to(model.dtype), before it reaches a remote layer"
        )
    return TensorSpec(tag, list(tensor.shape))  # type: ignore[arg-type]


def body_offsets(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Offset of each tensor in the body, and the body's length, in bytes."""
    offsets, end = [], 0
    for spec in specs:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets.append(start)
        end = start + spec.nbytes
    return offsets, end


def encode_body(tensors: Sequence[torch.Tensor]) -> pa.RecordBatch:
    """Tensors to a record batch; one contiguous CPU tensor is not copied.

    The batch keeps the tensor's memory alive, and shows later in-place changes of it.
    """
    if len(tensors) == 1:
        return batch_of(buffer_of(tensors[0]))
    if not tensors:
        return batch_of(pa.py_buffer(b""))
    parts: list[torch.Tensor] = []
    for tensor in tensors:
        if parts and (short := -parts[-1].nbytes % ALIGNMENT_BYTES):
            parts.append(torch.zeros(short, dtype=torch.uint8))
        parts.append(tensor.detach().reshape(-1).view(torch.uint8))
    body = torch.cat(parts)
    return batch_of(buffer_of(body))


def buffer_of(tensor: torch.Tensor) -> pa.Buffer:
    """The memory of a contiguous CPU tensor as an Arrow buffer, without a copy."""
    flat = tensor.detach().contiguous()
    return pa.foreign_buffer(flat.data_ptr(), flat.nbytes, base=flat) if flat.nbytes else pa.py_buffer(b"")


def batch_of(buffer: pa.Buffer) -> pa.RecordBatch:
    """A record batch `{data: uint8}` over a buffer, without a copy."""
    column = pa.Array.from_buffers(pa.uint8(), buffer.size, [None, buffer])
    return pa.RecordBatch.from_arrays([column], schema=SCHEMA)


def body_of(batch: pa.RecordBatch | None) -> pa.Buffer:
    """The body of a received message.

    Raises:
        ProtocolError: no record batch, another schema, nulls, or fewer bytes than the batch says.
    """
    if batch is None:
        raise ProtocolError("message has no record batch; expected the schema {data: uint8}")
    if batch.schema != SCHEMA:
        raise ProtocolError(f"record batch has the schema {{{_fields(batch.schema)}}}; expected {{data: uint8}}")
    column = batch.column(0)
    # Arrow takes lengths as the peer wrote them: nothing is counted or read before they are checked.
    validity, data = column.buffers()
    if validity is not None:
        raise ProtocolError("record batch has nulls; expected none")
    held_bytes = data.size if data is not None else 0
    if column.offset + len(column) > held_bytes:
        raise ProtocolError(f"record batch says {len(column):,} bytes and holds {held_bytes:,}")
    return data.slice(column.offset, len(column)) if data is not None else pa.py_buffer(b"")


def _fields(schema: pa.Schema) -> str:
    try:
        return ", ".join(f"{field.name}: {field.type}" for field in schema)
    except UnicodeDecodeError:  # Arrow takes names as the peer wrote them, too
        return f"{len(schema)} fields whose names are not UTF-8"


def decode_body(batch: pa.RecordBatch | None, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Record batch to tensors, without a copy; they may be written to.

    Raises:
        ProtocolError: the body's length is not the one that the specs give.
    """
    buffer = body_of(batch)
    offsets, total_bytes = body_offsets(specs)
    if buffer.size != total_bytes:
        raise ProtocolError(f"body has {buffer.size:,} bytes; its header describes {total_bytes:,}")
    return [
        tensor_over(buffer, offset, spec.nbytes, CALL_DTYPES[spec.dtype]).view(spec.shape)
        for spec, offset in zip(specs, offsets, strict=True)
    ]


def tensor_over(buffer: pa.Buffer, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor over part of a received buffer, which it keeps alive.

    Arrow marks received buffers read-only, but nobody else reads this one: layers may work in place
    on a result as they would on a local one, so the memory is taken as writable.
    """
    if not nbytes:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * nbytes).from_address(buffer.address + offset)
    memory._owner = buffer  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=dtype)
