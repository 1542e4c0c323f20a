"""The Gaussian mechanism: how much noise (epsilon, delta) asks for, and the noise itself.

    delta(epsilon) = Φ(μ/2 - ε/μ) - exp(ε) Φ(-μ/2 - ε/μ)          μ = sensitivity / standard deviation

(Balle and Wang 2018, theorem 8: exact, for every epsilon; the textbook's sqrt(2 log(1.25 / delta)) / epsilon holds
below 1 only.) Releases of one value compose: their μ add up in squares, and nothing is lost by that rule
(Dong, Roth and Su 2019, corollary 3.3).

One rule: in logarithms, since exp(epsilon) overflows where noise is small enough for a model to live with.
Opacus has the same formula (`accountants.analysis.gdp`), without logarithms and up to epsilon 500; tests compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from symbiosis.errors import MissingExtraError
from symbiosis.privacy.draws import fresh_seed, keystream

LARGEST_MU = 1e4  # epsilon of fifty million: no privacy at all
WORDS_AT_ONCE = 1 << 18


def log_delta(epsilon: float, mu: float) -> float:
    """The logarithm of the smallest delta that a mechanism with this μ has at epsilon."""
    from scipy.special import log_ndtr

    above, below = float(log_ndtr(mu / 2 - epsilon / mu)), float(log_ndtr(-mu / 2 - epsilon / mu))
    share = math.exp(min(0.0, epsilon + below - above))  # of the second term in the first
    return above + math.log1p(-share) if share < 1 else -math.inf


def mu_of(epsilon: float, delta: float) -> float:
    """The largest μ that (epsilon, delta) allows.

    Raises:
        MissingExtraError: the package scipy is not installed.
    """
    return _root(lambda mu: log_delta(epsilon, mu) - math.log(delta), 1e-6, LARGEST_MU)


def epsilon_of(mu: float, delta: float) -> float:
    """The smallest epsilon of a mechanism with this μ at delta; 0 where it is that private already.

    Raises:
        MissingExtraError: the package scipy is not installed.
    """
    _check_scipy()
    if log_delta(0.0, mu) <= math.log(delta):
        return 0.0
    highest = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1.0  # the tail bound, which is never below
    return _root(lambda epsilon: log_delta(epsilon, mu) - math.log(delta), 0.0, highest)


def draw_normal(rows: int, width: int) -> torch.Tensor:
    """Standard normal numbers [rows, width] in float64 that nobody can foresee.

    From a fresh ChaCha20 keystream: a bit for the sign, and 52 bits of probability for the size.
    """
    from scipy.special import ndtri

    stream = keystream(fresh_seed())
    out = torch.empty(rows, width, dtype=torch.float64)
    flat = out.view(-1).numpy()
    for start in range(0, len(flat), WORDS_AT_ONCE):
        part = flat[start : start + WORDS_AT_ONCE]
        words = np.frombuffer(stream.update(bytes(8 * len(part))), dtype="<u8")
        sizes = ndtri(((words >> 12).astype(np.float64) + 0.5) * 2.0**-53)  # of a probability in (0, 1/2)
        part[:] = np.where(words & 1, sizes, -sizes)
    return out


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    _check_scipy()
    from scipy.optimize import brentq

    return float(brentq(lambda x: max(function(x), -1e300), low, high, xtol=1e-12, rtol=1e-12))


def _check_scipy() -> None:
    try:
        import scipy  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "noise is calibrated with the package scipy, which is not installed; "
            "run: pip install 'symbiosis-flight[privacy]'"
        ) from error
