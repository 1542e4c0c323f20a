"""MaskedRemote: a Remote whose server sees each row under a mask, and nothing else of it.

    forward      x + n ──▶ server ──▶ (x + n) Wᵀ        minus the effect n Wᵀ, which the dealer gave  =  x Wᵀ
    grad_input   dy + n ──▶ server ──▶ (dy + n) W       minus n W                                     =  dy W

One rule: a row goes out under a mask that was never used before, or does not go out. So this layer refuses
what it cannot mask: it holds for linear functions only, and a block is none. Rounding follows the mask, which is
many times larger than the row, so masked traffic and its products are in double precision, or in single with
masks that are not so large; in less the result would be noise.

It stands between the stand-ins of a model and a Caller, and is a Remote to them: neither knows of it. Layers
that share an input share a call, and so a mask.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from symbiosis.errors import ConfigError, ModelMismatchError, UnsupportedMethodError
from symbiosis.privacy.dealer import Key, Pool, PoolStats
from symbiosis.privacy.draws import DOUBLE, SINGLE
from symbiosis.privacy.only_linears import OnlyLinears, finite_rows
from symbiosis.privacy.repeats import Memory, Repeats
from symbiosis.privacy.scale import Scale
from symbiosis.privacy.shares import Shares
from symbiosis.privacy.verify import Verifier
from symbiosis.tables import html_table

if TYPE_CHECKING:
    from symbiosis.config import ClientOptions, Masking
    from symbiosis.flight.protocol import Manifest, ModuleInfo
    from symbiosis.sharing import Remote

GRIDS = {"double": DOUBLE, "single": SINGLE}
STRENGTHS = {"double": 256.0, "single": 4.0}
WHAT_WEAK_DOES_NOT_STOP = (
    "masking without a dealer is weak: the server that sees the masked rows also draws the masks, and can take them "
    "off. It protects from a log of single requests and from nothing else; it is here for comparison. "
    "Masking(dealer=URL) asks a second server, of another host, for the masks"
)


class MaskedRemote(OnlyLinears):
    """Masks what goes to a server.

    Args:
        inner: what computes on masked rows.
        modules: what the server serves, by name.
        pool: masks and their effects.
        options: strength and budgets.
        verifier: checks replies, if given.
    """

    why = "masks can be taken off linears only; wrap with granularity='linear'"

    def __init__(
        self,
        inner: Remote,
        modules: Mapping[str, ModuleInfo],
        pool: Pool | Shares,
        options: Masking,
        verifier: Verifier | None = None,
    ) -> None:
        self._verifier = verifier
        super().__init__(inner, modules)
        self._pool = pool
        self.options = options
        self._strength = options.strength or STRENGTHS[options.precision]
        self._memory = Memory(options.remember_bytes)
        self._lanes: dict[Key, _Lane] = {}
        self._lock = threading.Lock()

    def call(self, op: str, modules: Sequence[str], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """As `Caller.call`, for linears.

        Raises:
            UnsupportedMethodError: what cannot be masked; nothing was sent.
            MasksExhaustedError, DeadlineExceededError: no masks are left.
            WrongReplyError: the reply failed its check.
            PrivacyBudgetError: the same row was sent too often.
        """
        self._check(op, modules, tensors[0].dtype)
        x, lost = finite_rows(tensors[0])  # [N, d]
        if not len(x):
            return self._inner.call(op, modules, tensors)
        key = Key(op, tuple(modules))
        lane = self._lane(key)
        with lane.lock:
            plan = lane.repeats.plan(x)
            hidden = torch.zeros_like(x)  # a row that is not sent again is padding, under a mask as any other
            hidden[plan.sent] = x[plan.sent]
            norms = torch.linalg.vector_norm(hidden, dim=1)
            steps = lane.scale.steps(norms)
            lane.repeats.spend(plan, lane.scale.exposures(norms, steps), f"the input of {op} of {', '.join(modules)}")
        y = self._masked(key, hidden, steps[:, None])
        with lane.lock:
            lane.repeats.finish(plan, y)
        y[lost] = torch.nan
        return y.to(tensors[0])

    @property
    def label(self) -> str:
        """For a repr."""
        return "masked" if self.options.dealer is not None else "masked (weak)"

    def check(self, manifest: Manifest, model: nn.Module, granularity: str) -> None:
        """As `refuse_unmaskable`."""
        refuse_unmaskable(self.options, manifest, model, granularity)

    def reveals(self, allowed: bool) -> bool:
        """Whether values of adapters may be sent, as DoRA must: not to a server that can take off the masks."""
        return allowed or self.options.dealer is not None

    def stats(self) -> MaskingStats:
        """How the masks are doing, and what was given away."""
        with self._lock:
            lanes = list(self._lanes.values())
        return MaskingStats(
            self._pool.stats(),
            sum(lane.repeats.answered for lane in lanes),
            sum(lane.scale.outliers for lane in lanes),
            sum(lane.scale.fixed for lane in lanes),
            self._memory.used_bytes,
            self._verifier.checked_rows if self._verifier is not None else 0,
        )

    def close(self) -> None:
        """Stop dealing."""
        self._pool.close()

    def _masked(self, key: Key, x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """x [N, d] under masks, to the server and back: [N, d'], a tensor of our own; steps [N, 1]."""
        dealt = self._pool.take(key, *x.shape)
        whole = (x / steps).round_() + dealt.masks
        sent = (whole * steps).to(self._pool.grid.dtype)  # exact: times 2^e
        reply = self._inner.call(key.op, key.modules, [sent])
        if self._verifier is not None:
            self._verifier.check(key.op, key.modules, sent, reply)
        return reply - steps * dealt.effects

    def _lane(self, key: Key) -> _Lane:
        with self._lock:
            if key not in self._lanes:
                scale, budget = Scale(self._pool.grid, self._strength), self.options.row_budget
                self._lanes[key] = _Lane(scale, Repeats(budget, self._memory), threading.Lock())
            return self._lanes[key]

    def _check(self, op: str, modules: Sequence[str], dtype: torch.dtype) -> None:
        self._refuse_others(modules)
        if self.options.precision == "single" and dtype != torch.float32:
            raise UnsupportedMethodError(
                f"{op} of {', '.join(modules)} got {dtype}, and Masking(precision='single') sends float32. Load the "
                "model with dtype=torch.float32, without autocast, or leave precision at 'double'"
            )


@dataclass
class _Lane:
    """What is kept per module and direction."""

    scale: Scale
    repeats: Repeats
    lock: threading.Lock


@dataclass(frozen=True)
class MaskingStats:
    """Masks ahead, and what was given away.

    Attributes:
        pool: of masks.
        answered_rows: rows that came again and were not sent again.
        outlier_rows: rows of which the server can tell that they were longer than ordinary ones.
        scales: how often a scale was fixed, each a power of two that the server can see.
        remembered_bytes: memory for answers.
        checked_rows: rows of replies that were checked, and were right.
    """

    pool: PoolStats
    answered_rows: int
    outlier_rows: int
    scales: int
    remembered_bytes: int
    checked_rows: int

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) pairs, formatted for people."""
        return [
            *self.pool.rows_of_text(),
            ("not sent again", f"{self.answered_rows:,} rows, {self.remembered_bytes / 1e6:,.1f} MB remembered"),
            ("seen as outliers", f"{self.outlier_rows:,} rows"),
            ("scales shown", f"{self.scales:,}"),
            ("checked", f"{self.checked_rows:,} rows"),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{label:<18}{value}" for label, value in self.rows())

    def _repr_html_(self) -> str:
        return html_table(self.rows())


class Peer(Protocol):
    """What must be known of a server; a Connection is one."""

    manifest: Manifest
    instances: frozenset[str]
    options: ClientOptions

    def certificates(self) -> list[bytes]:
        """What its servers show in TLS, DER."""


def check_dealer(server: Peer, dealer: Peer) -> None:
    """Compare a server and the one that deals for it.

    Raises:
        ConfigError: they are one, or have one key.
        ModelMismatchError: they hold different weights.
    """
    if server.instances & dealer.instances:
        raise ConfigError(
            "the dealer is the server itself: it would see the masked rows and their masks. Give the URL of another "
            "server, of another host; Masking(dealer=None) is the weak form, for comparison"
        )
    if shared := _host_keys(server) & _host_keys(dealer):
        raise ConfigError(
            f"the server and the dealer have the same {min(shared)[0]}: whoever holds it is both, and could take the "
            "masks off. Give the URL of a server of somebody else, with a key of its own"
        )
    held, dealt = server.manifest, dealer.manifest
    if (held.fingerprint, held.quantized) != (dealt.fingerprint, dealt.quantized):
        raise ModelMismatchError(
            f"the server holds {held.model} in {held.kept_as} with fingerprint {held.fingerprint[:12]}, the dealer "
            f"{dealt.model} in {dealt.kept_as} with {dealt.fingerprint[:12]}; start both with the same checkpoint, "
            "dtype and --quantize"
        )


def _host_keys(peer: Peer) -> set[tuple[str, str]]:
    """(what kind, which) of each key that tells whose a server is."""
    keys = {("TLS key", _public_key(certificate)) for certificate in peer.certificates()}
    return keys | ({("payload key", peer.options.server_key)} if peer.options.server_key else set())


def _public_key(certificate: bytes) -> str:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = x509.load_der_x509_certificate(certificate).public_key()
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo).hex()


def refuse_unmaskable(
    options: Masking, manifest: Manifest, model: nn.Module | None = None, granularity: str = "linear"
) -> None:
    """Refuse by name what cannot be masked.

    Raises:
        UnsupportedMethodError: experts, calls that are not linear, or less than float32 with single precision.
    """
    if granularity not in ("auto", "linear"):
        raise UnsupportedMethodError(
            f"granularity={granularity!r} makes calls that are not linear, and masks can be taken off linears only; "
            "leave it out"
        )
    experts = next((info.name for info in manifest.modules if info.kind == "experts"), None)
    if experts is not None:
        raise UnsupportedMethodError(f"{experts} is a mixture of experts, which is not linear and cannot be masked")
    if options.mode == "exact" and manifest.quantized:
        raise UnsupportedMethodError(
            f"the base is kept in {manifest.quantized}, and mode='exact' needs weights whose every bit is the same on "
            "two machines; start both servers without --quantize, or use mode='dealer'"
        )
    if options.precision == "double":
        return
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} if model is not None else set()
    if manifest.dtype != "F32" or dtypes - {torch.float32}:
        raise UnsupportedMethodError(
            f"Masking(precision='single') needs float32 everywhere, since rounding follows the mask; the base is "
            f"served in {manifest.dtype}, this model is {', '.join(map(str, dtypes)) or 'not known yet'}. Use float32 "
            "for both, or leave precision at 'double'"
        )
