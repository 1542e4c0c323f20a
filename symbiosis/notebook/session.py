"""What the magics keep for one kernel: the server process that it started. Connections are the user's own variables.

One rule: a connection is found where the user put it, in the namespace, whether a magic or a line of Python made it.
So there is no second list of them that could disagree.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symbiosis.errors import AuthError, ConfigError
from symbiosis.integrations.processes import Child, Children, wait_for_file

if TYPE_CHECKING:
    from symbiosis.connection import Connection

HOST = "127.0.0.1"
START_TIMEOUT_S = 1800.0  # a large model may have to be downloaded first
Tick = Callable[[], None]


class KernelServer:
    """A server in a process of its own, for this kernel; it ends with the kernel, however that ends."""

    def __init__(self, model: str, words: tuple[str, ...]) -> None:
        self.model = model
        self.url = ""
        self._folder = tempfile.TemporaryDirectory(prefix="symbiosis-server-")
        # Threads that wait must sleep: server and notebook compute on the same cores.
        self._children = Children(Path(self._folder.name), {"OMP_WAIT_POLICY": "PASSIVE", **os.environ})
        port_file = Path(self._folder.name, "port")
        self.process: Child = self._children.start(
            "server",
            "symbiosis.flight.cli",
            *("--model", model, "--host", HOST, "--port", "0", "--port-file", str(port_file)),
            *words,
        )
        self._port_file = port_file
        atexit.register(self.stop)

    def wait(self, tick: Tick) -> None:
        """Return when it answers.

        Raises:
            SymbiosisError: it ended instead, for the reason in its log.
        """
        self.url = f"grpc://{HOST}:{wait_for_file(self._port_file, self.process, START_TIMEOUT_S, tick).strip()}"

    @property
    def runs(self) -> bool:
        return self.process.code is None

    def stop(self) -> None:
        """End it; again is harmless."""
        atexit.unregister(self.stop)
        self._children.end()
        self._folder.cleanup()


class Session:
    """One kernel's server and connections.

    Args:
        namespace: the user's variables.
    """

    def __init__(self, namespace: MutableMapping[str, Any]) -> None:
        self.namespace = namespace
        self.server: KernelServer | None = None
        self.last_error: BaseException | None = None

    def serve(self, model: str, words: tuple[str, ...], tick: Tick) -> KernelServer:
        """Start a server, or return the one that serves this model already.

        Raises:
            ConfigError: this kernel serves another model.
            SymbiosisError: the server does not start.
        """
        if self.server and self.server.runs:
            if self.server.model == model:
                return self.server
            raise ConfigError(
                f"this kernel serves {self.server.model} already, at {self.server.url}; end that first: %symbiosis stop"
            )
        if "torch" not in sys.modules:  # it is read when torch loads OpenMP; see KernelServer
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        server = KernelServer(model, words)
        with _stopped_unless_ready(server):
            server.wait(tick)
        self.server = server
        return server

    def stop(self) -> bool:
        """End this kernel's server; False if there is none."""
        server, self.server = self.server, None
        if server:
            server.stop()
        return server is not None

    def connect(self, url: str | None, name: str, token_env: str | None) -> Connection:
        """Connect and bind the connection to a variable; one that is open to the same server and model is kept.

        Raises:
            ConfigError: no name for a variable, or it holds something else; a bad URL or option.
            AuthError: the variable of the token is not set.
            ConnectError: nothing answers.
        """
        import symbiosis

        self._check_free(name)
        url = url or (self.server.url if self.server and self.server.runs else None)
        fresh = symbiosis.connect(url, token=_token(token_env))
        held = self.connections().get(name)
        if held is not None and not held.closed and _same_server(held, fresh):
            fresh.close()
            return held
        self.namespace[name] = fresh
        return fresh

    def connections(self) -> dict[str, Connection]:
        """The user's connections, by variable name; results of cells (`_`, `_3`) are not theirs."""
        return {name: value for name, value in list(self.namespace.items()) if name[0] != "_" and _is_connection(value)}

    def connection(self, name: str | None) -> Connection:
        """The named connection, or the only one.

        Raises:
            ConfigError: there is none, or it is not clear which.
        """
        found = self.connections()
        if name in found:
            return found[name]
        if name is not None:
            raise ConfigError(f"no connection is called {name!r}; {_those(found)}")
        if "conn" in found:
            return found["conn"]
        if len({id(connection) for connection in found.values()}) != 1:
            raise ConfigError(_those(found) + ("; say which: --name NAME" if found else ""))
        return next(iter(found.values()))

    def _check_free(self, name: str) -> None:
        if not name.isidentifier() or name.startswith("_"):
            raise ConfigError(f"--name must be the name of a variable, got {name!r}; for example --name conn")
        if name in self.namespace and name not in self.connections():
            kind = type(self.namespace[name]).__name__
            raise ConfigError(f"{name} is a variable of yours already, of type {kind}; choose another: --name NAME")


@contextmanager
def _stopped_unless_ready(server: KernelServer) -> Iterator[None]:
    try:
        yield
    except BaseException:  # Ctrl-C while it loads, too
        server.stop()
        raise


def _token(variable: str | None) -> str | None:
    """The token in an environment variable or, in Colab, in the secret of that name."""
    if variable is None:
        return None
    token = os.environ.get(variable) or _colab_secret(variable)
    if not token:
        raise AuthError(
            f"the environment variable {variable} is not set in this kernel, so there is no token; "
            f"set it where Jupyter is started, or here: os.environ[{variable!r}] = getpass.getpass()"
        )
    return token


def _colab_secret(name: str) -> str | None:
    colab = sys.modules.get("google.colab")  # Colab's kernels import it before any cell runs
    if colab is None:
        return None
    try:
        secret: str | None = colab.userdata.get(name)
    except Exception as error:  # its classes exist only there: no such secret, or no access for this notebook
        raise AuthError(
            f"Colab does not give the secret {name} ({type(error).__name__}); add it under the key symbol in the "
            "side bar, and switch on its access for this notebook"
        ) from None
    return secret


def _is_connection(value: object) -> bool:
    """By name: after a reload of the package, the user's connections are of the class as it was before."""
    kind = type(value)
    return (kind.__module__, kind.__qualname__) == ("symbiosis.connection", "Connection")


def _same_server(held: Connection, fresh: Connection) -> bool:
    same = (
        held.manifest.fingerprint == fresh.manifest.fingerprint and held.manifest.quantized == fresh.manifest.quantized
    )
    return held.url == fresh.url and same


def _those(found: Mapping[str, object]) -> str:
    if not found:
        return "not connected; run: %symbiosis connect URL"
    return "connections are: " + ", ".join(found)
