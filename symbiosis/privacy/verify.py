"""Verifier: whether a server's replies are what the base's weights give, without having the weights.

    secret  r [d_out] of ±1, and from the dealer  s = r W [d_in]      then  y · r  must equal  x · s
    secret  t [d_in]  of ±1, and from the dealer  u = t Wᵀ [d_out]    then  dx · t must equal  dy · u

(Freivalds 1977.) A server that does not know r cannot change y so that y · r stays: each check misses a change of
two equal elements with probability 1/2, and there are CHECKS of them.

One rule: the tolerance is a bound on rounding, not a guess. What is checked is what travelled, masks and all, in
double precision; a change is seen when it moves a row by more than the tolerance, about 1e-8 of an ordinary
unmasked result. In single precision the bound would be as large as the results, so it is not offered.

    |y · r - x · s|  <=  |x| |W|  (LUCK d_in + d_out^1.5) u  +  |y| d_out^1.5 u        u = 2^-53

The server's errors know nothing of r, so their sum with the signs of r exceeds LUCK times their Euclidean norm
with probability below 1e-13 (Hoeffding); the client's and the dealer's are bounded in the worst case.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from symbiosis.errors import WrongReplyError

if TYPE_CHECKING:
    from symbiosis.flight.protocol import ModuleInfo
    from symbiosis.sharing import Remote

CHECKS = 16
LUCK = 8.0
UNIT = torch.finfo(torch.float64).eps / 2


class _Secret:
    """Signs [CHECKS, d] and their products with the weight [CHECKS, d'], in double precision."""

    def __init__(self, signs: torch.Tensor, products: torch.Tensor, norm: float) -> None:
        self.signs = signs
        self.products = products
        self.norm = norm  # of the weight, Frobenius


class Verifier:
    """Checks replies of one server with the help of another.

    Args:
        dealer: computes with the same weights, and does not tell the server the secrets.
    """

    def __init__(self, dealer: Remote) -> None:
        self._dealer = dealer
        self._secrets: dict[tuple[str, str], _Secret] = {}
        self._shared_signs: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        self.checked_rows = 0

    def check(self, op: str, modules: Sequence[str], sent: torch.Tensor, reply: torch.Tensor) -> None:
        """Check rows as they travelled: sent [N, d], reply [N, d'], both float64.

        Raises:
            WrongReplyError: names the modules.
        """
        known = [self._secret(op, name) for name in modules]
        if op == "forward":
            widths = [secret.signs.shape[1] for secret in known]
            for name, secret, part in zip(modules, known, reply.split(widths, dim=1), strict=True):
                expected = sent @ secret.products.t()  # [N, d_in] @ [d_in, CHECKS]
                self._compare(op, name, part, secret.signs, expected, [(sent, secret)])
        else:
            parts = sent.split([secret.products.shape[1] for secret in known], dim=1)
            pairs = list(zip(parts, known, strict=True))
            expected = torch.stack([part @ secret.products.t() for part, secret in pairs]).sum(0)  # [N, CHECKS]
            self._compare(op, ", ".join(modules), reply, known[0].signs, expected, pairs)
        self.checked_rows += len(sent)

    @staticmethod
    def _compare(
        op: str,
        name: str,
        reply: torch.Tensor,
        signs: torch.Tensor,
        expected: torch.Tensor,
        sources: Sequence[tuple[torch.Tensor, _Secret]],
    ) -> None:
        found = reply @ signs.t()  # [N, d'] @ [d', CHECKS]
        allowed = tolerance(reply, sources)
        off = (found - expected).abs().amax(dim=1)
        wrong = ~(off <= allowed)  # so that what is not a number is wrong
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise WrongReplyError(
                f"the reply to {op} of {name} is not what the base's weights give: row {row} of {len(reply)} is off by "
                f"{off[row]:.3g}, and rounding explains {allowed[row]:.3g} ({int(wrong.sum())} rows are wrong). The "
                "result was thrown away; do not go on with this server"
            )

    def _secret(self, op: str, name: str) -> _Secret:
        with self._lock:
            if (op, name) not in self._secrets:
                self._secrets[op, name] = self._new_secret(op, name)
            return self._secrets[op, name]

    def _new_secret(self, op: str, name: str) -> _Secret:
        columns, rows = self._dealer.weight_norms(name)
        if op == "forward":
            signs, other = _signs(len(rows)), "grad_input"
        else:  # modules of one input width share their signs: their gradients come as a sum
            signs, other = self._shared_signs.setdefault(len(columns), _signs(len(columns))), "forward"
        return _Secret(signs, self._dealer.call(other, [name], [signs]), rows.double().norm().item())


class Ring(Protocol):
    """A server that computes in integers; a Caller is one."""

    def whole(self, op: str, modules: Sequence[str], x: torch.Tensor) -> torch.Tensor:
        """int64 [N, d] to int64 [N, d'], modulo 2^64."""


class RingVerifier:
    """The same in the integers modulo 2^64, where nothing is rounded, and so any lie at all is wrong.

    Args:
        dealer: computes with the same integer weights, and does not tell the server the secrets.
        modules: what the server serves, by name.
    """

    def __init__(self, dealer: Ring, modules: Mapping[str, ModuleInfo]) -> None:
        self._dealer = dealer
        self._modules = modules
        self._secrets: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}
        self._shared_signs: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        self.checked_rows = 0

    def check(self, op: str, modules: Sequence[str], sent: torch.Tensor, reply: torch.Tensor) -> None:
        """Check rows as they travelled: sent [N, d], reply [N, d'], both int64.

        Raises:
            WrongReplyError: names the modules.
        """
        known = [self._secret(op, name) for name in modules]
        if op == "forward":
            parts = reply.split([signs.shape[1] for signs, _ in known], dim=1)
            for name, part, (signs, products) in zip(modules, parts, known, strict=True):
                self._compare(op, name, part @ signs.t(), sent @ products.t())  # [N, CHECKS]
        else:
            parts = sent.split([products.shape[1] for _, products in known], dim=1)
            pairs = zip(parts, known, strict=True)
            expected = torch.stack([part @ products.t() for part, (_, products) in pairs]).sum(0)
            self._compare(op, ", ".join(modules), reply @ known[0][0].t(), expected)
        self.checked_rows += len(sent)

    @staticmethod
    def _compare(op: str, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        wrong = (found != expected).any(dim=1)
        if wrong.any():
            raise WrongReplyError(
                f"the reply to {op} of {name} is not what the base's integer weights give: row "
                f"{int(wrong.nonzero()[0])} of {len(found)} and {int(wrong.sum()) - 1} others. The result was thrown "
                "away; do not go on with this server"
            )

    def _secret(self, op: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Signs [CHECKS, d'] and their products with the weight [CHECKS, d]."""
        with self._lock:
            if (op, name) not in self._secrets:
                info = self._modules[name]
                if op == "forward":
                    signs, other = _signs(info.d_out).to(torch.int64), "grad_input"
                else:  # modules of one input width share their signs: their gradients come as a sum
                    signs = self._shared_signs.setdefault(info.d_in, _signs(info.d_in).to(torch.int64))
                    other = "forward"
                self._secrets[op, name] = signs, self._dealer.whole(other, [name], signs)
            return self._secrets[op, name]


def tolerance(reply: torch.Tensor, sources: Sequence[tuple[torch.Tensor, _Secret]]) -> torch.Tensor:
    """How far off rounding may be, for each row: [N]."""
    wide = reply.shape[1] ** 1.5
    total: torch.Tensor = UNIT * wide * reply.norm(dim=1)
    for x, secret in sources:
        total += UNIT * (LUCK * x.shape[1] + max(wide, x.shape[1] ** 1.5)) * x.norm(dim=1) * secret.norm
    return total


def _signs(width: int) -> torch.Tensor:
    """[CHECKS, width] of ±1 that nobody can foresee."""
    bits = torch.frombuffer(bytearray(secrets.token_bytes(CHECKS * width)), dtype=torch.uint8)
    return (bits & 1).double().mul_(2).sub_(1).view(CHECKS, width)
