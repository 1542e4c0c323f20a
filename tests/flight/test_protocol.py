from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from symbiosis import config
from symbiosis.errors import InvalidInputError, ProtocolError
from symbiosis.flight import protocol
from symbiosis.flight.protocol import (
    Accept,
    Chunk,
    Error,
    Health,
    Hello,
    Manifest,
    ModuleInfo,
    Open,
    ParameterInfo,
    Reply,
    Request,
    SameHost,
    ServerStats,
    Step,
    TensorSpec,
    Ticket,
)

settings.register_profile("wire", deadline=None, max_examples=60)  # a shared machine may pause for longer than 200 ms
settings.load_profile("wire")

# --- golden bytes: what is on the wire may not change within one protocol version --------------------------------

GOLDEN_HEADERS = [
    (
        Open(protocol=1, fingerprint="ab12", client="nb-1"),
        "84 a474797065 a46f70656e a870726f746f636f6c 01 ab66696e6765727072696e74 a461623132 a6636c69656e74 a46e622d31",
    ),
    (
        Request(id=7, op="forward", modules=["q", "k"], tensors=[TensorSpec("BF16", [3, 8])], deadline_ms=1500),
        "86 a474797065 a772657175657374 a26964 07 a26f70 a7666f7277617264 a76d6f64756c6573 92 a171 a16b"
        "a774656e736f7273 91 82 a56474797065 a442463136 a57368617065 92 03 08 ab646561646c696e655f6d73 cd05dc",
    ),
    (
        Request(
            id=7,
            op="segment",
            modules=[],
            tensors=[TensorSpec("F32", [3, 8])],
            deadline_ms=1500,
            steps=(Step("linears", ("q",), (0,)), Step("scale", (), (1,), 0.5)),
            outputs=(2,),
        ),
        "88 a474797065 a772657175657374 a26964 07 a26f70 a77365676d656e74 a76d6f64756c6573 90"
        "a774656e736f7273 91 82 a56474797065 a3463332 a57368617065 92 03 08 ab646561646c696e655f6d73 cd05dc"
        "a57374657073 92 94 a76c696e65617273 91 a171 91 00 cb3ff0000000000000"
        "94 a57363616c65 90 91 01 cb3fe0000000000000 a76f757470757473 91 02",
    ),
    (
        Reply(
            id=7,
            tensors=[TensorSpec("F32", [3, 16])],
            queue_us=5,
            compute_us=300,
            server_us=400,
            batch_requests=2,
            batch_tokens=10,
        ),
        "88 a474797065 a57265706c79 a26964 07 a774656e736f7273 91 82 a56474797065 a3463332 a57368617065 92 03 10"
        "a871756575655f7573 05 aa636f6d707574655f7573 cd012c a97365727665725f7573 cd0190"
        "ae62617463685f7265717565737473 02 ac62617463685f746f6b656e73 0a",
    ),
    (
        Error(id=7, code="SERVER_BUSY", message="full", retry_after_ms=200),
        "85 a474797065 a56572726f72 a26964 07 a4636f6465 ab5345525645525f42555359 a76d657373616765 a466756c6c"
        "ae72657472795f61667465725f6d73 ccc8",
    ),
    (Hello(protocol=1), "82 a474797065 a568656c6c6f a870726f746f636f6c 01"),
    (
        Accept(key=bytes(range(32))),
        "82 a474797065 a6616363657074 a36b6579 c420 " + bytes(range(32)).hex(),
    ),
    (Ticket(what="files"), "82 a474797065 a67469636b6574 a477686174 a566696c6573"),
    (
        Chunk(name="a.json", offset_bytes=0, total_bytes=300),
        "84 a474797065 a56368756e6b a46e616d65 a6612e6a736f6e ac6f66667365745f6279746573 00"
        "ab746f74616c5f6279746573 cd012c",
    ),
    (
        Health(status="serving", uptime_s=1.5, gemm_us=9),
        "84 a474797065 a66865616c7468 a6737461747573 a773657276696e67 a8757074696d655f73 cb3ff8000000000000"
        "a767656d6d5f7573 09",
    ),
    (
        ServerStats(
            uptime_s=1.5,
            requests=4,
            batches=2,
            tokens=64,
            errors=1,
            queued=0,
            clients=2,
            compute_s=0.25,
            mean_batch=2.0,
            memory_bytes=1 << 20,
        ),
        "8b a474797065 ac7365727665725f7374617473 a8757074696d655f73 cb3ff8000000000000 a87265717565737473 04"
        "a762617463686573 02 a6746f6b656e73 40 a66572726f7273 01 a6717565756564 00 a7636c69656e7473 02"
        "a9636f6d707574655f73 cb3fd0000000000000 aa6d65616e5f6261746368 cb4000000000000000"
        "ac6d656d6f72795f6279746573 ce00100000",
    ),
    (
        Manifest(
            protocol=1,
            server_version="0.1",
            model="m",
            revision="",
            architecture="A",
            dtype="F32",
            config="{}",
            fingerprint="ff",
            max_message_bytes=1024,
            modules=[
                ModuleInfo(
                    name="q",
                    kind="linear",
                    d_in=2,
                    d_out=3,
                    parameters=6,
                    tied=False,
                    hashes={"F32": "aa"},
                    bias={"F32": "bb"},
                )
            ],
            parameters=[ParameterInfo("n", "I64", [2])],
            files=["t.json"],
            base_bytes=24,
        ),
        "de000e a474797065 a86d616e6966657374 a870726f746f636f6c 01 ae7365727665725f76657273696f6e a3302e31"
        "a56d6f64656c a16d a87265766973696f6e a0 ac617263686974656374757265 a141 a56474797065 a3463332"
        "a6636f6e666967 a27b7d ab66696e6765727072696e74 a26666 b16d61785f6d6573736167655f6279746573 cd0400"
        "a76d6f64756c6573 91 88 a46e616d65 a171 a46b696e64 a66c696e656172 a4645f696e 02 a5645f6f7574 03"
        "aa706172616d6574657273 06 a474696564 c2 a6686173686573 81 a3463332 a26161 a462696173 81 a3463332 a26262"
        "aa706172616d6574657273 91 83 a46e616d65 a16e a56474797065 a3493634 a57368617065 91 02"
        "a566696c6573 91 a6742e6a736f6e aa626173655f6279746573 18",
    ),
    (
        SameHost(address="symbiosis-a", ticket=bytes(range(32)), max_message_bytes=1024),
        "84 a474797065 a973616d655f686f7374 a761646472657373 ab73796d62696f7369732d61 a67469636b6574 c420"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f b16d61785f6d6573736167655f6279746573 cd0400",
    ),
]


