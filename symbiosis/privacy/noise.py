"""NoisyRemote: a Remote whose server sees each row clipped and with noise that nobody takes off again.

    x  ->  clipped to the norm C  ->  + N(0, σ²)  ->  server, whose result is used as it is

One rule: the noise stays, so what (epsilon, delta) says of a row that was sent holds against whoever has it, for ever,
and without a second server. It holds for one row of one call; releases of one token, through modules, directions and
steps, compose, and `stats` counts them.

The sum is one of whole numbers, as with masks: a clipped row is cut off to steps of σ / 2^20, noise is rounded to
them. Rounding Gaussian noise after a whole number was added is the same as before, so what is sent is a function of
the Gaussian mechanism's output and of nothing else; the low bits of a sum of floating-point numbers would not be
(Mironov 2012).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from symbiosis.errors import UnsupportedMethodError
from symbiosis.privacy.gaussian import draw_normal, epsilon_of, mu_of
from symbiosis.privacy.only_linears import OnlyLinears, finite_rows
from symbiosis.tables import html_table

if TYPE_CHECKING:
    from symbiosis.config import ActivationNoise
    from symbiosis.flight.protocol import Manifest, ModuleInfo
    from symbiosis.sharing import Remote

FINENESS_BITS = 20  # of a standard deviation
NOT_LARGER = 1 - 2.0**-40  # so that rounding makes no clipped row longer than the clip
ONLY_LINEARS = (
    "ActivationNoise goes with single linears only: a block or a segment sends its inputs twice, forward and back, and "
    "would show two noises of one row; leave granularity out"
)


class NoisyRemote(OnlyLinears):
    """Clips what goes to a server, and adds noise.

    Args:
        inner: what computes on noisy rows.
        modules: what the server serves, by name.
        options: epsilon, delta and clips.

    Attributes:
        sigma: standard deviation of the noise on each element of a row, by operation.
    """

    why = ONLY_LINEARS

    def __init__(self, inner: Remote, modules: Mapping[str, ModuleInfo], options: ActivationNoise) -> None:
        super().__init__(inner, modules)
        self.options = options
        self.mu = mu_of(options.epsilon, options.delta)
        self.clips = {"forward": options.clip, "grad_input": options.grad_clip or options.clip}
        # Any two clipped rows are at most 2 C apart.
        self.sigma = {op: 2 * clip / self.mu for op, clip in self.clips.items()}
        self._sent = {op: _Sent() for op in self.clips}
        self._lock = threading.Lock()

    def call(self, op: str, modules: Sequence[str], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """As `Caller.call`, for linears; a row that is not finite comes back as NaN, and noise is sent for it.

        Raises:
            UnsupportedMethodError: not a linear; nothing was sent.
        """
        self._refuse_others(modules)
        x, lost = finite_rows(tensors[0])  # [N, d]
        if not len(x):
            return self._inner.call(op, modules, tensors)
        y = self._inner.call(op, modules, [self._noisy(op, modules, x).to(tensors[0])])
        y[lost.to(y.device)] = torch.nan
        return y

    def check(self, manifest: Manifest, model: nn.Module | None = None, granularity: str = "linear") -> None:
        """Refuse by name what takes no noise.

        Raises:
            UnsupportedMethodError: experts, DoRA, or calls of more than linears.
        """
        if granularity not in ("auto", "linear"):
            raise UnsupportedMethodError(f"granularity={granularity!r} was asked for: {ONLY_LINEARS}")
        experts = next((info.name for info in manifest.modules if info.kind == "experts"), None)
        if experts is not None:
            raise UnsupportedMethodError(f"{experts} is a mixture of experts: {ONLY_LINEARS}")
        for name, module in model.named_modules() if model is not None else ():
            used = getattr(module, "use_dora", None)  # as in adapters.py, which this row may not import
            if isinstance(used, dict) and any(used.values()):
                raise UnsupportedMethodError(
                    f"{name} uses DoRA, whose norms ActivationNoise would blur, since noise stays in them; use LoRA or "
                    "rsLoRA (use_dora=False)"
                )

    @property
    def label(self) -> str:
        """For a repr."""
        return f"noise of epsilon {self.options.epsilon:g}, delta {self.options.delta:g} per row and call"

    def reveals(self, allowed: bool) -> bool:
        """Whether values of adapters may be sent, as DoRA must: never, since noise would stay in its norms."""
        return False

    def stats(self) -> NoiseStats:
        """What was sent, and what (epsilon, delta) says of it."""
        with self._lock:
            return NoiseStats(
                self.options.epsilon,
                self.options.delta,
                self.mu,
                self._calls_of_a_token(),
                tuple(
                    DirectionStats(
                        op, self.clips[op], self.sigma[op], sent.rows, sent.clipped, sent.noise**0.5, sent.signal**0.5
                    )
                    for op, sent in self._sent.items()
                ),
            )

    def close(self) -> None:
        """Nothing runs beside the calls."""

    def _calls_of_a_token(self) -> float:
        """Rows sent, both ways, for each row that the busiest module got: a token passes each module once."""
        tokens = max((rows for sent in self._sent.values() for rows in sent.by_module.values()), default=1)
        return sum(sent.rows for sent in self._sent.values()) / tokens

    def _noisy(self, op: str, modules: Sequence[str], x: torch.Tensor) -> torch.Tensor:
        """x [N, d], finite, clipped and with noise, in float64."""
        clip, sigma = self.clips[op], self.sigma[op]
        step = math.ldexp(1.0, math.floor(math.log2(sigma)) - FINENESS_BITS)
        norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)  # [N, 1]
        clipped = x * (clip * NOT_LARGER / norms.clamp_min(clip))
        noise = (draw_normal(*x.shape) * (sigma / step)).round_()
        with self._lock:
            self._sent[op].add(modules, norms, clip, clipped, sigma)
        whole: torch.Tensor = (clipped / step).trunc_() + noise
        return whole * step  # exact: whole numbers below 2^53, times 2^e


class _Sent:
    """What went out in one direction."""

    def __init__(self) -> None:
        self.rows = self.clipped = 0
        self.signal = self.noise = 0.0  # sums of squares
        self.by_module: dict[str, int] = {}

    def add(
        self, modules: Sequence[str], norms: torch.Tensor, clip: float, clipped: torch.Tensor, sigma: float
    ) -> None:
        self.rows += len(norms)
        self.clipped += int((norms > clip).sum())
        self.signal += clipped.square().sum().item()
        self.noise += sigma**2 * clipped.numel()
        for name in modules:
            self.by_module[name] = self.by_module.get(name, 0) + len(norms)


@dataclass(frozen=True)
class DirectionStats:
    """Rows that went one way.

    Attributes:
        clip: the norm that rows were clipped to.
        sigma: standard deviation of the noise on each element.
        clipped: rows that were longer than the clip.
        noise, signal: norms of all noise and of all clipped rows.
    """

    op: str
    clip: float
    sigma: float
    rows: int
    clipped: int
    noise: float
    signal: float


@dataclass(frozen=True)
class NoiseStats:
    """What noise promises, and what it does to rows.

    Attributes:
        epsilon, delta: of one row of one call.
        mu: distance of two rows over the standard deviation of the noise, at most.
        calls: in which rows of one token were sent, forward and back, each time that it passed through the model.
        directions: forward and grad_input.
    """

    epsilon: float
    delta: float
    mu: float
    calls: float
    directions: tuple[DirectionStats, ...]

    def epsilon_after(self, releases: float) -> float:
        """The epsilon, at the same delta, of so many rows that depend on one secret, such as a token."""
        return epsilon_of(self.mu * math.sqrt(releases), self.delta)

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) pairs, formatted for people."""
        whole = (
            f"epsilon {self.epsilon_after(self.calls):,.4g} in {self.calls:,.4g} calls" if self.calls else "no calls"
        )
        return [
            ("noise", f"epsilon {self.epsilon:,.4g}, delta {self.delta:.3g} per row and call"),
            ("a token, one pass", whole),
            *((d.op, _said(d)) for d in self.directions if d.rows),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{label:<18}{value}" for label, value in self.rows())

    def _repr_html_(self) -> str:
        return html_table(self.rows())


def _said(d: DirectionStats) -> str:
    ratio = f"noise is {d.noise / d.signal:,.3g} times the rows" if d.signal else "all zeros"
    return f"{d.rows:,} rows, {100 * d.clipped / d.rows:.1f}% clipped to {d.clip:g}; {ratio}"
