"""`python -m symbiosis doctor URL`: why a server cannot be used, or how well it can, a line for each step.

    [ok]   DNS           localhost is 127.0.0.1
    [FAIL] TCP           nothing listens on 127.0.0.1:8815
                         next: start symbiosis-flight-server there, or correct the port

One rule: the first step that fails ends it, since what follows could only repeat it; and every failure has a next step.
Token and TLS options are read from SYMBIOSIS_CLIENT_* as `connect` reads them.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from symbiosis._version import __version__
from symbiosis.connection import Connection, connect
from symbiosis.errors import ConfigError, SymbiosisError
from symbiosis.flight.channel import check_url
from symbiosis.flight.protocol import DTYPES, ModuleInfo
from symbiosis.flight.tls import address

USAGE = "usage: python -m symbiosis doctor URL"
CONNECT_TIMEOUT_S = 5.0
PINGS = 20
BANDWIDTH_BYTES = 4 << 20
# Of one product against another of the same numbers, summed in another order, in the server's dtype.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do if it is wrong."""

    step: str
    good: bool
    text: str
    next: str = ""

    def __str__(self) -> str:
        line = f"{'[ok]  ' if self.good else '[FAIL]'} {self.step:<13} {self.text}"
        return line + (f"\n{'':<21}next: {self.next}" if self.next else "")


