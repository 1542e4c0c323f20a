"""The caller over a fake channel: what it sends, how it splits, what it refuses to accept."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pytest
import torch

from symbiosis.caller import Caller
from symbiosis.errors import (
    DeadlineExceededError,
    InvalidInputError,
    MessageTooLargeError,
    ProtocolError,
    ServerBusyError,
    SymbiosisError,
    UnknownModuleError,
)
from symbiosis.flight import protocol
from symbiosis.flight.protocol import ModuleInfo, Reply, Request, Step
from symbiosis.flight.replicas import Replicas
from symbiosis.telemetry import CallEvent, EventBus

torch.manual_seed(0)
WEIGHTS = {"q": torch.randn(6, 4), "k": torch.randn(2, 4), "up": torch.randn(40, 4), "block": torch.randn(4, 4)}


def info(name: str) -> ModuleInfo:
    d_out, d_in = WEIGHTS[name].shape
    kind = "block" if name == "block" else "linear"
    return ModuleInfo(name=name, kind=kind, d_in=d_in, d_out=d_out, parameters=d_in * d_out, tied=False, hashes={})


class Answer(NamedTuple):
    app_metadata: bytes
    data: pa.RecordBatch | None


def answer(request: Request, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a right server would say."""
    if request.op == "segment":
        values = list(inputs)
        for step in request.steps:
            x = values[step.args[0]]
            values.append(torch.cat([x @ WEIGHTS[m].T for m in step.modules], 1) if step.modules else x * step.factor)
        return [values[i] for i in request.outputs]
    weights = [WEIGHTS[name].to(inputs[0].dtype) for name in request.modules]
    if request.op == "forward":
        return [torch.cat([inputs[0] @ w.T for w in weights], 1)]
    parts = inputs[-1].split([len(w) for w in weights], 1)
    return [torch.stack([part @ w for part, w in zip(parts, weights, strict=True)]).sum(0)]


class FakeChannel:
    """A channel that computes by itself; `change` may spoil what it answers."""

    url = "grpc://fake:1"
    open_header = b""
    transport = "fake"

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.sizes: list[int] = []
        self.deadlines: list[float] = []
        self.change: Callable[[dict[str, Any], list[torch.Tensor]], Any] = lambda header, outputs: None

    def exchange(self, header: bytes, batch: pa.RecordBatch, deadline_s: float, reply_bytes: int = 0) -> Answer:
        request: Request = protocol.decode_header(header, Request)
        self.requests.append(request)
        self.sizes.append(batch.nbytes)
        self.deadlines.append(deadline_s - time.monotonic())
        outputs = answer(request, [t.clone() for t in protocol.decode_body(batch, request.tensors)])
        reply = Reply(
            id=request.id,
            tensors=[protocol.spec_of(o) for o in outputs],
            queue_us=2000,
            compute_us=3000,
            batch_requests=2,
        )
        fields = msgspec.msgpack.decode(protocol.encode_header(reply))
        changed = self.change(fields, outputs)
        fields = fields if changed is None else changed
        self.sizes.append(sum(o.nbytes for o in outputs))
        return Answer(msgspec.msgpack.encode(fields), protocol.encode_body(outputs) if outputs else None)

    def action(self, name: str, body: bytes, timeout_s: float) -> bytes:
        raise NotImplementedError

    def download(self, ticket: bytes, timeout_s: float) -> Iterator[Any]:
        raise NotImplementedError

    def close(self) -> None:
        pass


@pytest.fixture
def channel() -> FakeChannel:
    return FakeChannel()


@pytest.fixture
def make(channel: FakeChannel) -> Callable[..., Caller]:
    def build(max_message_bytes: int = 1 << 20, timeout_s: float = 5.0, bus: EventBus | None = None) -> Caller:
        replicas = Replicas([channel], retry_s=0.0)
        return Caller(replicas, {n: info(n) for n in WEIGHTS}, bus or EventBus(), max_message_bytes, timeout_s)

    return build


# --- one call ------------------------------------------------------------------------------------------------------


