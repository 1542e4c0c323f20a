"""`symbiosis-flight-server`: the command line of the server.

One rule: nothing here may import torch before the options are known, so `--help` answers at once and
OMP_WAIT_POLICY is set in time. The flags are generated from ServerOptions; none is written here twice.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, get_args

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from symbiosis._version import __version__
from symbiosis.config import ServerOptions
from symbiosis.errors import ConfigError, MissingExtraError, SymbiosisError
from symbiosis.flight import admin
from symbiosis.flight.json_log import JsonFormatter
from symbiosis.settings import Setting, choices, did_you_mean, to_toml

PROG = "symbiosis-flight-server"
OWN_FLAGS = ("config", "print_config", "help", "version")
UNITS = {"_bytes": "BYTES", "_tokens": "TOKENS", "_us": "MICROSECONDS", "_s": "SECONDS"}
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it is told to stop; the process's exit code.

    Exit codes: 0 after a clean drain, 2 for a ConfigError, 1 for another failure, 130 for Ctrl-C at loading.
    """
    # Before torch loads OpenMP: threads that spin while they wait starve the clients on the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in admin.VERBS:
        return _administer(words)
    try:
        arguments = parse_arguments(words)
        settings = _collect(arguments)
        options = ServerOptions.from_settings(settings)
    except ConfigError as error:
        return _report(error)
    if arguments.print_config:
        print(to_toml(options, settings))
        return 0
    return _serve(options, lambda: load_server_options(words))


def _administer(words: Sequence[str]) -> int:
    try:
        return admin.main(words)
    except SymbiosisError as error:
        return _report(error)


def load_server_options(argv: Sequence[str]) -> ServerOptions:
    """The options of a server process: command line over environment over file over default.

    Raises:
        ConfigError: an unknown name, or a bad value, in any of the sources.
    """
    return ServerOptions.from_settings(_collect(parse_arguments(argv)))


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Split a command line into the flags that it gives; their values are checked by ServerOptions.

    Raises:
        ConfigError: an unknown flag, a flag without its value, or the model given twice.
    """
    arguments, extra = build_parser().parse_known_args(argv)
    if extra:
        raise ConfigError(_explain_extra(extra))
    if arguments.MODEL is not None and "model" in arguments:
        raise ConfigError("model on the command line: given both as MODEL and as --model; leave one out")
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """The parser, with one flag per field of ServerOptions."""
    parser = _Parser(
        prog=PROG,
        description="Serve one frozen base model to any number of clients over Arrow Flight.",
        epilog="Precedence: command line, then environment, then the --config file, then default. "
        f"Other commands: {PROG} token create|list|revoke|quota|weight, {PROG} certificate NAME (each with --help).",
        allow_abbrev=False,
    )
    parser.add_argument("MODEL", nargs="?", help="the same as --model")
    parser.add_argument("--config", metavar="PATH", help="TOML file of options [env: SYMBIOSIS_CONFIG]")
    parser.add_argument("--print-config", action="store_true", help="print the options in force as TOML and exit")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    for name, field in ServerOptions.model_fields.items():
        _add_flag(parser, name, field)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}; see {PROG} --help")


def _add_flag(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    # SUPPRESS: a flag that is not given leaves no trace, so that the layers below it can speak.
    text = _help(name, field)
    if field.annotation is bool:
        action = argparse.BooleanOptionalAction
        parser.add_argument(_flag(name), action=action, default=argparse.SUPPRESS, help=text)
    else:
        parser.add_argument(_flag(name), default=argparse.SUPPRESS, metavar=_metavar(name, field), help=text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(name: str, field: FieldInfo) -> str:
    text = f"{field.description} [{_default(name, field)}; env: {ServerOptions.env_name(name)}]"
    return text.replace("%", "%%")  # argparse formats help texts


def _default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "default: not set"
    if name.endswith("_bytes"):
        return f"default: {ByteSize(field.default).human_readable()}"
    return f"default: {str(field.default).lower() if field.annotation is bool else field.default}"


def _metavar(name: str, field: FieldInfo) -> str:
    if choices(field):
        return "{" + ",".join(choices(field)) + "}"
    if Path in get_args(field.annotation):
        return "PATH"
    unit = next((word for suffix, word in UNITS.items() if name.endswith(suffix)), None)
    return unit or ("N" if field.annotation is int else name.upper())


def _explain_extra(extra: list[str]) -> str:
    # Only names are repeated: what stands behind an unknown flag may be a secret.
    flags = [word.split("=", 1)[0] for word in extra if word.startswith("-")]
    if not flags:
        return f"command line: {extra[0]!r} is one argument too many; MODEL is the only one without a flag"
    known = [name.replace("_", "-") for name in (*ServerOptions.model_fields, *OWN_FLAGS)]
    hints = [did_you_mean(flag.lstrip("-"), known, lambda near: "--" + near) for flag in flags]
    return "\n".join(
        f"{flag} on the command line: unknown flag; {hint}" for flag, hint in zip(flags, hints, strict=True)
    )


def _collect(arguments: argparse.Namespace) -> dict[str, Setting]:
    given = {
        name: Setting(value, f"{_flag(name)} on the command line")
        for name, value in vars(arguments).items()
        if name in ServerOptions.model_fields
    }
    if arguments.MODEL is not None:
        given["model"] = Setting(arguments.MODEL, "MODEL on the command line")
    return ServerOptions.collect(given, arguments.config)


def _serve(options: ServerOptions, again: Callable[[], ServerOptions]) -> int:
    _configure_logging(options.log_level, options.log_format)
    try:
        return _run_server(options, again)
    except SymbiosisError as error:
        if options.log_level == "debug":
            traceback.print_exc()
        return _report(error)
    except KeyboardInterrupt:  # while loading; a server that runs handles the signal itself
        return EXIT_INTERRUPTED


def _run_server(options: ServerOptions, again: Callable[[], ServerOptions]) -> int:
    try:
        from symbiosis.flight.server import run
    except ModuleNotFoundError as error:
        if (error.name or "symbiosis").startswith("symbiosis"):
            raise
        raise MissingExtraError(
            f"the server needs the package {error.name}, which is not installed; "
            "run: pip install 'symbiosis-flight[server]'"
        ) from error
    return run(options, again)


def _configure_logging(level: str, log_format: str) -> None:
    # Only our own loggers follow the option: debug output of every library would bury ours.
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=form)
    logging.getLogger("symbiosis").setLevel(level.upper())
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())


def _report(error: SymbiosisError) -> int:
    for line in str(error).splitlines():
        print(f"error [{error.code}]: {line}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
