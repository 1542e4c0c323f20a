"""The server half of the wire: decode, submit, wait, encode.

One rule: a failure is an error header in the stream. An exception that left a Flight handler would
end the stream and carry this process's traceback to the client, so none does.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.flight as fl
import torch

from symbiosis.errors import (
    DeadlineExceededError,
    InvalidInputError,
    MessageTooLargeError,
    ModelMismatchError,
    NeedInputError,
    PayloadError,
    ProtocolError,
    ProtocolVersionError,
    RemoteComputeError,
    SymbiosisError,
)
from symbiosis.flight import protocol, segment
from symbiosis.flight.auth import KEY, Authentication, grant_of
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.executor import Executor, Result
from symbiosis.flight.ledger import Ledger, Party
from symbiosis.flight.protocol import Chunk, Error, Hello, Open, Reply, Request, TensorSpec, Ticket
from symbiosis.flight.scheduler import MAX_KEYS, CallKey, Key, Task
from symbiosis.flight.soft_cache import Kept, SoftCache
from symbiosis.flight.streams import Stream, Streams
from symbiosis.privacy.draws import BY_TAG, draw

if TYPE_CHECKING:
    from symbiosis.flight.same_host_service import SameHostPlane, ServerLink
    from symbiosis.flight.tokens import Grant
    from symbiosis.privacy.certificates import Identity
    from symbiosis.privacy.payload import ServerKey, Session

logger = logging.getLogger(__name__)
Message = tuple[bytes, pa.RecordBatch]
POLL_S = 0.5  # how late it may be noticed that a client went away
EMPTY_BATCH = protocol.batch_of(pa.py_buffer(b""))


class Service(fl.FlightServerBase):  # type: ignore[misc]
    """Flight handlers over a base model and an executor.

    Args:
        location: where to listen, `grpc://HOST:PORT`; port 0 takes any free one.
        base: the model, for checks, the manifest and parameters.
        executor: where calls are submitted.
        actions: name -> function without arguments that returns the header to answer with.
        max_message_bytes: limit of one message in either direction.
        soft_cache: what the executor kept of earlier calls.
        identity: certificate and key for TLS; None serves in the clear.
        ledger: who may do what, and what was done; None lets everybody do all.
        streams: counts and limits what clients hold open; None limits nothing.
        payload: the key for sealed streams, and whether others are refused; None seals none.
    """

    def __init__(
        self,
        location: str,
        base: BaseModel,
        executor: Executor,
        actions: dict[str, Callable[[], Any]],
        max_message_bytes: int,
        soft_cache: SoftCache,
        identity: Identity | None = None,
        ledger: Ledger | None = None,
        streams: Streams | None = None,
        payload: Payload | None = None,
    ) -> None:
        self._base = base
        self._soft_cache = soft_cache
        self._fingerprint = base.served_fingerprint
        self._executor = executor
        self._keys: dict[Key, Key] = {}
        self._checked: dict[tuple[Key, tuple[int, ...]], int] = {}  # the width of the reply
        self._actions = actions
        self._max_message_bytes = max_message_bytes
        self.streams = streams or Streams(max_per_client=1 << 30, idle_s=float("inf"), write_s=float("inf"))
        self.error_codes: Counter[str] = Counter()
        self._ledger = ledger or Ledger({})
        self._payload = payload
        self.same_host: SameHostPlane | None = None
        super().__init__(location, **_transport(identity), middleware=self._middleware())

    @property
    def errors(self) -> int:
        """How many calls were answered with an error."""
        return self.error_codes.total()

    @property
    def clients(self) -> int:
        """How many clients have a stream open."""
        return len(self.streams.per_client())

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        command = bytes(descriptor.command or b"")
        with self._stream(command, grant_of(context), context.peer()) as (stream, party, refusal):
            writer.begin(protocol.SCHEMA)
            session, refused = self._agree(command, writer)
            if not refused:
                refusal = refusal or self._unsealed(session is not None)
                self._converse(context, stream, reader, writer, session, party, refusal)

    def converse_on(self, link: ServerLink, grant: Grant | None, command: bytes) -> None:
        """Answer all requests of a same-host link, as those of a stream that was opened with this header."""
        with self._stream(command, grant, "same host") as (stream, party, refusal):
            self._converse(link, stream, link, link, None, party, refusal or self._unsealed(False))

    @contextlib.contextmanager
    def _stream(
        self, command: bytes, grant: Grant | None, peer: str
    ) -> Iterator[tuple[Stream, Party, SymbiosisError | None]]:
        """A stream, whose it is, and what all its requests are refused with, for as long as it is open."""
        refusal, named = self._open(command)
        party = Party(grant, named)
        logger.debug("stream of client %s opened", party.name)
        try:
            with self.streams.opened(party.name, peer) as stream:
                yield stream, party, refusal or self._too_many(party.name)
        except (pa.ArrowException, OSError):
            logger.debug("stream of client %s ended", party.name, exc_info=True)
        except Exception:
            logger.exception("stream of client %s failed", party.name)

    def _converse(
        self,
        context: Any,
        stream: Stream,
        reader: Any,
        writer: Any,
        session: Session | None,
        party: Party,
        refusal: SymbiosisError | None,
    ) -> None:
        """Answer messages in their order until the stream ends."""
        while (chunk := _read(reader)) is not None:
            stream.begins("computing", time.monotonic())
            try:
                answer = self._answer(session.open(chunk) if session else chunk, party, refusal, context)
                intact = True
            except PayloadError as error:  # of `open`: an answer raises nothing
                logger.warning("stream of client %s: a sealed message did not authenticate", party.name)
                answer, intact = self._error(None, error, party.name), False
            stream.begins("writing", time.monotonic())
            _write(writer, session, answer)
            if not intact:
                return
            stream.begins("reading", time.monotonic())

    def _unsealed(self, sealed: bool) -> SymbiosisError | None:
        if sealed or self._payload is None or not self._payload.required:
            return None
        return PayloadError("this server takes sealed streams only; give its key as server_key=")

    def _agree(self, command: bytes, writer: Any) -> tuple[Session | None, bool]:
        """The session of a sealed stream, after telling the client; whether it was refused."""
        try:
            offer = protocol.decode_header(command, Open).payload
        except SymbiosisError:
            return None, False  # `_open` has found that, too
        if not offer:
            return None, False
        try:
            if self._payload is None:
                raise PayloadError("this server seals no streams; its operator can start it with --payload offer")
            accept, session = self._payload.key.accept(command, offer)
        except PayloadError as error:
            _write(writer, None, self._error(None, error, ""))
            return None, True
        _write(writer, None, (protocol.encode_header(accept), EMPTY_BATCH))
        return session, False

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        grant = grant_of(context)
        self._ledger.note(grant, action.type)
        yield protocol.encode_header(self._act(action, grant))

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        return [(name, "docs/protocol.md section 6") for name in ("hello", *self._actions)]

    def do_get(self, context: Any, ticket: Any) -> fl.FlightDataStream:
        self._ledger.note(grant_of(context), "download")
        return fl.GeneratorStream(protocol.SCHEMA, self._chunks(ticket.ticket))

    # What this service does not offer. The defaults of pyarrow answer with a traceback of this process.

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        raise _not_offered("DoPut")

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        raise _not_offered("GetFlightInfo")

    def list_flights(self, context: Any, criteria: Any) -> Any:
        raise _not_offered("ListFlights")

    def get_schema(self, context: Any, descriptor: Any) -> fl.SchemaResult:
        return fl.SchemaResult(protocol.SCHEMA)  # an exception, even a Flight one, would carry a traceback here

    # --- one call ---------------------------------------------------------------------------------

    def _open(self, command: bytes) -> tuple[SymbiosisError | None, str]:
        """Check a stream's Open header; the refusal, if any, answers each of its requests."""
        try:
            header: Open = protocol.decode_header(command, Open)
        except SymbiosisError as error:
            return error, ""
        if header.protocol != protocol.VERSION:
            return _version_error(header.protocol), header.client
        if header.manifest and header.manifest != protocol.manifest_hash(self._actions["hello"]()):
            return ModelMismatchError(
                "the manifest that the client received is not this server's: connect again, and if that does not help, "
                "something between both ends changes it"
            ), header.client
        if header.fingerprint and header.fingerprint != self._fingerprint:
            return ModelMismatchError(
                f"this server holds {self._base.name} with fingerprint {self._fingerprint[:12]}, the stream was "
                f"opened for {header.fingerprint[:12]}; connect again to agree on the model"
            ), header.client
        return None, header.client

    def _too_many(self, client: str) -> SymbiosisError | None:
        try:
            self.streams.check(client)
        except SymbiosisError as error:
            return error
        return None

    def _answer(self, chunk: Any, party: Party, refusal: SymbiosisError | None, context: Any) -> Message:
        received_s = time.perf_counter()
        if refusal is not None:  # not raised: each raise would add this frame, and so the message, to its traceback
            return self._error(chunk, refusal, party.name)
        try:
            return self._call(chunk, party, received_s, context)
        except SymbiosisError as error:
            return self._error(chunk, error, party.name)
        except Exception:
            call_id = protocol.peek_id(chunk.app_metadata)
            context = {"call": call_id, "client": party.name}
            logger.exception("answering call %d of client %s failed", call_id, party.name, extra=context)
            failure = RemoteComputeError(f"the server failed on call {call_id}; its log has the details")
            return self._error(chunk, failure, party.name)

    def _call(self, chunk: Any, party: Party, received_s: float, context: Any) -> Message:
        request: Request = protocol.decode_header(chunk.app_metadata, Request)
        task = self._task(request, chunk.data, party, received_s, getattr(chunk, "borrowed", False))
        with self._ledger.admit(party, request, task.nbytes) as call:
            self._executor.submit(task)
            result = _wait(task, request, context)
            body = protocol.encode_body(result.outputs)
            call.bytes_out = body.nbytes
        reply = Reply(
            id=request.id,
            tensors=[TensorSpec(request.tensors[0].dtype, list(output.shape)) for output in result.outputs],
            queue_us=int(result.queue_s * 1e6),
            compute_us=int(result.compute_s * 1e6),
            server_us=int((time.perf_counter() - received_s) * 1e6),
            batch_requests=result.batch_requests,
            batch_tokens=result.batch_tokens,
            exponents=self._base.exponents(request.modules) if request.tensors[0].dtype == protocol.RING else [],
        )
        return protocol.encode_header(reply), body

    def _task(self, request: Request, batch: Any, party: Party, received_s: float, borrowed: bool = False) -> Task:
        specs = request.tensors
        shapes = [spec.shape for spec in specs]
        if any(spec.dtype != specs[0].dtype for spec in specs) or any(len(shape) != 2 for shape in shapes):
            raise ProtocolError(f"tensors {specs} of one request must all have one dtype and two dimensions")
        kept = self._kept(request, party.name)
        key = self._key(request, specs[0].dtype, len(kept.products))
        self._check_size(specs, self._width(key, request, [*shapes, *(list(tensor.shape) for tensor in kept.inputs)]))
        tensors = protocol.decode_body(batch, specs) if request.seed is None else self._drawn(request, batch)
        tensors = [*tensors, *kept.inputs, *kept.products]
        return Task(
            borrowed=borrowed,
            key=key,
            tokens=shapes[0][0],
            nbytes=sum(tensor.nbytes for tensor in tensors),
            tensors=tensors,
            client=party.name,
            tenant=party.tenant,
            keep=CallKey(party.name, request.id) if request.keep else None,
            enqueued_s=received_s,
            deadline_s=received_s + request.deadline_ms / 1e3,
        )

    def _drawn(self, request: Request, batch: Any) -> list[torch.Tensor]:
        """The mask that a request asks for instead of bringing a tensor (docs/protocol.md section 9)."""
        dtypes = [spec.dtype for spec in request.tensors]
        if protocol.body_of(batch).size or len(dtypes) != 1 or dtypes[0] not in BY_TAG or request.steps:
            raise ProtocolError("a request with a seed has an empty body, one tensor of F32, F64 or Z64 and no steps")
        if any(name not in self._base.linears for name in request.modules):
            raise InvalidInputError("masks are for linears only")
        assert request.seed is not None
        rows, width = request.tensors[0].shape
        return [draw(request.seed, rows, width, BY_TAG[dtypes[0]])]

    def _key(self, request: Request, dtype: str, products: int) -> Key:
        """One object for equal keys: dictionaries find it again without comparing all its steps."""
        modules = tuple(request.modules)
        key = Key(request.op, modules, dtype, request.steps, request.outputs, request.wrt, products)
        if len(self._keys) > MAX_KEYS:  # keys hold what clients choose
            self._keys.clear()
        return self._keys.setdefault(key, key)

    def _kept(self, request: Request, client: str) -> Kept:
        """What was kept of the call whose gradient a request asks for; empty if it does not refer to one."""
        if not request.kept:
            return Kept()
        kept = self._soft_cache.take(CallKey(client, request.kept))
        if kept is None or kept.steps != request.steps:
            raise NeedInputError(f"what call {request.kept} computed is not kept any more; send its inputs again")
        return kept

    def _width(self, key: Key, request: Request, shapes: list[list[int]]) -> int:
        """Check a request against the model; the width of its reply. Loops ask for the same again and again."""
        if request.op != "segment_grad" and (request.wrt or request.kept):
            raise ProtocolError(f"{request.op} asks for no gradients, so takes neither wrt nor kept")
        alike = all(shape[0] == shapes[0][0] for shape in shapes)  # then only the widths matter
        asked = (key, tuple(shape[1] for shape in shapes))
        width = self._checked.get(asked) if alike else None
        if width is None:
            width = self._check(request, shapes)
            if alike:
                if len(self._checked) > MAX_KEYS:
                    self._checked.clear()
                self._checked[asked] = width
        return width

    def _check(self, request: Request, shapes: list[list[int]]) -> int:
        if request.op in ("segment", "segment_grad"):
            _check_linears(request, linear=False)
        if request.op == "segment":
            return segment.check(self._base, request.steps, request.outputs, shapes)
        if request.op == "segment_grad":
            given, inputs = shapes[: len(request.outputs)], shapes[len(request.outputs) :]
            if not inputs:
                raise ProtocolError(f"a gradient of {len(request.outputs)} outputs came with {len(given)} tensors")
            return segment.check_grad(self._base, request.steps, request.outputs, request.wrt, given, inputs)
        if request.steps or request.outputs or not request.modules:
            raise ProtocolError(f"{request.op} takes modules, and neither steps nor outputs")
        _check_linears(request, linear=all(name in self._base.linears for name in request.modules))
        return self._base.check(request.op, request.modules, shapes)[1]

    def _check_size(self, specs: list[TensorSpec], width: int) -> None:
        tokens, itemsize = specs[0].shape[0], protocol.CALL_DTYPES[specs[0].dtype].itemsize
        request_bytes, reply_bytes = protocol.body_offsets(specs)[1], tokens * width * itemsize
        if max(request_bytes, reply_bytes) > self._max_message_bytes:
            token_bytes = max(sum(spec.shape[1] for spec in specs), width) * itemsize
            usable_bytes = self._max_message_bytes - protocol.ALIGNMENT_BYTES * (len(specs) - 1)
            raise MessageTooLargeError(
                f"{tokens:,} tokens make a request of {request_bytes:,} and a reply of {reply_bytes:,} bytes; the "
                f"limit is {self._max_message_bytes:,}, so send at most {usable_bytes // token_bytes:,} tokens"
            )

    def _error(self, chunk: Any, error: SymbiosisError, client: str) -> Message:
        call_id = protocol.peek_id(chunk.app_metadata) if chunk is not None else 0
        self.error_codes[error.code] += 1
        context = {"call": call_id, "client": client, "code": error.code}
        logger.debug("call %d of client %s: %s", call_id, client, error.code, extra=context)
        return protocol.encode_header(_error_header(call_id, error)), EMPTY_BATCH

    # --- actions and downloads -----------------------------------------------------------------------

    def _middleware(self) -> dict[str, fl.ServerMiddlewareFactory]:
        if self._ledger.book is None:
            return {}
        return {KEY: Authentication(self._ledger.book, self._refused)}

    def _refused(self, method: str) -> None:
        logger.info("refused a %s without a good token", method)
        self._ledger.note(None, f"refused {method}")

    def _act(self, action: Any, grant: Grant | None) -> protocol.Header:
        try:
            if action.type == "hello":
                hello: Hello = protocol.decode_header(action.body, Hello)
                if hello.protocol != protocol.VERSION:
                    raise _version_error(hello.protocol)
            elif action.type == "same_host" and self.same_host is not None:
                return self.same_host.offer(grant)
            elif action.type not in self._actions:
                raise ProtocolError(f"unknown action {action.type!r}; known are hello, {', '.join(self._actions)}")
            answer: protocol.Header = self._actions[action.type]()
            if isinstance(answer, protocol.ServerStats):
                return msgspec.structs.replace(answer, tenant=self._ledger.stats(Party(grant).tenant))
            return answer
        except SymbiosisError as error:
            return _error_header(0, error)
        except Exception:
            logger.exception("action %s failed", action.type)
            return _error_header(0, RemoteComputeError("the server failed on this action; its log has the details"))

    def _chunks(self, ticket: bytes) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        try:
            what: Ticket = protocol.decode_header(ticket, Ticket)
            if what.what == "parameters":
                for name, tensor in self._base.parameters.items():
                    yield from _chunk(name, protocol.buffer_of(tensor.to("cpu")))
            elif what.what == "weight_norms":
                for name, norms in self._base.weight_norms():
                    yield from _chunk(name, protocol.buffer_of(norms))
            else:
                for name, content in self._base.files().items():
                    yield from _chunk(name, pa.py_buffer(content))
        except SymbiosisError as error:
            yield EMPTY_BATCH, protocol.encode_header(_error_header(0, error))
        except Exception:
            logger.exception("sending parameters, norms or files failed")
            failure = RemoteComputeError("the server failed while sending; its log has the details")
            yield EMPTY_BATCH, protocol.encode_header(_error_header(0, failure))


