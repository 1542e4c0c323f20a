"""A small HTTP port for operators: /metrics, /livez and /readyz.

    livez    200 unless one batch has been computed for longer than `watchdog_s`: then a restart is the cure
    readyz   200 once a real product was computed in time; 503 while draining, or if it was not
    metrics  for Prometheus

One rule: a probe answers in time, whatever the device does. The metrics name tenants and the port has neither TLS nor
tokens, so it listens on this machine only unless told otherwise.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

logger = logging.getLogger(__name__)
READY_TIMEOUT_S = 5.0
KEPT_S = 1.0  # a probe asked again within this time gets the last answer: probing must not load the device
CLIENT_TIMEOUT_S = 10.0

Answer = tuple[int, str, bytes]


class Probes:
    """The HTTP server, in threads of its own.

    Args:
        host, port: where to listen; port 0 takes any free one.
        alive: whether the executor works.
        ready: computes something real and says whether the server takes calls; may raise or hang.
        metrics: the text for Prometheus.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self, host: str, port: int, alive: Callable[[], bool], ready: Callable[[], bool], metrics: Callable[[], bytes]
    ) -> None:
        self._alive = alive
        self._ready = ready
        self._metrics = metrics
        self._checked: tuple[float, bool] = (float("-inf"), False)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-ready")
        self._http = ThreadingHTTPServer((host, port), self._handler())
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, name="symbiosis-probes", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def answer(self, path: str) -> Answer:
        """Status, content type and body for a path."""
        if path == "/livez":
            return _verdict(self._alive(), "alive")
        if path == "/readyz":
            return _verdict(self._is_ready(), "ready")
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4; charset=utf-8", self._metrics()
        return 404, "text/plain", b"known are /metrics, /livez and /readyz\n"

    def _is_ready(self) -> bool:
        with self._lock:  # one at a time: a device that hangs must not collect threads
            checked_s, ready = self._checked
            if time.monotonic() - checked_s > KEPT_S:
                ready = self._alive() and self._in_time()
                self._checked = (time.monotonic(), ready)
            return ready

    def _in_time(self) -> bool:
        try:
            return self._pool.submit(self._ready).result(READY_TIMEOUT_S)
        except Exception:
            logger.warning("not ready", exc_info=True)
            return False

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        probes = self

        class Handler(BaseHTTPRequestHandler):
            timeout = CLIENT_TIMEOUT_S
            server_version = "symbiosis"
            sys_version = ""

            def do_GET(self) -> None:
                try:
                    status, kind, body = probes.answer(self.path.partition("?")[0])
                except Exception:
                    logger.exception("%s failed", self.path)
                    status, kind, body = 500, "text/plain", b"the server's log has the details\n"
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                logger.debug(format, *args)

        return Handler


def _verdict(good: bool, word: str) -> Answer:
    body = json.dumps({"status": word if good else f"not {word}"}).encode() + b"\n"
    return (200 if good else 503), "application/json", body
