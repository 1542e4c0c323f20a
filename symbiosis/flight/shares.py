"""Whose turn it is: tokens served to each tenant, kept within reach of one another.

Each tenant has a counter of the tokens served to it, divided by its weight; of those that wait, the ones whose
counter lags come first. Nobody saves up a claim by being idle: whoever comes back starts at most SAVED slacks
behind those present. (Clients are loops and leave after every call, so to start level would take from them
what they are owed.) The counters are those of VTC (Sheng et al., "Fairness in Serving Large Language Models",
OSDI '24), which S-LoRA uses; the slack is ours: tenants within it count as even, and then what can be computed
together decides.

One rule: a tenant that waits is passed over for at most `slack_tokens` of others, by its weight, and no task for
more than MAX_PASSED batches of small ones. Work is never put off for fairness' sake while nobody else waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

SMALL_TOKENS = 16  # a request of this size is decoding, or as quick
MAX_PASSED = 8  # batches of small requests in a row while others wait
SAVED = 2  # slacks
MAX_TENANTS = 10_000  # names are chosen by clients


class Shares:
    """Counts what tenants got.

    Args:
        slack_tokens: how far tenants may be apart before the one behind goes first.
        weight_of: a tenant's weight; one of 2 gets twice the tokens of one of 1.
    """

    def __init__(self, slack_tokens: int, weight_of: Callable[[str], float] = lambda tenant: 1.0) -> None:
        self.slack_tokens = slack_tokens
        self._weight_of = weight_of
        self._served: dict[str, float] = {}
        self._passed = 0

    def arrived(self, tenant: str, waiting: Collection[str]) -> None:
        """A tenant asks for something; `waiting` are those that already do."""
        if tenant in waiting:
            return
        if len(self._served) > MAX_TENANTS:
            self._served = {name: self._served[name] for name in waiting if name in self._served}
        floor = min((self._served.get(name, 0.0) for name in waiting), default=0.0)
        self._served[tenant] = max(self._served.get(tenant, 0.0), floor - SAVED * self.slack_tokens)

    def served(self, tenant: str, tokens: int) -> None:
        self._served[tenant] = self._served.get(tenant, 0.0) + max(1, tokens) / self._weight_of(tenant)

    def due(self, waiting: Collection[str]) -> set[str]:
        """Those of the waiting tenants that may be served now."""
        counters = {tenant: self._served.get(tenant, 0.0) for tenant in waiting}
        limit = min(counters.values(), default=0.0) + self.slack_tokens
        return {tenant for tenant, counter in counters.items() if counter <= limit}

    def small_first(self) -> bool:
        """Whether small requests may still go before others."""
        return self._passed < MAX_PASSED

    def ran(self, small: bool, others_wait: bool) -> None:
        """A batch was taken: of small requests only, while others were or were not waiting."""
        self._passed = self._passed + 1 if small and others_wait else 0
