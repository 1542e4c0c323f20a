"""Where a dashboard is shown: an output of the notebook that is replaced in place, and widgets made on request.

One rule: what is shown is an ordinary output, not a widget. It is saved with the notebook as it was last, and so can
be read where no kernel runs: reopened, on GitHub, through nbconvert. A widget's output holds only the id of a model
that lives in the kernel; reopened without it, JupyterLab shows "Error displaying widget: model not found" instead of
the text beside it (ipywidgets #1664, #3773; the same for bqplot, ipympl and anywidget). So a chart library for
widgets was not taken.
"""

from __future__ import annotations

import sys
import uuid
import weakref
from typing import Any

from symbiosis.errors import MissingExtraError

Bundle = dict[str, Any]  # MIME type -> content


class Surface:
    """Shows the same content in every place where it was displayed."""

    def __init__(self) -> None:
        self._display_id = f"symbiosis-{uuid.uuid4().hex}"
        self._displayed = False
        self._widgets: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def in_use(self) -> bool:
        return self._displayed or bool(self._widgets)

    def open(self, bundle: Bundle) -> None:
        """Display it in the cell that runs."""
        from IPython.display import display

        display(bundle, raw=True, display_id=self._display_id)
        self._displayed = has_kernel()  # a terminal can only print it again

    def replace(self, bundle: Bundle) -> None:
        """Show something else in all places."""
        if self._displayed:
            from IPython.display import update_display

            update_display(bundle, raw=True, display_id=self._display_id)
        for widget in self._widgets:
            widget.value = bundle["text/html"]

    def widget(self, bundle: Bundle) -> Any:
        """An `ipywidgets.HTML` with the same content.

        Raises:
            MissingExtraError: ipywidgets is not installed.
        """
        try:
            import ipywidgets
        except ImportError as error:
            raise MissingExtraError(
                "a widget needs ipywidgets, which is not installed; run: pip install 'symbiosis-flight[notebook]'. "
                "The dashboard itself does not: conn.dashboard()"
            ) from error
        made = ipywidgets.HTML(bundle["text/html"])
        self._widgets.add(made)
        return made


def shell() -> Any:
    """The running IPython shell, or None; does not load IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def has_kernel() -> bool:
    """Whether a front end listens that can replace an output."""
    return getattr(shell(), "kernel", None) is not None
