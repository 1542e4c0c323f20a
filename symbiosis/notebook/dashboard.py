"""A connection's numbers, live in a notebook: `conn.dashboard()`.

One rule: it has no thread and no timer. It redraws when the connection tells of a call, in the thread that runs the
cell, or when a cell ends; what other threads do is drawn by the kernel's event loop. And it pays for itself: after a
redraw that took d seconds, the next waits for 200 d at least, and the server is asked as sparingly; so both together
stay below 1% of the time, however slow the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from symbiosis.errors import SymbiosisError
from symbiosis.flight.protocol import ServerStats
from symbiosis.integrations import memory
from symbiosis.notebook.panels import View, to_html, to_text
from symbiosis.notebook.surface import Bundle, Surface, shell
from symbiosis.telemetry import Event, Stats, StepEvent
from symbiosis.timeline import Timeline, Training

if TYPE_CHECKING:
    from symbiosis.connection import Connection

MIN_INTERVAL_S = 0.25
PAUSE_PER_COST = 200.0  # seconds of pause for each second spent
SERVER_INTERVAL_S = 2.0
SERVER_TIMEOUT_S = 1.0
SERVER_RETRY_S = 15.0  # after it did not answer


class Dashboard:
    """Shows throughput, time, memory, the server and the training of one connection.

    It is displayed where it is a cell's last value, or by `display(...)`; `print` gives it as text.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._surface = Surface()
        self._timeline, self._training = Timeline(), Training()
        self._poll = _ServerPoll(connection)
        self._spent_s, self._next_s = 0.0, 0.0
        self._state, self._pending = "running", False
        self._loop = _running_loop()
        self._unsubscribe = connection.bus.subscribe(self._on_event)
        self._unhook = _hook_cells(self)
        self._drawn: tuple[str, int] | None = None  # the state and the number of calls that are shown
        self._sample(time.perf_counter())

    @property
    def closed(self) -> bool:
        return self._state == "closed"

    def close(self) -> None:
        """Stop following; what is shown stays as it is."""
        if self.closed:
            return
        self._state = "closed"
        self._unsubscribe()
        self._unhook()
        self._draw()

    def view(self) -> View:
        """The numbers as of now; asks nobody."""
        connection = self._connection
        return View(
            title=f"{_short(connection.manifest.model)} at {connection.url}",
            state=self._state,
            updated=time.strftime("%H:%M:%S"),
            stats=connection.stats(),
            timeline=self._timeline,
            training=self._training,
            base_bytes=connection.manifest.base_bytes,
            memory_bytes=memory.resident_bytes(),
            device_bytes=_device_bytes(),
            server=self._poll.last,
            server_before=self._poll.before,
            server_silent=self._poll.silent,
            privacy=connection.privacy.stats().rows() if connection.privacy is not None else (),
        )

    def widget(self) -> Any:
        """The same as an `ipywidgets.HTML`, for layouts of your own and for Voila.

        Unlike the dashboard's own output it goes on after a reload of the page, but is not saved with the notebook.

        Raises:
            MissingExtraError: ipywidgets is not installed.
        """
        return self._surface.widget(self._bundle())

    # --- when to draw -------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self._training.add(event, self._connection.stats())
        if time.perf_counter() < self._next_s:
            return
        if threading.current_thread() is threading.main_thread():
            self._draw()
        elif self._loop is not None and not self._pending:
            self._pending = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the kernel ends
                self._loop.call_soon_threadsafe(self._draw_in_loop)

    def _draw_in_loop(self) -> None:
        self._pending = False
        if not self.closed and time.perf_counter() >= self._next_s:
            self._draw()

    def _on_cell(self, begins: bool) -> None:
        self._state = "running" if begins else "idle"
        if not begins:
            if self._drawn != ("idle", self._connection.stats().calls):
                self._poll.hurry()
                self._draw()
        elif self._timeline.snapshots[-1].stats.calls == self._connection.stats().calls:
            self._timeline.resume(time.perf_counter())  # between the cells nothing happened

    def _draw(self) -> None:
        started_s = time.perf_counter()
        asked_s = 0.0 if self.closed else self._poll.ask(started_s)
        self._sample(started_s)
        if self._surface.in_use:
            self._surface.replace(self._bundle())
        self._drawn = self._state, self._timeline.snapshots[-1].stats.calls
        took_s = time.perf_counter() - started_s
        self._spent_s += took_s
        self._next_s = started_s + max(MIN_INTERVAL_S, PAUSE_PER_COST * (took_s - asked_s))

    def _sample(self, now_s: float) -> None:
        self._timeline.add(now_s, self._connection.stats(), memory.resident_bytes())

    # --- how it is shown ----------------------------------------------------------------------------

    def _bundle(self) -> Bundle:
        view = self.view()
        return {"text/plain": to_text(view), "text/html": to_html(view)}

    def _ipython_display_(self) -> None:
        self._surface.open(self._bundle())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> Bundle:
        return self._bundle()

    def __repr__(self) -> str:
        return f"<Dashboard of {self._connection.url} {self._state}>"

    def __str__(self) -> str:
        return to_text(self.view())

    def __copy__(self) -> Dashboard:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Dashboard:
        return self


class _ServerPoll:
    """Asks for the server's counters, seldom, and never for long."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._next_s = 0.0
        self.last: tuple[ServerStats, Stats] | None = None
        self.before: tuple[ServerStats, Stats] | None = None
        self.silent = ""

    def hurry(self) -> None:
        """A cell has ended: its last state is worth a question, unless the last one was in vain."""
        if not self.silent:
            self._next_s = 0.0

    def ask(self, now_s: float) -> float:
        """Ask if it is time; returns the seconds that took."""
        if now_s < self._next_s or self._connection.closed:
            return 0.0
        try:
            answer = self._connection.server_stats(timeout_s=SERVER_TIMEOUT_S)
        except SymbiosisError as error:
            self.silent = f"no answer ({error.code}) since {time.strftime('%H:%M:%S')}"
            self._next_s = now_s + SERVER_RETRY_S
        else:
            self.before, self.last, self.silent = self.last, (answer, self._connection.stats()), ""
            self._next_s = now_s + SERVER_INTERVAL_S
        took_s = time.perf_counter() - now_s
        self._next_s = max(self._next_s, now_s + PAUSE_PER_COST * took_s)
        return took_s


def _hook_cells(dashboard: Dashboard) -> Callable[[], None]:
    """Tell a dashboard when cells begin and end, as long as anybody holds it; the result stops that."""
    running = shell()
    if running is None:
        return lambda: None
    held = weakref.ref(dashboard)

    def begins(info: object) -> None:
        if (alive := held()) is not None:
            alive._on_cell(True)

    def ends(result: object) -> None:
        if (alive := held()) is not None:
            alive._on_cell(False)
        else:
            unhook()

    def unhook() -> None:
        for name, hook in (("pre_run_cell", begins), ("post_run_cell", ends)):
            with contextlib.suppress(ValueError):
                running.events.unregister(name, hook)

    running.events.register("pre_run_cell", begins)
    running.events.register("post_run_cell", ends)
    return unhook


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """The kernel's event loop, which runs the cell; in a script there is none."""
    try:
        return asyncio.get_running_loop() if shell() is not None else None
    except RuntimeError:
        return None


def _short(model: str) -> str:
    """A model that was loaded from a folder is known by the folder's name."""
    return model.rstrip("/").rpartition("/")[2] if model.startswith("/") else model


def _device_bytes() -> int | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_allocated())
