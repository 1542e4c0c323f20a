"""What each tenant does: admitted or refused, counted, written down.

One rule: every call passes `admit`, and nothing is computed for one that it refuses. The order is: is the token still
good, is it within the quota, is it within the extraction budget.

Without tokens there is one tenant without a name, which is everybody: what a client calls itself is not believed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from symbiosis.errors import AuthError, BudgetExceededError, QuotaExceededError, SymbiosisError
from symbiosis.flight.audit_log import AuditLog
from symbiosis.flight.extraction import Extraction, Width
from symbiosis.flight.protocol import Request, TenantStats
from symbiosis.flight.quota import Meter, Quota
from symbiosis.flight.tokens import Grant, TokenBook

NOBODY = Quota()
REFUSALS = (AuthError, QuotaExceededError, BudgetExceededError)


@dataclass(frozen=True)
class Party:
    """Who is at the other end of a stream: a tenant as its token says, a client as it says itself."""

    grant: Grant | None = None
    client: str = ""

    @property
    def tenant(self) -> str:
        return self.grant.tenant if self.grant else ""

    @property
    def name(self) -> str:
        """Unlike any client of another tenant: two notebooks of one person are two clients to the scheduler."""
        return f"{self.tenant}/{self.client}" if self.grant else self.client


@dataclass
class Account:
    """Sums of one tenant since the server's start."""

    extraction: Extraction
    meter: Meter = field(default_factory=Meter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: int = 0
    tokens: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    refused: int = 0

    def add(self, tokens: int, bytes_in: int, bytes_out: int, refused: bool) -> None:
        with self.lock:
            self.requests += 1
            self.tokens += 0 if refused else tokens
            self.bytes_in += bytes_in
            self.bytes_out += bytes_out
            self.refused += refused


@dataclass
class Call:
    """One call on its way; whoever answers it says how large the answer is."""

    bytes_out: int = 0


class Ledger:
    """Accounts of all tenants.

    Args:
        widths: d_in and d_out of the modules whose extraction is counted.
        book: tokens and quotas; None asks for neither.
        audit: where events are written; None writes none.
        budget: of extraction, as a multiple of d_in.
    """

    def __init__(
        self,
        widths: Mapping[str, Width],
        book: TokenBook | None = None,
        audit: AuditLog | None = None,
        budget: float | None = None,
    ) -> None:
        self.book = book
        self._widths = widths
        self._audit = audit
        self._budget = budget
        self._lock = threading.Lock()
        self._accounts: dict[str, Account] = {}

    @contextlib.contextmanager
    def admit(self, party: Party, request: Request, nbytes: int) -> Iterator[Call]:
        """Admit a call, and count it when the block ends, however it does.

        Raises:
            AuthError, QuotaExceededError, BudgetExceededError: nothing must be computed.
        """
        account, call, outcome = self.account(party.tenant), Call(), "OK"
        try:
            with self._admitted(account, party, request, nbytes, call):
                yield call
        except BaseException as error:
            outcome = error.code if isinstance(error, SymbiosisError) else SymbiosisError.code
            raise
        finally:
            refused = outcome in {refusal.code for refusal in REFUSALS}
            account.add(_tokens(request), nbytes, call.bytes_out, refused)
            self._write(party, request, nbytes, call.bytes_out, outcome)

    def note(self, grant: Grant | None, op: str) -> None:
        """Write down what is not a call: an action, a download, a refused stream."""
        if self._audit:
            self._audit.write(tenant=grant.tenant if grant else "", token=grant.token_id if grant else "", op=op)

    def account(self, tenant: str) -> Account:
        """The account of a tenant, opened with its first call."""
        with self._lock:
            if tenant not in self._accounts:
                self._accounts[tenant] = Account(Extraction(tenant, self._widths, self._budget))
            return self._accounts[tenant]

    def stats(self, tenant: str) -> TenantStats:
        """Sums of one tenant."""
        account = self.account(tenant)
        return TenantStats(
            tenant=tenant,
            requests=account.requests,
            tokens=account.tokens,
            bytes_in=account.bytes_in,
            bytes_out=account.bytes_out,
            refused=account.refused,
            extraction=account.extraction.share,
            extracted_modules=account.extraction.modules,
        )

    def weight(self, tenant: str) -> float:
        """How large a tenant's share of the device is, relative to others."""
        return self.book.weight(tenant) if self.book else 1.0

    @property
    def tenants(self) -> list[str]:
        """Who has called since start."""
        with self._lock:
            return sorted(self._accounts)

    def close(self) -> None:
        if self._audit:
            self._audit.close()

    @contextlib.contextmanager
    def _admitted(self, account: Account, party: Party, request: Request, nbytes: int, call: Call) -> Iterator[None]:
        if self.book and party.grant:
            self.book.check(party.grant)
        quota = self.book.quota(party.tenant) if self.book else NOBODY
        account.meter.enter(quota, _tokens(request), nbytes)
        try:
            account.extraction.count(request.op, _modules(request), _tokens(request))
            yield
        finally:
            account.meter.leave(call.bytes_out)

    def _write(self, party: Party, request: Request, bytes_in: int, bytes_out: int, outcome: str) -> None:
        if self._audit:
            self._audit.write(
                tenant=party.tenant,
                token=party.grant.token_id if party.grant else "",
                client=party.client,
                op=request.op,
                modules=_modules(request),
                call=request.id,
                tokens=_tokens(request),
                bytes_in=bytes_in,
                bytes_out=bytes_out,
                outcome=outcome,
            )


def _tokens(request: Request) -> int:
    return request.tensors[0].shape[0]


def _modules(request: Request) -> list[str]:
    return list(request.modules) or [name for step in request.steps for name in step.modules]
