"""The thread that looks after a server: cuts off dead clients, and says where it hangs if the executor does.

One rule: it only looks and reports. It never touches the device, so that it still runs when that hangs.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time

from symbiosis.flight.executor import Executor
from symbiosis.flight.streams import Streams

logger = logging.getLogger(__name__)
EVERY_S = 1.0


class Caretaker:
    """Looks at the streams and at the executor once a second.

    Args:
        streams: whose overdue ones are cut off.
        executor: watched.
        watchdog_s: a batch that takes longer is reported, once, with the stacks of all threads; 0 = never.
    """

    def __init__(self, streams: Streams, executor: Executor, watchdog_s: float) -> None:
        self._streams = streams
        self._executor = executor
        self.watchdog_s = watchdog_s
        self._reported_s: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="symbiosis-caretaker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    @property
    def stuck(self) -> bool:
        """Whether one batch has been computed for longer than the watchdog allows."""
        since_s = self._executor.busy_since_s
        return bool(self.watchdog_s) and since_s is not None and time.perf_counter() - since_s > self.watchdog_s

    def look(self) -> None:
        """What the thread does each time."""
        self._streams.cut()
        since_s = self._executor.busy_since_s
        if self.stuck and since_s != self._reported_s:
            self._reported_s = since_s
            logger.error("a batch has been computed for more than %.0f s; the stacks follow", self.watchdog_s)
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)

    def _loop(self) -> None:
        while not self._closed.wait(EVERY_S):
            try:
                self.look()
            except Exception:
                logger.exception("the caretaker failed, and goes on")
