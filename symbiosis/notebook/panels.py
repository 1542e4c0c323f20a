"""The panels of a dashboard: numbers with their names, a chart where it says more, as HTML and as plain text.

One rule: a panel is made of a View, which holds numbers and no connection; so drawing asks nobody and cannot fail on
I/O.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from symbiosis.flight.protocol import ServerStats
from symbiosis.notebook.charts import area_chart, legend, line_chart
from symbiosis.telemetry import Stats
from symbiosis.timeline import PARTS, Interval, Timeline, Training

RECENT_S = 5.0  # what "now" means in a rate


@dataclass(frozen=True)
class View:
    """All that a dashboard shows, at one moment.

    Attributes:
        title: which model, where.
        state: running, idle or closed.
        updated: the time of day.
        stats: the connection's sums.
        base_bytes: weights that the server holds instead of this process.
        device_bytes: allocated on this process's accelerator, where there is one.
        server: its last answer, and the connection's sums when that came; `server_before` is the one before.
        server_silent: why there was no answer, the last time it was asked.
        privacy: (label, value) of the masks, where they are on.
    """

    title: str
    state: str
    updated: str
    stats: Stats
    timeline: Timeline
    training: Training
    base_bytes: int
    memory_bytes: int
    device_bytes: int | None = None
    server: tuple[ServerStats, Stats] | None = None
    server_before: tuple[ServerStats, Stats] | None = None
    server_silent: str = ""
    privacy: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Panel:
    """One box: `numbers` are (key, label, value); `chart` is HTML."""

    title: str
    numbers: Sequence[tuple[str, str, str]]
    chart: str = ""


def panels(view: View) -> list[Panel]:
    """In the order in which they are shown; training only once a step was tracked, privacy only where it is on."""
    found = [_throughput(view), _time(view), _memory(view), _server(view)]
    if view.privacy or view.stats.epsilon:
        found.append(_privacy(view))
    return [_training(view), *found] if view.training.last else found


def to_text(view: View) -> str:
    """The whole dashboard as lines of text."""
    lines = [f"symbiosis  {view.title}  {_state(view)}"]
    for panel in panels(view):
        numbers = "   ".join(f"{label} {value}" for _, label, value in panel.numbers)
        lines.append(f"{panel.title:<15}{numbers}")
    return "\n".join(lines)


def to_html(view: View) -> str:
    """The whole dashboard: boxes side by side where there is room, below each other where there is not."""
    boxes = "".join(_box(panel) for panel in panels(view))
    grid = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,250px),1fr));gap:8px;margin:6px 0"
    return (
        '<div role="group" aria-label="symbiosis dashboard" style="max-width:1100px;line-height:1.45">'
        f"<div><b>symbiosis</b> &#160;{html.escape(view.title)} &#160;"
        f'<span data-symbiosis="state" style="opacity:0.75">{html.escape(_state(view))}</span></div>'
        f'<div style="{grid}">{boxes}</div></div>'
    )


def _box(panel: Panel) -> str:
    digits = "font-variant-numeric:tabular-nums;white-space:nowrap"
    row = "display:flex;justify-content:space-between;gap:8px"
    cells = "".join(
        f'<div style="{row}"><span style="opacity:0.75">{html.escape(label)}</span> '
        f'<span data-symbiosis="{key}" style="{digits}">{html.escape(value)}</span></div>'
        for key, label, value in panel.numbers
    )
    border = "border:1px solid rgba(128,128,128,0.45);border-radius:4px;padding:6px 10px;min-width:0"
    return (
        f'<div role="group" aria-label="{panel.title}" style="{border}"><b>{panel.title}</b>{panel.chart}{cells}</div>'
    )


def _state(view: View) -> str:
    return f"{view.state}, as of {view.updated}"


def _throughput(view: View) -> Panel:
    # A step's tokens are counted when its forward pass is sent: less than two steps would show the pulse, not the rate.
    window_s = max(RECENT_S, 2 * (view.training.step_s() or 0.0))
    now, stats = view.timeline.recent(window_s), view.stats
    windows = view.timeline.windows(window_s)
    # The first ones are short, and a burst in a short time would dwarf all that follows.
    full = [window for window in windows if window.seconds >= window_s] or windows
    rates = [(i.ended_s, i.rate("model_tokens")) for i in full]
    top = max((rate for _, rate in rates), default=0.0)
    words = f"tokens per second over time, now {now.rate('model_tokens'):,.0f}, at most {top:,.0f}"
    numbers = [
        ("tokens_per_s", "tokens/s", f"{now.rate('model_tokens'):,.0f}"),
        ("calls_per_s", "calls/s", f"{now.rate('calls'):,.0f}"),
        ("bytes_per_s", "MB/s out, in", f"{now.rate('bytes_out') / 1e6:,.1f}, {now.rate('bytes_in') / 1e6:,.1f}"),
        ("tokens", "tokens", f"{stats.model_tokens:,}"),
        ("calls", "calls", f"{stats.calls:,}"),
        ("bytes", "MB out, in", f"{stats.bytes_out / 1e6:,.1f}, {stats.bytes_in / 1e6:,.1f}"),
    ]
    return Panel("throughput", numbers, line_chart([rates], words))


def _time(view: View) -> Panel:
    steps = view.training.intervals()
    tracked = len(steps) > 1
    intervals = steps if tracked else view.timeline.intervals()
    recent = _sum(intervals[-5:]) if tracked else view.timeline.recent(RECENT_S)
    parts = dict(zip(PARTS, recent.parts(), strict=True))
    total = sum(parts.values())
    shares = {name: seconds / total if total else 0.0 for name, seconds in parts.items()}
    columns = [i.parts() if tracked else _divided(i) for i in intervals]
    layers = {name: [column[n] for column in columns] for n, name in enumerate(PARTS)}
    words = "where the time goes: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    chart = area_chart([i.ended_s for i in intervals], layers, words) + legend(shares)
    if tracked:
        per_step = recent.seconds / len(intervals[-5:])
        return Panel("time per step", [("step_s", "a step, of late", f"{per_step:,.2f} s")], chart)
    return Panel("time", [("batch", "requests per batch", f"{view.stats.mean_batch:.2f}")], chart)


def _memory(view: View) -> Panel:
    points = [(s.clock_s, s.memory_bytes / 1e6) for s in view.timeline.snapshots]
    words = f"memory of this process over time, now {view.memory_bytes / 1e6:,.0f} MB"
    numbers = [("memory", "this process", f"{view.memory_bytes / 1e6:,.0f} MB")]
    if view.device_bytes is not None:
        numbers.append(("device", "this device", f"{view.device_bytes / 1e6:,.0f} MB"))
    numbers.append(("base", "base, not held here", f"{view.base_bytes / 1e6:,.0f} MB"))
    return Panel("memory", numbers, line_chart([points], words))


def _server(view: View) -> Panel:
    if view.server is None:
        return Panel("server", [("server", "state", view.server_silent or "not asked yet")])
    server, _ = view.server
    numbers = [
        ("clients", "clients", f"{server.clients:,}"),
        ("queue", "requests waiting", f"{server.queued:,}"),
        ("mean_batch", "requests per batch", f"{_mean_batch(view):.2f}"),
        ("share", "your share of its tokens", _share(view)),
        ("server_memory", "its memory, at most", f"{server.memory_bytes / 1e6:,.0f} MB"),
    ]
    if view.server_silent:
        numbers.insert(0, ("server", "state", view.server_silent))
    return Panel("server", numbers)


def _mean_batch(view: View) -> float:
    """Of late, where two answers tell; else since the server's start."""
    assert view.server is not None
    now = view.server[0]
    before = view.server_before[0] if view.server_before else None
    if before is None or now.batches <= before.batches:
        return now.mean_batch
    return (now.requests - before.requests) / (now.batches - before.batches)


