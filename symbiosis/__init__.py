"""symbiosis: many fine-tuning and inference clients share one frozen base model.

The rule: importing this package is free. `errors` and the version are here at once; every other public
name is looked up on first use (PEP 562), so that `import symbiosis` loads neither torch nor pyarrow and
a shell, a test collector or a notebook extension can import it in milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from symbiosis import errors
from symbiosis._version import __version__
from symbiosis.errors import SymbiosisError

if TYPE_CHECKING:
    from symbiosis.connection import Connection, connect
    from symbiosis.flight.server import serve

__all__ = ["Connection", "SymbiosisError", "__version__", "connect", "errors", "serve"]

_HOME: Final = {
    "Connection": "symbiosis.connection",
    "connect": "symbiosis.connection",
    "serve": "symbiosis.flight.server",
    "load_ipython_extension": "symbiosis.notebook.magics",  # what %load_ext looks for, and %unload_ext
    "unload_ipython_extension": "symbiosis.notebook.magics",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next look-up no longer comes here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