def main(argv: Sequence[str]) -> int:
    """Examine a server; 0 if all is well, 1 if not, 2 for a wrong command line."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print(USAGE)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    good = True
    for finding in examine(argv[0]):
        print(finding, flush=True)
        good = good and finding.good
    return 0 if good else 1


def examine(url: str) -> Iterator[Finding]:
    """All findings about a server, in order; ends with the first that is bad."""
    for look in (_url, _dns, _tcp):
        finding = look(url)
        yield finding
        if not finding.good:
            return
    try:
        started_s = time.perf_counter()
        conn = connect(url, connect_timeout_s=CONNECT_TIMEOUT_S, retry_s=0.0)
        elapsed_s = time.perf_counter() - started_s
    except SymbiosisError as error:
        yield Finding("connect", False, f"{error.code}: {error}", f"docs/errors.md, section {error.code}")
        return
    with conn:
        yield _agreed(conn, elapsed_s)
        for step, check in CHECKS.items():
            try:
                finding = check(conn)
            except SymbiosisError as error:
                finding = Finding(step, False, f"{error.code}: {error}", f"docs/errors.md, section {error.code}")
            yield finding
            if not finding.good:
                return


def _url(url: str) -> Finding:
    try:
        return Finding("URL", True, check_url(url))
    except ConfigError as error:
        return Finding("URL", False, str(error), "use the URL that the server prints after 'listening on'")


def _dns(url: str) -> Finding:
    if url.startswith("grpc+unix://"):
        return Finding("DNS", True, "a Unix socket, no name to look up")
    host, port = address(url)
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as error:
        return Finding("DNS", False, f"{host} has no address: {error}", "correct the name, or use the IP address")
    return Finding("DNS", True, f"{host} is {', '.join(sorted(found))}")


def _tcp(url: str) -> Finding:
    if url.startswith("grpc+unix://"):
        return Finding("TCP", True, "a Unix socket, no port")
    started_s = time.perf_counter()
    try:
        with socket.create_connection(address(url), CONNECT_TIMEOUT_S):
            return Finding("TCP", True, f"connected in {1e3 * (time.perf_counter() - started_s):.1f} ms")
    except TimeoutError:
        return Finding("TCP", False, "no answer at all", "a firewall drops it, or the host is down: ask its operator")
    except OSError as error:
        advice = "start symbiosis-flight-server there (it listens on loopback unless given --host), or correct the port"
        return Finding("TCP", False, f"refused: {error}", advice)


def _agreed(conn: Connection, elapsed_s: float) -> Finding:
    manifest = conn.manifest
    secured = "with TLS" if conn.url.startswith("grpc+tls://") else "without TLS"
    versions = f"server {manifest.server_version}, this client {__version__}, protocol {manifest.protocol}"
    return Finding("connect", True, f"in {1e3 * elapsed_s:.0f} ms, {secured}; {versions}")


def _model(conn: Connection) -> Finding:
    manifest = conn.manifest
    return Finding(
        "model",
        True,
        f"{manifest.model} ({manifest.architecture}, {manifest.kept_as}), {len(manifest.modules)} modules, "
        f"fingerprint {manifest.fingerprint[:12]}",
    )


def _health(conn: Connection) -> Finding:
    health = conn.health()
    if health.status != "serving":
        return Finding(
            "health", False, f"the server is {health.status}", "wait for its restart, or use another replica"
        )
    return Finding(
        "health", True, f"serving for {health.uptime_s:,.0f} s; a product took {health.gemm_us / 1e3:.2f} ms"
    )


def _latency(conn: Connection) -> Finding:
    x = torch.zeros(1, _linear(conn).d_in, dtype=_dtype(conn))
    times_s = []
    for _ in range(PINGS):
        started_s = time.perf_counter()
        conn._caller.call("forward", [_linear(conn).name], [x])
        times_s.append(time.perf_counter() - started_s)
    median_ms, worst_ms = 1e3 * statistics.median(times_s), 1e3 * max(times_s)
    return Finding("latency", True, f"{median_ms:.2f} ms a call (median of {PINGS}; at worst {worst_ms:.2f} ms)")


def _bandwidth(conn: Connection) -> Finding:
    info, dtype = _linear(conn), _dtype(conn)
    limit_bytes = min(BANDWIDTH_BYTES, conn.manifest.max_message_bytes // 2)
    tokens = max(1, limit_bytes // (max(info.d_in, info.d_out) * dtype.itemsize))
    before = conn.stats()
    conn._caller.call("forward", [info.name], [torch.zeros(tokens, info.d_in, dtype=dtype)])
    spent = conn.stats() - before
    moved_bytes = spent.bytes_out + spent.bytes_in
    rate = moved_bytes / max(spent.network_s, 1e-6) / 1e6
    return Finding("bandwidth", True, f"{rate:,.0f} MB/s, both directions together ({moved_bytes / 1e6:.1f} MB)")


def _product(conn: Connection) -> Finding:
    """Columns of W against their published norms, and backward against forward: <x, g Wᵀ> = |g|² for g = x W."""
    info, dtype = _linear(conn), _dtype(conn)
    generator = torch.Generator().manual_seed(0)
    columns = min(4, info.d_in)
    y = conn._caller.call("forward", [info.name], [torch.eye(info.d_in, dtype=dtype)[:columns]]).double()
    expected = conn._caller.weight_norms(info.name)[0][:columns].double()
    off = ((y.norm(dim=1) - expected).abs() / expected.clamp_min(1e-30)).max().item()
    x = torch.randn(3, info.d_in, generator=generator).to(dtype)
    g = conn._caller.call("forward", [info.name], [x])
    backward = (x.double() * conn._caller.call("grad_input", [info.name], [g]).double()).sum()
    off = max(off, (backward / g.double().square().sum() - 1.0).abs().item())
    text = f"{info.name}: forward, backward and the published weights agree to {off:.1e}"
    if off <= TOLERANCES[dtype]:
        return Finding("product", True, text)
    return Finding("product", False, text, "do not train against this server; report it with this output")


CHECKS: dict[str, Callable[[Connection], Finding]] = {
    "model": _model,
    "health": _health,
    "latency": _latency,
    "bandwidth": _bandwidth,
    "product": _product,
}


def _linear(conn: Connection) -> ModuleInfo:
    linears = [info for info in conn.manifest.modules if info.kind in ("linear", "conv1d")]
    return min(linears, key=lambda info: (info.d_in * info.d_out, info.name))


def _dtype(conn: Connection) -> torch.dtype:
    return DTYPES[conn.manifest.dtype]
