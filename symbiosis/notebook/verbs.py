"""The verbs of `%symbiosis`: their arguments, their help, and what Tab offers after them.

One rule: a verb is declared once, here; the parser, the help and the completion follow from it.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NoReturn

from IPython.core.error import UsageError

NAME: Final = "symbiosis"


@dataclass(frozen=True)
class Verb:
    """One verb: its arguments as help shows them, its line of help, and the options that completion offers."""

    usage: str
    help: str
    options: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


_WHICH = ("--name",)
VERBS: Final[Mapping[str, Verb]] = MappingProxyType(
    {
        "serve": Verb(
            "MODEL [-- SERVER OPTIONS]",
            "start a server for this kernel: demo, a model id or a folder",
            ("--",),
            ("demo",),
        ),
        "stop": Verb("", "end that server; it also ends with the kernel"),
        "connect": Verb(
            "[URL] [--token-env NAME] [--name conn]",
            "connect to a server, without URL to this kernel's; the connection is the variable conn",
            ("--token-env", "--name"),
            ("grpc://", "grpc+tls://"),
        ),
        "status": Verb("", "the connections, and whether their servers answer"),
        "plan": Verb("[--name conn]", "what runs where in the model wrapped last", _WHICH),
        "stats": Verb("[--name conn]", "calls, tokens, bytes, and where the time went", _WHICH),
        "dashboard": Verb("[--name conn]", "the same, live", _WHICH),
        "disconnect": Verb("[--name conn]", "close a connection", _WHICH),
        "traceback": Verb("", "the whole traceback of the last failure of %symbiosis"),
        "help": Verb("", "this"),
    }
)
USAGE: Final = "\n".join(
    [
        "%symbiosis VERB ...",
        *(f"  {name + ' ' + verb.usage:<52}{verb.help}" for name, verb in VERBS.items()),
        "%%symbiosis [--name conn]",
        f"  {'first line of a cell':<52}run the cell; then its tokens, calls, bytes, time and memory",
    ]
)


def completions(line: str, names: Iterable[str]) -> list[str]:
    """What may follow a line that begins with one of the magics: verbs, options, values, connections.

    Args:
        line: up to the cursor.
        names: of the connections there are.
    """
    words = line.split()
    done = words if not line or line[-1].isspace() else words[:-1]
    if not done or done[0].lstrip("%") != NAME or done[0] == line:
        return []
    if done[-1] == "--name":
        return list(names)
    if done[0].startswith("%%"):
        return list(_WHICH)
    if len(done) == 1:
        return list(VERBS)
    verb = VERBS.get(done[1])
    return [*verb.values, *(option for option in verb.options if option not in done)] if verb else []


def parsers() -> dict[str, argparse.ArgumentParser]:
    """A parser for each verb, and one for the first line of a cell; their errors are IPython's UsageError."""
    made = {name: _Parser(prog=f"%{NAME} {name}", add_help=False) for name in VERBS}
    made["cell"] = _Parser(prog=f"%%{NAME}", add_help=False)
    made["serve"].add_argument("model", metavar="MODEL")
    made["connect"].add_argument("url", metavar="URL", nargs="?")
    made["connect"].add_argument("--token-env", metavar="NAME")
    made["connect"].add_argument("--name", default="conn")
    for name in ("plan", "stats", "dashboard", "disconnect", "cell"):
        made[name].add_argument("--name")
    return dict(made)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        verb = VERBS.get(self.prog.rpartition(" ")[2])
        usage = f"{self.prog} {verb.usage}" if verb else f"{self.prog} [--name conn]"
        raise UsageError(f"{self.prog}: {message}; usage: {usage}")


def split(line: str) -> list[str]:
    """The words of a line, as a shell would see them.

    Raises:
        UsageError: a quotation that does not end.
    """
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"%symbiosis: {error}: {line}") from None


def without_server_options(words: list[str]) -> list[str]:
    """What stands before `--`."""
    return words[: words.index("--")] if "--" in words else words
