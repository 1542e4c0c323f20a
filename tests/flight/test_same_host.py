"""Shared memory for clients on the server's machine: the same results, the same rights, and nobody can hurt the other.

Results are equal bit by bit: both ways hand the same request to the same product. Gradients of many rows are sums whose
order depends on where memory begins: 1e-6.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.errors import AuthError, ClosedError, ConnectError, DeadlineExceededError
from symbiosis.flight import protocol, same_host
from symbiosis.flight.channel import FlightChannel
from symbiosis.flight.protocol import Open, Request, SameHost
from symbiosis.flight.same_host import INLINE_BYTES, MAX_SLOTS, Link, Slot, close_all
from symbiosis.flight.same_host_channel import SameHostChannel
from symbiosis.flight.same_host_service import SameHostPlane, ServerLink
from symbiosis.flight.server import Server
from symbiosis.flight.tokens import TokenFile

pytestmark = pytest.mark.skipif(not same_host.AVAILABLE, reason="needs Linux")
Q = "model.layers.0.self_attn.q_proj"
Start = Callable[..., Server]
SIZES = [1, 40, 512, 4096]  # rows of 128 bytes: in the packet, at its edge, in slots of the smallest size


def forward(connection: symbiosis.Connection, x: torch.Tensor) -> torch.Tensor:
    return connection._caller.call("forward", [Q], [x])


def links(connection: symbiosis.Connection) -> list[Any]:
    channel: Any = connection._channel
    return channel._idle


@pytest.fixture
def both(llama_server: Server) -> Iterator[tuple[symbiosis.Connection, symbiosis.Connection]]:
    """Connections to one server: through shared memory, and over the wire."""
    url = llama_server.url
    with symbiosis.connect(url) as shared, symbiosis.connect(url, same_host=False) as wire:
        yield shared, wire


# --- the same results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_the_wire(both: Any, rows: int, dtype: torch.dtype) -> None:
    shared, wire = both
    x = torch.randn(rows, 32).to(dtype)

    assert torch.equal(forward(shared, x), forward(wire, x))
    assert shared.stats().servers[0].transport == "shared memory"
    assert wire.stats().servers[0].transport == "Flight"
    assert ("transport", "shared memory") in shared.stats().rows()


def test_a_training_step_is_that_of_the_wire(both: Any, tiny_llama: Any) -> None:
    """With calls whose inputs the server keeps for the gradient, while the memory that they came in is used again."""
    ids = torch.randint(0, 60, (8, 96), generator=torch.Generator().manual_seed(0))
    gradients = []
    for connection in both:
        model: Any = connection.wrap(tiny_llama())
        model.get_input_embeddings().weight.requires_grad_()
        for _ in range(2):  # the first learns which layers share calls
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
        gradients.append(model.get_input_embeddings().weight.grad)

    assert (gradients[0] - gradients[1]).abs().max() <= 1e-6 * gradients[1].abs().max()


def test_a_result_stays_what_it_is_when_its_memory_is_wanted(both: Any) -> None:
    """More of them than a link has slots."""
    shared, wire = both
    inputs = [torch.randn(1024, 32) + i for i in range(2 * MAX_SLOTS)]
    results = [forward(shared, x) for x in inputs]

    assert all(torch.equal(result, forward(wire, x)) for result, x in zip(results, inputs, strict=True))
    (link,) = links(shared)
    assert len(link._slots) <= MAX_SLOTS
    assert sum(not slot.free for slot in link._slots) <= MAX_SLOTS // 2


def test_slots_are_used_again(both: Any) -> None:
    shared, _ = both
    for _ in range(50):
        forward(shared, torch.randn(1024, 32))

    assert len(links(shared)[0]._slots) <= 3  # body, reply, and the reply that the next one replaces


def test_a_result_outlives_its_connection(llama_server: Server) -> None:
    with symbiosis.connect(llama_server.url) as shared:
        x = torch.randn(1024, 32)
        y = forward(shared, x)
        copy = y.clone()
    gc.collect()

    assert torch.equal(y, copy)
    y.add_(1)  # it is the client's own


def test_threads_have_links_of_their_own(both: Any) -> None:
    shared, wire = both
    inputs = [torch.randn(1024, 32) for _ in range(4)]
    results: list[Any] = [None] * 4

    def work(place: int) -> None:
        for _ in range(10):
            results[place] = forward(shared, inputs[place])

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert all(torch.equal(result, forward(wire, x)) for result, x in zip(results, inputs, strict=True))


# --- where there is no such plane ---------------------------------------------------------------------------------


def test_a_server_that_does_not_offer_it_is_called_over_the_wire(start_server: Start, tiny_llama: Any) -> None:
    with symbiosis.connect(start_server(tiny_llama(), same_host=False).url) as connection:
        forward(connection, torch.randn(3, 32))
        assert connection.stats().servers[0].transport == "Flight"


def test_a_socket_that_cannot_be_reached_is_done_without(
    llama_server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As from another container, or through a tunnel."""
    plane: Any = llama_server._same_host
    monkeypatch.setattr(plane, "address", protocol.SAME_HOST_PREFIX + "elsewhere")
    with caplog.at_level(logging.DEBUG), symbiosis.connect(llama_server.url) as connection:
        forward(connection, torch.randn(3, 32))
        assert connection.stats().servers[0].transport == "Flight"
    assert "go over the wire" in caplog.text