@dataclass(frozen=True)
class Payload:
    """How a server seals streams."""

    key: ServerKey
    required: bool


def _write(writer: Any, session: Session | None, message: Message) -> None:
    header, batch = session.seal(*message) if session else message
    writer.write_with_metadata(batch, header)


def _transport(identity: Identity | None) -> dict[str, Any]:
    """How Flight is told about TLS."""
    if identity is None:
        return {}
    return {
        "tls_certificates": [(identity.certificate, identity.key)],
        "verify_client": identity.client_ca is not None,
        "root_certificates": identity.client_ca,
    }


def _chunk(name: str, content: pa.Buffer) -> Iterator[tuple[pa.RecordBatch, bytes]]:
    for offset in range(0, max(1, content.size), protocol.CHUNK_BYTES):
        header = Chunk(name=name, offset_bytes=offset, total_bytes=content.size)
        part = content.slice(offset, min(protocol.CHUNK_BYTES, content.size - offset))
        yield protocol.batch_of(part), protocol.encode_header(header)


def _read(reader: Any) -> Any:
    try:
        return reader.read_chunk()
    except StopIteration:
        return None


def _wait(task: Task, request: Request, context: Any) -> Result:
    """The result of a task, which is dropped from the queue if its client goes away or its time is over."""
    give_up_s = time.monotonic() + request.deadline_ms / 1e3 + 1.0
    while True:
        left_s = give_up_s - time.monotonic()
        try:
            result: Result = task.result.result(timeout=max(0.0, min(left_s, POLL_S)))
            return result
        except DeadlineExceededError:  # the executor's: it says more, and is a TimeoutError too
            raise
        except FutureTimeoutError:
            if left_s > POLL_S and not context.is_cancelled():
                continue
            task.result.cancel()
            raise DeadlineExceededError(
                f"call {request.id} was not computed within {request.deadline_ms} ms, or its client went away"
            ) from None


def _check_linears(request: Request, linear: bool) -> None:
    dtype = request.tensors[0].dtype
    if dtype in ("F64", protocol.RING) and not linear:
        raise InvalidInputError(f"{dtype} is for linears only")


def _not_offered(method: str) -> fl.FlightServerError:
    return fl.FlightServerError(f"{method} is not part of the protocol (docs/protocol.md): use DoExchange")


def _version_error(theirs: int) -> ProtocolVersionError:
    return ProtocolVersionError(
        f"the client speaks protocol {theirs}, this server {protocol.VERSION}; "
        "install the same symbiosis-flight release on both sides"
    )


def _error_header(call_id: int, error: SymbiosisError) -> Error:
    retry_after_ms = None if error.retry_after_s is None else int(error.retry_after_s * 1000)
    return Error(id=call_id, code=error.code, message=str(error), retry_after_ms=retry_after_ms)
