"""Payload encryption by itself: the exchange, the order of messages, and what no change survives."""

from __future__ import annotations

import hashlib
import hmac
import stat
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from symbiosis.errors import ConfigError, PayloadError
from symbiosis.flight import protocol
from symbiosis.flight.protocol import Open
from symbiosis.privacy.payload import Offer, Opened, ServerKey, Session


def as_batch(body: bytes) -> pa.RecordBatch:
    return protocol.batch_of(pa.py_buffer(body))


OPEN = protocol.encode_header(Open(protocol=1, fingerprint="ab" * 32, client="me"))


@pytest.fixture
def key(tmp_path: Path) -> ServerKey:
    return ServerKey.kept(tmp_path / "payload.key")


@pytest.fixture
def ends(key: ServerKey) -> tuple[Session, Session]:
    """The sessions of client and server."""
    return agree(key)


def agree(key: ServerKey) -> tuple[Session, Session]:
    offer = Offer(key.text, OPEN)
    accept, server = key.accept(offer.command, protocol.decode_header(offer.command, Open).payload)
    return offer.accepted(protocol.encode_header(accept)), server


def frame(session: Session, header: bytes = b"header", body: bytes = b"body" * 100) -> Opened:
    return Opened(*session.seal(header, as_batch(body)))


def content(opened: Opened) -> tuple[bytes, bytes]:
    return opened.app_metadata, protocol.body_of(opened.data).to_pybytes()


def test_messages_arrive_in_both_directions(ends: tuple[Session, Session]) -> None:
    client, server = ends
    for number in range(5):
        body = bytes([number]) * (number * 1000)  # an empty one, too
        assert content(server.open(frame(client, b"%d" % number, body))) == (b"%d" % number, body)
        assert content(client.open(frame(server, b"", body))) == (b"", body)


def test_nothing_of_a_message_is_seen_and_equal_messages_differ(ends: tuple[Session, Session]) -> None:
    client, _ = ends
    first, second = content(frame(client)), content(frame(client))

    assert b"header" not in first[0]
    assert b"bodybody" not in first[1]
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_any_flipped_bit_is_noticed(key: ServerKey) -> None:
    client, server = agree(key)
    header, body = content(frame(client))
    for part, other in ((header, body), (body, header)):
        for bit in range(0, 8 * len(part), 13):
            flipped = bytearray(part)
            flipped[bit // 8] ^= 1 << bit % 8
            pair = (bytes(flipped), other) if part is header else (other, bytes(flipped))
            with pytest.raises(PayloadError, match="did not authenticate"):
                server.open(Opened(pair[0], as_batch(pair[1])))
    assert content(server.open(Opened(header, as_batch(body)))) == (b"header", b"body" * 100)


@pytest.mark.parametrize("cut", [1, 16, 200, 10_000])
def test_a_cut_message_is_noticed(cut: int, ends: tuple[Session, Session]) -> None:
    client, server = ends
    header, body = content(frame(client))
    for pair in ((header, body[:-cut]), (header[:-cut], body), (header, body + b"\0")):
        with pytest.raises(PayloadError):
            server.open(Opened(pair[0], as_batch(pair[1])))
    with pytest.raises(PayloadError):
        server.open(Opened(header, None))  # type: ignore[arg-type]


def test_what_is_repeated_left_out_reordered_or_turned_back_is_noticed(key: ServerKey) -> None:
    def refused(receiver: Session, message: Opened) -> None:
        with pytest.raises(PayloadError):
            receiver.open(message)

    client, server = agree(key)
    first, second, third = (frame(client, b"%d" % number) for number in range(3))
    refused(server, second)
    server.open(first)
    refused(server, first)
    refused(server, third)
    refused(client, second)
    swapped = Opened(second.app_metadata, third.data)
    refused(server, swapped)
    server.open(second)


def test_a_stream_cannot_be_replayed_to_the_same_server(key: ServerKey) -> None:
    offer = Offer(key.text, OPEN)
    public = protocol.decode_header(offer.command, Open).payload
    accept, _ = key.accept(offer.command, public)
    recorded = frame(offer.accepted(protocol.encode_header(accept)))

    _, again = key.accept(offer.command, public)

    with pytest.raises(PayloadError):
        again.open(recorded)


def test_a_changed_open_header_or_another_server_gives_other_keys(key: ServerKey, tmp_path: Path) -> None:
    offer = Offer(key.text, OPEN)
    opened = protocol.decode_header(offer.command, Open)
    changed = protocol.encode_header(msgspec.structs.replace(opened, client="you"))
    for accept, server in (
        key.accept(changed, opened.payload),
        ServerKey.kept(tmp_path / "other.key").accept(offer.command, opened.payload),
    ):
        with pytest.raises(PayloadError):
            server.open(frame(offer.accepted(protocol.encode_header(accept))))


@pytest.mark.parametrize("point", [bytes(32), b"\1" + bytes(31), b"", b"short"])
def test_keys_that_are_none_are_refused(point: bytes, key: ServerKey) -> None:
    with pytest.raises(PayloadError, match="key for payload encryption is none"):
        key.accept(OPEN, point)
    if len(point) == 32:
        with pytest.raises(PayloadError, match="key for payload encryption is none"):
            Offer(key.text, OPEN).accepted(protocol.encode_header(protocol.Accept(key=point)))


def test_the_keys_are_those_of_the_specification(key: ServerKey) -> None:
    offer = Offer(key.text, OPEN)
    public = protocol.decode_header(offer.command, Open).payload
    accept, server = key.accept(offer.command, public)
    client = offer.accepted(protocol.encode_header(accept))
    # docs/protocol.md section 10, once more with the standard library's HMAC in place of HKDF
    ephemeral: X25519PrivateKey = offer._ephemeral
    shared = b"".join(ephemeral.exchange(X25519PublicKey.from_public_bytes(p)) for p in (key.public, accept.key))
    transcript = hashlib.sha256(hashlib.sha256(offer.command).digest() + accept.key + key.public).digest()
    extracted = hmac.digest(bytes(32), shared, "sha256")
    info = b"symbiosis payload 1" + transcript
    first = hmac.digest(extracted, info + b"\1", "sha256")
    second = hmac.digest(extracted, first + info + b"\2", "sha256")
    sealed, batch = client.seal(b"header", as_batch(b"body"))

    assert AESGCM(first).decrypt(bytes(12), sealed, b"header") == b"header"
    assert AESGCM(first).decrypt(bytes(11) + b"\1", protocol.body_of(batch).to_pybytes(), sealed) == b"body"
    assert AESGCM(second).decrypt(bytes(12), server.seal(b"reply", as_batch(b""))[0], b"header") == b"reply"


def test_a_key_is_kept_private_and_shown_as_text(key: ServerKey, tmp_path: Path) -> None:
    path = tmp_path / "payload.key"

    assert ServerKey.kept(path).public == key.public
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert repr(key) == f"<ServerKey {key.text}>"
    assert key.text.startswith("x25519:")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        ServerKey.kept(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="has 5 bytes, expected 32"):
        ServerKey.kept(path)
