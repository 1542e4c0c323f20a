"""One line of output that counts seconds while something is awaited.

One rule: in a notebook it is one output, replaced in place; where nothing can be replaced, the first and the last text.
"""

from __future__ import annotations

import time
import uuid
from types import TracebackType

from symbiosis.notebook.surface import has_kernel

EVERY_S = 1.0


class Line:
    """Shows `text` at once, counts while `tick` is called, and ends with what `finish` is given."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._id = f"symbiosis-{uuid.uuid4().hex}"
        self._started_s = self._shown_s = time.monotonic()

    def __enter__(self) -> Line:
        if has_kernel():
            self._show(self._text, update=False)
        else:
            print(self._text)
        return self

    def tick(self) -> None:
        now_s = time.monotonic()
        if has_kernel() and now_s - self._shown_s >= EVERY_S:
            self._shown_s = now_s
            self._show(f"{self._text}: {now_s - self._started_s:.0f} s")

    def finish(self, text: str) -> None:
        if has_kernel():
            self._show(text)
        else:
            print(text)

    def _show(self, text: str, update: bool = True) -> None:
        from IPython.display import display

        display({"text/plain": text}, raw=True, display_id=self._id, update=update)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.finish(f"{self._text}: not ready after {time.monotonic() - self._started_s:.0f} s")