def test_a_server_does_not_choose_what_is_connected_to(llama_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind("\0somebody-elses-" + os.urandom(8).hex())
        other.listen()
        other.setblocking(False)
        monkeypatch.setattr(llama_server._same_host, "address", other.getsockname()[1:].decode())
        with symbiosis.connect(llama_server.url) as connection:
            forward(connection, torch.randn(3, 32))
        with pytest.raises(BlockingIOError):
            other.accept()


def test_sealed_calls_stay_sealed(start_server: Start, tiny_llama: Any, tmp_path: Path) -> None:
    offering = start_server(tiny_llama(), payload="offer", cache_dir=tmp_path)
    requiring = start_server(tiny_llama(), payload="require", cache_dir=tmp_path)
    for server in (offering, requiring):
        with symbiosis.connect(server.url, server_key=server.payload.key.text) as connection:  # type: ignore[union-attr]
            forward(connection, torch.randn(3, 32))
            assert connection.stats().servers[0].transport == "Flight"
    assert requiring._same_host is None


# --- who may come -------------------------------------------------------------------------------------------------


@pytest.fixture
def raw(llama_server: Server) -> Iterator[Callable[..., Link]]:
    """raw(ticket=..., command=...): a link to the server, by hand."""
    plane: Any = llama_server._same_host
    with contextlib.ExitStack() as stack:

        def opened(ticket: bytes | None = None, command: bytes | None = None) -> Link:
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connected.settimeout(5)
            connected.connect("\0" + plane.address)
            stack.callback(connected.close)
            opening = protocol.encode_header(Open(protocol=protocol.VERSION, client="raw"))
            connected.send((ticket or plane.offer(None).ticket) + (opening if command is None else command))
            return Link(connected)

        yield opened


def asked(x: torch.Tensor, **fields: Any) -> bytes:
    defaults = {"id": 7, "op": "forward", "modules": [Q], "tensors": [protocol.spec_of(x)], "deadline_ms": 5000}
    return protocol.encode_header(Request(**{**defaults, **fields}))  # type: ignore[arg-type]


def answered(link: Link) -> Any:
    packet = link.receive()
    return packet and protocol.decode_header(packet.header, protocol.AnyReply)


def works(link: Link) -> bool:
    x = torch.randn(2, 32)
    link.send(asked(x), protocol.body_of(protocol.encode_body([x])))
    return type(answered(link)).__name__ == "Reply"


def test_a_ticket_is_good_once(raw: Callable[..., Link], llama_server: Server) -> None:
    ticket = llama_server._same_host.offer(None).ticket  # type: ignore[union-attr]
    assert works(raw(ticket))
    assert raw(ticket).receive() is None


def test_without_a_ticket_there_is_no_word(raw: Callable[..., Link]) -> None:
    assert raw(os.urandom(32)).receive() is None
    assert raw(b"short", command=b"").receive() is None


def test_a_ticket_expires(raw: Callable[..., Link], llama_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.flight.same_host_service.TICKET_S", -1.0)
    late = llama_server._same_host.offer(None).ticket  # type: ignore[union-attr]
    monkeypatch.undo()
    assert raw(late).receive() is None


def test_a_link_is_opened_for_one_model(raw: Callable[..., Link]) -> None:
    link = raw(command=protocol.encode_header(Open(protocol=protocol.VERSION, fingerprint="0" * 64)))
    x = torch.randn(2, 32)
    link.send(asked(x), protocol.body_of(protocol.encode_body([x])))
    assert answered(link).code == "MODEL_MISMATCH"


def test_a_tenant_stays_who_it_is(start_server: Start, tiny_llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    alice = TokenFile(path).create("alice")
    server = start_server(tiny_llama(), tokens=str(path))
    with symbiosis.connect(server.url, token=alice) as connection:
        forward(connection, torch.randn(5, 32))
        assert connection.stats().servers[0].transport == "shared memory"
        assert server.ledger.stats("alice").tokens == 5
    channel = FlightChannel(server.url)
    with pytest.raises(AuthError):
        channel.action("same_host", b"", 5)
    channel.close()


# --- hostile packets ----------------------------------------------------------------------------------------------


def memory(nbytes: int, seals: int | None = None) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    if seals is not None:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
HOSTILE: dict[str, Callable[[Link, bytes, Any], None]] = {
    "a slot that may shrink": lambda link, h, b: link.send(h, b, descriptors=[memory(1 << 20)]),
    "a slot that may be sealed further": lambda link, h, b: link.send(
        h, b, descriptors=[memory(1 << 20, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)]
    ),
    "an empty slot": lambda link, h, b: link.send(h, b, descriptors=[memory(0, SEALED)]),
    "a slot beyond all limits": lambda link, h, b: link.send(h, b, descriptors=[memory(1 << 40, SEALED)]),
    "a slot that is no memory": lambda link, h, b: link.send(h, b, descriptors=[os.open("/dev/null", os.O_RDWR)]),
    "a body in a slot that is not there": lambda link, h, b: link.send(h, b, slot=3),
    "a reply in a slot that is not there": lambda link, h, b: link.send(h, b, reply_slot=0),
    "a slot below none": lambda link, h, b: link.send(h, b, reply_slot=-2),
    "one slot for both": lambda link, h, b: link.send(h, b, 0, 0, [memory(1 << 20, SEALED)]),
    "a body larger than its slot": lambda link, h, b: link.socket.sendmsg(
        [same_host._FRAME.pack(len(h), 0, 1 << 40, -1), h],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, memory(4096, SEALED).to_bytes(4, "little"))],
    ),
    "half a frame": lambda link, h, b: link.socket.send(b"\1\2\3") and None,
    "a header longer than the packet": lambda link, h, b: (
        link.socket.send(same_host._FRAME.pack(1 << 30, -1, 0, -1) + h) and None
    ),
    "bytes behind the body": lambda link, h, b: (
        link.socket.send(same_host._FRAME.pack(len(h), -1, b.size, -1) + h + b.to_pybytes() + b"!") and None
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_packet_ends_its_link_and_no_other(raw: Callable[..., Link], case: str) -> None:
    good, bad = raw(), raw()
    x = torch.randn(2, 32)
    before = set(os.listdir("/proc/self/fd"))
    HOSTILE[case](bad, asked(x), protocol.body_of(protocol.encode_body([x])))

    assert bad.receive() is None
    assert works(good)
    ours = [int(name) for name in set(os.listdir("/proc/self/fd")) - before]
    close_all([fd for fd in ours if "memfd:test" in _target(fd) or "null" in _target(fd)])


def _target(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def test_more_slots_than_a_link_may_have_end_it(raw: Callable[..., Link]) -> None:
    link, x = raw(), torch.randn(2, 32)
    body = protocol.body_of(protocol.encode_body([x]))
    for number in range(MAX_SLOTS + 1):
        _, descriptor = Slot.create(4096)
        link.send(asked(x), body, descriptors=[descriptor])
        os.close(descriptor)
        if number < MAX_SLOTS:
            assert answered(link).id == 7
    assert link.receive() is None


def test_a_large_reply_without_a_slot_is_an_error(raw: Callable[..., Link]) -> None:
    link, x = raw(), torch.randn(1024, 32)
    slot, descriptor = Slot.create(1 << 20)
    body = protocol.body_of(protocol.encode_body([x]))
    slot.write(body)
    link.send(asked(x), body, slot=0, descriptors=[descriptor])
    os.close(descriptor)

    assert answered(link).code == "PROTOCOL"
    assert works(link)


def test_a_bad_request_is_answered_as_on_the_wire(raw: Callable[..., Link]) -> None:
    link, x = raw(), torch.randn(2, 32)
    body = protocol.body_of(protocol.encode_body([x]))
    link.send(asked(x, modules=["nobody"]), body)
    assert answered(link).code == "UNKNOWN_MODULE"
    link.send(b"\xff", body)
    assert answered(link).code == "PROTOCOL"
    assert works(link)


# --- ends ---------------------------------------------------------------------------------------------------------


class Mute:
    """A plane whose links are never answered, and a channel to it."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.links: list[ServerLink] = []
        self.plane = SameHostPlane(self._converse, 1 << 20, idle_s=60, write_s=60)
        flight: Any = FlightChannel("grpc://127.0.0.1:1")
        flight.action = lambda *_: protocol.encode_header(self.plane.offer(None))
        self.channel = SameHostChannel(flight, 1 << 20)

    def _converse(self, link: ServerLink, grant: Any, command: bytes) -> None:
        self.links.append(link)
        self.release.wait(20)

    def call(self, seconds: float) -> Any:
        body = protocol.encode_body([torch.zeros(2, 2)])
        return self.channel.exchange(b"x", body, time.monotonic() + seconds, 16)


@pytest.fixture
def mute() -> Iterator[Mute]:
    made = Mute()
    yield made
    made.release.set()
    made.channel.close()
    made.plane.close()


def test_a_deadline_ends_a_call(mute: Mute) -> None:
    started_s = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="no reply"):
        mute.call(0.3)
    assert time.monotonic() - started_s < 5
    assert mute.channel._idle == []  # with a reply still to come it must not be used again


def test_an_interrupt_ends_a_call(mute: Mute) -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        mute.call(20)
    assert mute.channel._idle == []


def test_close_ends_no_call_wrongly_and_refuses_the_next(mute: Mute) -> None:
    mute.channel.close()
    with pytest.raises(ClosedError):
        mute.call(5)


def test_a_client_that_waits_is_not_taken_for_gone(mute: Mute) -> None:
    def call() -> None:
        with contextlib.suppress(DeadlineExceededError):
            mute.call(1.0)

    waiting = threading.Thread(target=call)
    waiting.start()
    deadline_s = time.monotonic() + 5
    while not mute.links:
        assert time.monotonic() < deadline_s
    started_s = time.monotonic()
    assert not mute.links[0].is_cancelled()
    assert time.monotonic() - started_s < 0.5
    waiting.join(5)


def test_a_client_that_goes_is_noticed(mute: Mute) -> None:
    with pytest.raises(DeadlineExceededError):
        mute.call(0.3)
    deadline_s = time.monotonic() + 5
    link = mute.links[0]
    while not link.is_cancelled():
        assert time.monotonic() < deadline_s


def test_a_server_that_goes_is_an_error_that_is_tried_again(mute: Mute) -> None:
    mute.release.set()  # each link ends at once
    with pytest.raises(ConnectError):
        mute.call(5)


def test_a_server_that_came_back_is_called_again(start_server: Start, tiny_llama: Any) -> None:
    first = start_server(tiny_llama())
    x = torch.randn(1024, 32)
    with symbiosis.connect(first.url) as connection:
        before = forward(connection, x)
        port = first.port
        first.close()
        for link in links(connection):
            link.close()  # as the end of its process does
        second = start_server(tiny_llama(), port=port)
        assert torch.equal(forward(connection, x), before)
        assert second.stats().requests == 1
        assert connection.stats().servers[0].transport == "shared memory"


def test_nothing_is_left_behind(llama_server: Server) -> None:
    def held() -> int:
        gc.collect()
        return sum("memfd:symbiosis" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = held()
    for _ in range(3):
        with symbiosis.connect(llama_server.url) as connection:
            forward(connection, torch.randn(1024, 32))
    deadline_s = time.monotonic() + 5
    while held() > before:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert INLINE_BYTES < 1024 * 32 * 4
    assert isinstance(llama_server._same_host.offer(None), SameHost)  # type: ignore[union-attr]