@pytest.mark.parametrize(("header", "golden"), GOLDEN_HEADERS, ids=[type(h).__name__ for h, _ in GOLDEN_HEADERS])
def test_header_has_its_golden_bytes(header: Any, golden: str) -> None:
    assert protocol.encode_header(header).hex() == golden.replace(" ", "")
    assert protocol.decode_header(bytes.fromhex(golden), type(header)) == header


def test_golden_bytes_cover_every_header() -> None:
    assert {type(header) for header, _ in GOLDEN_HEADERS} == set(protocol.Header.__subclasses__())


def test_body_of_two_tensors_has_its_golden_bytes() -> None:
    first = torch.tensor([[1.0, 2.0]])  # 8 bytes, then 56 of gap
    second = torch.tensor([[3.0]], dtype=torch.bfloat16)

    body = protocol.body_of(protocol.encode_body([first, second])).to_pybytes()

    assert body.hex() == "0000803f" + "00000040" + "00" * 56 + "4040"


def test_body_of_one_tensor_has_no_padding() -> None:
    body = protocol.body_of(protocol.encode_body([torch.tensor([1.0, -2.0], dtype=torch.float16)]))

    assert body.to_pybytes().hex() == "003c" + "00c0"


def test_a_tensor_that_ends_at_the_boundary_is_followed_at_once() -> None:
    specs = [TensorSpec("F32", [4, 4]), TensorSpec("F16", [1, 1]), TensorSpec("F32", [0, 9]), TensorSpec("F32", [1, 1])]

    assert protocol.body_offsets(specs) == ([0, 64, 128, 128], 132)


