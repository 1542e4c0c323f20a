"""The dashboard: what it shows, when it redraws and in which thread, and what is left of it afterwards."""

from __future__ import annotations

import asyncio
import copy
import gc
import re
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import pytest

import symbiosis
from symbiosis.connection import Connection
from symbiosis.errors import MissingExtraError
from symbiosis.flight.protocol import ServerStats
from symbiosis.notebook import dashboard as module
from symbiosis.notebook.dashboard import Dashboard
from symbiosis.notebook.panels import View, duration, to_html, to_text
from symbiosis.privacy.dp import PrivacySpent
from symbiosis.telemetry import CallEvent, Stats, StepEvent
from symbiosis.timeline import Timeline, Training
from tests.notebook.conftest import Notebook

CALL = CallEvent("forward", ("q",), 10, 1000, 2000, 0.0, 0.01, 0.001, 0.001, 0.005, 1)


@pytest.fixture
def conn(url: str) -> Iterator[Connection]:
    with symbiosis.connect(url) as connection:
        yield connection


class Clock:
    """time.perf_counter, under our control: each reading takes `tick_s`."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s, self.tick_s = 1000.0, tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module.time, "perf_counter", made)
    return made


def shown_numbers(html: str) -> dict[str, str]:
    return dict(re.findall(r'data-symbiosis="(\w+)"[^>]*>([^<]*)<', html))


def redraws(notebook: Notebook) -> int:
    return len([output for output in notebook.outputs if output.get("update")])


def displayed(notebook: Notebook, conn: Connection) -> Dashboard:
    notebook.shell.user_ns["conn"] = conn
    notebook.ok("conn.dashboard()")
    notebook.outputs.clear()
    return conn.dashboard()


# --- what is shown -------------------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_connection(notebook: Notebook, conn: Connection) -> None:
    displayed(notebook, conn)
    notebook.ok("model = conn.load_model()\nimport torch\nmodel(input_ids=torch.ones(2, 9, dtype=torch.long))")

    stats, numbers = conn.stats(), shown_numbers(notebook.outputs[-1]["data"]["text/html"])
    assert stats.calls > 0
    assert numbers["calls"] == f"{stats.calls:,}"
    assert numbers["tokens"] == f"{stats.model_tokens:,}" == "18"
    assert numbers["bytes"] == f"{stats.bytes_out / 1e6:,.1f}, {stats.bytes_in / 1e6:,.1f}"
    assert numbers["clients"] == "1"
    assert numbers["state"].startswith("idle, as of ")


def test_it_is_text_and_html_in_one_output_that_is_replaced(notebook: Notebook, conn: Connection) -> None:
    notebook.shell.user_ns["conn"] = conn
    notebook.ok("conn.dashboard()")

    first, last = notebook.outputs[0], notebook.outputs[-1]
    assert set(first["data"]) == {"text/plain", "text/html"}
    assert first["transient"]["display_id"] == last["transient"]["display_id"]
    assert last["update"]


def view(**changes: Any) -> View:
    timeline, training = Timeline(), Training()
    for n in range(3):
        timeline.add(float(n), Stats(calls=n, model_tokens=50 * n, wall_s=n, local_s=n / 2, compute_s=n / 2), 10**9)
    fields: dict[str, Any] = {
        "title": "m at u",
        "state": "running",
        "updated": "12:00:00",
        "stats": Stats(calls=2),
        "timeline": timeline,
        "training": training,
        "base_bytes": 5 * 10**8,
        "memory_bytes": 10**9,
        **changes,
    }
    return View(**fields)


def test_every_chart_says_in_words_what_it_shows() -> None:
    images = ElementTree.fromstring(to_html(view())).iter("img")

    alternatives = [image.get("alt") for image in images]
    assert "tokens per second over time, now 50, at most 50" in alternatives
    assert any("where the time goes: local 50%" in str(alternative) for alternative in alternatives)
    assert all(alternatives)


def test_names_from_the_server_cannot_write_html() -> None:
    shown = to_html(view(title="<script>alert(1)</script> & more"))

    assert "<script>" not in shown
    ElementTree.fromstring(shown)


def test_colours_are_the_page_s_own_but_in_charts() -> None:
    # Light or dark: text has no colour of ours, and boxes no background.
    assert set(re.findall(r"(?<![-\w])color:([^;\"]+)", to_html(view()))) <= set(
        {"#56B4E9", "#CC79A7", "#E69F00", "#D55E00", "#009E73", "#999999"}
    )
    assert "background" not in to_html(view())


def test_training_is_shown_once_a_step_was_tracked() -> None:
    assert "training" not in to_text(view())
    training = Training()
    for n in (1, 2, 3):
        training.add(StepEvent(n, 2.0 / n, 4.0 * n, 1e-3, 64, steps=20), Stats(wall_s=4.0 * n, compute_s=3.0 * n))

    text = to_text(view(training=training))
    assert "step 3 of 20   loss 0.6667   learning rate 1.00e-03   tokens 192   time left 1:08 min" in text
    assert "time per step" in text
    assert "a step, of late 4.00 s" in text


def test_privacy_is_shown_where_it_is_on(url: str, start_server: Any, tiny_llama: Any) -> None:
    from symbiosis.privacy import Masking

    with symbiosis.connect(url) as plain:
        assert 'aria-label="privacy"' not in to_html(plain.dashboard().view())
    with symbiosis.connect(url, privacy=Masking(dealer=start_server(tiny_llama()).url)) as masked:
        assert masked.privacy is not None
        shown = shown_numbers(to_html(masked.dashboard().view()))
        assert shown["privacy_0"] == masked.privacy.stats().rows()[0][1]


def test_epsilon_is_drawn_as_it_grows(conn: Connection) -> None:
    board = conn.dashboard()
    for steps in (1, 2):
        conn.track(2.0, spent=PrivacySpent(1.5 * steps, 8.0, 1e-5, steps, 0.7))

    html = to_html(board.view())
    assert shown_numbers(html)["epsilon"] == "3.000 of 8, delta 1e-05"
    assert 'aria-label="privacy"' in html
    assert "epsilon over steps, now 3.000 of 8" in html
    assert "epsilon" in str(conn.stats())


def test_the_share_is_ours_of_all_that_the_server_computed() -> None:
    def answer(requests: int, tokens: int) -> ServerStats:
        return ServerStats(
            uptime_s=1, requests=requests, batches=requests // 2, tokens=tokens, errors=0, queued=3, clients=2,
            compute_s=1, mean_batch=1.5, memory_bytes=10**9,
        )  # fmt: skip

    shown = to_text(
        view(server_before=(answer(10, 100), Stats(tokens=100)), server=(answer(50, 500), Stats(tokens=200)))
    )
    assert "clients 2   requests waiting 3   requests per batch 2.00   your share of its tokens 25%" in shown


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0 s"), (42, "42 s"), (185, "3:05 min"), (7800, "2:10 h")])
def test_durations_are_said_as_people_do(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_without_a_shell_it_is_text(conn: Connection) -> None:
    assert "throughput" in str(conn.dashboard())
    assert repr(conn.dashboard()) == f"<Dashboard of {conn.url} running>"


# --- when it is drawn ----------------------------------------------------------------------------------------------


def test_it_is_redrawn_at_most_four_times_a_second(notebook: Notebook, conn: Connection, clock: Clock) -> None:
    displayed(notebook, conn)
    for _ in range(1000):  # ten seconds
        clock.now_s += 0.01
        conn.bus.emit(CALL)

    assert 38 <= redraws(notebook) <= 40


def test_it_takes_less_than_a_hundredth_of_the_time_however_slow_a_redraw_is(
    notebook: Notebook, conn: Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(view: View) -> str:
        clock.now_s += 0.1
        return to_html(view)

    def slow_answer(timeout_s: float | None = None) -> ServerStats:
        clock.now_s += 0.05
        return answer

    answer = conn.server_stats()
    monkeypatch.setattr(module, "to_html", slow)
    monkeypatch.setattr(conn, "server_stats", slow_answer)
    dashboard = displayed(notebook, conn)
    began_s, before_s = clock.now_s, dashboard._spent_s
    for _ in range(20_000):
        clock.now_s += 0.01
        conn.bus.emit(CALL)

    assert redraws(notebook) >= 5
    # One redraw more than the pauses paid for may have been begun.
    assert dashboard._spent_s - before_s < 0.01 * (clock.now_s - began_s) + 0.15


def test_a_call_between_redraws_costs_next_to_nothing(notebook: Notebook, conn: Connection, clock: Clock) -> None:
    dashboard = displayed(notebook, conn)
    conn.bus.emit(CALL)
    handled = []
    sys.setprofile(lambda frame, kind, argument: handled.append(frame.f_code.co_name) if kind == "call" else None)
    try:
        dashboard._on_event(CALL)
    finally:
        sys.setprofile(None)

    assert handled == ["_on_event", "__call__"]  # a look at the clock


def test_no_other_thread_draws(notebook: Notebook, conn: Connection, clock: Clock) -> None:
    dashboard = displayed(notebook, conn)
    clock.now_s += 10
    worker = threading.Thread(target=conn.bus.emit, args=(CALL,))
    worker.start()
    worker.join()
    assert redraws(notebook) == 0

    async def kernel() -> int:
        dashboard._loop = asyncio.get_running_loop()
        for _ in range(5):
            await asyncio.to_thread(conn.bus.emit, CALL)
        return redraws(notebook)

    assert asyncio.run(kernel()) == 1  # by the loop, in this thread


def test_time_between_cells_is_no_step_time(notebook: Notebook, conn: Connection, clock: Clock) -> None:
    dashboard = displayed(notebook, conn)
    notebook.ok("conn.bus")
    clock.now_s += 3600
    notebook.ok("conn.bus")

    assert sum(interval.seconds for interval in dashboard._timeline.intervals()) < 1


def test_a_server_that_is_gone_is_said_and_not_waited_for(notebook: Notebook, conn: Connection, clock: Clock) -> None:
    from symbiosis.errors import ConnectError

    asked = []

    def gone(timeout_s: float | None = None) -> ServerStats:
        asked.append(timeout_s)
        raise ConnectError("gone")

    conn.server_stats = gone  # type: ignore[method-assign]
    dashboard = displayed(notebook, conn)
    for _ in range(100):
        clock.now_s += 0.1
        conn.bus.emit(CALL)

    assert asked == [module.SERVER_TIMEOUT_S]
    assert "no answer (CONNECT) since" in str(dashboard)


# --- what is left of it --------------------------------------------------------------------------------------------


def hooks(notebook: Notebook) -> int:
    return sum(len(found) for found in notebook.shell.events.callbacks.values())


def test_closing_the_connection_closes_it(notebook: Notebook, conn: Connection) -> None:
    before = hooks(notebook)
    dashboard = displayed(notebook, conn)
    assert hooks(notebook) == before + 2

    conn.close()

    assert dashboard.closed
    assert hooks(notebook) == before
    assert shown_numbers(notebook.outputs[-1]["data"]["text/html"])["state"].startswith("closed")
    shown = len(notebook.outputs)
    conn.bus.emit(CALL)
    assert len(notebook.outputs) == shown


def test_running_all_cells_twice_leaves_no_second_dashboard(notebook: Notebook, url: str) -> None:
    cells = [f"import symbiosis\nconn = symbiosis.connect('{url}')", "conn.dashboard()", "conn.health()"]
    before = hooks(notebook)
    for cell in cells:
        notebook.ok(cell)
    first = weakref.ref(notebook.shell.user_ns["conn"])
    for cell in cells:
        notebook.ok(cell)
    notebook.shell.displayhook.flush()  # Out holds results of cells
    gc.collect()
    notebook.ok("pass")

    assert first() is None
    assert hooks(notebook) == before + 2


def test_a_connection_has_one_until_it_is_closed(conn: Connection) -> None:
    first = conn.dashboard()
    assert conn.dashboard() is first

    first.close()
    first.close()

    assert conn.dashboard() is not first


def test_copies_are_the_thing_itself(conn: Connection) -> None:
    for thing in (conn, conn.dashboard()):
        assert copy.copy(thing) is thing
        assert copy.deepcopy(thing) is thing


# --- widgets -------------------------------------------------------------------------------------------------------


def test_a_widget_follows_too(conn: Connection, clock: Clock) -> None:
    widget = conn.dashboard().widget()
    before = shown_numbers(widget.value)
    clock.now_s += 1
    conn.bus.emit(CALL)
    conn._recorder.record(CALL)
    clock.now_s += 1
    conn.bus.emit(CALL)

    assert int(shown_numbers(widget.value)["calls"]) > int(before["calls"])


def test_only_widgets_need_ipywidgets(notebook: Notebook, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    dashboard = displayed(notebook, conn)

    with pytest.raises(MissingExtraError, match="symbiosis-flight\\[notebook\\]"):
        dashboard.widget()


# --- steps ---------------------------------------------------------------------------------------------------------


def test_track_counts_steps_and_takes_tensors(conn: Connection) -> None:
    import torch

    events: list[Any] = []
    conn.bus.subscribe(events.append)
    for _ in range(3):
        conn.track(torch.tensor(0.5, requires_grad=True), steps=2)
    conn.track(1.5, step=7)

    assert [event.step for event in events] == [1, 2, 1, 7]  # after the last step, another training begins
    assert [event.loss for event in events] == [0.5, 0.5, 0.5, 1.5]
