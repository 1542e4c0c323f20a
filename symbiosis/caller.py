"""Caller: tensors in, tensors out, over any Channel. The `Remote` of a connection.

One rule: what is split, sent again or counted is decided here, so that layers see one plain call and
the channel sees one message.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from symbiosis.errors import MessageTooLargeError, ProtocolError, UnknownModuleError, from_wire
from symbiosis.flight import protocol
from symbiosis.flight.channel import Channel, Message
from symbiosis.flight.protocol import Error, ModuleInfo, Reply, Request
from symbiosis.telemetry import CallEvent, EventBus


class Caller:
    """Runs operations on a server's modules.

    Args:
        channel: how messages travel.
        modules: what the server serves, by name.
        bus: gets a CallEvent per message.
        max_message_bytes: limit of one message in either direction.
        timeout_s: how long one call may take.
    """

    def __init__(
        self,
        channel: Channel,
        modules: Mapping[str, ModuleInfo],
        bus: EventBus,
        max_message_bytes: int,
        timeout_s: float,
    ) -> None:
        self._channel = channel
        self._modules = modules
        self._bus = bus
        self._max_message_bytes = max_message_bytes
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Caller:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a live connection cannot be pickled; connect again in the other process")

    def call(self, op: str, modules: Sequence[str], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run one operation, in as many messages as the limit asks for.

        Args:
            op: "forward" or "grad_input".
            modules: names of linears that share their input, or of one block.
            tensors: each [N, d], N the number of tokens.

        Returns:
            [N, d], in the dtype and on the device of the first tensor.

        Raises:
            SymbiosisError: as the server or the channel reports.
        """
        tokens = tensors[0].shape[0]
        step = self._tokens_per_message(op, modules, tensors)
        if tokens <= step:
            return self._send(op, modules, tensors)
        parts = zip(*(tensor.split(step) for tensor in tensors), strict=True)
        return torch.cat([self._send(op, modules, part) for part in parts])

    def _tokens_per_message(self, op: str, modules: Sequence[str], tensors: Sequence[torch.Tensor]) -> int:
        infos = [self._info(name) for name in modules]
        d_out = sum(info.d_out for info in infos) if op == "forward" else infos[0].d_in
        itemsize = tensors[0].element_size()
        widest = max(sum(tensor.shape[1] for tensor in tensors), d_out)
        usable_bytes = self._max_message_bytes - protocol.ALIGNMENT_BYTES * len(tensors)
        step = usable_bytes // (widest * itemsize)
        if step < 1:
            raise MessageTooLargeError(
                f"one token of {op} of {', '.join(modules)} takes {widest * itemsize:,} bytes; the limit of a message "
                f"is {self._max_message_bytes:,}. Raise max_message_bytes on client and server"
            )
        return step

    def _info(self, name: str) -> ModuleInfo:
        info = self._modules.get(name)
        if info is None:
            raise UnknownModuleError(f"the server does not serve {name!r}; connection.manifest.modules lists the names")
        return info

    def _send(self, op: str, modules: Sequence[str], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        started_s = time.perf_counter()
        # Kept until the reply: the batch is a window onto this memory.
        inputs = [tensor.detach().to("cpu").contiguous() for tensor in tensors]
        request = Request(
            id=next(self._ids),
            op=op,  # type: ignore[arg-type]
            modules=list(modules),
            tensors=[protocol.spec_of(tensor) for tensor in inputs],
            deadline_ms=max(1, min(protocol.MAX_DEADLINE_MS, int(self._timeout_s * 1e3))),
        )
        header, body = protocol.encode_header(request), protocol.encode_body(inputs)
        sent_s = time.perf_counter()
        message = self._channel.exchange(header, body, time.monotonic() + self._timeout_s)
        received_s = time.perf_counter()
        reply, output = self._decode(message, request)
        output = output.to(tensors[0].device)
        ended_s = time.perf_counter()
        self._bus.emit(
            CallEvent(
                op=op,
                modules=tuple(modules),
                tokens=inputs[0].shape[0],
                bytes_out=body.nbytes + len(header),
                bytes_in=output.nbytes + len(message.app_metadata),
                started_s=started_s,
                ended_s=ended_s,
                serialise_s=(sent_s - started_s) + (ended_s - received_s),
                queue_s=reply.queue_us / 1e6,
                compute_s=reply.compute_us / 1e6,
                batch_requests=reply.batch_requests,
            )
        )
        return output

    def _decode(self, message: Message, request: Request) -> tuple[Reply, torch.Tensor]:
        reply: Reply | Error = protocol.decode_header(message.app_metadata, protocol.AnyReply)
        if isinstance(reply, Error):
            raise from_wire(
                reply.code,
                reply.message,
                retry_after_s=None if reply.retry_after_ms is None else reply.retry_after_ms / 1e3,
            )
        if reply.id != request.id:
            raise ProtocolError(f"reply has id {reply.id}, the request {request.id}")
        expected = [request.tensors[0].shape[0], self._width(request)]
        if [spec.shape for spec in reply.tensors] != [expected] or reply.tensors[0].dtype != request.tensors[0].dtype:
            raise ProtocolError(
                f"reply to {request.op} of {request.modules} is {reply.tensors}, expected one {expected}"
            )
        return reply, protocol.decode_body(message.data, reply.tensors)[0]

    def _width(self, request: Request) -> int:
        infos = [self._modules[name] for name in request.modules]
        return infos[0].d_in if request.op == "grad_input" else sum(info.d_out for info in infos)
