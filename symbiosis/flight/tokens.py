"""Tokens: who may use a server, and how much. A JSON file that the operator's commands write and a server reads.

One rule: the file holds no token, only its SHA-256. A token is 32 random bytes, so there is nothing to guess or to look
up: a slow, salted hash (bcrypt, scrypt) protects words that people choose, and here would only make every stream slow.

A token reads `sym_ID_SECRET`. The ID is public: it names the token in lists, logs and `revoke`. The server compares the
hashes of whole tokens in constant time.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from symbiosis.errors import AuthError, ConfigError
from symbiosis.flight.quota import Quota
from symbiosis.private_files import check_owned, locked, private_folder, read_file, write_private

logger = logging.getLogger(__name__)
SECRET_BYTES = 32
RELOAD_S = 1.0  # how soon a change of the file is seen
REFUSED = "the credentials were refused"  # the same words whatever the reason: an attacker learns nothing from them
TENANT = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
NO_HASH = "0" * 64

TenantName = Annotated[str, Meta(pattern=f"^{TENANT}$")]
# Bounded, so that the lightest tenant still gets a turn while the heaviest keeps the server busy.
Weight = Annotated[float, Meta(ge=0.01, le=100.0)]


class Entry(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One token, without itself. `expires_s` is in seconds since 1970; None never."""

    id: str
    tenant: TenantName
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    created_s: float
    expires_s: float | None = None


class Content(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    version: Annotated[int, Meta(ge=1, le=1)] = 1
    tokens: tuple[Entry, ...] = ()
    quotas: dict[TenantName, Quota] = {}
    weights: dict[TenantName, Weight] = {}  # shares of the device, relative to others; 1 where there is none


class Grant(NamedTuple):
    """What a token was good for when a stream was opened."""

    tenant: str
    token_id: str


class TokenFile:
    """The operator's view: every change reads the file, and replaces it at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, tenant: str, expires_s: float | None = None) -> str:
        """A new token of a tenant; the only time that it is seen.

        Raises:
            ConfigError: a name that is none, or a file that cannot be used.
        """
        check_tenant(tenant)
        token_id = secrets.token_hex(4)
        token = f"sym_{token_id}_{secrets.token_urlsafe(SECRET_BYTES)}"
        entry = Entry(token_id, tenant, _hash(token), time.time(), expires_s)
        self._change(lambda content: msgspec.structs.replace(content, tokens=(*content.tokens, entry)))
        return token

    def revoke(self, which: str) -> list[Entry]:
        """Remove the token of that id, or all tokens of that tenant; what was removed.

        Raises:
            ConfigError: there is none.
        """
        removed = [entry for entry in self.read().tokens if which in (entry.id, entry.tenant)]
        if not removed:
            raise ConfigError(f"{self.path} has no token with the id {which!r} and no tenant of that name")
        gone = {entry.id for entry in removed}
        self._change(
            lambda content: msgspec.structs.replace(
                content, tokens=tuple(entry for entry in content.tokens if entry.id not in gone)
            )
        )
        return removed

    def set_quota(self, tenant: str, quota: Quota) -> None:
        """Replace the quota of a tenant."""
        check_tenant(tenant)
        self._change(
            lambda content: msgspec.structs.replace(content, quotas={**content.quotas, tenant: quota}),
        )

    def set_weight(self, tenant: str, weight: float) -> None:
        """Replace the weight of a tenant: one of 2 gets twice the tokens of one of 1, where both wait.

        Raises:
            ConfigError: a weight that is none.
        """
        check_tenant(tenant)
        checked = check_weight(tenant, weight)
        self._change(
            lambda content: msgspec.structs.replace(content, weights={**content.weights, tenant: checked}),
        )

    def read(self) -> Content:
        """What the file holds; nothing if there is none yet."""
        return _parse(self.path) if self.path.exists() else Content()

    def _change(self, change: Callable[[Content], Content]) -> None:
        private_folder(self.path.parent)
        with locked(self.path):
            content = msgspec.json.encode(change(self.read()))
            write_private(self.path, msgspec.json.format(content, indent=2) + b"\n")


class TokenBook:
    """The server's view: which token is good now. Follows the file while the server runs.

    A file that is gone refuses everybody; one that cannot be parsed is reported and changes nothing, since a slip of an
    editor must not lock all clients out.

    Raises:
        ConfigError: at start, a file that is missing, unreadable, or that others may change.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._checked_s = clock()
        if not path.exists():
            raise ConfigError(f"tokens {path}: there is no such file; run: symbiosis-flight-server token create TENANT")
        check_owned(path, "tokens", secret=False)
        self._stamp = _stamp(path)
        self._content = _parse(path)

    def grant(self, token: str) -> Grant | None:
        """What this token is good for; None if nothing."""
        token_id = token.split("_", 2)[1] if token.count("_") >= 2 else ""
        entry = next((entry for entry in self._current().tokens if entry.id == token_id), None)
        same = hmac.compare_digest(_hash(token), entry.sha256 if entry else NO_HASH)
        return Grant(entry.tenant, entry.id) if entry and same and _lasts(entry) else None

    def check(self, grant: Grant) -> None:
        """A stream stays open for hours; its token must still be good at each call.

        Raises:
            AuthError: the token was revoked or has expired.
        """
        if not any(entry.id == grant.token_id and _lasts(entry) for entry in self._current().tokens):
            raise AuthError(REFUSED)

    def quota(self, tenant: str) -> Quota:
        """The limits of a tenant."""
        return self._current().quotas.get(tenant, Quota())

    def weight(self, tenant: str) -> float:
        """The share of a tenant, relative to others; asks no file, since the scheduler asks under its lock."""
        return self._content.weights.get(tenant, 1.0)

    def reload(self) -> None:
        """Look at the file now, instead of at the next call a second from now."""
        with self._lock:
            self._reload()

    def _current(self) -> Content:
        with self._lock:
            now_s = self._clock()
            if now_s - self._checked_s >= RELOAD_S:
                self._checked_s = now_s
                self._reload()
            return self._content

    def _reload(self) -> None:
        stamp = _stamp(self.path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._content = _parse(self.path) if stamp is not None else Content()
            logger.info("tokens %s: read again, %d tokens", self.path, len(self._content.tokens))
        except ConfigError as error:
            logger.error("%s; the tokens read before stay in force", error)


def check_tenant(name: str) -> None:
    """Refuse a name that could not stand in a file, a log or a table."""
    if not re.fullmatch(TENANT, name):
        raise ConfigError(f"tenant {name!r} is no name; expected up to 64 letters, digits, dots, dashes, underscores")


def check_weight(tenant: str, weight: float) -> float:
    """Refuse a weight that would starve a tenant, or all others."""
    try:
        return msgspec.convert(weight, Weight)
    except msgspec.ValidationError as error:
        raise ConfigError(f"weight of {tenant}: got {weight}; {error}; 1 is what everybody has") from None


def when(seconds: float | None) -> str:
    """A time of the file, for people."""
    if seconds is None:
        return "never"
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _lasts(entry: Entry) -> bool:
    return entry.expires_s is None or time.time() < entry.expires_s


def _parse(path: Path) -> Content:
    try:
        return msgspec.json.decode(read_file(path, "tokens"), type=Content)
    except msgspec.DecodeError as error:
        raise ConfigError(f"tokens {path}: {error}; write it with symbiosis-flight-server token") from None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
