"""What somebody between client and server sees and can do: without protection, under TLS, on sealed streams."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import symbiosis
from symbiosis.errors import ModelMismatchError, PayloadError, SymbiosisError, TlsError
from symbiosis.flight import protocol
from symbiosis.flight.server import Server

Factory = Callable[..., Any]
NAME = "model.layers.0.self_attn.q_proj"
ROWS = torch.arange(4 * 32, dtype=torch.float32).reshape(4, 32) / 7
GREETING = "symbiosis/tests"  # in the Open header


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"symbiosis_test_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


between = _load("between")


@pytest.fixture(autouse=True)
def over_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is between must not be gone around."""
    monkeypatch.setenv("SYMBIOSIS_CLIENT_SAME_HOST", "false")


@pytest.fixture
def tap() -> Iterator[Callable[..., Any]]:
    """tap(server, **options) -> a Tap in front of it."""
    taps: list[Any] = []

    def start(server: Server, **options: Any) -> Any:
        taps.append(between.Tap(server.port, **options))
        return taps[-1]

    yield start
    for one in taps:
        one.close()


@pytest.fixture
def sealed(tiny_llama: Factory, start_server: Factory, tmp_path: Path) -> Server:
    """A server that takes sealed streams only."""
    return start_server(tiny_llama(), payload="require", cache_dir=tmp_path)


@pytest.fixture
def proxy(sealed: Server) -> Iterator[Any]:
    """A FlightProxy in front of it: what ends TLS would see and could do all this."""
    server = between.FlightProxy(sealed.url)
    yield server
    threading.Thread(target=server.shutdown, daemon=True).start()


def connected(url: str, server: Server, **options: Any) -> symbiosis.Connection:
    key = server.payload.key.text if server.payload else None
    return symbiosis.connect(url, server_key=key, retry_s=0, **options)


def call(conn: symbiosis.Connection) -> torch.Tensor:
    return conn._caller.call("forward", [NAME], [ROWS])


def pieces(x: torch.Tensor) -> list[bytes]:
    """Each row of a tensor, as it would travel."""
    return [row.contiguous().numpy().tobytes() for row in x]


def shown(data: bytes, server: Server) -> list[str]:
    """Which of the secrets of a call are in these bytes: its rows, the rows of its answer, the module's name."""
    answer = ROWS @ server.base.linears[NAME].weight.detach().T
    secrets = {"rows": pieces(ROWS), "answer": pieces(answer[:, :8]), "name": [NAME.encode()]}
    return [name for name, parts in secrets.items() if any(part in data for part in parts)]


# --- a tap on the wire ---------------------------------------------------------------------------------------------


def test_without_protection_the_wire_shows_everything(tap: Factory, tiny_llama: Factory, start_server: Factory) -> None:
    # The next two tests look for the same bytes; this one shows that they would find them.
    server = start_server(tiny_llama())
    wire = tap(server)
    with connected(f"grpc://127.0.0.1:{wire.port}", server) as conn:
        call(conn)

    assert shown(bytes(wire.seen["out"] + wire.seen["in"]), server) == ["rows", "answer", "name"]


def test_under_tls_the_wire_shows_nothing(
    tap: Factory, tiny_llama: Factory, start_server: Factory, tmp_path: Path
) -> None:
    server = start_server(tiny_llama(), tls="auto", cache_dir=tmp_path)
    wire = tap(server)
    with connected(
        f"grpc+tls://127.0.0.1:{wire.port}", server, tls_ca=tmp_path / "tls" / "ca.pem", token="t0ken-on-the-wire"
    ) as conn:
        call(conn)

    seen = bytes(wire.seen["out"] + wire.seen["in"])
    assert len(seen) > 2 * ROWS.nbytes
    assert shown(seen, server) == []
    assert b"t0ken-on-the-wire" not in seen


def test_under_payload_encryption_the_wire_shows_nothing_of_a_call(sealed: Server, tap: Factory) -> None:
    wire = tap(sealed)
    with connected(f"grpc://127.0.0.1:{wire.port}", sealed) as conn:
        before = len(wire.seen["out"]), len(wire.seen["in"])  # the manifest is not sealed
        out = call(conn)
        seen = bytes(wire.seen["out"][before[0] :] + wire.seen["in"][before[1] :])

    # fp32, another batch
    torch.testing.assert_close(out, ROWS @ sealed.base.linears[NAME].weight.detach().T, rtol=1e-5, atol=1e-4)
    assert len(seen) > 2 * ROWS.nbytes
    assert shown(seen, sealed) == []


