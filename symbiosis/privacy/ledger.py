"""Ledger: counts private steps, and says what they add up to.

One rule: what was spent travels with the optimizer's state, and a state that does not say it is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opacus.accountants import create_accountant
from opacus.optimizers import DPOptimizer

from symbiosis.errors import ConfigError
from symbiosis.tables import html_table

STATE = "privacy"  # key of what was spent in an optimizer's state


@dataclass(frozen=True)
class PrivacySpent:
    """What has been spent of a budget: epsilon at delta, after so many steps."""

    epsilon: float
    target_epsilon: float
    delta: float
    steps: int
    noise_multiplier: float

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) pairs, formatted for people."""
        return [
            ("epsilon", f"{self.epsilon:.3f} of {self.target_epsilon:g}"),
            ("delta", f"{self.delta:g}"),
            ("private steps", f"{self.steps:,}"),
            ("noise", f"{self.noise_multiplier:.3f} x max_grad_norm"),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{label:<15}{value}" for label, value in self.rows())

    def _repr_html_(self) -> str:
        return html_table(self.rows())


class Ledger:
    """Counts private steps and says what they add up to."""

    def __init__(
        self, mechanism: str, noise_multiplier: float, sample_rate: float, target_epsilon: float, delta: float
    ) -> None:
        self.accountant = create_accountant(mechanism)
        self.noise_multiplier = noise_multiplier
        self.sample_rate = sample_rate
        self.target_epsilon = target_epsilon
        self.delta = delta

    @property
    def steps(self) -> int:
        return sum(count for _, _, count in self.accountant.history)

    def spent(self) -> PrivacySpent:
        with quiet_accountant():
            epsilon = float(self.accountant.get_epsilon(self.delta)) if self.steps else 0.0
        return PrivacySpent(epsilon, self.target_epsilon, self.delta, self.steps, self.noise_multiplier)

    def state_dict(self) -> dict[str, Any]:
        return {
            "mechanism": self.accountant.mechanism(),
            "history": [list(entry) for entry in self.accountant.history],
            "delta": self.delta,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["mechanism"] != self.accountant.mechanism():
            raise ConfigError(
                f"this training was counted by the accountant {state['mechanism']!r}; make_private was called with "
                f"{self.accountant.mechanism()!r}"
            )
        self.accountant.history = [tuple(entry) for entry in state["history"]]


class CountedOptimizer(DPOptimizer):  # type: ignore[misc]
    """An optimizer of Opacus with a ledger."""

    ledger: Ledger

    def spent(self) -> PrivacySpent:
        """What has been spent of the budget so far."""
        return self.ledger.spent()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own state, and what was spent."""
        return {**super().state_dict(), STATE: self.ledger.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            ConfigError: it does not say what was spent.
        """
        if STATE not in state_dict:
            raise ConfigError(
                "this optimizer state does not say what was spent of the privacy budget, so going on from it could "
                "not be counted; save with the optimizer that make_private returned"
            )
        self.ledger.load_state_dict(state_dict[STATE])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != STATE})


@contextmanager
def quiet_accountant() -> Iterator[None]:
    """Without the remark that a bound, which holds, could be tighter: it is made while noise levels are tried out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Optimal order is", UserWarning)
        yield
