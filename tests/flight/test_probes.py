"""The operators' port of a real server: metrics, livez, readyz."""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import symbiosis
from symbiosis.errors import ConfigError, InvalidInputError
from symbiosis.flight import metrics, probes
from symbiosis.flight.json_log import JsonFormatter
from symbiosis.flight.metrics import Metrics, Snapshot
from symbiosis.flight.server import Server

Q = "model.layers.0.self_attn.q_proj"


def get(server: Server, path: str) -> tuple[int, bytes]:
    assert server.metrics_port is not None
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}{path}", timeout=15) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def samples(text: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(text.decode())
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture
def server(tiny_llama: Any, start_server: Callable[..., Server]) -> Server:
    return start_server(tiny_llama(), metrics_port=0)


def test_metrics_count_what_was_done(server: Server) -> None:
    with symbiosis.connect(server.url) as conn:
        for _ in range(3):
            conn._caller.call("forward", [Q], [torch.ones(5, 32)])
        with pytest.raises(InvalidInputError):
            conn._caller.call("forward", [Q], [torch.ones(1, 7)])
        found = samples(get(server, "/metrics")[1])

    assert found["symbiosis_requests_total"] == 3
    assert found["symbiosis_tokens_total"] == 15
    assert found["symbiosis_batch_requests_count"] == found["symbiosis_batches_total"]
    assert found["symbiosis_batch_tokens_sum"] == 15
    assert found["symbiosis_queue_seconds_count"] == 3
    assert found["symbiosis_errors_total[INVALID_INPUT]"] == 1
    assert found["symbiosis_clients"] == 1
    assert (
        found["symbiosis_queued_requests"] == found["symbiosis_queued_bytes"] == found["symbiosis_queued_tokens"] == 0
    )
    assert found["symbiosis_memory_bytes"] > 1e6
    assert found["symbiosis_tenant_tokens_total[]"] == 15
    assert found["symbiosis_tenant_bytes_in_total[]"] >= 3 * 5 * 32 * 4


def test_ready_means_that_a_product_was_computed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert get(server, "/readyz") == (200, b'{"status": "ready"}\n')

    monkeypatch.setattr(probes, "KEPT_S", 0.0)
    monkeypatch.setattr(server.base, "run", lambda *_: 1 / 0)
    assert get(server, "/readyz") == (503, b'{"status": "not ready"}\n')
    assert get(server, "/livez")[0] == 200  # a restart would not help


def test_a_device_that_hangs_is_not_ready_in_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "KEPT_S", 0.0)
    monkeypatch.setattr(probes, "READY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(server.base, "run", lambda *_: time.sleep(1.0))
    started_s = time.monotonic()

    assert [get(server, "/readyz")[0] for _ in range(2)] == [503, 503]
    assert time.monotonic() - started_s < 3.0


def test_a_draining_server_is_alive_and_not_ready(server: Server) -> None:
    server._draining = True
    assert (get(server, "/readyz")[0], get(server, "/livez")[0]) == (503, 200)
    assert samples(get(server, "/metrics")[1])["symbiosis_draining"] == 1
    server._draining = False


def test_a_server_that_hangs_is_not_alive(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(server._executor), "busy_since_s", property(lambda _: time.perf_counter() - 1000.0))

    assert get(server, "/livez") == (503, b'{"status": "not alive"}\n')
    assert samples(get(server, "/metrics")[1])["symbiosis_stuck"] == 1


def test_other_paths_are_not_found(server: Server) -> None:
    assert get(server, "/")[0] == get(server, "/metrics/../etc/passwd")[0] == 404


def test_a_taken_port_is_a_config_error(tiny_llama: Any, start_server: Callable[..., Server], server: Server) -> None:
    with pytest.raises(ConfigError, match="--metrics-port"):
        start_server(tiny_llama(), metrics_port=server.metrics_port)


def test_without_the_option_nothing_listens(tiny_llama: Any, start_server: Callable[..., Server]) -> None:
    assert start_server(tiny_llama()).metrics_port is None


def test_tenants_are_bounded_and_the_rest_is_summed_up() -> None:
    tenants = {f"t{i}": {"tokens": float(i)} for i in range(metrics.MAX_TENANTS + 10)}
    found = samples(Metrics(lambda: Snapshot({}, {}, {}, tenants)).text())

    by_tenant = {name: value for name, value in found.items() if "tenant_tokens" in name}
    assert len(by_tenant) == metrics.MAX_TENANTS + 1
    assert by_tenant[f"symbiosis_tenant_tokens_total[{metrics.OTHERS}]"] == sum(range(10))
    assert sum(by_tenant.values()) == sum(range(metrics.MAX_TENANTS + 10))


def test_log_lines_are_json_whatever_is_logged() -> None:
    try:
        raise ValueError("of\ntwo lines")
    except ValueError:
        import sys

        record = logging.LogRecord("symbiosis.x", logging.ERROR, "", 0, 'a "quote" %s', ("ü",), sys.exc_info())
    record.client, record.call = "notebook-7", 12

    line = JsonFormatter().format(record)

    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["level"], fields["message"], fields["client"], fields["call"]) == (
        "error", 'a "quote" ü', "notebook-7", 12,
    )  # fmt: skip
    assert "of\ntwo lines" in fields["traceback"]