# --- round trips -----------------------------------------------------------------------------------------------

names = st.text(min_size=1, max_size=20)
dims = st.integers(0, (1 << 31) - 1)
specs = st.builds(TensorSpec, st.sampled_from(list(protocol.DTYPES)), st.lists(dims, min_size=1, max_size=2))
counters = st.integers(0, 1 << 62)
steps = st.builds(
    Step,
    do=st.sampled_from(["linears", "bias", "call", "add", "scale"]),
    modules=st.lists(names, max_size=3).map(tuple),
    args=st.lists(st.integers(0, 40), min_size=1, max_size=2).map(tuple),
    factor=st.floats(allow_nan=False),
)
requests = st.builds(
    Request,
    id=st.integers(1, (1 << 63) - 1),
    op=st.sampled_from(["forward", "grad_input", "segment"]),
    modules=st.lists(names, max_size=16),
    steps=st.lists(steps, max_size=4).map(tuple),
    outputs=st.lists(st.integers(0, 40), max_size=4).map(tuple),
    tensors=st.lists(specs, min_size=1, max_size=4),
    deadline_ms=st.integers(1, protocol.MAX_DEADLINE_MS),
)
replies = st.builds(
    Reply,
    id=st.integers(1, (1 << 63) - 1),
    tensors=st.lists(specs, max_size=4),
    queue_us=counters,
    compute_us=counters,
    server_us=counters,
    batch_requests=counters,
    batch_tokens=counters,
)
errors = st.builds(
    Error, id=st.integers(0, (1 << 63) - 1), code=names, message=st.text(), retry_after_ms=st.none() | counters
)
opens = st.builds(Open, protocol=st.integers(0, 99), fingerprint=st.text(max_size=64), client=st.text(max_size=64))


@given(requests)
def test_request_survives_the_wire(header: Request) -> None:
    assert protocol.decode_header(protocol.encode_header(header), Request) == header


@given(replies | errors)
def test_reply_or_error_survives_the_wire(header: Reply | Error) -> None:
    assert protocol.decode_header(protocol.encode_header(header), protocol.AnyReply) == header


