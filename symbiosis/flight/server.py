"""Server: a base model, a scheduler, an executor and a Flight service, started and drained together.

    load -> listen -> serve -> drain

One rule: the port opens only when a call can be answered, and closes before the work that was
accepted is finished.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import resource
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow.flight as fl
import torch
from torch import nn

from symbiosis._version import __version__
from symbiosis.config import ServerOptions, is_loopback
from symbiosis.errors import ConfigError, MissingExtraError
from symbiosis.flight import protocol, reload
from symbiosis.flight.audit_log import AuditLog
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.caretaker import Caretaker
from symbiosis.flight.executor import Executor
from symbiosis.flight.ledger import Ledger
from symbiosis.flight.probes import Probes
from symbiosis.flight.same_host import AVAILABLE
from symbiosis.flight.same_host_service import SameHostPlane
from symbiosis.flight.scheduler import Batch, Scheduler
from symbiosis.flight.service import Payload, Service
from symbiosis.flight.soft_cache import SoftCache
from symbiosis.flight.streams import Streams
from symbiosis.flight.tokens import TokenBook

if TYPE_CHECKING:
    from symbiosis.flight.metrics import Metrics, Snapshot
    from symbiosis.privacy.certificates import Identity

logger = logging.getLogger(__name__)


class Server:
    """A running base-model service; use it as a context manager, or call `close()`.

    Args:
        base: what to serve.
        options: where and within which limits.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, base: BaseModel, options: ServerOptions) -> None:
        self.base = base
        self.options = options
        self._started_s = time.monotonic()
        self._counters = _Counters()
        self._scheduler = Scheduler(
            max_batch_tokens=options.max_batch_tokens,
            max_queue_bytes=options.max_queue_bytes,
            max_queue_tokens=options.max_queue_tokens,
            max_wait_s=options.max_wait_us / 1e6,
            weight_of=lambda account: self.ledger.weight(account),
        )
        self._soft_cache = SoftCache(options.soft_cache_bytes)
        self._executor = Executor(base, self._scheduler, options.threads, self._counters.observe, self._soft_cache)
        self._streams = Streams(options.max_streams_per_client, options.idle_timeout_s, options.write_timeout_s)
        self._draining = False
        self._manifest = self._describe()
        self.identity = _identity(options)
        self.payload = _payload(options)
        self.ledger = _ledger(base, options)
        self._service = self._bind()
        self._same_host = self._open_same_host()
        self._probes: Probes | None = None
        self._caretaker = Caretaker(self._streams, self._executor, options.watchdog_s)
        self._executor.start()
        atexit.register(self._streams.cut_all)  # after pyarrow's own handler, and so called before it
        self._caretaker.start()
        if options.metrics_port is not None:
            self._open_probes(options.metrics_host, options.metrics_port)

    @property
    def metrics_port(self) -> int | None:
        """Where /metrics, /livez and /readyz are, if they are."""
        return self._probes.port if self._probes else None

    @property
    def port(self) -> int:
        return int(self._service.port)

    @property
    def url(self) -> str:
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return f"{self._scheme}://{host}:{self.port}"

    @property
    def _scheme(self) -> str:
        return "grpc" if self.identity is None else "grpc+tls"

    def close(self, drain_timeout_s: float | None = None) -> bool:
        """Refuse new calls, finish those accepted, close the port; True if all was finished in time.

        Streams that clients keep open are answered as draining until they end, or are cut off when the interpreter
        exits: pyarrow would wait for them for ever.
        """
        if self._draining:
            return True
        self._draining = True
        limit_s = self.options.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        deadline_s = time.monotonic() + limit_s
        self._scheduler.close()
        finished = self._executor.join(limit_s)
        closing = threading.Thread(target=self._service.shutdown, name="symbiosis-shutdown", daemon=True)
        self._caretaker.close()
        if self._same_host:
            self._same_host.close()
        if self._probes:
            self._probes.close()
        closing.start()
        closing.join(max(0.5, min(2.0, deadline_s - time.monotonic())))
        if not closing.is_alive():
            atexit.unregister(self._streams.cut_all)
        self.ledger.close()
        return finished

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "draining" if self._draining else "serving"
        return f"<Server {self.url} {state} {self.base.name}: {len(self.base.modules)} modules>"

    def reload(self, wanted: ServerOptions) -> None:
        """Follow the limits of these options from now on, and read the tokens again; says what needs a restart.

        Raises:
            ConfigError: the limits do not fit the options that cannot change; nothing was changed.
        """
        self.options, live, later = reload.changes(self.options, wanted)
        options = self.options
        self._scheduler.set_limits(
            options.max_batch_tokens, options.max_queue_bytes, options.max_queue_tokens, options.max_wait_us / 1e6
        )
        self._streams.set_limits(options.max_streams_per_client, options.idle_timeout_s, options.write_timeout_s)
        self._caretaker.watchdog_s = options.watchdog_s
        if "log_level" in live:
            logging.getLogger("symbiosis").setLevel(options.log_level.upper())
        if self.ledger.book:
            self.ledger.book.reload()
        shown = ", ".join(f"{name} = {getattr(options, name)}" for name in live) or "no limit has changed"
        logger.info("reload: %s", shown)
        if later:
            logger.warning("reload: %s changed too, which takes a restart", ", ".join(later))

    def stats(self) -> protocol.ServerStats:
        """Counters since start, as the `stats` action gives them."""
        counters = self._counters
        return protocol.ServerStats(
            uptime_s=time.monotonic() - self._started_s,
            requests=counters.requests,
            batches=counters.batches,
            tokens=counters.tokens,
            errors=self._service.errors,
            queued=self._scheduler.queued,
            clients=self._service.clients,
            compute_s=counters.compute_s,
            mean_batch=counters.requests / counters.batches if counters.batches else 0.0,
            memory_bytes=peak_memory_bytes(),
            fingerprint=self.base.served_fingerprint,
        )

    def _open_same_host(self) -> SameHostPlane | None:
        """Shared memory for clients on this machine, unless what they send must be sealed."""
        options = self.options
        if not options.same_host or not AVAILABLE or options.payload == "require":
            return None
        plane = SameHostPlane(
            self._service.converse_on, options.max_message_bytes, options.idle_timeout_s, options.write_timeout_s
        )
        self._service.same_host = plane
        return plane

    def _open_probes(self, host: str, port: int) -> None:
        try:
            from symbiosis.flight.metrics import Metrics
        except ModuleNotFoundError as error:
            self.close(0.0)
            raise MissingExtraError(
                f"metrics_port needs the package {error.name}; run: pip install 'symbiosis-flight[server]'"
            ) from error
        metrics = self._counters.metrics = Metrics(self._snapshot)
        try:
            self._probes = Probes(
                host,
                port,
                alive=lambda: not self._caretaker.stuck,
                ready=lambda: self._health().status == "serving",
                metrics=metrics.text,
            )
        except OSError as error:
            self.close(0.0)
            raise ConfigError(f"cannot listen on {host}:{port}: {error}; give --metrics-port another one") from error

    def _snapshot(self) -> Snapshot:
        """What Prometheus is told."""
        counters, streams = self._counters, self._streams.per_client()
        on_device = self.base.device.type == "cuda"
        tenants = {tenant: self.ledger.stats(tenant) for tenant in self.ledger.tenants}
        fields = ("requests", "tokens", "bytes_in", "bytes_out", "refused")
        from symbiosis.flight.metrics import Snapshot

        return Snapshot(
            gauges={
                "queued_requests": self._scheduler.queued,
                "queued_tokens": self._scheduler.queued_tokens,
                "queued_bytes": self._scheduler.queued_bytes,
                "clients": len(streams),
                "streams": streams.total(),
                "memory_bytes": memory_bytes(),
                "device_memory_bytes": torch.cuda.memory_allocated(self.base.device) if on_device else 0,
                "draining": self._draining,
                "stuck": self._caretaker.stuck,
                "uptime_seconds": time.monotonic() - self._started_s,
            },
            counters={
                "requests": counters.requests,
                "batches": counters.batches,
                "tokens": counters.tokens,
                "compute_seconds": counters.compute_s,
                "connections_cut": self._streams.cut_off,
            },
            errors=dict(self._service.error_codes),
            tenants={name: {field: getattr(stats, field) for field in fields} for name, stats in tenants.items()},
        )

    def _describe(self) -> protocol.Manifest:
        base = self.base
        return protocol.Manifest(
            protocol=protocol.VERSION,
            server_version=__version__,
            model=base.name,
            revision=base.revision,
            architecture=base.architecture,
            dtype=protocol.TAGS.get(base.dtype, "F32"),
            config=base.config.to_json_string(use_diff=False),
            fingerprint=base.fingerprint,
            max_message_bytes=self.options.max_message_bytes,
            modules=base.module_infos(),
            parameters=base.parameter_infos(),
            files=sorted(base.files()),
            base_bytes=base.base_bytes,
            instance=uuid.uuid4().hex,
            quantized=base.quantized or "",
        )

    def _bind(self) -> Service:
        if self.identity is None and not is_loopback(self.options.host):
            logger.warning(
                "INSECURE: listening on %s without TLS. Whoever is on the way reads and changes everything; "
                "leave out --insecure to get TLS",
                self.options.host,
            )
        if self.ledger.book is None and not is_loopback(self.options.host):
            logger.warning(
                "no tokens: whoever reaches %s may use this server; run symbiosis-flight-server token create TENANT",
                self.options.host,
            )
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        location = f"{self._scheme}://{host}:{self.options.port}"
        actions = {"hello": lambda: self._manifest, "health": self._health, "stats": self.stats}
        try:
            _refuse_taken(self.options.host, self.options.port)
            limit = self.options.max_message_bytes
            return Service(
                location,
                self.base,
                self._executor,
                actions,
                limit,
                self._soft_cache,
                self.identity,
                self.ledger,
                self._streams,
                self.payload,
            )
        except (fl.FlightError, OSError) as error:
            self.ledger.close()
            raise ConfigError(
                f"cannot listen on {location}: {error}. "
                "stop what uses the port, or give --port another one (0: any free)"
            ) from error

    def _health(self) -> protocol.Health:
        """A real product of the first linear, through the model but beside the queue."""
        started_s = time.perf_counter()
        name, linear = next(iter(self.base.linears.items()))
        with torch.no_grad():
            x = torch.ones(1, linear.d_in, dtype=self.base.dtype, device=self.base.device)
            self.base.run("forward", [name], [x]).sum().item()
        return protocol.Health(
            status="draining" if self._draining else "serving",
            uptime_s=time.monotonic() - self._started_s,
            gemm_us=int((time.perf_counter() - started_s) * 1e6),
        )


