"""How much noise (epsilon, delta) asks for, and the noise itself."""

from __future__ import annotations

import math

import pytest
import torch

from symbiosis.privacy import gaussian
from symbiosis.privacy.gaussian import draw_normal, epsilon_of, log_delta, mu_of


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 4.0, 60.0, 400.0])
@pytest.mark.parametrize("mu", [0.02, 0.5, 1.0, 3.0, 20.0])
def test_delta_is_that_of_opacus(epsilon: float, mu: float) -> None:
    gdp = pytest.importorskip("opacus.accountants.analysis.gdp")
    theirs = gdp.delta_eps_mu(eps=epsilon, mu=mu)

    # The difference of two numbers near 1 in theirs: 1e-14 is its rounding.
    assert math.exp(log_delta(epsilon, mu)) == pytest.approx(theirs, rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-10])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 100.0, 2000.0, 1e5, 1e6])
def test_mu_and_epsilon_are_each_others_inverse(epsilon: float, delta: float) -> None:
    mu = mu_of(epsilon, delta)

    assert log_delta(epsilon, mu) == pytest.approx(math.log(delta), abs=1e-3)
    assert log_delta(epsilon, 1.001 * mu) > math.log(delta)  # no less noise would do
    assert epsilon_of(mu, delta) == pytest.approx(epsilon, rel=1e-6)


def test_the_textbooks_noise_is_more_below_one_and_too_little_above() -> None:
    """sqrt(2 log(1.25 / delta)) / epsilon: the reason for the exact formula."""
    for epsilon, enough in ((0.5, True), (10.0, False)):
        textbook = epsilon / math.sqrt(2 * math.log(1.25 / 1e-5))
        assert (mu_of(epsilon, 1e-5) > textbook) is enough


def test_epsilon_is_nothing_where_noise_drowns_all() -> None:
    assert epsilon_of(1e-6, 1e-5) == 0.0


def test_noise_is_normal_and_never_the_same() -> None:
    sample = draw_normal(200, 1000)
    values = sample.flatten()
    # 200,000 draws: five standard errors each of mean, variance and fourth moment.
    assert abs(values.mean()) < 5 / len(values) ** 0.5
    assert abs(values.var() - 1) < 5 * (2 / len(values)) ** 0.5
    assert abs(values.pow(4).mean() - 3) < 5 * (96 / len(values)) ** 0.5
    assert abs((values > 1.959964).double().mean() - 0.025) < 5 * (0.025 / len(values)) ** 0.5
    assert abs((sample[:, 1:] * sample[:, :-1]).mean()) < 5 / len(values) ** 0.5
    assert values.isfinite().all()
    assert not torch.equal(sample, draw_normal(200, 1000))


def test_the_ends_of_the_keystream_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ends:
        def update(self, zeros: bytes) -> bytes:
            return (bytes(8) + b"\xff" * 8) * (len(zeros) // 16)

    monkeypatch.setattr(gaussian, "keystream", lambda seed: Ends())

    low, high = draw_normal(1, 2)[0].tolist()
    assert low == pytest.approx(8.29, abs=0.01)  # the largest: as unlikely as 2^-54
    assert -1e-15 < high <= 0


def test_more_numbers_than_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaussian, "WORDS_AT_ONCE", 7)

    sample = draw_normal(5, 5)

    assert len(sample.unique()) == 25
