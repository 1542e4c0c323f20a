"""`%symbiosis VERB` and `%%symbiosis`, after `%load_ext symbiosis`.

One rule: loading registers the two names and does nothing else: no output, no network, no torch. A verb is one entry
in `VERBS`; a failure of ours is one paragraph, and its traceback is there when asked for: `%symbiosis traceback`.
"""

from __future__ import annotations

import argparse
import time
import traceback
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.display import display

from symbiosis.errors import ConfigError, SymbiosisError
from symbiosis.notebook.cell import CellWatch
from symbiosis.notebook.line import Line
from symbiosis.notebook.session import Session
from symbiosis.notebook.verbs import NAME, USAGE, VERBS, completions, parsers, split, without_server_options
from symbiosis.settings import did_you_mean
from symbiosis.tables import html_table

if TYPE_CHECKING:
    from symbiosis.connection import Connection

Words = argparse.Namespace


@magics_class
class SymbiosisMagics(Magics):
    """The two magics of one kernel."""

    def __init__(self, shell: Any, session: Session | None = None) -> None:
        super().__init__(shell)
        self.session = session or Session(shell.user_ns)

    @line_cell_magic(NAME)  # type: ignore[arg-type]  # IPython annotates its decorators with Never
    def symbiosis(self, line: str, cell: str | None = None) -> None:
        """Share one frozen base model: serve, connect, and see where the time goes."""
        try:
            if cell is None:
                self._run(line)
            else:
                self._run_cell(line, cell)
        except SymbiosisError as error:
            self._show_briefly(error)
            raise

    def _run(self, line: str) -> None:
        words = split(line)
        verb = words.pop(0) if words else "help"
        if verb not in VERBS:
            raise UsageError(f"%symbiosis {verb}: no such verb; {did_you_mean(verb, VERBS)}  (%symbiosis help)")
        args = parsers()[verb].parse_args(without_server_options(words))
        args.server_options = tuple(words[words.index("--") + 1 :]) if "--" in words else ()
        getattr(self, f"_{verb}")(args)

    # --- verbs --------------------------------------------------------------------------------------

    def _serve(self, args: Words) -> None:
        started_s = time.monotonic()
        line = Line(f"starting a server for {args.model}; the first time a model is prepared, which takes longer")
        with line:
            server = self.session.serve(args.model, args.server_options, line.tick)
            where = f"serving {server.model} at {server.url} (process {server.process.pid}, ends with this kernel)"
            line.finish(f"{where}, ready after {time.monotonic() - started_s:.0f} s. Next: %symbiosis connect")

    def _stop(self, args: Words) -> None:
        print("server ended" if self.session.stop() else "this kernel has no server")

    def _connect(self, args: Words) -> None:
        connection = self.session.connect(args.url, args.name, args.token_env)
        manifest = connection.manifest
        print(
            f"{args.name}: {manifest.model} ({manifest.architecture}, {manifest.dtype}) at {connection.url}; "
            f"{manifest.base_bytes / 1e6:,.0f} MB of weights stay there. Next: model = {args.name}.load_model()"
        )

    def _status(self, args: Words) -> None:
        rows = [(name, c.manifest.model, c.url, _health(c)) for name, c in self.session.connections().items()]
        server = self.session.server
        if server:
            rows.append(("(server)", server.model, server.url, "runs" if server.runs else "ended"))
        if not rows:
            print("not connected, and no server of this kernel. Next: %symbiosis serve demo, or %symbiosis connect URL")
            return
        head = ("name", "model", "server", "state")
        widths = [max(len(row[column]) for row in (head, *rows)) + 2 for column in range(len(head))]
        text = "\n".join(
            "".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)
        )
        display({"text/plain": text, "text/html": html_table(rows, head)}, raw=True)

    def _plan(self, args: Words) -> None:
        connection = self.session.connection(args.name)
        if connection.plan is None:
            raise ConfigError("no model is wrapped yet; run model = conn.load_model(), or conn.wrap(model)")
        _display(connection.plan)

    def _stats(self, args: Words) -> None:
        _display(self.session.connection(args.name).stats())

    def _dashboard(self, args: Words) -> None:
        display(self.session.connection(args.name).dashboard())

    def _disconnect(self, args: Words) -> None:
        connection = self.session.connection(args.name)
        connection.close()
        print(f"closed the connection to {connection.url}; models that use it need a new one: %symbiosis connect")

    def _traceback(self, args: Words) -> None:
        error = self.session.last_error
        print("".join(traceback.format_exception(error)) if error else "no failure of %symbiosis so far")

    def _help(self, args: Words) -> None:
        print(USAGE)

    # --- cells --------------------------------------------------------------------------------------

    def _run_cell(self, line: str, cell: str) -> None:
        args = parsers()["cell"].parse_args(split(line))
        watch, started_s = CellWatch(self._chosen(args.name)), time.perf_counter()
        assert self.shell is not None
        result = self.shell.run_cell(cell)
        report = watch.report(self._chosen(args.name), time.perf_counter() - started_s)
        display({"text/plain": str(report), "text/html": report._repr_html_()}, raw=True)
        error = result.error_before_exec or result.error_in_exec
        if error is not None:  # it was shown; it must still end "Run all"
            error._render_traceback_ = lambda: [f"{type(error).__name__} in the cell above"]
            raise error

    def _chosen(self, name: str | None) -> dict[str, Connection]:
        found = self.session.connections()
        return found if name is None or name not in found else {name: found[name]}

    def _show_briefly(self, error: SymbiosisError) -> None:
        self.session.last_error = error
        lines = [f"{error.code}: {error}", "(%symbiosis traceback shows where it was raised)"]
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]  # IPython asks for it


def load_ipython_extension(shell: Any) -> None:
    """Register the magics; what an earlier load started is taken over."""
    earlier = shell.magics_manager.registry.get(SymbiosisMagics.__name__)
    magics = SymbiosisMagics(shell, getattr(earlier, "session", None))
    shell.register_magics(magics)
    _remove_completion(shell)
    shell.Completer.custom_matchers.append(_matcher(magics.session))


def unload_ipython_extension(shell: Any) -> None:
    """Take the names back; the server and the connections are the user's, and stay."""
    _remove_completion(shell)
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop(NAME, None)


def _matcher(session: Session) -> Any:
    @context_matcher(identifier=NAME)  # type: ignore[untyped-decorator]  # IPython's own has no annotations
    def match(context: CompletionContext) -> dict[str, Any]:
        found = completions(context.text_until_cursor, session.connections())
        fitting = [SimpleCompletion(word, type="magic") for word in found if word.startswith(context.token)]
        return {"completions": fitting, "suppress": bool(fitting)}  # Python's own words do not belong there

    return match


def _remove_completion(shell: Any) -> None:
    matchers = shell.Completer.custom_matchers
    matchers[:] = [matcher for matcher in matchers if getattr(matcher, "matcher_identifier", "") != NAME]


def _health(connection: Connection) -> str:
    if connection.closed:
        return "closed"
    try:
        return connection.health().status
    except SymbiosisError as error:
        return f"no answer: {error}"


def _display(shown: Any) -> None:
    """As text and as HTML, without `Out[n]`: a verb is a statement."""
    display({"text/plain": str(shown), "text/html": shown._repr_html_()}, raw=True)


# `%symbiosis?` shows the docstring of the method, so the verbs are written into it.
SymbiosisMagics.symbiosis.__doc__ = f"Share one frozen base model.\n\n{USAGE}\n"  # type: ignore[assignment]