class _Counters:
    """What the executor did; written by the thread that computes."""

    def __init__(self) -> None:
        self.requests = self.batches = self.tokens = 0
        self.compute_s = 0.0
        self.metrics: Metrics | None = None

    def observe(self, batch: Batch, computed_s: float) -> None:
        if self.metrics:
            ended_s = time.perf_counter()
            queue_s = (max(0.0, ended_s - computed_s - task.enqueued_s) for task in batch.tasks)
            self.metrics.batch(len(batch.tasks), batch.tokens, computed_s, queue_s)
        self.requests += len(batch.tasks)
        self.batches += 1
        self.tokens += batch.tokens
        self.compute_s += computed_s


def serve(model: nn.Module | str, *, tokenizer: Any = None, **options: Any) -> Server:
    """Serve a model from inside this process.

    Args:
        model: a transformers model (its weights are shared, not copied), or what `--model` takes.
        tokenizer: published to clients; a model given by name brings its own.
        **options: fields of ServerOptions, such as port=0.

    Raises:
        ConfigError: a bad option, or an address that cannot be bound.
    """
    if isinstance(model, str):
        from symbiosis.flight.loading import load_base  # loads transformers' auto classes only if needed

        settings = ServerOptions(model=model, **options)
        return Server(load_base(settings), settings)
    settings = ServerOptions(model=type(model).__name__, **options)
    base = BaseModel(
        model, name=settings.name or "", tokenizer=tokenizer, quantized=settings.quantized, prepack=settings.prepack
    )
    return Server(base, settings)