@given(opens)
def test_open_survives_the_wire(header: Open) -> None:
    assert protocol.decode_header(protocol.encode_header(header), Open) == header


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bit pattern, NaN and infinity among them, of any wire dtype; zero rows or columns too."""
    dtype = draw(st.sampled_from(list(protocol.TAGS)))
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=2))
    seed = draw(st.integers(0, 2**31))
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@given(st.lists(tensors(), min_size=1, max_size=4))
@example([torch.empty(0, 5)])
@example([torch.empty(0, 5, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)])
@example([torch.empty(0), torch.empty(3, 0, dtype=torch.float16), torch.empty(0, 0)])
def test_body_survives_bit_for_bit(sent: list[torch.Tensor]) -> None:
    specs = [protocol.spec_of(tensor) for tensor in sent]

    received = protocol.decode_body(protocol.encode_body(sent), specs)

    assert [(t.dtype, t.shape) for t in received] == [(t.dtype, t.shape) for t in sent]
    assert [bits_of(t) for t in received] == [bits_of(t) for t in sent]


@given(st.lists(tensors(), min_size=1, max_size=4))
def test_body_length_is_the_one_that_its_specs_give(sent: list[torch.Tensor]) -> None:
    offsets, total_bytes = protocol.body_offsets([protocol.spec_of(tensor) for tensor in sent])

    assert protocol.body_of(protocol.encode_body(sent)).size == total_bytes
    assert all(offset % protocol.ALIGNMENT_BYTES == 0 for offset in offsets)
    assert total_bytes == offsets[-1] + sent[-1].nbytes


def test_a_transposed_tensor_travels_in_row_major_order() -> None:
    x = torch.arange(6.0).view(2, 3).t()  # [3, 2], not contiguous

    (received,) = protocol.decode_body(protocol.encode_body([x]), [protocol.spec_of(x)])

    assert torch.equal(received, x)


def test_one_contiguous_tensor_is_sent_without_a_copy() -> None:
    x = torch.zeros(4, 4)

    buffer = protocol.body_of(protocol.encode_body([x]))

    assert buffer.address == x.data_ptr()


def test_received_tensors_may_be_written_to() -> None:
    x = torch.zeros(2, 2)
    received_buffer = pa.py_buffer(bytes(x.nbytes))  # read-only, as Flight's are
    (received,) = protocol.decode_body(protocol.batch_of(received_buffer), [protocol.spec_of(x)])

    received += 1

    assert received.sum() == 4


def test_a_received_tensor_keeps_its_memory_alive() -> None:
    spec = TensorSpec("F32", [256, 256])
    kept = [protocol.decode_body(protocol.batch_of(pa.py_buffer(b"\1" * spec.nbytes)), [spec])[0] for _ in range(8)]

    assert all(bits_of(tensor) == b"\1" * spec.nbytes for tensor in kept)


# --- limits ----------------------------------------------------------------------------------------------------


def a_request(**changes: Any) -> bytes:
    fields = {
        "type": "request",
        "id": 1,
        "op": "forward",
        "modules": ["m"],
        "tensors": [{"dtype": "F32", "shape": [2, 3]}],
        "deadline_ms": 1000,
    }
    return msgspec.msgpack.encode({k: v for k, v in {**fields, **changes}.items() if v is not None})


AT_THE_LIMIT = {
    "largest id": {"id": (1 << 63) - 1},
    "16 modules": {"modules": ["m"] * 16},
    "name of 512 characters": {"modules": ["é" * 512]},
    "4 tensors": {"tensors": [{"dtype": "F16", "shape": [1, 1]}] * 4},
    "largest dims": {"tensors": [{"dtype": "BF16", "shape": [(1 << 31) - 1, 0]}]},
    "one hour": {"deadline_ms": 3_600_000},
    "one millisecond": {"deadline_ms": 1},
    "no type where only one can stand": {"type": None},
    "32 steps": {"op": "segment", "modules": [], "steps": [["scale", [], [0], 1.0]] * 32, "outputs": [0] * 4},
}

BEYOND = {
    "id 0": ({"id": 0}, "id"),
    "id below 0": ({"id": -1}, "id"),
    "id of 64 bits": ({"id": 1 << 63}, "id"),
    "id as text": ({"id": "1"}, "id"),
    "id as float": ({"id": 1.5}, "id"),
    "id as bool": ({"id": True}, "id"),
    "no id": ({"id": None}, "id"),
    "unknown op": ({"op": "grad_weight"}, "op"),
    "no op": ({"op": None}, "op"),
    "no list of modules": ({"modules": None}, "modules"),
    "17 modules": ({"modules": ["m"] * 17}, "modules"),
    "modules as text": ({"modules": "m"}, "modules"),
    "empty name": ({"modules": [""]}, "modules"),
    "name of 513 characters": ({"modules": ["m" * 513]}, "modules"),
    "no tensors": ({"tensors": []}, "tensors"),
    "9 tensors": ({"tensors": [{"dtype": "F32", "shape": [1, 1]}] * 9}, "tensors"),
    "dtype without a tag": ({"tensors": [{"dtype": "I64", "shape": [2, 3]}]}, "dtype"),
    "dtype in lower case": ({"tensors": [{"dtype": "f32", "shape": [2, 3]}]}, "dtype"),
    "shape without dimensions": ({"tensors": [{"dtype": "F32", "shape": []}]}, "shape"),
    "3 dimensions": ({"tensors": [{"dtype": "F32", "shape": [1, 2, 3]}]}, "shape"),
    "negative dimension": ({"tensors": [{"dtype": "F32", "shape": [-1, 3]}]}, "shape"),
    "dimension of 32 bits": ({"tensors": [{"dtype": "F32", "shape": [1 << 31, 3]}]}, "shape"),
    "unknown field in a tensor": ({"tensors": [{"dtype": "F32", "shape": [1], "strides": [4]}]}, "strides"),
    "deadline 0": ({"deadline_ms": 0}, "deadline_ms"),
    "deadline over an hour": ({"deadline_ms": 3_600_001}, "deadline_ms"),
    "no deadline": ({"deadline_ms": None}, "deadline_ms"),
    "33 steps": ({"steps": [["scale", [], [0], 1.0]] * 33}, "steps"),
    "unknown step": ({"steps": [["exec", [], [0], 1.0]]}, "steps"),
    "step of nothing": ({"steps": [["scale", [], [], 1.0]]}, "steps"),
    "step of 3 values": ({"steps": [["add", [], [0, 0, 0], 1.0]]}, "steps"),
    "step with 17 modules": ({"steps": [["linears", ["m"] * 17, [0], 1.0]]}, "steps"),
    "step as a map": ({"steps": [{"do": "scale", "modules": [], "args": [0]}]}, "steps"),
    "factor as text": ({"steps": [["scale", [], [0], "2"]]}, "steps"),
    "5 outputs": ({"outputs": [0] * 5}, "outputs"),
    "unknown field": ({"priority": 1}, "priority"),
    "type of another header": ({"type": "reply"}, "reply"),
}


@pytest.mark.parametrize("changes", AT_THE_LIMIT.values(), ids=AT_THE_LIMIT)
def test_a_request_at_the_limit_is_read(changes: dict[str, Any]) -> None:
    request = protocol.decode_header(a_request(**changes), Request)

    assert isinstance(request, Request)


@pytest.mark.parametrize(("changes", "named"), BEYOND.values(), ids=BEYOND)
def test_a_request_beyond_a_limit_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ProtocolError, match=named) as caught:
        protocol.decode_header(a_request(**changes), Request)

    assert "docs/protocol.md" in str(caught.value)


def test_a_header_at_the_limit_is_read_and_one_byte_more_is_not() -> None:
    room = protocol.MAX_HEADER_BYTES - len(protocol.encode_header(Error(id=1, code="X", message=""))) - 2  # str16's tag
    longest = protocol.encode_header(Error(id=1, code="X", message="m" * room))
    assert len(longest) == protocol.MAX_HEADER_BYTES

    assert protocol.decode_header(longest, Error).id == 1
    with pytest.raises(ProtocolError, match=r"65,537 bytes exceeds the limit of 65,536"):
        protocol.decode_header(protocol.encode_header(Error(id=1, code="X", message="m" * (room + 1))), Error)


def test_the_manifest_may_be_longer_than_other_headers() -> None:
    module = ModuleInfo(
        name="m" * 60, kind="linear", d_in=2, d_out=3, parameters=6, tied=False, hashes={"F32": "a" * 64}
    )
    manifest = msgspec.structs.replace(
        next(h for h, _ in GOLDEN_HEADERS if isinstance(h, Manifest)), modules=[module] * 500
    )
    data = protocol.encode_header(manifest)
    assert len(data) > protocol.MAX_HEADER_BYTES

    assert protocol.decode_header(data, Manifest) == manifest
    assert protocol.decode_header(data, Manifest | Error) == manifest


def test_a_reply_without_a_type_is_refused_because_it_might_be_an_error() -> None:
    with pytest.raises(ProtocolError, match="type"):
        protocol.decode_header(msgspec.msgpack.encode({"id": 1, "tensors": []}), protocol.AnyReply)


def test_open_limits_what_a_client_may_call_itself() -> None:
    with pytest.raises(ProtocolError, match="client"):
        protocol.decode_header(protocol.encode_header(Open(protocol=1, client="c" * 65)), Open)


def test_config_and_wire_agree_on_the_limits() -> None:
    # config.py may not import torch, and so not protocol.py: the numbers stand in both.
    assert config.MAX_MESSAGE_BYTES == protocol.MAX_MESSAGE_BYTES
    assert config.MAX_REQUEST_TIMEOUT_S * 1000 == protocol.MAX_DEADLINE_MS
    assert config.ServerOptions(model="m").max_message_bytes == protocol.DEFAULT_MAX_MESSAGE_BYTES


# --- whatever a peer sends ---------------------------------------------------------------------------------------

DEEP = b"\x91" * 60_000 + b"\xc0"  # a list in a list in a list ...
GARBAGE = {
    "nothing": b"",
    "nil": b"\xc0",
    "a number": b"\x07",
    "a list": b"\x90",
    "an empty map": b"\x80",
    "never used": b"\xc1",
    "cut off": a_request()[:-3],
    "something after it": a_request() + b"\x00",
    "text that is not UTF-8": a_request().replace(b"forward", b"f\xffrward"),
    "name that is not UTF-8": a_request().replace(b"\xa1m", b"\xa1\xff"),
    "key that is not UTF-8": a_request().replace(b"\xa2op", b"\xa2\xffp"),
    "a list said to hold 4 billion": b"\xdd\xff\xff\xff\xff",
    "bytes said to be 4 billion": b"\xc6\xff\xff\xff\xff",
    "deep": DEEP,
    "deep as a type": b"\x81\xa4type" + DEEP,
    "deep as an unknown field": b"\x82\xa4type\xa7request\xa1x" + DEEP,
    "deep as an id": b"\x82\xa4type\xa7request\xa2id" + DEEP,
    "deep in a tensor": a_request(tensors=[{"dtype": "F32", "shape": [1], "x": "Q"}]).replace(b"\xa1Q", DEEP),
    "maps in maps": b"\x81\xa2id" * 15_000 + b"\x01",
    "keys that are maps": b"\x81\x81\x80\x01\x01",
    "an extension": b"\xd4\x05\x00",
    "a timestamp out of range": b"\xd7\xff" + b"\xff" * 8,
    "id twice": b"\x82\xa2id\x01\xa2id\x02",
    "a pickle": pickle.dumps(ProtocolError),
}


@pytest.mark.parametrize("kind", [Request, Open, Hello, Ticket, protocol.AnyReply, Manifest], ids=str)
@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_a_protocol_error(data: bytes, kind: Any) -> None:
    with pytest.raises(ProtocolError, match="not a valid"):
        protocol.decode_header(data, kind)


def test_a_missing_header_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="not a valid Request"):
        protocol.decode_header(None, Request)


@given(st.binary(max_size=300))
def test_random_bytes_are_a_header_or_a_protocol_error(data: bytes) -> None:
    for kind in (Request, Open, protocol.AnyReply, Ticket):
        with contextlib.suppress(ProtocolError):
            protocol.decode_header(data, kind)


@given(st.data())
def test_a_request_with_changed_bytes_is_a_header_or_a_protocol_error(data: st.DataObject) -> None:
    frame = bytearray(a_request())
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        assert isinstance(protocol.decode_header(bytes(frame), Request), Request)
    protocol.peek_id(bytes(frame))


# --- the id of a frame that is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "named"), BEYOND.values(), ids=BEYOND)
def test_the_id_is_found_in_a_request_that_breaks_another_rule(changes: dict[str, Any], named: str) -> None:
    expected = 0 if "id" in changes else 1

    assert protocol.peek_id(a_request(**changes)) == expected


@pytest.mark.parametrize(
    "data", [None, *(d for k, d in GARBAGE.items() if k not in ("id twice", "something after it"))]
)
def test_garbage_has_id_zero(data: bytes | None) -> None:
    found = protocol.peek_id(data)

    assert found in (0, 1)
    assert type(found) is int


@given(st.binary(max_size=200))
def test_looking_for_an_id_never_raises(data: bytes) -> None:
    assert 0 <= protocol.peek_id(data) < 1 << 63


def test_no_id_is_looked_for_in_a_header_that_is_too_long() -> None:
    assert protocol.peek_id(a_request(modules=["m" * protocol.MAX_HEADER_BYTES])) == 0


def test_a_bool_is_no_id() -> None:
    assert type(protocol.peek_id(a_request(id=True))) is int


# --- bodies that do not fit ---------------------------------------------------------------------------------------

SPEC = TensorSpec("F32", [2, 2])


@pytest.mark.parametrize("size", [0, 15, 17, 1000])
def test_a_body_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"body has {size:,} bytes; its header describes 16"):
        protocol.decode_body(protocol.batch_of(pa.py_buffer(bytes(size))), [SPEC])


def test_dims_whose_product_overflows_are_refused_by_length() -> None:
    huge = TensorSpec("F32", [(1 << 31) - 1, (1 << 31) - 1])

    with pytest.raises(ProtocolError, match="its header describes 18,446,744"):
        protocol.decode_body(protocol.batch_of(pa.py_buffer(b"")), [huge])


def column(*values: int | None, dtype: pa.DataType | None = None) -> pa.Array:
    return pa.array(values, dtype or pa.uint8())


@pytest.mark.parametrize(
    "batch",
    [
        pa.record_batch({"data": column(1, dtype=pa.int32())}),
        pa.record_batch({"data": column(1, dtype=pa.int8())}),
        pa.record_batch({"other": column(1)}),
        pa.record_batch({"data": column(1), "more": column(1)}),
        pa.record_batch({"data": pa.array([[1]], pa.list_(pa.uint8()))}),
        pa.record_batch({"data": pa.array([b"a"])}),
    ],
    ids=lambda batch: str(batch.schema).replace("\n", " "),
)
def test_a_batch_of_another_schema_is_refused(batch: pa.RecordBatch) -> None:
    with pytest.raises(ProtocolError, match=r"record batch has the schema \{.*\}; expected \{data: uint8\}"):
        protocol.body_of(batch)


def test_a_batch_without_columns_is_refused() -> None:
    with pytest.raises(ProtocolError, match="schema"):
        protocol.body_of(pa.RecordBatch.from_arrays([], schema=pa.schema([])))


def test_names_that_are_not_utf_8_are_refused_like_any_other() -> None:
    schema = pa.schema([pa.field(b"d\xf4t", pa.uint8())])  # found by flipping bits on the way

    with pytest.raises(ProtocolError, match="names are not UTF-8"):
        protocol.body_of(pa.RecordBatch.from_arrays([pa.array([1], pa.uint8())], schema=schema))


def test_a_batch_with_nulls_is_refused() -> None:
    with pytest.raises(ProtocolError, match="nulls"):
        protocol.body_of(pa.record_batch({"data": column(1, None, 3)}))


def test_no_batch_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no record batch"):
        protocol.body_of(None)


def test_a_slice_of_a_batch_is_read_from_its_offset() -> None:
    batch = pa.record_batch({"data": column(*range(200))}).slice(100, 3)

    assert protocol.body_of(batch).to_pybytes() == bytes([100, 101, 102])


def lying_batch(said: int, held: int) -> pa.RecordBatch:
    """A batch whose length says more than its memory holds; Arrow's reader takes such lengths over from the peer."""
    memory = pa.allocate_buffer(said, resizable=True)
    batch = protocol.batch_of(memory)
    memory.resize(held)
    return batch


def test_a_batch_that_says_more_than_it_holds_is_refused() -> None:
    with pytest.raises(ProtocolError, match="says 4,096 bytes and holds 64"):
        protocol.decode_body(lying_batch(4096, 64), [TensorSpec("F32", [32, 32])])


# --- what may be sent ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_dtype_without_a_tag_is_refused_before_it_is_sent(dtype: torch.dtype) -> None:
    with pytest.raises(
        InvalidInputError, match=r"cannot be sent; expected one of torch\.float32.*\.to\(model\.dtype\)"
    ):
        protocol.spec_of(torch.zeros(1, 1).to(dtype))


def test_stored_dtypes_hold_the_sizes_of_what_is_published() -> None:
    assert ParameterInfo("n", "I64", [2, 3]).nbytes == 48
    assert ParameterInfo("n", "BF16", [5]).nbytes == 10
    assert ParameterInfo("n", "BOOL", []).nbytes == 1


def test_headers_are_values() -> None:
    header = GOLDEN_HEADERS[1][0]

    assert copy.deepcopy(header) == header
    with pytest.raises(AttributeError):
        header.id = 8
