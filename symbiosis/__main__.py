"""`python -m symbiosis VERB`: the commands that need both halves, or neither.

The rule: a verb is one entry in `VERBS` and its work is done elsewhere; the module that does it is imported
only when the verb runs, so that `--help` and a mistyped verb answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from symbiosis._version import __version__
from symbiosis.errors import SymbiosisError

PROG: Final = "python -m symbiosis"
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Verb:
    """One command: its line in the help, and the function that takes the words after it."""

    help: str
    run: Callable[[Sequence[str]], int]


def _demo(argv: Sequence[str]) -> int:
    from symbiosis.integrations import demo

    return demo.main(argv)


def _doctor(argv: Sequence[str]) -> int:
    from symbiosis import doctor

    return doctor.main(argv)


def _top(argv: Sequence[str]) -> int:
    from symbiosis.integrations import top

    return top.main(argv)


def _bench(argv: Sequence[str]) -> int:
    from symbiosis.integrations import bench

    return bench.main(argv)


def _audit(argv: Sequence[str]) -> int:
    from symbiosis.integrations import audit

    return audit.main(argv)


VERBS: Final[Mapping[str, Verb]] = MappingProxyType(
    {
        "demo": Verb("two clients fine-tune different adapters on one shared model", _demo),
        "doctor": Verb("examine a server, step by step: doctor URL", _doctor),
        "top": Verb("a server's counters, live, in the terminal", _top),
        "bench": Verb("latency, bandwidth and tokens a second of a server, from here", _bench),
        "audit": Verb("attack the traffic of each privacy setting, and say what was found", _audit),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb that the command line names.

    Args:
        argv: the words after the program's name; those of this process when None.

    Returns:
        The exit status: 0 done, 1 the verb failed, 2 the command line is wrong, 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not words:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    if not words[0].startswith("-") and words[0] not in VERBS:
        print(f"{PROG}: {_unknown(words[0])}", file=sys.stderr)
        return EXIT_USAGE
    args = parser.parse_args(words[:1])
    return _run(VERBS[args.verb], words[1:])


def _run(verb: Verb, words: Sequence[str]) -> int:
    try:
        return verb.run(words)
    except SymbiosisError as error:
        print(f"{PROG}: {error.code}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _unknown(word: str) -> str:
    nearest = difflib.get_close_matches(word, VERBS, n=1, cutoff=0.5)
    hint = f"did you mean '{nearest[0]}'? " if nearest else ""
    return f"unknown verb '{word}'; {hint}verbs: {', '.join(VERBS)} (--help says what each does)"


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, VERBS))
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Fine-tune and run many adapters against one shared frozen base model.",
        epilog="verbs:\n" + "\n".join(f"  {name:<{width}}  {verb.help}" for name, verb in VERBS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"symbiosis {__version__}")
    parser.add_argument("verb", metavar="VERB", help=f"one of: {', '.join(VERBS)}; its own options follow it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
