"""What an operator does beside running a server: `symbiosis-flight-server token ...`, `... certificate ...`.

One rule: a new token is printed once, alone, on standard output, and nothing else ever prints one. The files are those
that the server with the same options reads, so the commands take `--tokens`, `--cache-dir` and the same environment.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from symbiosis.config import ServerOptions
from symbiosis.errors import ConfigError, MissingExtraError
from symbiosis.flight.quota import Quota
from symbiosis.flight.tokens import TokenFile, check_tenant, check_weight, when
from symbiosis.settings import Setting

VERBS: Final = ("token", "certificate")
DAY_S = 86_400


def main(argv: Sequence[str]) -> int:
    """Run the verb that the first word names.

    Raises:
        ConfigError: a command line that is wrong, or a file that cannot be used.
    """
    arguments = _parser().parse_args(argv)
    given = {name: getattr(arguments, name) for name in ("tokens", "cache_dir", "config") if hasattr(arguments, name)}
    explicit = {
        name: Setting(value, f"--{name.replace('_', '-')}") for name, value in given.items() if name != "config"
    }
    settings = ServerOptions.collect(explicit, given.get("config"))
    options = ServerOptions.from_settings({"model": Setting("none", "unused"), **settings})
    run = {"token": _token, "certificate": _certificate}[arguments.verb]
    return run(arguments, options)


def _token(arguments: argparse.Namespace, options: ServerOptions) -> int:
    path = options.tokens_path
    if path is None:
        raise ConfigError("tokens is off, so there is no file to change; name one with --tokens FILE")
    file = TokenFile(path)
    actions = {"create": _create, "list": _list, "revoke": _revoke, "quota": _quota, "weight": _weight}
    actions[arguments.action](arguments, file)
    return 0


def _create(arguments: argparse.Namespace, file: TokenFile) -> None:
    days = arguments.expires_days
    if days is not None and not days > 0:
        raise ConfigError(f"--expires-days: got {days}, expected more than 0; leave it out for a token that lasts")
    if arguments.weight is not None:
        check_weight(arguments.tenant, arguments.weight)  # before there is a token that nobody has seen
    first = not file.path.exists()
    token = file.create(arguments.tenant, None if days is None else time.time() + days * DAY_S)
    if arguments.weight is not None:
        file.set_weight(arguments.tenant, arguments.weight)
    print(token)
    _say(f"made a token of tenant {arguments.tenant} in {file.path}; it is shown this once. Clients take it as")
    _say("SYMBIOSIS_CLIENT_TOKEN, token_file= or token=getpass.getpass().")
    if first:
        _say("This is the first one: a server that already runs has to be started again to ask for tokens.")


def _list(arguments: argparse.Namespace, file: TokenFile) -> None:
    content = file.read()
    rows = [("ID", "TENANT", "CREATED", "EXPIRES", "WEIGHT", "QUOTA")]
    for entry in content.tokens:
        expired = entry.expires_s is not None and entry.expires_s <= time.time()
        expires = when(entry.expires_s) + (" (expired)" if expired else "")
        weight, quota = content.weights.get(entry.tenant, 1.0), content.quotas.get(entry.tenant)
        rows.append((entry.id, entry.tenant, when(entry.created_s), expires, f"{weight:g}", _shown(quota)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _revoke(arguments: argparse.Namespace, file: TokenFile) -> None:
    for entry in file.revoke(arguments.which):
        print(f"revoked {entry.id} of tenant {entry.tenant}; servers refuse it within a second or two")


def _quota(arguments: argparse.Namespace, file: TokenFile) -> None:
    check_tenant(arguments.tenant)
    given = {name: getattr(arguments, name) for name in Quota.__struct_fields__}
    try:
        quota = msgspec.convert(given, Quota)
    except msgspec.ValidationError as error:
        raise ConfigError(f"quota of {arguments.tenant}: {error}") from None
    file.set_quota(arguments.tenant, quota)
    print(f"quota of {arguments.tenant}: {_shown(quota)}")


def _weight(arguments: argparse.Namespace, file: TokenFile) -> None:
    file.set_weight(arguments.tenant, arguments.weight)
    print(f"weight of {arguments.tenant}: {arguments.weight:g}; servers follow within a second or two")


def _shown(quota: Quota | None) -> str:
    limits = msgspec.structs.asdict(quota or Quota())
    return ", ".join(f"{name}={value:g}" for name, value in limits.items() if value is not None) or "none"


def _certificate(arguments: argparse.Namespace, options: ServerOptions) -> int:
    check_tenant(arguments.name)
    try:
        from symbiosis.privacy import certificates
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"certificates need the package {error.name}; run: pip install 'symbiosis-flight[server]'"
        ) from error
    paths = certificates.issue_client(options.cache_path / "tls", arguments.name, arguments.out)
    _say(f"a server takes it with --tls-client-ca {options.cache_path / 'tls' / 'ca.pem'}")
    print(*paths, sep="\n")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="symbiosis-flight-server", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    token = verbs.add_parser("token", help="who may use the server").add_subparsers(dest="action", required=True)
    create = _add(token, "create", "make a token and print it, once")
    create.add_argument("tenant", metavar="TENANT", help="whose it is: a person, a team, a service")
    create.add_argument("--expires-days", type=float, metavar="DAYS", help="how long it lasts [default: for ever]")
    create.add_argument("--weight", type=float, metavar="N", help="the same as `token weight TENANT N` afterwards")
    _add(token, "list", "show which tokens are good, without the tokens")
    _add(token, "revoke", "refuse a token from now on").add_argument(
        "which", metavar="ID_OR_TENANT", help="the ID that list shows, or a tenant: all its tokens"
    )
    quota = _add(token, "quota", "set how much a tenant may use; what is left out is not limited")
    quota.add_argument("tenant", metavar="TENANT")
    quota.add_argument("--tokens-per-s", type=float, metavar="N", help="rows that are computed, of any module")
    quota.add_argument("--bytes-per-s", type=float, metavar="N", help="requests and replies together")
    quota.add_argument("--concurrent-calls", type=int, metavar="N", help="calls under way at once")
    weight = _add(token, "weight", "set a tenant's share of the device, relative to others that wait")
    weight.add_argument("tenant", metavar="TENANT")
    weight.add_argument("weight", type=float, metavar="N", help="0.01 to 100; 1 is what everybody has")
    certificate = _add(verbs, "certificate", "make a client certificate, signed by the CA of --tls auto")
    certificate.add_argument("name", metavar="NAME", help="whose it is")
    certificate.add_argument(
        "--out", type=Path, default=Path(), metavar="FOLDER", help="where NAME.pem and NAME.key go"
    )
    return parser


def _add(verbs: argparse._SubParsersAction[_Parser], name: str, text: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
    for flag, metavar in (("--tokens", "FILE"), ("--cache-dir", "PATH"), ("--config", "PATH")):
        parser.add_argument(flag, metavar=metavar, default=argparse.SUPPRESS, help="as the server's")
    return parser
