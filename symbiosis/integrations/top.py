"""`python -m symbiosis top [URL]`: a server's counters in a terminal, live, as `top` shows a machine's.

One rule: it asks one question per redraw and computes nothing on the server; a server that does not answer stays on the
screen with its last numbers, until it answers again or Ctrl-C.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from symbiosis.connection import Connection, connect
from symbiosis.errors import MissingExtraError, SymbiosisError
from symbiosis.flight.protocol import ServerStats

MIN_INTERVAL_S = 0.25
TIMEOUT_S = 5.0
Answer = tuple[float, ServerStats]  # when it came, by the monotonic clock


def main(argv: Sequence[str] | None = None) -> int:
    """Show the server until Ctrl-C; with --once, print its numbers and end.

    Raises:
        MissingExtraError: rich is not installed.
        SymbiosisError: the server cannot be reached at the start.
    """
    args = _parse(argv)
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise MissingExtraError(
            "top draws with the package rich, which is not installed; run: pip install 'symbiosis-flight[notebook]'"
        ) from error
    with connect(args.url) as connection:
        view = TopView(connection)
        view.ask()
        if args.once:
            Console().print(view.table())
            return 0
        with Live(view.table(), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(args.interval)
                view.ask()
                live.update(view.table(), refresh=True)


class TopView:
    """The last two answers of a server, and the table of them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.last: Answer | None = None
        self.before: Answer | None = None
        self.problem = ""

    def ask(self) -> None:
        """Take another answer, or the reason why there is none.

        Raises:
            SymbiosisError: the server has not answered once.
        """
        try:
            answer = self._connection.server_stats(timeout_s=TIMEOUT_S)
        except SymbiosisError as error:
            if self.last is None:
                raise
            self.problem = f"no answer ({error.code}) for {time.monotonic() - self.last[0]:.0f} s"
            return
        if self.last and answer.uptime_s < self.last[1].uptime_s:
            self.last = None  # it was started again: its counters began anew
        self.before, self.last, self.problem = self.last, (time.monotonic(), answer), ""

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) pairs."""
        assert self.last is not None
        now = self.last[1]
        rates = self._rates()
        return [
            ("up", f"{now.uptime_s / 3600:,.1f} h"),
            ("clients", f"{now.clients:,}"),
            ("waiting", f"{now.queued:,}"),
            ("requests", f"{now.requests:,}" + rates["requests"]),
            ("tokens in calls", f"{now.tokens:,}" + rates["tokens"]),
            ("requests per batch", f"{now.mean_batch:.2f}" + rates["mean_batch"]),
            ("computing", f"{now.compute_s:,.0f} s" + rates["compute"]),
            ("errors", f"{now.errors:,}"),
            ("memory, at most", f"{now.memory_bytes / 1e6:,.0f} MB"),
        ]

    def table(self) -> Any:
        """A rich table."""
        from rich.table import Table
        from rich.text import Text

        manifest = self._connection.manifest
        title = f"{manifest.model} at {self._connection.url}"
        table = Table(title=Text(title), caption=Text(self.problem or "Ctrl-C ends"), show_header=False)
        table.add_column(style="dim")
        table.add_column(justify="right")
        for label, value in self.rows():
            table.add_row(label, value)
        return table

    def _rates(self) -> dict[str, str]:
        """What happened between the last two answers, in words; empty where there is only one."""
        if self.before is None or self.last is None:
            return dict.fromkeys(("requests", "tokens", "mean_batch", "compute"), "")
        (then_s, then), (now_s, now) = self.before, self.last
        seconds = max(1e-9, now_s - then_s)
        batches = now.batches - then.batches
        requests = now.requests - then.requests
        return {
            "requests": f", {requests / seconds:,.0f}/s",
            "tokens": f", {(now.tokens - then.tokens) / seconds:,.0f}/s",
            "mean_batch": f", now {requests / batches:.2f}" if batches else "",
            "compute": f", now {min(1.0, (now.compute_s - then.compute_s) / seconds):.0%}",
        }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m symbiosis top", description="A server's counters, live.")
    parser.add_argument("url", nargs="?", metavar="URL", help="the server; not given: SYMBIOSIS_CLIENT_URL")
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="SECONDS", help="between questions (%(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="print the numbers once and end")
    return parser.parse_args(argv)


def _interval(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not seconds >= MIN_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"expected seconds from {MIN_INTERVAL_S}, got {word!r}")
    return seconds
