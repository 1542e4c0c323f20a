"""Each way to break docs/protocol.md that we know of, against a real server.

FRAMES is the list of attacks: a header and a body that no client of ours would send, the code that must answer
it, and why it fails. After each one, an honest call on the same stream gives the right result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.flight as fl
import pytest
import torch

from symbiosis.errors import SymbiosisError
from symbiosis.flight import protocol
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.server import Server

Q = "model.layers.0.self_attn.q_proj"  # 32 -> 48
K = "model.layers.0.self_attn.k_proj"  # 32 -> 24
O = "model.layers.0.self_attn.o_proj"  # 48 -> 32  # noqa: E741
MLP = "model.layers.0.mlp"  # block, 32 -> 32
D_IN, D_OUT = 32, 48
LIMIT_BYTES = 64 * 1024
EMPTY = protocol.batch_of(pa.py_buffer(b""))


class Attack(NamedTuple):
    why: str
    code: str
    header: Any
    body: pa.RecordBatch | None
    says: str = ""
    id: int = 9


class BadSegment(NamedTuple):
    why: str
    code: str
    steps: list[Any]
    outputs: list[int]
    says: str = ""


def request(**changes: Any) -> dict[str, Any]:
    """A valid header of `forward` on Q with two tokens, and what is wrong with it."""
    fields = {
        "type": "request",
        "id": 9,
        "op": "forward",
        "modules": [Q],
        "tensors": [{"dtype": "F32", "shape": [2, D_IN]}],
        "deadline_ms": 10_000,
    }
    return {**fields, **changes}


def tensor(dtype: str, *shape: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape)}


def body(size: int = 2 * D_IN * 4) -> pa.RecordBatch:
    return protocol.batch_of(pa.py_buffer(bytes(size)))


def lying_body(said: int, held: int) -> pa.RecordBatch:
    """A body that says it is longer than the memory that travels with it."""
    memory = pa.allocate_buffer(said, resizable=True)
    batch = protocol.batch_of(memory)
    memory.resize(held)
    return batch


def encoded(**changes: Any) -> bytes:
    return msgspec.msgpack.encode(request(**changes))


DEEP = b"\x91" * 60_000 + b"\xc0"
LONG = "model.layers.0.mlp.down_proj" * 4000

FRAMES = {
    # --- the frame
    "no_body": Attack("metadata only", "PROTOCOL", request(), None, "no record batch"),
    "no_header": Attack("an empty header", "PROTOCOL", b"", body(), "not a valid Request", 0),
    "random_header": Attack("not MessagePack", "PROTOCOL", b"\xc1\xff\x00garbage", body(), "not a valid Request", 0),
    "random_header_and_no_body": Attack("not even that", "PROTOCOL", b"\xc1", None, "not a valid Request", 0),
    "cut_off": Attack("header ends early", "PROTOCOL", encoded()[:-2], body(), "not a valid Request", 0),
    "deep": Attack("recursion: 60,000 lists", "PROTOCOL", DEEP, body(), "not a valid Request", 0),
    "deep_id": Attack(
        "recursion behind the id", "PROTOCOL", b"\x82\xa4type\xa7request\xa2id" + DEEP, body(), "not a valid", 0
    ),
    "deep_tensor": Attack(
        "recursion in a field that is skipped",
        "PROTOCOL",
        encoded(tensors=[{"dtype": "F32", "shape": [2, D_IN], "x": "Q"}]).replace(b"\xa1Q", DEEP),
        body(),
        "not a valid Request",
        0,
    ),
    "huge_header": Attack(
        "memory before any check", "PROTOCOL", request(modules=[LONG]), body(), "exceeds the limit of 65,536", 0
    ),
    "4_billion_names": Attack(
        "a length of 32 bits, and nothing behind it",
        "PROTOCOL",
        encoded(modules="Q").replace(b"\xa1Q", b"\xdd\xff\xff\xff\xff"),
        body(),
        "not a valid Request",
        0,
    ),
    "bad_utf8": Attack(
        "text that is not UTF-8", "PROTOCOL", encoded().replace(b"q_proj", b"q_\xff\xfeoj"), body(), "not a valid", 0
    ),
    "other_type": Attack(
        "a reply to the server", "PROTOCOL", {"type": "reply", "id": 9, "tensors": []}, EMPTY, "not a valid Request"
    ),
    "open_in_the_stream": Attack("an open, twice", "PROTOCOL", {"type": "open", "protocol": 1}, EMPTY, "", 0),
    "unknown_field": Attack("a field of the future", "PROTOCOL", request(shard=1), body(), "shard"),
    # --- seeds
    "seed_of_31_bytes": Attack("a seed that is too short", "PROTOCOL", request(seed=bytes(31)), EMPTY, "seed"),
    "seed_as_text": Attack("a seed that is text", "PROTOCOL", request(seed="s" * 32), EMPTY, "seed"),
    "seed_and_tensor": Attack(
        "a mask, and a tensor in its place", "PROTOCOL", request(seed=bytes(32)), body(), "has an empty body"
    ),
    "seed_of_bfloat16": Attack(
        "a mask of another dtype",
        "PROTOCOL",
        request(seed=bytes(32), tensors=[{"dtype": "BF16", "shape": [2, D_IN]}]),
        EMPTY,
        "one tensor of F32, F64 or Z64",
    ),
    "seed_of_a_block": Attack(
        "a mask for what is not linear",
        "INVALID_INPUT",
        request(seed=bytes(32), modules=["model.layers.0.mlp"]),
        EMPTY,
        "masks are for linears",
    ),
    "double_of_a_block": Attack(
        "double precision where it is not offered",
        "INVALID_INPUT",
        request(tensors=[tensor("F64", 2, D_IN)], modules=[MLP]),
        body(2 * D_IN * 8),
        "F64 is for linears only",
    ),
    "double_in_a_segment": Attack(
        "the same in a segment",
        "INVALID_INPUT",
        request(
            op="segment", modules=[], tensors=[tensor("F64", 2, D_IN)], steps=[["scale", [], [0], 2.0]], outputs=[1]
        ),
        body(2 * D_IN * 8),
        "F64 is for linears only",
    ),
    "integers_of_a_block": Attack(
        "whole numbers where nothing multiplies them",
        "INVALID_INPUT",
        request(tensors=[tensor("Z64", 2, D_IN)], modules=[MLP]),
        body(2 * D_IN * 8),
        "Z64 is for linears only",
    ),
    "integers_in_the_gradient_of_a_segment": Attack(
        "whole numbers where a gradient is asked for",
        "INVALID_INPUT",
        request(
            op="segment_grad",
            modules=[],
            tensors=[tensor("Z64", 2, D_IN)] * 2,
            steps=[["scale", [], [0], 2.0]],
            outputs=[1],
            wrt=[0],
        ),
        body(4 * D_IN * 8),
        "Z64 is for linears only",
    ),
    "seed_of_4_billion_rows": Attack(
        "a mask that fills the memory",
        "MESSAGE_TOO_LARGE",
        request(seed=bytes(32), tensors=[{"dtype": "F32", "shape": [2**31 - 1, D_IN]}]),
        EMPTY,
        "send at most",
    ),
    # --- id, op, deadline
    "id_0": Attack("id of nobody", "PROTOCOL", request(id=0), body(), "id", 0),
    "id_negative": Attack("id below zero", "PROTOCOL", request(id=-4), body(), "id", 0),
    "id_text": Attack("id as text", "PROTOCOL", request(id="9"), body(), "id", 0),
    "id_bool": Attack("id as bool", "PROTOCOL", request(id=True), body(), "id", 0),
    "id_64_bits": Attack("id that fits no int64", "PROTOCOL", request(id=1 << 63), body(), "id", 0),
    "unknown_op": Attack("an op that would show weights", "PROTOCOL", request(op="grad_weight"), body(), "op"),
    "deadline_0": Attack("already late", "PROTOCOL", request(deadline_ms=0), body(), "deadline_ms"),
    "deadline_huge": Attack("waits for years", "PROTOCOL", request(deadline_ms=1 << 62), body(), "deadline_ms"),
    # --- modules
    "unknown_module": Attack("a name that is not served", "UNKNOWN_MODULE", request(modules=["model.nope"]), body()),
    "attribute": Attack("a path into Python", "UNKNOWN_MODULE", request(modules=["__class__.__init__"]), body()),
    "embedding": Attack(
        "a module that is the client's", "UNKNOWN_MODULE", request(modules=["model.embed_tokens"]), body()
    ),
    "no_modules": Attack("nothing to do", "PROTOCOL", request(modules=[]), body(), "modules"),
    "no_modules_for_grad": Attack("nothing to do", "PROTOCOL", request(op="grad_input", modules=[]), body(), "modules"),
    "17_modules": Attack("more than share an input", "PROTOCOL", request(modules=[Q] * 17), body(), "modules"),
    "module_twice": Attack("work multiplied", "INVALID_INPUT", request(modules=[Q, Q]), body(), "named twice"),
    "widths_differ": Attack("inputs of 32 and 48", "INVALID_INPUT", request(modules=[Q, O]), body(), "cannot share"),
    "block_in_company": Attack("a block is alone", "INVALID_INPUT", request(modules=[MLP, Q]), body(), "cannot share"),
    # --- tensors
    "wrong_width": Attack(
        "one too wide", "INVALID_INPUT", request(tensors=[tensor("F32", 2, 33)]), body(264), "expected [[2, 32]]"
    ),
    "swapped_dims": Attack(
        "as many bytes, another shape", "INVALID_INPUT", request(tensors=[tensor("F32", 32, 2)]), body(), "expected"
    ),
    "grad_width_for_forward": Attack(
        "dy for x", "INVALID_INPUT", request(tensors=[tensor("F32", 2, D_OUT)]), body(384), "expected [[2, 32]]"
    ),
    "two_tensors_for_a_linear": Attack(
        "a tensor too many", "INVALID_INPUT", request(tensors=[tensor("F32", 2, D_IN)] * 2), body(512), "expected"
    ),
    "one_tensor_for_a_block": Attack(
        "a tensor too few",
        "INVALID_INPUT",
        request(op="grad_input", modules=[MLP]),
        body(),
        "expected [[2, 32], [2, 32]]",
    ),
    "rows_differ": Attack(
        "x and dy of other lengths",
        "INVALID_INPUT",
        request(op="grad_input", modules=[MLP], tensors=[tensor("F32", 2, D_IN), tensor("F32", 3, D_IN)]),
        body(256 + 384),
        "expected [[2, 32], [2, 32]]",
    ),
    "9_tensors": Attack(
        "more than any op has", "PROTOCOL", request(tensors=[tensor("F32", 2, 32)] * 9), body(), "tensors"
    ),
    "1_dimension": Attack("no tokens", "PROTOCOL", request(tensors=[tensor("F32", 64)]), body(), "two dimensions"),
    "3_dimensions": Attack("not flattened", "PROTOCOL", request(tensors=[tensor("F32", 1, 2, 32)]), body(), "shape"),
    "negative_dims": Attack(
        "-2 x -32 is 64, too", "PROTOCOL", request(tensors=[tensor("F32", -2, -32)]), body(), "shape"
    ),
    "overflow": Attack(
        "a product beyond 64 bits",
        "MESSAGE_TOO_LARGE",
        request(tensors=[tensor("F32", (1 << 31) - 1, D_IN)]),
        body(),
        "send at most 341 tokens",  # 64 KiB / (48 wide * 4 bytes)
    ),
    "dims_of_33_bits": Attack(
        "wraps to 0 rows", "PROTOCOL", request(tensors=[tensor("F32", 1 << 32, 32)]), EMPTY, "shape"
    ),
    "body_too_short": Attack(
        "reads what is not there", "PROTOCOL", request(), body(255), "255 bytes; its header describes 256"
    ),
    "body_too_long": Attack("two ways to find the length", "PROTOCOL", request(), body(257), "257 bytes; its header"),
    "body_missing": Attack(
        "nothing behind the header", "PROTOCOL", request(), EMPTY, "0 bytes; its header describes 256"
    ),
    "body_for_no_tokens": Attack(
        "zero rows, but bytes", "PROTOCOL", request(tensors=[tensor("F32", 0, 32)]), body(), "describes 0"
    ),
    "lying_body": Attack(
        "reads the server's memory", "PROTOCOL", request(), lying_body(256, 8), "says 256 bytes and holds 8"
    ),
    "dtype_without_tag": Attack("integers", "PROTOCOL", request(tensors=[tensor("I64", 2, 32)]), body(512), "dtype"),
    "dtypes_mixed": Attack(
        "x and dy of two dtypes",
        "PROTOCOL",
        request(op="grad_input", modules=[MLP], tensors=[tensor("F32", 2, 32), tensor("BF16", 2, 32)]),
        body(256 + 128),
        "must all have one dtype",
    ),
    "too_large": Attack(
        "more than was agreed",
        "MESSAGE_TOO_LARGE",
        request(tensors=[tensor("F32", 500, D_IN)]),
        body(500 * D_IN * 4),
        "send at most 341 tokens",
    ),
    "reply_too_large": Attack(
        "a small request for a large reply",
        "MESSAGE_TOO_LARGE",
        request(tensors=[tensor("F32", 342, D_IN)]),  # 43 KB in, 65.7 KB out
        body(342 * D_IN * 4),
        "send at most 341 tokens",
    ),
}

# Steps for one tensor [2, 32] and what answers them: segments are the one place where a client says what to do.
SEGMENTS = {
    "no_steps": BadSegment("an echo of unlimited size", "INVALID_INPUT", [], []),
    "no_outputs": BadSegment("work for nothing", "INVALID_INPUT", [["linears", [Q], [0], 1.0]], []),
    "unknown_step": BadSegment("a step that would be code", "PROTOCOL", [["__import__", [], [0], 1.0]], [1], "steps"),
    "33_steps": BadSegment("work without end", "PROTOCOL", [["linears", [Q], [0], 1.0]] * 33, [1], "steps"),
    "5_outputs": BadSegment("a reply of five", "PROTOCOL", [["scale", [], [0], 1.0]], [1] * 5, "outputs"),
    "reads_ahead": BadSegment("its own value", "INVALID_INPUT", [["scale", [], [1], 1.0]], [1], "uses values [1] of 1"),
    "reads_before": BadSegment(
        "Python's -1", "INVALID_INPUT", [["scale", [], [-1], 1.0]], [1], "uses values [-1] of 1"
    ),
    "sends_before": BadSegment("Python's -1", "INVALID_INPUT", [["scale", [], [0], 1.0]], [-1], "send back [-1]"),
    "sends_too_far": BadSegment("no such value", "INVALID_INPUT", [["scale", [], [0], 1.0]], [1 << 62], "send back"),
    "unknown_module": BadSegment("a name not served", "UNKNOWN_MODULE", [["call", ["model"], [0], 1.0]], [1]),
    "wrong_width": BadSegment("32 into 48", "INVALID_INPUT", [["linears", [O], [0], 1.0]], [1]),
    "module_twice": BadSegment("work multiplied", "INVALID_INPUT", [["linears", [Q, Q], [0], 1.0]], [1]),
    "linears_of_nothing": BadSegment("no modules", "INVALID_INPUT", [["linears", [], [0], 1.0]], [1]),
    "modules_for_add": BadSegment("names unused", "INVALID_INPUT", [["add", [Q], [0, 0], 1.0]], [1]),
    "adds_one": BadSegment("one argument", "INVALID_INPUT", [["add", [], [0], 1.0]], [1]),
    "block_as_linear": BadSegment("another kind", "INVALID_INPUT", [["linears", [MLP], [0], 1.0]], [1]),
    "linear_as_block": BadSegment("another kind", "INVALID_INPUT", [["call", [Q], [0], 1.0]], [1]),
    "no_bias": BadSegment(
        "Llama has none", "INVALID_INPUT", [["linears", [Q], [0], 1.0], ["bias", [Q], [1], 1.0]], [2]
    ),
}

# Frames of a stream that was begun with another schema than {data: uint8}.
SCHEMAS = {
    "int32": pa.record_batch({"data": pa.array([0] * 64, pa.int32())}),
    "float32": pa.record_batch({"data": pa.array([0] * 64, pa.float32())}),
    "other_name": pa.record_batch({"tensor": pa.array([0] * 256, pa.uint8())}),
    "two_columns": pa.record_batch({"data": pa.array([0] * 256, pa.uint8()), "more": pa.array([0] * 256, pa.uint8())}),
    "no_columns": pa.RecordBatch.from_arrays([], schema=pa.schema([])),
    "nested": pa.record_batch({"data": pa.array([[0] * 4] * 64, pa.list_(pa.uint8()))}),
    "text": pa.record_batch({"data": pa.array(["a" * 256])}),
    "dictionary": pa.record_batch({"data": pa.array(["a", "b"]).dictionary_encode()}),
    "nulls": pa.record_batch({"data": pa.array([0] * 255 + [None], pa.uint8())}),
}

OPENS = {
    "nothing": (b"", "PROTOCOL"),
    "garbage": (b"\xc1 garbage", "PROTOCOL"),
    "deep": (DEEP, "PROTOCOL"),
    "a_request": (encoded(), "PROTOCOL"),
    "too_long_a_name": (protocol.encode_header(protocol.Open(protocol=1, client="c" * 65)), "PROTOCOL"),
    "protocol_0": (protocol.encode_header(protocol.Open(protocol=0)), "PROTOCOL_VERSION"),
    "protocol_of_the_future": (protocol.encode_header(protocol.Open(protocol=2)), "PROTOCOL_VERSION"),
    "other_model": (protocol.encode_header(protocol.Open(protocol=1, fingerprint="f" * 64)), "MODEL_MISMATCH"),
}


@pytest.fixture(scope="module")
def base(tiny_llama: Callable[..., Any]) -> BaseModel:
    return BaseModel(tiny_llama())


@pytest.fixture(scope="module")
def server(base: BaseModel) -> Any:
    from symbiosis.config import ServerOptions

    options = ServerOptions(model="m", port=0, max_message_bytes=LIMIT_BYTES, drain_timeout_s=2.0)
    with Server(base, options) as server:
        yield server


@pytest.fixture
def honest(base: BaseModel) -> Callable[..., None]:
    """honest(stream): a call that must give the right answer."""

    def check(stream: Any) -> None:
        x = torch.randn(3, D_IN)
        expected = x @ base.linears[Q].weight.t()
        # The same product by the same library; only where the memory lies may differ, and with it the rounding.
        torch.testing.assert_close(stream.forward(Q, x), expected, rtol=1e-6, atol=1e-6)

    return check


def check_refusal(reply: dict[str, Any], code: str, call_id: int) -> None:
    assert reply["type"] == "error", reply
    assert reply["code"] == code, reply
    assert reply["id"] == call_id
    assert type(reply["id"]) is int
    assert reply["message"]
    check_nothing_leaks(reply["message"])


def check_nothing_leaks(text: str) -> None:
    assert "Traceback" not in text
    assert ".py" not in text
    assert 'File "' not in text


@pytest.mark.parametrize("attack", FRAMES.values(), ids=FRAMES)
def test_frame_is_refused_in_band(
    attack: Attack, server: Server, raw_stream: Callable[..., Any], honest: Callable[..., None]
) -> None:
    stream = raw_stream(server.url)

    reply, _ = stream.send(attack.header, attack.body)

    check_refusal(reply, attack.code, attack.id)
    assert attack.says in reply["message"]
    honest(stream)


@pytest.mark.parametrize("attack", SEGMENTS.values(), ids=SEGMENTS)
def test_segment_is_refused_in_band(
    attack: BadSegment, server: Server, raw_stream: Callable[..., Any], honest: Callable[..., None]
) -> None:
    stream = raw_stream(server.url)
    header = request(op="segment", modules=[], steps=attack.steps, outputs=attack.outputs)

    reply, _ = stream.send(header, body())

    check_refusal(reply, attack.code, 9)
    assert attack.says in reply["message"]
    honest(stream)


def test_a_segment_may_not_grow_on_the_way(server: Server, raw_stream: Callable[..., Any]) -> None:
    # A small request and a small reply, but a value in between that is larger than any message may be.
    up = "model.layers.0.mlp.up_proj"  # 32 -> 56: 64 KiB at 292 tokens
    header = request(
        op="segment", modules=[], tensors=[tensor("F32", 300, D_IN)], steps=[["linears", [up], [0], 1.0]], outputs=[0]
    )

    reply, _ = raw_stream(server.url).send(header, body(300 * D_IN * 4))

    check_refusal(reply, "MESSAGE_TOO_LARGE", 9)
    assert "send at most 292 tokens" in reply["message"]


def test_steps_outside_of_a_segment_are_refused(server: Server, raw_stream: Callable[..., Any]) -> None:
    reply, _ = raw_stream(server.url).send(request(steps=[["scale", [], [0], 1.0]], outputs=[1]), body())

    check_refusal(reply, "PROTOCOL", 9)


def test_inputs_of_a_segment_with_other_lengths_are_refused(server: Server, raw_stream: Callable[..., Any]) -> None:
    tensors = [tensor("F32", 2, D_IN), tensor("F32", 3, D_IN)]
    header = request(op="segment", modules=[], tensors=tensors, steps=[["add", [], [0, 1], 1.0]], outputs=[2])

    reply, _ = raw_stream(server.url).send(header, body(256 + 384))

    check_refusal(reply, "INVALID_INPUT", 9)


def test_all_frames_on_one_stream(server: Server, raw_stream: Callable[..., Any], honest: Callable[..., None]) -> None:
    stream = raw_stream(server.url)

    for name, attack in FRAMES.items():
        reply, _ = stream.send(attack.header, attack.body)
        assert (name, reply.get("code")) == (name, attack.code)

    honest(stream)


def test_frames_with_changed_bytes_are_answered_in_band(
    server: Server, raw_stream: Callable[..., Any], honest: Callable[..., None]
) -> None:
    stream = raw_stream(server.url)
    random = Random(0)
    origins = [encoded(), encoded(op="grad_input", modules=[MLP], tensors=[tensor("F32", 2, 32)] * 2)]
    origins += [encoded(op="segment", modules=[], steps=[["linears", [Q], [0], 1.0]], outputs=[1])]
    answers = set()

    for _ in range(500):
        frame = bytearray(random.choice(origins))
        for _ in range(random.randint(1, 3)):
            frame[random.randrange(len(frame))] = random.randrange(256)
        reply, _ = stream.send(bytes(frame), random.choice([body(), body(512), None]))
        answers.add(reply.get("code", "reply"))
        check_nothing_leaks(reply.get("message", ""))

    assert "REMOTE_COMPUTE" not in answers  # what is wrong with a frame is found before anything is computed
    assert {"PROTOCOL", "UNKNOWN_MODULE"} <= answers
    honest(stream)


@pytest.mark.parametrize("batch", SCHEMAS.values(), ids=SCHEMAS)
def test_stream_of_another_schema_is_refused_in_band(
    batch: pa.RecordBatch, server: Server, raw_stream: Callable[..., Any], honest: Callable[..., None]
) -> None:
    stream = raw_stream(server.url, schema=batch.schema)

    for _ in range(2):
        reply, _ = stream.send(request(), batch)
        check_refusal(reply, "PROTOCOL", 9)

    honest(raw_stream(server.url))


@pytest.mark.parametrize(("command", "code"), OPENS.values(), ids=OPENS)
def test_bad_open_is_answered_on_each_request(
    command: bytes, code: str, server: Server, raw_stream: Callable[..., Any], honest: Callable[..., None]
) -> None:
    stream = raw_stream(server.url, command=command)

    for call_id in (9, 10):
        reply, _ = stream.send(request(id=call_id), body())
        check_refusal(reply, code, call_id)

    honest(raw_stream(server.url))


def test_a_path_for_a_command_is_answered_in_band(server: Server) -> None:
    with fl.FlightClient(server.url) as client:
        writer, reader = client.do_exchange(fl.FlightDescriptor.for_path("model", "layers"))
        writer.begin(protocol.SCHEMA)
        writer.write_with_metadata(body(), encoded())
        reply = msgspec.msgpack.decode(reader.read_chunk().app_metadata)
        writer.close()

    check_refusal(reply, "PROTOCOL", 9)


@pytest.mark.parametrize("name", ["nope", "", "Hello", "../hello", "x" * 1000])
def test_unknown_action_is_refused_in_band(name: str, server: Server) -> None:
    with fl.FlightClient(server.url) as client:
        (answer,) = client.do_action(fl.Action(name, b""))

    check_refusal(msgspec.msgpack.decode(answer.body), "PROTOCOL", 0)


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (b"", "PROTOCOL"),
        (b"\xc1", "PROTOCOL"),
        (DEEP, "PROTOCOL"),
        (b"\x80" * 100_000, "PROTOCOL"),
        (encoded(), "PROTOCOL"),
        (msgspec.msgpack.encode({"type": "hello", "protocol": "1"}), "PROTOCOL"),
        (msgspec.msgpack.encode({"type": "hello", "protocol": 2}), "PROTOCOL_VERSION"),
        (msgspec.msgpack.encode({"type": "hello", "protocol": -1}), "PROTOCOL_VERSION"),
    ],
    ids=["nothing", "garbage", "deep", "long", "a_request", "text", "future", "negative"],
)
def test_bad_hello_is_refused_in_band(hello: bytes, code: str, server: Server) -> None:
    with fl.FlightClient(server.url) as client:
        (answer,) = client.do_action(fl.Action("hello", hello))

    check_refusal(msgspec.msgpack.decode(answer.body), code, 0)


@pytest.mark.parametrize(
    "ticket",
    [b"", b"\xc1", DEEP, encoded(), msgspec.msgpack.encode({"type": "ticket", "what": "weights"})],
    ids=["nothing", "garbage", "deep", "a_request", "weights"],
)
def test_bad_ticket_is_refused_in_band(ticket: bytes, server: Server) -> None:
    with fl.FlightClient(server.url) as client:
        chunks = list(client.do_get(fl.Ticket(ticket)))

    assert len(chunks) == 1
    check_refusal(msgspec.msgpack.decode(chunks[0].app_metadata), "PROTOCOL", 0)


NOT_OFFERED: dict[str, Callable[[fl.FlightClient], Any]] = {
    "do_put": lambda client: client.do_put(fl.FlightDescriptor.for_command(b"x"), protocol.SCHEMA)[0].close(),
    "get_flight_info": lambda client: client.get_flight_info(fl.FlightDescriptor.for_command(b"x")),
    "list_flights": lambda client: list(client.list_flights()),
}


@pytest.mark.parametrize("call", NOT_OFFERED.values(), ids=NOT_OFFERED)
def test_a_method_that_is_not_offered_says_so_without_a_traceback(
    call: Callable[[fl.FlightClient], Any], server: Server, raw_stream: Callable[..., Any], honest: Callable[..., None]
) -> None:
    with (
        fl.FlightClient(server.url) as client,
        pytest.raises(fl.FlightError, match="not part of the protocol") as caught,
    ):
        call(client)

    check_nothing_leaks(str(caught.value))
    honest(raw_stream(server.url))


def test_get_schema_tells_the_one_schema(server: Server) -> None:
    with fl.FlightClient(server.url) as client:
        assert client.get_schema(fl.FlightDescriptor.for_command(b"x")).schema == protocol.SCHEMA


def test_an_empty_message_ends_only_its_own_stream(
    server: Server, raw_stream: Callable[..., Any], honest: Callable[..., None]
) -> None:
    stream = raw_stream(server.url)
    with pytest.raises(StopIteration):
        stream.send(b"", None)

    honest(raw_stream(server.url))


# --- clients that vanish -------------------------------------------------------------------------------------------


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    end_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)
    return condition()


def opened_as(client: str) -> bytes:
    return protocol.encode_header(protocol.Open(protocol=1, client=client))


def test_a_client_that_opens_a_stream_and_vanishes_is_forgotten(
    server: Server, raw_stream: Callable[..., Any], honest: Callable[..., None]
) -> None:
    stream = raw_stream(server.url, command=opened_as("vanishing"))
    honest(stream)
    assert eventually(lambda: server.stats().clients == 1)

    stream.close()

    assert eventually(lambda: server.stats().clients == 0)
    honest(raw_stream(server.url))


def test_a_client_that_vanishes_in_the_middle_of_a_call_harms_nobody(
    server: Server, raw_stream: Callable[..., Any], honest: Callable[..., None]
) -> None:
    for _ in range(3):
        stream = raw_stream(server.url, command=opened_as("vanishing"))
        stream.writer.write_with_metadata(body(), encoded())
        stream.close()

    honest(raw_stream(server.url))
    assert eventually(lambda: server.stats().clients <= 1)


@pytest.mark.parametrize("schema", [protocol.SCHEMA, None], ids=["begins", "does_not_even_begin"])
def test_a_client_that_opens_and_never_writes_blocks_nobody(
    schema: pa.Schema | None, server: Server, raw_stream: Callable[..., Any], honest: Callable[..., None]
) -> None:
    silent = [raw_stream(server.url, command=opened_as("silent"), schema=schema) for _ in range(5)]

    honest(raw_stream(server.url))
    for stream in silent:
        stream.close()
    assert eventually(lambda: server.stats().clients <= 1)


def test_hostile_and_honest_clients_at_once(
    server: Server, raw_stream: Callable[..., Any], honest: Callable[..., None]
) -> None:
    failures: list[BaseException] = []

    def attack() -> None:
        stream = raw_stream(server.url)
        for frame in FRAMES.values():
            stream.send(frame.header, frame.body)

    def work() -> None:
        stream = raw_stream(server.url)
        for _ in range(20):
            honest(stream)

    def guarded(run: Callable[[], None]) -> Callable[[], None]:
        def wrapper() -> None:
            try:
                run()
            except BaseException as error:
                failures.append(error)

        return wrapper

    threads = [threading.Thread(target=guarded(run)) for run in (attack, work, attack, work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert failures == []


def test_every_code_that_answers_a_frame_is_in_the_error_tree() -> None:
    known = {cls.code for cls in _subclasses(SymbiosisError)}

    assert {attack.code for attack in FRAMES.values()} <= known


def _subclasses(root: type) -> set[type]:
    return {root}.union(*map(_subclasses, root.__subclasses__()))
