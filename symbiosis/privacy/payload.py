"""Payload encryption: calls that nobody between client and server can read or change, though a proxy ends TLS.

One rule: a stream is either sealed from its first request to its end, or not at all; whatever does not authenticate
ends it. The exchange is the pattern NK of the Noise framework (noiseprotocol.org, revision 34, section 7.5), with its
tokens `es` and `ee`, built from X25519, HKDF-SHA256 and AES-256-GCM (docs/protocol.md section 10). The client pins the
server's static key; ephemeral keys of both ends make every stream's keys new, so a recorded stream can be neither
replayed nor, once both ends forgot them, read with a static key that was stolen later.

Rejected: encrypting under the static key alone, which saves a round trip per stream and loses both of these.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from symbiosis.config import format_key, parse_key
from symbiosis.errors import ConfigError, PayloadError, SymbiosisError, from_wire
from symbiosis.flight import protocol
from symbiosis.flight.protocol import Accept, Error, Open
from symbiosis.private_files import check_owned, locked, private_folder, read_file, write_private

INFO = b"symbiosis payload 1"
KEY_BYTES = 32
NONCE_BYTES = 12
HEADER_LABEL = b"header"


@dataclass
class Opened:
    """A message as its sender wrote it."""

    app_metadata: bytes
    data: pa.RecordBatch


class ServerKey:
    """A server's static key, made once and kept in a file."""

    def __init__(self, private: X25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw()

    @classmethod
    def kept(cls, path: Path) -> ServerKey:
        """The key in this file; made if there is none.

        Raises:
            ConfigError: the file cannot be used, or others can read it.
        """
        private_folder(path.parent)
        with locked(path):
            if not path.exists():
                write_private(path, X25519PrivateKey.generate().private_bytes_raw())
        check_owned(path, "payload key", secret=True)
        content = read_file(path, "payload key")
        if len(content) != KEY_BYTES:
            raise ConfigError(
                f"payload key {path} has {len(content)} bytes, expected {KEY_BYTES}; restore it, or remove it"
            )
        return cls(X25519PrivateKey.from_private_bytes(content))

    @property
    def text(self) -> str:
        """What a client pins as `server_key=`."""
        return format_key(self.public)

    def accept(self, command: bytes, offer: bytes) -> tuple[Accept, Session]:
        """Answer the key that a client offered in its Open header `command`.

        Raises:
            PayloadError: it is no key.
        """
        ephemeral = X25519PrivateKey.generate()
        accept = Accept(key=ephemeral.public_key().public_bytes_raw())
        shared = _agree(self._private, offer) + _agree(ephemeral, offer)
        from_client, from_server = _derive(shared, command, accept.key, self.public)
        return accept, Session(sends=from_server, receives=from_client)

    def __repr__(self) -> str:
        return f"<ServerKey {self.text}>"


class Offer:
    """A client's side of the exchange, for one stream.

    Args:
        server_key: what the server's operator published.
        open_header: the Open header, encoded, without an offer.
    """

    def __init__(self, server_key: str, open_header: bytes) -> None:
        self._server_key = parse_key(server_key)
        self._ephemeral = X25519PrivateKey.generate()
        opened: Open = protocol.decode_header(open_header, Open)
        self.command = protocol.encode_header(
            msgspec.structs.replace(opened, payload=self._ephemeral.public_key().public_bytes_raw())
        )

    def accepted(self, answer: Any) -> Session:
        """The session, once the server has answered.

        Raises:
            PayloadError: the server offers no encryption, or answers with no key.
        """
        accept: Accept | Error = protocol.decode_header(answer, Accept | Error)
        if isinstance(accept, Error):
            raise from_wire(accept.code, accept.message)
        shared = _agree(self._ephemeral, self._server_key) + _agree(self._ephemeral, accept.key)
        from_client, from_server = _derive(shared, self.command, accept.key, self._server_key)
        return Session(sends=from_client, receives=from_server)


class Session:
    """Both directions of one sealed stream. Messages must be opened in the order in which they were sealed."""

    def __init__(self, sends: bytes, receives: bytes) -> None:
        self._sends, self._receives = AESGCM(sends), AESGCM(receives)
        self._sent = self._received = 0  # two for each message: nonces, which are never sent

    def seal(self, header: bytes, batch: pa.RecordBatch) -> tuple[bytes, pa.RecordBatch]:
        """A message that only the other end can read."""
        sealed = self._sends.encrypt(_nonce(self._sent), header, HEADER_LABEL)
        body = self._sends.encrypt(_nonce(self._sent + 1), _bytes_of(batch), sealed)
        self._sent += 2
        return sealed, protocol.batch_of(pa.py_buffer(body))

    def open(self, message: Any) -> Opened:
        """The message that was sealed.

        Raises:
            PayloadError: it was changed, cut, repeated, left out or sent in another order; the stream must end.
        """
        try:
            sealed = bytes(message.app_metadata or b"")
            header = self._receives.decrypt(_nonce(self._received), sealed, HEADER_LABEL)
            body = self._receives.decrypt(_nonce(self._received + 1), _bytes_of(message.data), sealed)
        except (InvalidTag, SymbiosisError, ValueError):
            # Which of these it was would help who tries.
            raise PayloadError(
                "a sealed message did not authenticate: it was changed, cut, repeated or left out on the way, or "
                "server_key is not this server's; compare it with the key that the server prints at start"
            ) from None
        self._received += 2
        return Opened(header, protocol.batch_of(pa.py_buffer(body)))


def _bytes_of(batch: pa.RecordBatch) -> memoryview:
    return memoryview(protocol.body_of(batch)).cast("B")


def _agree(private: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # of another length, or a point of small order, which would make the secret a known one
        raise PayloadError("the peer's key for payload encryption is none") from None


def _derive(shared: bytes, command: bytes, accept_key: bytes, server_key: bytes) -> tuple[bytes, bytes]:
    """The keys from client to server and back, bound to all that was said before them."""
    transcript = hashlib.sha256(hashlib.sha256(command).digest() + accept_key + server_key).digest()
    keys = HKDF(hashes.SHA256(), 2 * KEY_BYTES, salt=None, info=INFO + transcript).derive(shared)
    return keys[:KEY_BYTES], keys[KEY_BYTES:]


def _nonce(counter: int) -> bytes:
    return counter.to_bytes(NONCE_BYTES, "big")
