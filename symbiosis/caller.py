"""Caller: tensors in, tensors out, over any Channel. The `Remote` of a connection.

One rule: what is split or counted is decided here, so that layers see one plain call and the channel sees
one message; `flight/replicas.py` decides what is sent again.
"""

from __future__ import annotations

import itertools
import secrets
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import pyarrow as pa
import torch

from symbiosis.errors import (
    MessageTooLargeError,
    ModelMismatchError,
    NeedInputError,
    ProtocolError,
    SymbiosisError,
    UnknownModuleError,
    from_wire,
)
from symbiosis.flight import protocol
from symbiosis.flight.channel import Channel, Message
from symbiosis.flight.protocol import Error, ModuleInfo, Reply, Request, Step, TensorSpec
from symbiosis.flight.replicas import Replicas
from symbiosis.telemetry import CallEvent, EventBus

Norms = tuple[torch.Tensor, torch.Tensor]


@dataclass
class _Try:
    """When one try of a call began, and what passed the wire."""

    started_s: float
    sent_s: float = 0.0
    received_s: float = 0.0
    bytes_out: int = 0
    bytes_in: int = 0


class Caller:
    """Runs operations on a server's modules.

    Args:
        replicas: where messages go.
        modules: what the server serves, by name.
        bus: gets a CallEvent per message.
        max_message_bytes: limit of one message in either direction.
        timeout_s: how long one call may take.
        weight_norms: fetches the norms of all weights, by module, when they are first asked for.
    """

    def __init__(
        self,
        replicas: Replicas,
        modules: Mapping[str, ModuleInfo],
        bus: EventBus,
        max_message_bytes: int,
        timeout_s: float,
        weight_norms: Callable[[], Mapping[str, Norms]] = dict,
    ) -> None:
        self._fetch_weight_norms = weight_norms
        self._weight_norms: Mapping[str, Norms] | None = None
        self._replicas = replicas
        self._modules = modules
        self._bus = bus
        self._max_message_bytes = max_message_bytes
        self._timeout_s = timeout_s
        self._exponents: dict[str, int] = {}
        self._ids = itertools.count(1 + secrets.randbits(62))  # the server may keep things by id: nobody guesses them

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

    def segment(
        self,
        steps: Sequence[Step],
        outputs: Sequence[int],
        tensors: Sequence[torch.Tensor],
        kept: list[int] | None = None,
    ) -> list[torch.Tensor]:
        """Run several steps in one call, in as many messages as the limit asks for.

        Args:
            steps: what to do, as docs/protocol.md section 4 says.
            outputs: which values to return.
            tensors: the first values, each [N, d].
            kept: filled with what `segment_grad` needs to find again what the server computed on the way.
        """
        _, expected, limit = self._plan_segment(steps, outputs, tensors)
        sent = []
        for part in _parts(tensors, limit):
            request = self._request("segment", part, steps=tuple(steps), outputs=tuple(outputs), keep=kept is not None)
            sent.append(self._exchange(request, part, expected))
            if kept is not None:
                kept.append(request.id)
        return _joined(sent)

    def segment_grad(
        self,
        steps: Sequence[Step],
        outputs: Sequence[int],
        wrt: Sequence[int],
        grads: Sequence[torch.Tensor | None],
        tensors: Sequence[torch.Tensor],
        kept: Sequence[int],
    ) -> list[torch.Tensor]:
        """Gradients of a segment for some of its inputs, each [N, d].

        Args:
            steps: as they were given to `segment`.
            outputs: likewise.
            wrt: places of the inputs whose gradients are wanted.
            grads: of the outputs, each [N, d]; None where there is none, but not everywhere.
            tensors: the inputs, as they were; they travel only if the server no longer has them.
            kept: what `segment` filled.
        """
        widths, _, limit = self._plan_segment(steps, outputs, tensors)
        given = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        common: dict[str, Any] = {
            "steps": tuple(steps),
            "outputs": tuple(output for output, _ in given),
            "wrt": tuple(wrt),
        }
        expected = [widths[place] for place in wrt]
        sent = []
        parts = zip(kept, _parts([grad for _, grad in given], limit), _parts(tensors, limit), strict=True)
        for call_id, part, inputs in parts:
            try:
                request = self._request("segment_grad", part, **common, kept=call_id)
                sent.append(self._exchange(request, part, expected))
            except NeedInputError:
                request = self._request("segment_grad", [*part, *inputs], **common)
                sent.append(self._exchange(request, [*part, *inputs], expected))
        return _joined(sent)

    def whole(self, op: str, modules: Sequence[str], x: torch.Tensor) -> torch.Tensor:
        """As `call`, in the integers modulo 2^64, with integer weights whose scales `exponents` gives.

        Args:
            x: int64 [N, d].

        Raises:
            ModelMismatchError: the server's integer weights are others than before.
        """
        step = self._tokens_per_message(op, modules, [x])
        parts = x.split(step) if len(x) else (x,)
        return torch.cat([self._send(op, modules, [part], ring=True) for part in parts])

    def exponents(self, modules: Sequence[str]) -> list[int]:
        """Of each linear, the power of two that made its weight whole numbers; asks the server once."""
        for name in modules:
            if name not in self._exponents:  # a call without rows tells
                self.whole("forward", [name], torch.empty(0, self._info(name).d_in, dtype=torch.int64))
        return [self._exponents[name] for name in modules]

    def effect(self, op: str, modules: Sequence[str], seed: bytes, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """What an operation gives for the mask [rows, d] that the server draws from a seed; [rows, d'].

        Raises:
            MessageTooLargeError: more rows than `rows_at_once` allows.
        """
        return self._send(op, modules, [self._mask(op, modules, rows, dtype)], seed, ring=dtype == torch.int64)

    def rows_at_once(self, op: str, modules: Sequence[str], dtype: torch.dtype) -> int:
        """How many rows of a mask and of its effect fit in a message."""
        return self._tokens_per_message(op, modules, [self._mask(op, modules, 0, dtype)])

    def _mask(self, op: str, modules: Sequence[str], rows: int, dtype: torch.dtype) -> torch.Tensor:
        """What the server draws, without values."""
        width = self._info(modules[0]).d_in if op == "forward" else sum(self._info(name).d_out for name in modules)
        return torch.empty(rows, width, dtype=dtype, device="meta")

    def weight_norms(self, module: str) -> Norms:
        """Norms of the columns [d_in] and of the rows [d_out] of a linear's weight, float32, on the CPU."""
        if self._weight_norms is None:
            self._weight_norms = self._fetch_weight_norms()
        if module not in self._weight_norms:
            raise UnknownModuleError(f"the server publishes no norms of {module!r}")
        return self._weight_norms[module]

    def _plan_segment(
        self, steps: Sequence[Step], outputs: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> tuple[list[int], list[int], int]:
        """Widths of all values and of the outputs, and how many tokens fit, also when a gradient sends all again."""
        widths = self._segment_widths(steps, [tensor.shape[1] for tensor in tensors])
        expected = [widths[output] for output in outputs]
        inputs = sum(widths[: len(tensors)])
        limit = self._fitting(tensors, max(inputs + sum(expected), *widths), f"a segment of {len(steps)} steps")
        return widths, expected, limit

    def _segment_widths(self, steps: Sequence[Step], widths: list[int]) -> list[int]:
        for step in steps:
            known = step.do in ("linears", "call")
            widths.append(sum(self._info(n).d_out for n in step.modules) if known else widths[step.args[0]])
        return widths

    def _tokens_per_message(self, op: str, modules: Sequence[str], tensors: Sequence[torch.Tensor]) -> int:
        infos = [self._info(name) for name in modules]
        d_out = sum(info.d_out for info in infos) if op == "forward" else infos[0].d_in
        return self._fitting(tensors, d_out, f"{op} of {', '.join(modules)}")

    def _fitting(self, tensors: Sequence[torch.Tensor], d_out: int, what: str) -> int:
        """How many tokens of a request and its reply fit in a message."""
        itemsize = tensors[0].element_size()
        widest = max(sum(tensor.shape[1] for tensor in tensors), d_out)
        usable_bytes = self._max_message_bytes - protocol.ALIGNMENT_BYTES * protocol.MAX_TENSORS
        step = usable_bytes // (widest * itemsize)
        if step < 1:
            raise MessageTooLargeError(
                f"one token of {what} takes {widest * itemsize:,} bytes; the limit of a message "
                f"is {self._max_message_bytes:,}. Raise max_message_bytes on client and server"
            )
        return step

    def _info(self, name: str) -> ModuleInfo:
        info = self._modules.get(name)
        if info is None:
            raise UnknownModuleError(f"the server does not serve {name!r}; connection.manifest.modules lists the names")
        return info

    def _send(
        self,
        op: str,
        modules: Sequence[str],
        tensors: Sequence[torch.Tensor],
        seed: bytes | None = None,
        ring: bool = False,
    ) -> torch.Tensor:
        infos = [self._info(name) for name in modules]
        width = infos[0].d_in if op == "grad_input" else sum(info.d_out for info in infos)
        request = self._request(op, tensors, modules=list(modules), seed=seed, ring=ring)
        return self._exchange(request, tensors, [width])[0]

    def _request(
        self, op: Any, tensors: Sequence[torch.Tensor], *, modules: Any = (), ring: bool = False, **more: Any
    ) -> Request:
        return Request(
            id=next(self._ids),
            op=op,
            modules=list(modules),
            tensors=[TensorSpec("Z64", list(x.shape)) if ring else protocol.spec_of(x) for x in tensors],
            deadline_ms=1,  # each try has its own
            **more,
        )

    def _exchange(self, request: Request, tensors: Sequence[torch.Tensor], widths: list[int]) -> list[torch.Tensor]:
        """One message and its answer: tensors [N, d] for each of the widths; with a seed, those drawn there."""
        started_s = time.perf_counter()
        deadline_s = time.monotonic() + self._timeout_s
        # Kept until the reply: the batch is a window onto this memory.
        inputs = [tensor.detach().to("cpu").contiguous() for tensor in tensors] if request.seed is None else []
        body = protocol.encode_body(inputs)
        sent_s = time.perf_counter()
        tries: list[_Try] = []
        try:
            reply, results = self._replicas.run(
                lambda channel: self._try(channel, request, body, widths, deadline_s, tries), deadline_s
            )
        except SymbiosisError as error:
            _let_go(error)
            del inputs, body
            raise
        last = tries[-1]
        if request.seed is None:
            results = [result.to(tensors[0].device) for result in results]
        ended_s = time.perf_counter()
        self._bus.emit(
            CallEvent(
                op=request.op,
                modules=tuple(request.modules) or tuple(name for step in request.steps for name in step.modules),
                tokens=tensors[0].shape[0],
                bytes_out=body.nbytes + last.bytes_out,
                bytes_in=sum(result.nbytes for result in results) + last.bytes_in,
                started_s=started_s,
                ended_s=ended_s,
                serialise_s=(sent_s - started_s) + (last.sent_s - last.started_s) + (ended_s - last.received_s),
                queue_s=reply.queue_us / 1e6,
                compute_s=reply.compute_us / 1e6,
                batch_requests=reply.batch_requests,
                retries=len(tries) - 1,
                retry_s=last.started_s - sent_s if len(tries) > 1 else 0.0,
            )
        )
        return results

    def _try(
        self,
        channel: Channel,
        request: Request,
        body: pa.RecordBatch,
        widths: list[int],
        deadline_s: float,
        tries: list[_Try],
    ) -> tuple[Reply, list[torch.Tensor]]:
        """Send a message once, with the time that is left to it."""
        this = _Try(time.perf_counter())
        tries.append(this)
        left_ms = int((deadline_s - time.monotonic()) * 1e3)
        header = protocol.encode_header(
            msgspec.structs.replace(request, deadline_ms=max(1, min(protocol.MAX_DEADLINE_MS, left_ms)))
        )
        this.bytes_out, this.sent_s = len(header), time.perf_counter()
        first = request.tensors[0]
        reply_bytes = protocol.body_offsets([TensorSpec(first.dtype, [first.shape[0], w]) for w in widths])[1]
        message = channel.exchange(header, body, deadline_s, reply_bytes)
        this.bytes_in, this.received_s = len(message.app_metadata), time.perf_counter()
        return self._decode(message, request, widths)

    def _decode(self, message: Message, request: Request, widths: list[int]) -> tuple[Reply, list[torch.Tensor]]:
        reply: Reply | Error = protocol.decode_header(message.app_metadata, protocol.AnyReply)
        if isinstance(reply, Error):
            raise from_wire(
                reply.code,
                reply.message,
                retry_after_s=None if reply.retry_after_ms is None else reply.retry_after_ms / 1e3,
            )
        if reply.id != request.id:
            raise ProtocolError(f"reply has id {reply.id}, the request {request.id}")
        first = request.tensors[0]
        expected = [TensorSpec(first.dtype, [first.shape[0], width]) for width in widths]
        if reply.tensors != expected:
            raise ProtocolError(f"reply to {request.op} of {request.modules} is {reply.tensors}, expected {expected}")
        if first.dtype == protocol.RING:
            self._note(request.modules, reply.exponents)
        return reply, protocol.decode_body(message.data, reply.tensors)

    def _note(self, modules: Sequence[str], exponents: Sequence[int]) -> None:
        """Remember how weights are integers; the results of two kinds cannot be put together."""
        if len(exponents) != len(modules):
            raise ProtocolError(f"the reply has {len(exponents)} exponents for {len(modules)} modules in integers")
        for name, exponent in zip(modules, exponents, strict=True):
            if self._exponents.setdefault(name, exponent) != exponent:
                raise ModelMismatchError(
                    f"{name} was {self._exponents[name]} as a power of two of its integer weights and is {exponent} "
                    "now: the server holds other weights; connect again"
                )


def _let_go(error: BaseException | None) -> None:
    """Whoever keeps an error, as notebooks do, must not keep what was sent: frames of its traceback hold it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _parts(tensors: Sequence[torch.Tensor], limit: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors [N, d] in parts of at most `limit` rows; one part if there are none."""
    return zip(*(tensor.split(limit) if tensor.shape[0] else (tensor,) for tensor in tensors), strict=True)


def _joined(sent: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return sent[0] if len(sent) == 1 else [torch.cat(column) for column in zip(*sent, strict=True)]
