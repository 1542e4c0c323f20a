"""connect(url) -> Connection: wrap(), load_model(), tokenizer(), stats(), close().

One rule: a Connection is the only live object a user holds. It agrees on the model once, at connect;
everything it hands out calls through it, and it can be closed, copied and shown without surprises.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
import torch
from pydantic import SecretStr
from torch import nn
from tqdm.auto import tqdm

from symbiosis import provenance, skeleton, wrapping
from symbiosis.adapters import base_of
from symbiosis.caller import Caller
from symbiosis.config import ClientOptions, Masking, PrivacyOptions, load_client_options
from symbiosis.errors import (
    ConfigError,
    ConnectError,
    ModelMismatchError,
    ProtocolError,
    ProtocolVersionError,
    SymbiosisError,
    from_wire,
)
from symbiosis.flight import protocol
from symbiosis.flight.channel import Channel, FlightChannel
from symbiosis.flight.fingerprint import served_fingerprint
from symbiosis.flight.protocol import Manifest
from symbiosis.flight.replicas import Replicas
from symbiosis.flight.same_host_channel import SameHostChannel, on_this_host
from symbiosis.flight.tls import Tls, certificate_of
from symbiosis.plan import Granularity, Place, Plan
from symbiosis.privacy.hiding import Hiding, check_options, hide
from symbiosis.privacy.masking import check_dealer
from symbiosis.tables import html_table
from symbiosis.telemetry import Epsilon, EventBus, Recorder, Stats, StepEvent

if TYPE_CHECKING:
    from symbiosis.notebook.dashboard import Dashboard
    from symbiosis.privacy.dp import PrivacySpent

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=nn.Module)


def connect(
    url: str | Sequence[str] | None = None,
    *,
    token: str | SecretStr | None = None,
    token_file: str | Path | None = None,
    request_timeout_s: float | None = None,
    connect_timeout_s: float | None = None,
    max_message_bytes: int | None = None,
    max_streams: int | None = None,
    same_host: bool | None = None,
    retry_s: float | None = None,
    keepalive_s: float | None = None,
    lm_head: Place | None = None,
    reveal_adapter: bool | None = None,
    tls_ca: str | Path | None = None,
    tls_fingerprint: str | None = None,
    tls_hostname: str | None = None,
    tls_client_cert: str | Path | None = None,
    tls_client_key: str | Path | None = None,
    server_key: str | None = None,
    privacy: PrivacyOptions | None = None,
) -> Connection:
    """Connect to a base-model server and agree on the model.

    Args:
        url: `grpc+tls://HOST:PORT` or `grpc://HOST:PORT`, as the server prints it; or several of them, of servers that
            hold the same model: calls go to the one with the fewest clients, and to another when it fails. None is
            what SYMBIOSIS_CLIENT_URL says.
        token, token_file: the token that the operator gave you, or the file it is in. What is written in a notebook is
            saved with it: prefer SYMBIOSIS_CLIENT_TOKEN, a file, or `getpass.getpass()`.
        request_timeout_s, connect_timeout_s, max_message_bytes, max_streams, same_host, retry_s, keepalive_s, lm_head,
            reveal_adapter: as in `symbiosis.config.ClientOptions`; what is not given is read from
            SYMBIOSIS_CLIENT_* variables.
        tls_ca, tls_fingerprint: whom to trust: all certificates of a CA (PEM file), or the one with this SHA-256.
        tls_hostname: the name to expect in the certificate, if it is not the URL's.
        tls_client_cert, tls_client_key: what to show to a server that asks for it (mTLS).
        server_key: seals calls for the server that has this key, whoever is in between; it prints it at start.
        privacy: a `symbiosis.privacy.Masking` or `ActivationNoise`, to hide activations and gradients from the
            server's host.

    Raises:
        ConfigError: a bad URL or option, or a dealer that is the server itself.
        ConnectError: nothing answers there.
        AuthError: the token is missing or not good.
        TlsError: the server is not the one to trust, or one end does not speak TLS.
        ProtocolVersionError: the server speaks another version.
        ModelMismatchError: two of the servers, or the dealer, hold different models.
        UnsupportedMethodError: a base that cannot be masked, or takes no noise.
    """
    token = SecretStr(token) if isinstance(token, str) else token  # hidden from tracebacks that show locals
    explicit = {
        "token": token,
        "token_file": token_file,
        "request_timeout_s": request_timeout_s,
        "connect_timeout_s": connect_timeout_s,
        "max_message_bytes": max_message_bytes,
        "max_streams": max_streams,
        "same_host": same_host,
        "retry_s": retry_s,
        "keepalive_s": keepalive_s,
        "lm_head": lm_head,
        "reveal_adapter": reveal_adapter,
        "tls_ca": tls_ca,
        "tls_fingerprint": tls_fingerprint,
        "tls_hostname": tls_hostname,
        "tls_client_cert": tls_client_cert,
        "tls_client_key": tls_client_key,
        "server_key": server_key,
    }
    options = load_client_options(explicit)
    if url is None:
        url = [word.strip() for word in options.url.split(",")] if options.url else []
    urls = dict.fromkeys([url] if isinstance(url, str) else url)
    if not urls:
        raise ConfigError("no URL given; expected grpc://HOST:PORT, or a list of them, here or in SYMBIOSIS_CLIENT_URL")
    replicas = Replicas([_channel(url, options) for url in urls], options.retry_s)
    try:
        return Connection(replicas, options, privacy)
    except BaseException:
        replicas.close()
        raise


def _channel(url: str, options: ClientOptions) -> Channel:
    tls, token = _tls(options), options.secret()
    flight = FlightChannel(url, options.max_streams, options.keepalive_s, tls, token, options.server_key)
    if not options.same_host or options.server_key or not on_this_host(flight.url):
        return flight
    limit = options.max_message_bytes or protocol.MAX_MESSAGE_BYTES
    return SameHostChannel(flight, limit, options.max_streams, options.keepalive_s)


def _tls(options: ClientOptions) -> Tls:
    return Tls(
        options.tls_ca, options.tls_fingerprint, options.tls_hostname, options.tls_client_cert, options.tls_client_key
    )


class Connection:
    """A session with one server, or with several that hold the same model. Make one with `connect`.

    Attributes:
        url: where the server is, or the servers are.
        manifest: what is served.
        instances: the ids of the server processes that answered.
        bus: telemetry of every call; subscribe to follow along.
        plan: what runs where in the model wrapped last, or None.
        privacy: the masks or the noise of this connection, or None; `privacy.stats()` says how they are doing.
    """

    def __init__(self, replicas: Replicas, options: ClientOptions, privacy: PrivacyOptions | None = None) -> None:
        self.url = ", ".join(replicas.urls)
        self.options = options
        self.bus = EventBus()
        self.plan: Plan | None = None
        self._replicas = replicas
        self._recorder = Recorder()
        self.bus.subscribe(self._recorder.record)
        self._closed = False
        self._dashboard: Dashboard | None = None
        self._steps = 0  # that `track` was told of
        self._files: dict[str, bytes] | None = None
        self.manifest = self._hello()
        self._served = served_fingerprint(self.manifest.fingerprint, self.manifest.quantized)
        replicas.open(self._open_header(), self._served)
        self._caller = Caller(
            replicas,
            {info.name: info for info in self.manifest.modules},
            self.bus,
            min(options.max_message_bytes or self.manifest.max_message_bytes, self.manifest.max_message_bytes),
            options.request_timeout_s,
            self._weight_norms,
        )
        self._dealer: Connection | None = None  # opened by us, so closed by us
        self.privacy = self._hidden(privacy)

    # --- models -----------------------------------------------------------------------------------

    def wrap(
        self,
        model: M,
        *,
        granularity: Granularity = "auto",
        lm_head: Place | None = None,
        local: Sequence[str] = (),
        keep_weights: bool = False,
        verify: bool = True,
    ) -> M:
        """Make the frozen base layers of a model remote, in place, and free their weights.

        Args:
            model: a transformers model or a PeftModel, with weights or on the meta device.
            granularity: "linear": a call per linear, or per linears that share an input; "module": a
                frozen MLP in one call, whose backward computes it again; "segment": also, without
                gradients, all between two attentions in one call; "auto": segments without
                gradients, linears with.
            lm_head: where the output head runs; None is the connection's option.
            local: names or glob patterns of modules to keep here, such as "*.layers.0.*".
            keep_weights: keep the replaced layers in memory, so that `unwrap` works.
            verify: compare weight hashes with the server's; shapes are always compared.

        Returns:
            The same object.

        Raises:
            ModelMismatchError: it is not the server's model; nothing was changed.
            UnsupportedMethodError: an adapter that needs base weights; nothing was changed.
        """
        if self.privacy is not None:
            self.privacy.check(self.manifest, model, granularity)
            granularity = "linear"
        allowed = self.options.reveal_adapter
        self.plan = wrapping.wrap(
            model,
            self.manifest,
            self.privacy or self._caller,
            granularity=granularity,
            lm_head=lm_head or self.options.lm_head,
            local=local,
            keep_weights=keep_weights,
            verify=verify,
            reveals=self.privacy.reveals(allowed) if self.privacy is not None else allowed,
        )
        self._fill(base_of(model))
        provenance.tag(model, self.manifest)
        return model

    def load_model(
        self,
        *,
        dtype: torch.dtype | None = None,
        granularity: Granularity = "auto",
        lm_head: Place | None = None,
    ) -> Any:
        """A transformers model of the server's architecture, wrapped, without ever holding base weights.

        Args:
            dtype: of the client's parameters and of what travels; None is the server's.
            granularity, lm_head: as in `wrap`.

        Raises:
            ModelMismatchError: the installed transformers does not know the architecture.
            ConfigError: lm_head="local" for a head that the server does not give away.
        """
        model = skeleton.build(self.manifest, dtype or protocol.DTYPES[self.manifest.dtype])
        self.wrap(model, granularity=granularity, lm_head=lm_head)
        generation_config = skeleton.generation_config_from(self._published_files())
        if generation_config is not None:
            model.generation_config = generation_config
        return model

    def unwrap(self, model: M) -> M:
        """Put back the layers that `wrap(keep_weights=True)` kept; returns the same object.

        Raises:
            UnsupportedMethodError: the model is not wrapped, or its weights were freed.
        """
        wrapping.unwrap(model)
        return model

    def save_adapter(self, model: Any, folder: str | Path, adapter_name: str = "default") -> Path:
        """Save an adapter as an ordinary peft folder that also says which base it was made for.

        Plain `model.save_pretrained` does as well, but for the revision; it may ask a model hub about the vocabulary.

        Returns:
            The folder of the adapter: a sub-folder if its name is not "default", as peft has it.

        Raises:
            ConfigError: not a PeftModel of a wrapped model, or it has no adapter of this name.
        """
        from symbiosis import export  # peft takes a second to import, which the others need not spend

        self._check_wrapped(model)
        return export.save(model, Path(folder), self.manifest, adapter_name)

    def load_adapter(
        self, model: Any, folder: str | Path, adapter_name: str = "default", *, is_trainable: bool = False
    ) -> Any:
        """Put a saved adapter, ours or plain peft's, on a wrapped model; warns if it was made for another base.

        Args:
            model: a wrapped model, or a PeftModel of one, which keeps the adapters it has.
            folder: with adapter_config.json in it.
            adapter_name: in this model.
            is_trainable: whether to go on training it.

        Returns:
            The PeftModel.

        Raises:
            ConfigError: the model is not wrapped, the name is taken, or there is no whole adapter in the folder.
            ModelMismatchError: layers or tensors are missing, unexpected or of another size.
            UnsupportedMethodError: it needs base weights. After each of these the model is as it was before.
        """
        from symbiosis import export

        self._check_wrapped(model)
        return export.load(model, Path(folder), self.manifest, adapter_name, is_trainable)

    def tokenizer(self) -> Any:
        """The server's tokenizer, without a model hub.

        Raises:
            ConfigError: the server publishes none.
        """
        if not any("tokenizer" in name or name.endswith(".model") for name in self.manifest.files):
            raise ConfigError(f"{self.manifest.model} at {self.url} publishes no tokenizer; load it with transformers")
        return skeleton.tokenizer_from(self._published_files())

    # --- the session --------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Calls, tokens, bytes and where the time went, since connect. Subtract two to get what lies between."""
        said = tuple(self.privacy.stats().rows()) if self.privacy is not None else ()
        return dataclasses.replace(self._recorder.stats(), servers=self._replicas.states(), privacy=said)

    def server_stats(self, *, timeout_s: float | None = None) -> protocol.ServerStats:
        """The server's own counters, over all its clients; waits for `timeout_s`, or as long as `connect` does."""
        stats: protocol.ServerStats = self._action("stats", b"", protocol.ServerStats, timeout_s)
        return stats

    def dashboard(self) -> Dashboard:
        """These numbers live, in a notebook: make it the last line of a cell. The same object until it is closed."""
        from symbiosis.notebook.dashboard import Dashboard  # only who looks pays for the charts

        if self._dashboard is None or self._dashboard.closed:
            self._dashboard = Dashboard(self)
        return self._dashboard

    def track(
        self,
        loss: Any,
        *,
        step: int | None = None,
        steps: int | None = None,
        learning_rate: float | None = None,
        tokens: int | None = None,
        spent: PrivacySpent | None = None,
    ) -> None:
        """Tell the dashboard, and whoever else subscribed to `bus`, that a training step has ended.

        Args:
            loss: a number, or a tensor of one element.
            step: counted from 1; None is the one after the last, and 1 after the last of `steps`.
            steps: how many there will be, which gives the time that is left.
            learning_rate: of this step.
            tokens: in this step's batch.
            spent: `optimizer.spent()` of `make_private`'s optimizer; stats() and the dashboard show the last one.
        """
        over = steps is not None and self._steps >= steps
        self._steps = step if step is not None else 1 if over else self._steps + 1
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        epsilon = Epsilon(spent.epsilon, spent.target_epsilon, spent.delta) if spent is not None else None
        self.bus.emit(StepEvent(self._steps, value, time.perf_counter(), learning_rate, tokens, steps, epsilon))

    def certificates(self) -> list[bytes]:
        """What its servers show in TLS now, DER; of those without TLS, or that cannot be reached, nothing."""
        shown = [certificate_of(url, _tls(self.options)) for url in self._replicas.urls]
        return [certificate for certificate in shown if certificate is not None]

    def health(self) -> protocol.Health:
        """Whether the server computes: it runs a real GEMM before it answers."""
        health: protocol.Health = self._action("health", b"", protocol.Health)
        return health

    def close(self) -> None:
        """End all streams. Wrapped models stay as they are; their next call raises ClosedError."""
        self._closed = True
        if self._dashboard is not None:
            self._dashboard.close()
        if self.privacy is not None:
            self.privacy.close()
        if self._dealer is not None:
            self._dealer.close()
        self._replicas.close()

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __copy__(self) -> Connection:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Connection:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a live connection cannot be pickled; connect again in the other process")

    def __repr__(self) -> str:
        up = [state.up for state in self._replicas.states()]
        state = "closed" if self._closed else "open" if all(up) else f"down {len(up) - sum(up)}/{len(up)}"
        calls = self._recorder.stats().calls
        # A debugger shows also what is still connecting.
        model = self.manifest.model if "manifest" in vars(self) else "?"
        hidden = f", {privacy.label}" if (privacy := vars(self).get("privacy")) is not None else ""
        return f"<Connection {self.url} {state} {model}: {calls:,} calls{hidden}>"

    def _repr_html_(self) -> str:
        rows = [
            ("server", self.url + (" (closed)" if self._closed else "")),
            ("model", f"{self.manifest.model} ({self.manifest.architecture}, {self.manifest.kept_as})"),
            ("modules", f"{len(self.manifest.modules)}, {self.manifest.base_bytes / 1e6:,.0f} MB held there"),
            *self.stats().rows(),
        ]
        return html_table(rows)

    def _hidden(self, privacy: PrivacyOptions | None) -> Hiding | None:
        if privacy is None:
            return None
        check_options(privacy, self.manifest)
        dealer = self._caller
        if isinstance(privacy, Masking) and privacy.dealer is not None:
            dealer = self._dealer_of(privacy)._caller
        return hide(privacy, self.manifest, self._caller, dealer, self.options.request_timeout_s)

    def _dealer_of(self, privacy: Masking) -> Connection:
        dealer: Any = privacy.dealer
        if isinstance(dealer, str):
            o = self.options
            dealer = self._dealer = connect(
                dealer,
                request_timeout_s=o.request_timeout_s,
                connect_timeout_s=o.connect_timeout_s,
                retry_s=o.retry_s,
                keepalive_s=o.keepalive_s,
                same_host=o.same_host,
            )
        try:
            check_dealer(self, dealer)
        except BaseException:
            if self._dealer is not None:
                self._dealer.close()
            raise
        return dealer  # type: ignore[no-any-return]

    def _check_wrapped(self, model: nn.Module) -> None:
        if wrapping.plan_of(model) is None:
            raise ConfigError("this model is not wrapped; call conn.wrap(model) first, or use plain peft")

    def _hello(self) -> Manifest:
        """What every server that answers agrees on; those that cannot be reached now may come later."""
        answers = self._replicas.each(self._hello_to)
        manifests = {url: answer for url, answer in answers.items() if isinstance(answer, Manifest)}
        failures = [answer for answer in answers.values() if isinstance(answer, SymbiosisError)]
        if not manifests or not all(isinstance(failure, ConnectError | TimeoutError) for failure in failures):
            raise failures[0]
        (url, first), *others = manifests.items()
        for other_url, other in others:
            if (other.fingerprint, other.quantized) != (first.fingerprint, first.quantized):
                raise ModelMismatchError(
                    f"{url} holds {first.model} in {first.kept_as} with fingerprint {first.fingerprint[:12]}, "
                    f"{other_url} {other.model} in {other.kept_as} with {other.fingerprint[:12]}; connect only to "
                    "servers of one model, with the same --quantize"
                )
        self.instances = frozenset(manifest.instance for manifest in manifests.values())
        limit_bytes = min(manifest.max_message_bytes for manifest in manifests.values())
        return msgspec.structs.replace(first, max_message_bytes=limit_bytes)

    def _hello_to(self, channel: Channel) -> Manifest:
        body = protocol.encode_header(protocol.Hello(protocol=protocol.VERSION))
        manifest: Manifest = self._act(channel, "hello", body, Manifest)
        if manifest.protocol != protocol.VERSION:
            raise ProtocolVersionError(
                f"{channel.url} speaks protocol {manifest.protocol}, this client {protocol.VERSION}; "
                "install the same symbiosis-flight release on both sides"
            )
        return manifest

    def _open_header(self) -> bytes:
        client = f"{platform.node()[:24]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        manifest = protocol.manifest_hash(self.manifest) if self.options.server_key else b""
        return protocol.encode_header(
            protocol.Open(protocol=protocol.VERSION, fingerprint=self._served, client=client, manifest=manifest)
        )

    @property
    def _channel(self) -> Channel:
        return self._replicas.home

    def _action(self, name: str, body: bytes, kind: Any, timeout_s: float | None = None) -> Any:
        return self._act(self._channel, name, body, kind, timeout_s)

    def _act(self, channel: Channel, name: str, body: bytes, kind: Any, timeout_s: float | None = None) -> Any:
        answer = protocol.decode_header(
            channel.action(name, body, timeout_s or self.options.connect_timeout_s), kind | protocol.Error
        )
        if isinstance(answer, protocol.Error):
            raise from_wire(answer.code, answer.message)
        return answer

    def _fill(self, base: nn.Module) -> None:
        """Give a model on the meta device what a client may hold."""
        if not wrapping.has_meta(base):
            return
        published = self.manifest.parameters
        rename = wrapping.renaming(base, (info.name for info in self.manifest.modules))
        skeleton.fill(base, published, self._parameters(), rename)
        wrapping.remember_values(base)

    def _parameters(self) -> Iterator[tuple[str, int, int, memoryview]]:
        total = sum(info.nbytes for info in self.manifest.parameters)
        with tqdm(total=total, desc="fetching parameters", unit="B", unit_scale=True, leave=False, delay=1) as bar:
            for chunk in self._download("parameters"):
                yield chunk
                bar.update(len(chunk[3]))

    def _weight_norms(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Of each linear, the norms of its columns [d_in] and of its rows [d_out]."""
        content: dict[str, bytes] = {}
        for name, _, _, data in self._download("weight_norms"):
            content[name] = content.get(name, b"") + bytes(data)
        widths = {i.name: [i.d_in, i.d_out] for i in self.manifest.modules if i.kind in ("linear", "conv1d")}
        for name, (d_in, d_out) in widths.items():
            if len(content.get(name, b"")) != 4 * (d_in + d_out):
                raise ProtocolError(f"the server sent {len(content.get(name, b''))} bytes of norms of {name}")
        both = {name: torch.frombuffer(bytearray(content[name]), dtype=torch.float32) for name in widths}
        return {name: both[name].split(width) for name, width in widths.items()}

    def _published_files(self) -> dict[str, bytes]:
        if self._files is None:
            found: dict[str, bytes] = {}
            for name, _, _, data in self._download("files"):
                found[name] = found.get(name, b"") + bytes(data)
            self._files = found
        return self._files

    def _download(self, what: str) -> Iterator[tuple[str, int, int, memoryview]]:
        ticket = protocol.encode_header(protocol.Ticket(what=what))  # type: ignore[arg-type]
        for message in self._replicas.download(ticket, self.options.request_timeout_s):
            header = protocol.decode_header(message.app_metadata, protocol.Chunk | protocol.Error)
            if isinstance(header, protocol.Error):
                raise from_wire(header.code, header.message)
            body = memoryview(protocol.body_of(message.data))
            if header.offset_bytes + len(body) > header.total_bytes:
                raise ProtocolError(f"chunk of {header.name!r} exceeds its total of {header.total_bytes:,} bytes")
            yield header.name, header.offset_bytes, header.total_bytes, body
