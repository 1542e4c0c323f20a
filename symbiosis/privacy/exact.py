"""ExactRemote: a Remote whose server sees each row as numbers that are uniform and independent of it.

    x      ->  whole = round(x / step)  ->  whole + n (mod 2^64)              n uniform over all 64-bit integers
    server  :  (whole + n) Vᵀ (mod 2^64)                                      V = round(W 2^k), an integer weight
    dealer  :  n Vᵀ (mod 2^64), from the seed, ahead of time
    y      =   (the one - the other) * step / 2^k

One rule: nothing of a row but its place and its number is in what is sent, whatever is known beside it and however
often it comes again (one-time pad). So there is no scale to keep, no budget and no memory of rows, and the step is
each row's own.

Nothing wraps that must not: magnitudes of a row are at most 2^31 and those of V's rows and columns add up to 2^31 at
most (`flight/ring.py`), so results are below 2^62, and the difference modulo 2^64 is the result itself.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import nn

from symbiosis.errors import ModelMismatchError, UnsupportedMethodError
from symbiosis.privacy.dealer import Key, Pool, PoolStats
from symbiosis.privacy.only_linears import OnlyLinears, finite_rows
from symbiosis.tables import html_table

WHOLE_BITS = 31  # of the largest magnitude of a row


class Ring(Protocol):
    """A server that computes in integers; a Caller is one."""

    def whole(self, op: str, modules: Sequence[str], x: torch.Tensor) -> torch.Tensor:
        """int64 [N, d] to int64 [N, d'], modulo 2^64."""

    def exponents(self, modules: Sequence[str]) -> list[int]:
        """k of each module's integer weight."""


if TYPE_CHECKING:
    from symbiosis.config import Masking
    from symbiosis.flight.protocol import Manifest, ModuleInfo
    from symbiosis.privacy.verify import RingVerifier
    from symbiosis.sharing import Remote

    class Server(Remote, Ring, Protocol):
        """What computes in integers and otherwise; a Caller is one."""


class ExactRemote(OnlyLinears):
    """Sends what goes to a server under masks that are uniform over the integers modulo 2^64.

    Args:
        inner: what computes on masked rows.
        modules: what the server serves, by name.
        pool: masks and their effects.
        dealer: who deals them.
        options: what was asked for.
        verifier: checks replies, if given.
    """

    why = "masks can be taken off linears only; wrap with granularity='linear'"

    def __init__(
        self,
        inner: Server,
        modules: Mapping[str, ModuleInfo],
        pool: Pool,
        dealer: Ring,
        options: Masking,
        verifier: RingVerifier | None = None,
    ) -> None:
        super().__init__(inner, modules)
        self._ring: Ring = inner
        self._pool = pool
        self._dealer = dealer
        self.options = options
        self._verifier = verifier
        self._lock = threading.Lock()
        self._exponents: dict[str, int] = {}

    def call(self, op: str, modules: Sequence[str], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """As `Caller.call`, for linears, with their weights in whole numbers; rows that are not finite are NaN.

        Raises:
            UnsupportedMethodError: not a linear; nothing was sent.
            MasksExhaustedError, DeadlineExceededError: no masks are left.
            ModelMismatchError: the two servers have other integer weights.
            WrongReplyError: the reply failed its check.
        """
        self._refuse_others(modules)
        x, lost = finite_rows(tensors[0])  # [N, d]
        if not len(x):
            return self._inner.call(op, modules, tensors)
        units = self._units(op, modules)
        if op == "grad_input":  # sums over modules need one unit
            x *= units
        whole, steps = in_whole_numbers(x, len(modules) if op == "grad_input" else 1)
        y = self._masked(Key(op, tuple(modules)), whole).double() * steps  # [N, d'] * [N, 1]
        if op == "forward":
            y *= units
        y[lost] = torch.nan
        return y.to(tensors[0])

    @property
    def label(self) -> str:
        """For a repr."""
        return "masked (exact)"

    def check(self, manifest: Manifest, model: nn.Module, granularity: str) -> None:
        """Refuse calls that are not linear; the base was looked at when the connection was made."""
        if granularity not in ("auto", "linear"):
            raise UnsupportedMethodError(
                f"granularity={granularity!r} makes calls that are not linear, and {self.why.partition(';')[0]}; "
                "leave it out"
            )

    def reveals(self, allowed: bool) -> bool:
        """Whether values of adapters may be sent: nothing of them is seen."""
        return True

    def stats(self) -> ExactStats:
        """How the masks are doing."""
        return ExactStats(self._pool.stats(), self._verifier.checked_rows if self._verifier is not None else 0)

    def close(self) -> None:
        """Stop dealing."""
        self._pool.close()

    def _masked(self, key: Key, whole: torch.Tensor) -> torch.Tensor:
        """int64 [N, d] under masks, to the server and back: int64 [N, d'], below 2^62."""
        dealt = self._pool.take(key, *whole.shape)
        sent = whole + dealt.masks  # modulo 2^64, as all that follows
        reply = self._ring.whole(key.op, key.modules, sent)
        if self._verifier is not None:
            self._verifier.check(key.op, key.modules, sent, reply)
        return reply - dealt.effects

    def _units(self, op: str, modules: Sequence[str]) -> torch.Tensor:
        """2^-k of the module that each output of a linear belongs to, [sum d_out]."""
        missing = [name for name in modules if name not in self._exponents]
        if missing:
            here, there = self._ring.exponents(missing), self._dealer.exponents(missing)
            for name, k, other in zip(missing, here, there, strict=True):
                if k != other:
                    raise ModelMismatchError(
                        f"the integer weights of {name} are scaled by 2^{k} on the server and by 2^{other} on the "
                        "dealer; start both with the same checkpoint and dtype"
                    )
                self._exponents[name] = k
        units = [torch.full((self._modules[name].d_out,), math.ldexp(1.0, -self._exponents[name])) for name in modules]
        return torch.cat(units).double()


def in_whole_numbers(x: torch.Tensor, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, d], finite, as int64 [N, d] of magnitudes up to 2^31 / parts, and the step of each row, [N, 1].

    The error of an element is at most 2^-32 of its row's largest, times parts rounded up to a power of two.
    """
    largest = x.abs().amax(dim=1, keepdim=True)
    _, power = torch.frexp(largest)  # largest < 2^power
    lift = WHOLE_BITS - (parts - 1).bit_length()
    steps = torch.from_numpy(np.ldexp(1.0, power.numpy() - lift))  # torch's ldexp goes through float32
    return (x / steps).round_().to(torch.int64), steps


@dataclass(frozen=True)
class ExactStats:
    """Masks ahead; nothing is given away.

    Attributes:
        pool: of masks.
        checked_rows: whose replies were checked.
    """

    pool: PoolStats
    checked_rows: int

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) pairs, formatted for people."""
        return [*self.pool.rows_of_text(), ("checked", f"{self.checked_rows:,} rows")]

    def __str__(self) -> str:
        return "\n".join(f"{label:<18}{value}" for label, value in self.rows())

    def _repr_html_(self) -> str:
        return html_table(self.rows())