def test_forward_of_two_linears_comes_side_by_side(make: Callable[..., Caller], channel: FakeChannel) -> None:
    x = torch.randn(3, 4)

    y = make().call("forward", ["q", "k"], [x])

    torch.testing.assert_close(y, torch.cat([x @ WEIGHTS["q"].T, x @ WEIGHTS["k"].T], 1))
    assert [request.modules for request in channel.requests] == [["q", "k"]]


def test_grad_input_of_two_linears_is_their_sum(make: Callable[..., Caller]) -> None:
    dy = torch.randn(3, 8)

    dx = make().call("grad_input", ["q", "k"], [dy])

    torch.testing.assert_close(dx, dy[:, :6] @ WEIGHTS["q"] + dy[:, 6:] @ WEIGHTS["k"])


def test_grad_input_of_a_block_sends_both_tensors(make: Callable[..., Caller], channel: FakeChannel) -> None:
    x, dy = torch.randn(3, 4), torch.randn(3, 4)

    make().call("grad_input", ["block"], [x, dy])

    assert [spec.shape for spec in channel.requests[0].tensors] == [[3, 4], [3, 4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_reply_has_the_dtype_of_the_request(dtype: torch.dtype, make: Callable[..., Caller]) -> None:
    assert make().call("forward", ["q"], [torch.randn(3, 4).to(dtype)]).dtype == dtype


def test_no_tokens_are_sent_and_come_back_as_none(make: Callable[..., Caller], channel: FakeChannel) -> None:
    y = make().call("forward", ["q"], [torch.empty(0, 4)])

    assert y.shape == (0, 6)
    assert len(channel.requests) == 1


def test_an_input_that_needs_a_gradient_or_is_not_contiguous_is_sent(make: Callable[..., Caller]) -> None:
    x = torch.randn(4, 3, requires_grad=True)

    y = make().call("forward", ["q"], [x.t()])

    torch.testing.assert_close(y, x.detach().t() @ WEIGHTS["q"].T)
    assert not y.requires_grad


def test_a_dtype_that_cannot_travel_is_refused_before_anything_is_sent(
    make: Callable[..., Caller], channel: FakeChannel
) -> None:
    with pytest.raises(InvalidInputError, match="int64"):
        make().call("forward", ["q"], [torch.zeros(3, 4, dtype=torch.int64)])

    assert channel.requests == []


def test_an_unknown_module_is_refused_before_anything_is_sent(
    make: Callable[..., Caller], channel: FakeChannel
) -> None:
    with pytest.raises(UnknownModuleError, match=r"'v'.*manifest"):
        make().call("forward", ["q", "v"], [torch.randn(3, 4)])

    assert channel.requests == []


def test_the_deadline_travels_with_the_request(make: Callable[..., Caller], channel: FakeChannel) -> None:
    make(timeout_s=2.5).call("forward", ["q"], [torch.randn(1, 4)])

    assert 2000 < channel.requests[0].deadline_ms <= 2500
    assert 2.0 < channel.deadlines[0] <= 2.5


def test_a_call_that_is_sent_again_carries_what_is_left_of_its_time(channel: FakeChannel) -> None:
    bus, events = EventBus(), []
    bus.subscribe(events.append)
    caller = Caller(Replicas([channel], retry_s=30.0), {n: info(n) for n in WEIGHTS}, bus, 1 << 20, 5.0)
    busy = [{"type": "error", "id": 1, "code": "SERVER_BUSY", "message": "full", "retry_after_ms": 200}]
    channel.change = lambda header, outputs: busy.pop() if busy else None
    x = torch.randn(3, 4)

    y = caller.call("forward", ["q"], [x])

    torch.testing.assert_close(y, x @ WEIGHTS["q"].T)
    first, second = channel.requests
    assert second.deadline_ms <= first.deadline_ms - 200
    assert events[0].retries == 1
    assert 0.2 <= events[0].retry_s <= events[0].elapsed_s
    assert events[0].network_s < events[0].elapsed_s - 0.2


@pytest.mark.parametrize(("timeout_s", "sent_ms"), [(0.0001, 1), (1e9, protocol.MAX_DEADLINE_MS)])
def test_the_deadline_sent_is_one_that_the_wire_allows(
    timeout_s: float, sent_ms: int, make: Callable[..., Caller], channel: FakeChannel
) -> None:
    make(timeout_s=timeout_s).call("forward", ["q"], [torch.randn(1, 4)])

    assert channel.requests[0].deadline_ms == sent_ms


def test_ids_are_never_used_twice(make: Callable[..., Caller], channel: FakeChannel) -> None:
    caller = make()
    threads = [
        threading.Thread(target=lambda: [caller.call("forward", ["q"], [torch.ones(1, 4)]) for _ in range(25)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    ids = [request.id for request in channel.requests]
    assert len(set(ids)) == 100
    assert min(ids) >= 1


# --- splitting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "modules", "width"),
    [("forward", ["q"], 4), ("forward", ["up", "k"], 4), ("grad_input", ["up"], 40), ("grad_input", ["q", "k"], 8)],
)
def test_a_split_call_gives_the_same_and_stays_within_the_limit(
    op: str, modules: list[str], width: int, make: Callable[..., Caller], channel: FakeChannel
) -> None:
    x = torch.randn(101, width)
    whole = make().call(op, modules, [x])
    channel.requests.clear()
    channel.sizes.clear()

    split = make(max_message_bytes=2048).call(op, modules, [x])

    # Rows are multiplied in groups of another size: fp32 rounding of a sum of at most 40 products.
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-5)
    assert len(channel.requests) > 1
    assert sum(request.tensors[0].shape[0] for request in channel.requests) == 101
    assert max(channel.sizes) <= 2048


def test_both_tensors_of_a_block_are_split_alike(make: Callable[..., Caller], channel: FakeChannel) -> None:
    x, dy = torch.randn(100, 4), torch.randn(100, 4)

    dx = make(max_message_bytes=1024).call("grad_input", ["block"], [x, dy])

    torch.testing.assert_close(dx, dy @ WEIGHTS["block"], rtol=1e-5, atol=1e-5)
    assert all(r.tensors[0].shape == r.tensors[1].shape for r in channel.requests)
    assert max(channel.sizes) <= 1024


def test_a_token_that_fits_no_message_says_what_to_raise(make: Callable[..., Caller], channel: FakeChannel) -> None:
    with pytest.raises(
        MessageTooLargeError, match=r"one token of forward of up takes 160 bytes.*Raise max_message_bytes"
    ):
        make(max_message_bytes=300).call("forward", ["up"], [torch.randn(1, 4)])

    assert channel.requests == []


def test_a_segment_is_split_and_joined_again(make: Callable[..., Caller], channel: FakeChannel) -> None:
    x = torch.randn(100, 4)
    steps = (Step("linears", ("up",), (0,)), Step("scale", (), (0,), 2.0))

    up, doubled = make(max_message_bytes=4096).segment(steps, (1, 2), [x])

    torch.testing.assert_close(up, x @ WEIGHTS["up"].T, rtol=1e-5, atol=1e-5)
    assert torch.equal(doubled, 2 * x)
    assert len(channel.requests) > 1
    assert max(channel.sizes) <= 4096


def test_a_segment_is_split_by_its_widest_value(make: Callable[..., Caller], channel: FakeChannel) -> None:
    steps = (Step("linears", ("up",), (0,)), Step("scale", (), (0,), 2.0))  # 40 wide on the way, 4 at the end

    make(max_message_bytes=4096).segment(steps, (2,), [torch.randn(100, 4)])

    assert max(request.tensors[0].shape[0] for request in channel.requests) * 40 * 4 <= 4096


def test_a_segment_of_no_tokens(make: Callable[..., Caller]) -> None:
    (up,) = make().segment((Step("linears", ("up",), (0,)),), (1,), [torch.empty(0, 4)])

    assert up.shape == (0, 40)


# --- replies that are not right ------------------------------------------------------------------------------------


def spoil(**fields: Any) -> Callable[..., Any]:
    return lambda header, outputs: {**header, **fields}


WRONG = {
    "id of another call": (spoil(id=999), "reply has id 999"),
    "another dtype": (spoil(tensors=[{"dtype": "F16", "shape": [3, 6]}]), "reply to forward"),
    "fewer rows": (spoil(tensors=[{"dtype": "F32", "shape": [2, 6]}]), "reply to forward"),
    "other width": (spoil(tensors=[{"dtype": "F32", "shape": [3, 7]}]), "reply to forward"),
    "transposed": (spoil(tensors=[{"dtype": "F32", "shape": [6, 3]}]), "reply to forward"),
    "one dimension": (spoil(tensors=[{"dtype": "F32", "shape": [18]}]), "reply to forward"),
    "no tensor": (spoil(tensors=[]), "reply to forward"),
    "two tensors": (spoil(tensors=[{"dtype": "F32", "shape": [3, 6]}] * 2), "reply to forward"),
    "a request": (spoil(type="request"), "not a valid"),
    "unknown field": (spoil(more=1), "not a valid"),
    "short body": (lambda header, outputs: outputs.__setitem__(0, outputs[0][:2]), "body has 48 bytes"),
    "no body": (lambda header, outputs: outputs.clear(), "no record batch"),
}


@pytest.mark.parametrize(("change", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_reply_is_refused(
    change: Callable[..., Any], says: str, make: Callable[..., Caller], channel: FakeChannel
) -> None:
    channel.change = change

    with pytest.raises(ProtocolError, match=says):
        make().call("forward", ["q"], [torch.randn(3, 4)])


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("SERVER_BUSY", ServerBusyError),
        ("DEADLINE_EXCEEDED", DeadlineExceededError),
        ("UNKNOWN_MODULE", UnknownModuleError),
        ("A_CODE_OF_THE_FUTURE", SymbiosisError),
    ],
)
def test_an_error_reply_becomes_the_error_that_it_names(
    code: str, kind: type[SymbiosisError], make: Callable[..., Caller], channel: FakeChannel
) -> None:
    error = {"type": "error", "id": 1, "code": code, "message": "said by the server", "retry_after_ms": 250}
    channel.change = lambda header, outputs: error

    with pytest.raises(kind, match="said by the server") as caught:
        make().call("forward", ["q"], [torch.randn(3, 4)])

    assert caught.value.retry_after_s == 0.25


def test_an_error_reply_without_retry_after(make: Callable[..., Caller], channel: FakeChannel) -> None:
    channel.change = lambda header, outputs: {"type": "error", "id": 0, "code": "PROTOCOL", "message": "bad frame"}

    with pytest.raises(ProtocolError, match="bad frame") as caught:
        make().call("forward", ["q"], [torch.randn(3, 4)])

    assert caught.value.retry_after_s is None


# --- what is counted -----------------------------------------------------------------------------------------------


def test_each_message_is_an_event(make: Callable[..., Caller]) -> None:
    bus, events = EventBus(), list[CallEvent]()
    bus.subscribe(events.append)

    make(bus=bus).call("forward", ["q", "k"], [torch.randn(3, 4)])

    (event,) = events
    assert (event.op, event.modules, event.tokens) == ("forward", ("q", "k"), 3)
    assert event.bytes_out > 3 * 4 * 4
    assert event.bytes_in > 3 * 8 * 4
    assert (event.queue_s, event.compute_s, event.batch_requests) == (0.002, 0.003, 2)
    assert event.started_s <= event.ended_s
    assert 0 <= event.serialise_s <= event.elapsed_s


def test_a_split_call_is_counted_per_message(make: Callable[..., Caller], channel: FakeChannel) -> None:
    bus, events = EventBus(), list[CallEvent]()
    bus.subscribe(events.append)

    make(max_message_bytes=2048, bus=bus).call("forward", ["up"], [torch.randn(50, 4)])

    assert len(events) == len(channel.requests) > 1
    assert sum(event.tokens for event in events) == 50


def test_a_failed_call_is_no_event(make: Callable[..., Caller], channel: FakeChannel) -> None:
    bus, events = EventBus(), list[CallEvent]()
    bus.subscribe(events.append)
    channel.change = spoil(id=999)

    with pytest.raises(ProtocolError):
        make(bus=bus).call("forward", ["q"], [torch.randn(3, 4)])

    assert events == []


# --- an object that is alive ---------------------------------------------------------------------------------------


def test_a_copy_of_a_model_shares_its_caller(make: Callable[..., Caller]) -> None:
    caller = make()

    assert copy.deepcopy(caller) is caller


def test_pickling_says_what_to_do_instead(make: Callable[..., Caller]) -> None:
    with pytest.raises(TypeError, match="connect again in the other process"):
        pickle.dumps(make())
