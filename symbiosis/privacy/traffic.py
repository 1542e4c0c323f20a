"""Tap: what a server sees of a client, recorded on the client's side of the wire.

One rule: it stands where the wire begins, so that it holds what is sent, byte for byte, and not what somebody
meant to send. Tests and the audit read it; nothing else should.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from symbiosis.flight import protocol
from symbiosis.flight.protocol import Reply, Request

if TYPE_CHECKING:
    import pyarrow as pa

    from symbiosis.flight.channel import Channel, Message


@dataclass(frozen=True)
class Exchange:
    """One request and its reply, as they travelled.

    Attributes:
        tensors: of the request, each [N, d]; none where a seed was sent.
        results: of the reply, each [N, d]; none where it was an error.
    """

    started_s: float
    ended_s: float
    request: Request
    tensors: list[torch.Tensor]
    results: list[torch.Tensor]

    @property
    def op(self) -> str:
        return self.request.op

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.request.modules)


class Tap:
    """A Channel that records what passes through it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.url = channel.url
        self.exchanges: list[Exchange] = []

    @property
    def open_header(self) -> bytes:
        return self._channel.open_header

    @open_header.setter
    def open_header(self, value: bytes) -> None:
        self._channel.open_header = value

    @property
    def transport(self) -> str:
        return self._channel.transport

    def exchange(self, header: bytes, batch: pa.RecordBatch, deadline_s: float, reply_bytes: int = 0) -> Message:
        request: Request = protocol.decode_header(header, Request)
        sent = [t.clone() for t in protocol.decode_body(batch, request.tensors)] if request.seed is None else []
        started_s = time.perf_counter()
        message = self._channel.exchange(header, batch, deadline_s, reply_bytes)
        ended_s = time.perf_counter()
        reply = protocol.decode_header(message.app_metadata, protocol.AnyReply)
        got = protocol.decode_body(message.data, reply.tensors) if isinstance(reply, Reply) else []
        self.exchanges.append(Exchange(started_s, ended_s, request, sent, [t.clone() for t in got]))
        return message

    def action(self, name: str, body: bytes, timeout_s: float) -> bytes:
        return self._channel.action(name, body, timeout_s)

    def download(self, ticket: bytes, timeout_s: float) -> Iterator[Any]:
        return self._channel.download(ticket, timeout_s)

    def close(self) -> None:
        self._channel.close()
