"""What one cell did on the server: `%%symbiosis`.

One rule: a report is numbers, taken once; showing it asks nobody.
"""

from __future__ import annotations

import contextlib
import html
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from symbiosis.integrations import memory
from symbiosis.notebook.charts import share_bar
from symbiosis.tables import html_table
from symbiosis.telemetry import Stats
from symbiosis.timeline import PARTS

if TYPE_CHECKING:
    from symbiosis.connection import Connection

CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # of what clear_refs understands; see proc(5)


@dataclass(frozen=True)
class CellReport:
    """Calls, tokens, bytes and time of one cell.

    Attributes:
        wall_s: from its first line to its last.
        stats: by connection; `local_s` of one is the cell's time outside its calls.
        peak_bytes: most resident memory of this process while it ran.
        start_bytes: resident memory before it.
    """

    wall_s: float
    stats: Mapping[str, Stats]
    peak_bytes: int
    start_bytes: int

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) pairs, formatted for people."""
        rows = [("cell", f"{self.wall_s:,.2f} s")]
        for name, stats in self.stats.items():
            prefix = f"{name}: " if len(self.stats) > 1 else ""
            rows += [(prefix + label, value) for label, value in _stats_rows(stats, self.wall_s)]
        growth = (self.peak_bytes - self.start_bytes) / 1e6
        rows.append(
            ("memory", f"{self.peak_bytes / 1e6:,.0f} MB at most in this process, {growth:+,.0f} MB by this cell")
        )
        return rows

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.rows()) + 2
        return "\n".join(f"{label:<{width}}{value}" for label, value in self.rows())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        bars = "".join(
            share_bar({part: getattr(stats, f"{part}_s") for part in PARTS}, html.escape(name))
            for name, stats in self.stats.items()
            if stats.calls
        )
        return f"<div>{bars}{html_table(self.rows())}</div>"


class CellWatch:
    """Takes the numbers before a cell, and makes the report after it."""

    def __init__(self, connections: Mapping[str, Connection]) -> None:
        self._before = {id(connection): connection.stats() for connection in connections.values()}
        self._start_bytes = memory.resident_bytes()
        with contextlib.suppress(OSError):  # where it cannot be reset, the peak is the process's
            CLEAR_REFS.write_text(RESET_PEAK)

    def report(self, connections: Mapping[str, Connection], wall_s: float) -> CellReport:
        distinct = {id(connection): name for name, connection in connections.items()}
        stats = {
            name: _within(connections[name].stats() - self._before.get(key, Stats()), wall_s)
            for key, name in distinct.items()
        }
        return CellReport(wall_s, stats, memory.peak_bytes(), self._start_bytes)


def _within(between: Stats, wall_s: float) -> Stats:
    """The same calls, with the cell's time as a whole: a Stats cannot know when nobody was computing."""
    in_calls_s = between.wall_s - between.local_s
    return replace(between, wall_s=wall_s, local_s=max(0.0, wall_s - in_calls_s))


def _stats_rows(stats: Stats, wall_s: float) -> list[tuple[str, str]]:
    if not stats.calls:
        return [("calls", "none: this cell asked the server nothing")]
    rate = stats.model_tokens / wall_s if wall_s else 0.0
    parts = [f"{part} {getattr(stats, f'{part}_s'):,.2f} s" for part in PARTS if part != "retry" or stats.retries]
    return [
        ("tokens", f"{stats.model_tokens:,}, {rate:,.0f} per second"),
        ("calls", f"{stats.calls:,}, {1e3 * (wall_s - stats.local_s) / stats.calls:,.1f} ms each"),
        ("bytes", f"{stats.bytes_out / 1e6:,.1f} MB sent, {stats.bytes_in / 1e6:,.1f} MB received"),
        ("time", ", ".join(parts)),
    ]