@pytest.mark.parametrize("direction", ["out", "in"])
@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_bytes_of_tls_that_were_changed_end_the_connection_with_a_typed_error(
    direction: str, how: str, tap: Factory, tiny_llama: Factory, start_server: Factory, tmp_path: Path
) -> None:
    armed = threading.Event()

    def change(way: str, data: bytes) -> bytes:
        if not armed.is_set() or way != direction or len(data) < 200:
            return data
        middle = len(data) // 2
        return data[:middle] if how == "cut" else data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]

    server = start_server(tiny_llama(), tls="auto", cache_dir=tmp_path)
    wire = tap(server, change=change)
    ca = tmp_path / "tls" / "ca.pem"
    with connected(f"grpc+tls://127.0.0.1:{wire.port}", server, tls_ca=ca, request_timeout_s=5) as conn:
        expected = call(conn)
        armed.set()
        with pytest.raises(SymbiosisError) as caught:
            call(conn)
        assert caught.value.code in ("CONNECT", "TLS", "DEADLINE_EXCEEDED")
        armed.clear()
        with connected(f"grpc+tls://127.0.0.1:{wire.port}", server, tls_ca=ca) as again:
            torch.testing.assert_close(call(again), expected, rtol=0, atol=0)


# --- a proxy that ends TLS -----------------------------------------------------------------------------------------


def test_a_proxy_sees_nothing_of_sealed_calls_and_they_work(
    sealed: Server, proxy: Any, tiny_llama: Factory, tokens: Factory
) -> None:
    ids, expected = tokens(), tiny_llama()
    with connected(proxy.url, sealed) as conn:
        model = conn.load_model()
        out = call(conn)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)

    frames = proxy.seen["out"] + proxy.seen["in"][1:]
    assert len(frames) > 4
    assert shown(b"".join(header + body for header, body in frames), sealed) == []
    assert not any(piece in body for piece in pieces(out) for _, body in frames)


def flip_header(header: bytes, body: bytes) -> list[tuple[bytes, bytes]]:
    return [(header[:-1] + bytes([header[-1] ^ 1]), body)]


def flip_body(header: bytes, body: bytes) -> list[tuple[bytes, bytes]]:
    return [(header, bytes([body[0] ^ 128]) + body[1:])]


CHANGES = {
    "a flipped bit in the header": flip_header,
    "a flipped bit in the body": flip_body,
    "a cut body": lambda header, body: [(header, body[:-1])],
    "a cut header": lambda header, body: [(header[:5], body)],
    "no body": lambda header, body: [(header, b"")],
    "a message of the proxy's own": lambda header, body: [(b"\x80", bytes(64))],
}