def run(options: ServerOptions, again: Callable[[], ServerOptions] | None = None) -> int:
    """The life of a server process: load, listen, say so, wait for a signal, drain.

    Args:
        options: where and within which limits.
        again: collects the options anew at SIGHUP; None keeps them, and only tokens are read again.

    Raises:
        ConfigError: a bad option, or an address that cannot be bound.
    """
    from symbiosis.flight.loading import load_base

    if options.port_file and not options.port_file.parent.is_dir():
        raise ConfigError(f"--port-file {options.port_file}: there is no folder {options.port_file.parent}")
    received: list[signal.Signals] = []  # no Event: its lock may be held by the code that a handler interrupts

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    base = load_base(options, bars=sys.stderr.isatty())
    server = Server(base, _with_tokens(options))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    print(_listening(server), flush=True)
    if options.port_file:
        _write_port(options.port_file, server.port)
    while (ending := _next_end(received, server, again or (lambda: options))) is None:
        time.sleep(0.2)
    logger.info("%s: draining", ending.name)
    finished = server.close()
    sys.stdout.flush()
    logging.shutdown()
    # Streams that clients left open would keep gRPC's threads, and so the process, alive.
    os._exit(0 if finished else 1)


def _next_end(
    received: list[signal.Signals], server: Server, again: Callable[[], ServerOptions]
) -> signal.Signals | None:
    """Attend to the signals received; the first that ends the server, if any does."""
    while received:
        number = received.pop(0)
        if number is not signal.SIGHUP:
            return number
        try:
            server.reload(_with_tokens(again()))
        except ConfigError as error:  # a slip of an editor must not end a server that works
            logger.error("reload: %s; the options in force stay", error)
    return None


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _identity(options: ServerOptions) -> Identity | None:
    return _cryptography("certificates", "TLS").identity(options) if options.tls_on else None