def _share(view: View) -> str:
    if view.server is None or view.server_before is None:
        return "-"
    (now, mine), (before, mine_before) = view.server, view.server_before
    total = now.tokens - before.tokens
    return f"{min(1.0, (mine.tokens - mine_before.tokens) / total):.0%}" if total > 0 else "-"


def _training(view: View) -> Panel:
    training = view.training
    last = training.last
    assert last is not None
    losses = [(float(event.step), event.loss) for event, _ in training.steps]
    words = f"loss over steps, first {losses[0][1]:.3f}, last {last.loss:.3f}"
    step = f"{last.step:,}" + (f" of {last.steps:,}" if last.steps else "")
    numbers = [("step", "step", step), ("loss", "loss", f"{last.loss:.4f}")]
    if last.learning_rate is not None:
        numbers.append(("learning_rate", "learning rate", f"{last.learning_rate:.2e}"))
    if training.tokens:
        numbers.append(("trained_tokens", "tokens", f"{training.tokens:,}"))
    remaining_s = training.remaining_s()
    if remaining_s is not None:
        numbers.append(("remaining", "time left", duration(remaining_s)))
    return Panel("training", numbers, line_chart([losses], words, floor=None))


def _privacy(view: View) -> Panel:
    masks = [(f"privacy_{n}", *row) for n, row in enumerate(view.privacy)]
    spent = view.stats.epsilon
    if spent is None:
        return Panel("privacy", masks)
    points = [(float(event.step), event.epsilon.spent) for event, _ in view.training.steps if event.epsilon]
    words = f"epsilon over steps, now {spent.spent:.3f} of {spent.target:g}"
    return Panel("privacy", [("epsilon", "epsilon", str(spent)), *masks], line_chart([points], words))


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3:05 min, 2:10 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02} h"


def _sum(intervals: Sequence[Interval]) -> Interval:
    stats = Stats()
    for interval in intervals:
        stats = stats + interval.stats
    return Interval(intervals[-1].ended_s, sum(i.seconds for i in intervals), stats)


def _divided(interval: Interval) -> tuple[float, ...]:
    total = sum(interval.parts()) or 1.0
    return tuple(part / total for part in interval.parts())