@pytest.mark.parametrize("direction", ["out", "in"])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_proxy_changes_is_noticed(
    change: str, direction: str, sealed: Server, proxy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = 1 if direction == "in" else 0  # after the accept
    proxy.tamper = lambda way, number, frame: (
        CHANGES[change](*frame) if way == direction and number == first + 1 else [frame]
    )
    with connected(proxy.url, sealed) as conn:
        call(conn)
        with pytest.raises(PayloadError, match="did not authenticate") as caught:
            call(conn)
        assert not caught.value.retryable
        proxy.tamper = between.unchanged
        call(conn)  # on a new stream
    assert ("did not authenticate" in caplog.text) == (direction == "out")


def test_a_replayed_request_is_refused(sealed: Server, proxy: Any) -> None:
    proxy.tamper = lambda way, number, frame: [frame, frame] if way == "out" and number == 1 else [frame]
    with connected(proxy.url, sealed) as conn:
        call(conn)
        requests = sealed.ledger.stats("").requests
        call(conn)  # the server answers it, refuses the copy, and ends the stream
        with pytest.raises(SymbiosisError) as caught:
            call(conn)
        assert caught.value.code in ("PAYLOAD", "CONNECT")
    assert sealed.ledger.stats("").requests == requests + 1


def test_an_old_answer_in_place_of_the_new_one_is_refused(sealed: Server, proxy: Any) -> None:
    answers: list[Any] = []

    def tamper(way: str, number: int, frame: Any) -> list[Any]:
        if way == "in" and number:
            answers.append(frame)
            return [answers[0]]
        return [frame]

    proxy.tamper = tamper
    with connected(proxy.url, sealed) as conn:
        call(conn)
        with pytest.raises(PayloadError):
            call(conn)


def test_a_whole_stream_replayed_to_the_server_computes_nothing(
    sealed: Server, proxy: Any, raw_stream: Factory
) -> None:
    with connected(proxy.url, sealed) as conn:
        call(conn)
    requests = sealed.ledger.stats("").requests
    stream = raw_stream(sealed.url, command=proxy.commands[0])
    stream.reader.read_chunk()  # accept
    header, body = proxy.seen["out"][0]
    stream.writer.write_with_metadata(between.as_batch(body), header)
    sealed_refusal = bytes(stream.reader.read_chunk().app_metadata)

    with pytest.raises(StopIteration):
        stream.reader.read_chunk()
    assert b"PAYLOAD" not in sealed_refusal
    assert sealed.ledger.stats("").requests == requests


def test_a_proxy_that_answers_for_the_server_is_noticed(sealed: Server, proxy: Any) -> None:
    def tamper(way: str, number: int, frame: Any) -> list[Any]:
        own = protocol.encode_header(protocol.Accept(key=b"\x09" + bytes(31)))
        return [(own, b"")] if way == "in" and number == 0 else [frame]

    proxy.tamper = tamper
    with connected(proxy.url, sealed) as conn, pytest.raises(SymbiosisError) as caught:
        call(conn)
    assert caught.value.code in ("PAYLOAD", "CONNECT")


def test_a_changed_open_header_or_manifest_is_noticed(sealed: Server, proxy: Any) -> None:
    def rename(command: bytes) -> bytes:
        opened = protocol.decode_header(command, protocol.Open)
        return protocol.encode_header(msgspec.structs.replace(opened, client="somebody else"))

    proxy.change_command = rename
    with connected(proxy.url, sealed) as conn, pytest.raises(PayloadError):
        call(conn)

    proxy.change_command = lambda command: command
    proxy.change_answer = lambda name, answer: answer.replace(b"gate_proj", b"down_proj") if name == "hello" else answer
    with connected(proxy.url, sealed) as conn, pytest.raises(ModelMismatchError, match="manifest"):
        call(conn)


def test_a_proxy_that_strips_the_offer_gets_no_plaintext(sealed: Server, proxy: Any) -> None:
    def strip(command: bytes) -> bytes:
        return protocol.encode_header(
            msgspec.structs.replace(protocol.decode_header(command, protocol.Open), payload=b"")
        )

    proxy.change_command = strip
    with connected(proxy.url, sealed, request_timeout_s=2) as conn, pytest.raises(SymbiosisError):
        call(conn)
    assert proxy.seen["out"] == []


# --- one end only --------------------------------------------------------------------------------------------------


def test_a_client_without_the_key_is_refused_where_it_is_required(sealed: Server) -> None:
    with symbiosis.connect(sealed.url, retry_s=0) as conn, pytest.raises(PayloadError, match="server_key="):
        call(conn)


def test_where_it_is_offered_both_kinds_of_streams_work(
    tiny_llama: Factory, start_server: Factory, tmp_path: Path
) -> None:
    server = start_server(tiny_llama(), payload="offer", cache_dir=tmp_path)
    with symbiosis.connect(server.url) as plain, connected(server.url, server) as sealing:
        # fp32, alone in its batch both times
        torch.testing.assert_close(call(plain), call(sealing), rtol=0, atol=0)


def test_a_server_that_does_not_seal_says_so(tiny_llama: Factory, start_server: Factory, sealed: Server) -> None:
    server = start_server(tiny_llama())
    with connected(server.url, sealed) as conn, pytest.raises(PayloadError, match="--payload offer"):
        call(conn)


def test_another_servers_key_is_noticed(
    sealed: Server, tiny_llama: Factory, start_server: Factory, tmp_path: Path
) -> None:
    other = start_server(tiny_llama(), payload="offer", cache_dir=tmp_path / "other")
    with connected(other.url, sealed) as conn, pytest.raises(PayloadError, match="server_key is not this server's"):
        call(conn)


def test_tls_is_checked_before_anything_is_sealed(sealed: Server) -> None:
    with pytest.raises(TlsError):
        connected(sealed.url.replace("grpc:", "grpc+tls:"), sealed)
