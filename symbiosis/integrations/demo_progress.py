"""Progress of several clients in one place: bars on a terminal, plain lines elsewhere.

One rule: only this process writes to the terminal, so bars of clients that run at once cannot garble each other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Never, TextIO

from tqdm import tqdm

from symbiosis.integrations.demo_events import Progress

BAR_FORMAT = "  {desc} |{bar:30}| {n_fmt:>3}/{total_fmt} {elapsed}{postfix}"
LINE_EVERY_S = 15.0  # between two lines of one client in one phase


class Board:
    """Shows the latest Progress of each client.

    Args:
        names: who will report.
        stream: where to; a terminal gets bars.
    """

    def __init__(self, names: Sequence[str], stream: TextIO) -> None:
        self._stream = stream
        self._width = max(map(len, names))
        self._bars: dict[str, tqdm[Never]] = {}
        self._shown: dict[str, tuple[str, float]] = {}  # name -> (phase, when) of its last line
        if stream.isatty():
            self._bars = {name: self._bar(name, position) for position, name in enumerate(names)}

    def show(self, name: str, progress: Progress) -> None:
        """Bring one client's bar, or its line, up to date."""
        if bar := self._bars.get(name):
            bar.total = progress.total
            bar.n = progress.done
            bar.set_description_str(self._label(name, progress.phase), refresh=False)
            if progress.loss is not None:
                bar.set_postfix_str(f"loss {progress.loss:.3f}", refresh=False)
            bar.refresh()
        elif self._is_due(name, progress.phase):
            loss = "" if progress.loss is None else f"  loss {progress.loss:.3f}"
            line = f"  {self._label(name, progress.phase)} {progress.done:>3}/{progress.total}{loss}"
            print(line, file=self._stream, flush=True)

    def refresh(self) -> None:
        """Let the clocks of the bars go on."""
        for bar in self._bars.values():
            bar.refresh()

    def close(self) -> None:
        """Leave the bars as they stand; the next output starts below them."""
        for bar in self._bars.values():
            bar.close()

    def _bar(self, name: str, position: int) -> tqdm[Never]:
        label = self._label(name, "loading")
        return tqdm(desc=label, total=1, position=position, file=self._stream, bar_format=BAR_FORMAT, leave=True)

    def _label(self, name: str, phase: str) -> str:
        return f"{name:<{self._width}}  {phase:<14}"

    def _is_due(self, name: str, phase: str) -> bool:
        last_phase, last_s = self._shown.get(name, ("", 0.0))
        now_s = time.monotonic()
        if phase == last_phase and now_s - last_s < LINE_EVERY_S:
            return False
        self._shown[name] = (phase, now_s)
        return True