def _payload(options: ServerOptions) -> Payload | None:
    if options.payload == "off":
        return None
    key = _cryptography("payload", "payload encryption").ServerKey.kept(options.cache_path / "payload.key")
    return Payload(key, options.payload == "require")


def _cryptography(module: str, what: str) -> Any:
    """A module of `privacy` that needs the package cryptography, imported where it is used."""
    try:
        return importlib.import_module(f"symbiosis.privacy.{module}")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{what} needs the package {error.name}, which is not installed; "
            "run: pip install 'symbiosis-flight[server]'"
        ) from error


def _ledger(base: BaseModel, options: ServerOptions) -> Ledger:
    """Tokens are asked for only if a file is named: `run` looks for the one in the cache folder, `serve` does not."""
    path = options.tokens_path if options.tokens is not None else None
    audit = options.audit_log
    widths = {info.name: (info.d_in, info.d_out) for info in base.module_infos() if info.kind != "norm"}
    return Ledger(
        widths,
        TokenBook(path) if path else None,
        AuditLog(audit, options.audit_log_bytes, options.audit_log_files) if audit else None,
        options.extraction_budget,
    )


def _with_tokens(options: ServerOptions) -> ServerOptions:
    """Ask for tokens where the operator has made some."""
    path = options.tokens_path
    found = options.tokens is None and path is not None and path.exists()
    return options.model_copy(update={"tokens": str(path)}) if found else options


def memory_bytes() -> int:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _listening(server: Server) -> str:
    base, identity = server.base, server.identity
    words = {
        "model": base.name,
        "modules": len(base.modules),
        "memory": f"{base.base_bytes / 1e6:.0f}MB",
        "dtype": str(base.dtype).removeprefix("torch."),
        **({"quantized": base.quantized} if base.quantized else {}),
        "device": base.device,
        "fingerprint": base.fingerprint[:12],
        **({"tls": f"sha256:{identity.fingerprint}"} if identity else {}),
        **({"payload": server.payload.key.text} if server.payload else {}),
        "tokens": "off" if server.ledger.book is None else "required",
    }
    return f"listening on {server.url} " + " ".join(f"{key}={value}" for key, value in words.items())


def _write_port(path: Path, port: int) -> None:
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(f"{port}\n")
    part.replace(path)


def _refuse_taken(host: str, port: int) -> None:
    """gRPC binds with SO_REUSEPORT, so two servers would share a port silently; ask the socket layer first."""
    import socket

    if not port:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
