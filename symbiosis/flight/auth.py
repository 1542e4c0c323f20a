"""Who calls: a Flight middleware that turns a bearer token into a tenant, before any handler runs.

One rule: a refusal says nothing that an attacker could use, and no exception but Flight's own leaves this module:
another one would send this process's traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow.flight as fl

from symbiosis.flight.tokens import REFUSED, Grant, TokenBook

logger = logging.getLogger(__name__)
KEY = "auth"
SCHEME = "bearer "


class Authentication(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses every call without a good token.

    Args:
        book: which tokens are good.
        refused: told the method of each refused call.
    """

    def __init__(self, book: TokenBook, refused: Callable[[str], None]) -> None:
        super().__init__()
        self._book = book
        self._refused = refused

    def start_call(self, info: Any, headers: Mapping[str, Sequence[str | bytes]]) -> Authenticated:
        try:
            grant = self._grant(headers)
        except Exception:
            logger.exception("checking credentials failed")
            grant = None
        if grant is None:
            self._refused(info.method.name.lower())
            raise fl.FlightUnauthenticatedError(REFUSED)
        return Authenticated(grant)

    def _grant(self, headers: Mapping[str, Sequence[str | bytes]]) -> Grant | None:
        values = headers.get("authorization", ())
        if len(values) != 1 or not isinstance(value := values[0], str) or not value.lower().startswith(SCHEME):
            return None
        return self._book.grant(value[len(SCHEME) :].strip())


class Authenticated(fl.ServerMiddleware):  # type: ignore[misc]
    """What a handler finds in its context: the grant of this call."""

    def __init__(self, grant: Grant) -> None:
        super().__init__()
        self.grant = grant


def grant_of(context: Any) -> Grant | None:
    """The grant of a call; None where the server asks for no token."""
    found = context.get_middleware(KEY)
    return found.grant if found is not None else None
