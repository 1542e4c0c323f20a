"""Prometheus metrics of one server.

One rule: what is read when Prometheus asks costs calls nothing; only histograms are fed as batches end. A label has
a bounded number of values: tenants beyond MAX_TENANTS are summed up as `_other`, and names that clients choose for
themselves are no labels at all.

Needs the package prometheus-client, which the extra `server` brings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

MAX_TENANTS = 50
OTHERS = "_other"
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
Family = GaugeMetricFamily | CounterMetricFamily


@dataclass(frozen=True)
class Snapshot:
    """What a server can tell at any moment; counters are since its start."""

    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    errors: Mapping[str, int] = field(default_factory=dict)  # code -> replies
    tenants: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # tenant -> counter -> value


HELP = {
    "queued_requests": "requests that wait",
    "queued_tokens": "tokens of requests that wait",
    "queued_bytes": "bytes of requests that wait",
    "clients": "clients with a stream open",
    "streams": "streams open",
    "memory_bytes": "resident memory of the process",
    "device_memory_bytes": "memory allocated on the accelerator",
    "draining": "1 while the server takes no new calls",
    "stuck": "1 while one batch takes longer than watchdog_s",
    "uptime_seconds": "seconds since start",
    "requests": "requests computed",
    "batches": "batches computed",
    "tokens": "tokens computed",
    "compute_seconds": "seconds spent in products",
    "connections_cut": "connections closed since their client was idle or did not read",
    "tenant_requests": "requests of a tenant",
    "tenant_tokens": "tokens of a tenant",
    "tenant_bytes_in": "bytes received from a tenant",
    "tenant_bytes_out": "bytes sent to a tenant",
    "tenant_refused": "requests of a tenant that its token, quota or budget refused",
}


class Metrics(Collector):
    """A registry of its own, so that several servers fit in one process.

    Args:
        read: gives what is asked for at each scrape.
    """

    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self._read = read
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._batch_requests = Histogram(
            "symbiosis_batch_requests",
            "requests computed as one",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )
        self._batch_tokens = Histogram(
            "symbiosis_batch_tokens",
            "tokens computed as one",
            buckets=tuple(4**i for i in range(9)),
            registry=self.registry,
        )
        self._queue_s = Histogram(
            "symbiosis_queue_seconds", "from a request's arrival to its batch", buckets=SECONDS, registry=self.registry
        )
        self._compute_s = Histogram(
            "symbiosis_batch_compute_seconds", "to compute a batch", buckets=SECONDS, registry=self.registry
        )

    def batch(self, requests: int, tokens: int, compute_s: float, queue_s: Iterable[float]) -> None:
        """A batch was computed; `queue_s` are the waits of its requests."""
        self._batch_requests.observe(requests)
        self._batch_tokens.observe(tokens)
        self._compute_s.observe(compute_s)
        for seconds in queue_s:
            self._queue_s.observe(seconds)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)

    def describe(self) -> list[Family]:
        return []  # read() may not work yet when the registry asks for names

    def collect(self) -> Iterable[Family]:
        snapshot = self._read()
        for name, value in snapshot.gauges.items():
            yield GaugeMetricFamily(f"symbiosis_{name}", HELP[name], value=value)
        for name, value in snapshot.counters.items():
            yield CounterMetricFamily(f"symbiosis_{name}", HELP[name], value=value)
        errors = CounterMetricFamily("symbiosis_errors", "error replies by code (docs/errors.md)", labels=["code"])
        for code, count in snapshot.errors.items():
            errors.add_metric([code], count)
        yield errors
        yield from _by_tenant(snapshot.tenants)


def _by_tenant(tenants: Mapping[str, Mapping[str, float]]) -> Iterable[CounterMetricFamily]:
    largest = sorted(tenants, key=lambda tenant: -tenants[tenant].get("tokens", 0.0))
    names = dict.fromkeys(name for counters in tenants.values() for name in counters)
    for name in names:
        family = CounterMetricFamily(f"symbiosis_tenant_{name}", HELP[f"tenant_{name}"], labels=["tenant"])
        for tenant in largest[:MAX_TENANTS]:
            family.add_metric([tenant], tenants[tenant].get(name, 0.0))
        rest = sum(tenants[tenant].get(name, 0.0) for tenant in largest[MAX_TENANTS:])
        if len(largest) > MAX_TENANTS:
            family.add_metric([OTHERS], rest)
        yield family
