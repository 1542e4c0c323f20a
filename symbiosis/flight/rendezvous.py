"""When it pays to let one client wait for another, so that their requests are computed together.

Training and decoding are loops: a client asks for the same modules in the same order, step after step.
So it can be foreseen when a client that is a few calls behind will ask for the modules that another
asks for now. Running those behind first, and holding those ahead for a moment, lines loops up once;
lined up, they stay so at the price of their jitter, and every product is shared.

One rule: never a barrier. Nobody is held for a client that is not foreseen, nobody longer than
`max_wait_s`, and no client for more than a small share of its own time plus what sharing saved it.
A small request is never held for a large one: it would be slowed by the size of the other.

Rejected: a fixed wait for whoever may come (as in dynamic batching servers): out of step by one layer,
clients delay each other for ever and never meet.

No clock is read here: every method takes `now_s`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

MAX_KEYS = 10_000  # more than a model of hundreds of layers has
HORIZON_CALLS = 256  # how far ahead a client is followed
SMOOTHING = 0.3  # weight of the newest gap between two calls
LATELY_S = 1.0  # a client that called within this time may call again at any moment
FORGET_S = 30.0  # a client unseen for this long is forgotten
OVERDUE = 2.0  # a client that is this many times later than foreseen is not waited for
SLACK_S = 0.0003  # jitter that is always allowed for
ALIKE = 8  # requests that differ in tokens by more than this factor are not held for each other
START_CALLS = 128  # a new client may be held for as long as its first calls took: enough to line up once
MAX_CALLS = 256  # most that a client can have saved up, in calls at its pace
ALLOWANCE = 0.05  # share of a client's time that it may be held
CALL_OVERHEAD_S = 0.0001  # saved by each call that is not computed by itself, besides its product


@dataclass
class _Step:
    """What a client did after a call: the next key, and the usual time until then."""

    next: Hashable
    gap_s: float


@dataclass
class _Client:
    key: Hashable
    seen_s: float
    tokens: int
    budget_s: float = 0.0
    calls: int = 0
    pace_s: float = 0.0  # usual time between two calls
    steps: dict[Hashable, _Step] = field(default_factory=dict)

    def called(self, gap_s: float) -> None:
        """Another call: it earns a share of the time that it took."""
        self.calls += 1
        self.pace_s += (gap_s - self.pace_s) * max(0.01, 1 / self.calls)
        self.earn(gap_s if self.calls <= START_CALLS else ALLOWANCE * gap_s)

    def earn(self, seconds: float) -> None:
        self.budget_s = min(MAX_CALLS * self.pace_s, self.budget_s + seconds)


class Rendezvous:
    """Foresees arrivals and chooses what to run.

    Args:
        max_wait_s: longest time that a request is held for others; 0 holds none.
    """

    def __init__(self, max_wait_s: float) -> None:
        self.max_wait_s = max_wait_s
        self._clients: dict[Hashable, _Client] = {}
        self._alone_s: dict[Hashable, float] = {}  # key -> seconds to compute one request by itself

    def is_alone(self, client: Hashable, now_s: float) -> bool:
        """Whether no other client has called lately."""
        return all(now_s - other.seen_s > LATELY_S for name, other in self._clients.items() if name != client)

    def arrived(self, client: Hashable, key: Hashable, tokens: int, now_s: float) -> None:
        """A client asks for a key: learn how it got there."""
        known = self._clients.get(client)
        if known is None:
            self._forget(now_s)
            self._clients[client] = _Client(key, now_s, tokens)
            return
        gap_s = now_s - known.seen_s
        known.called(gap_s)
        step = known.steps.get(known.key)
        if step is not None and step.next == key:
            step.gap_s += SMOOTHING * (gap_s - step.gap_s)
        else:
            if len(known.steps) > MAX_KEYS:
                known.steps.clear()
            known.steps[known.key] = _Step(key, gap_s)
        known.key, known.seen_s, known.tokens = key, now_s, tokens

    def choose(self, waiting: Mapping[K, Collection[Hashable]], oldest_s: float, now_s: float) -> tuple[K, float]:
        """What to run of the keys that clients wait for.

        Args:
            waiting: key -> clients that wait for it; keys in order of their oldest request.
            oldest_s: when the oldest request of all came.
            now_s: the time.

        Returns:
            A key and seconds: run it now (0), or ask again after that time or the next arrival.
        """
        first = next(iter(waiting))
        if self.max_wait_s <= 0 or len(self._clients) < 2 or now_s - oldest_s >= self.max_wait_s:
            return first, 0.0
        lags = {key: self._lag(key, clients, now_s) for key, clients in waiting.items()}
        nearest = min(lags, key=lambda key: lags[key][0])
        lag_s, behind = lags[nearest]
        busy = {client for clients in waiting.values() for client in clients}
        if lag_s == 0.0 or behind & busy:
            return nearest, 0.0
        return nearest, min(lag_s * OVERDUE + SLACK_S, oldest_s + self.max_wait_s - now_s)

    def ran(self, key: Hashable, held_s: Mapping[Hashable, float], compute_s: float) -> None:
        """Account for a batch: being held is paid by each client, what sharing saved is earned by each."""
        count = len(held_s)
        saved_s = CALL_OVERHEAD_S * (count - 1)
        if count == 1:
            if len(self._alone_s) > MAX_KEYS:  # keys hold what clients choose
                self._alone_s.clear()
            self._alone_s[key] = compute_s
        elif key in self._alone_s:
            saved_s += max(0.0, count * self._alone_s[key] - compute_s) / count
        for client, seconds in held_s.items():
            if client in self._clients:
                self._clients[client].earn(saved_s - seconds)

    def _lag(self, key: Hashable, here: Collection[Hashable], now_s: float) -> tuple[float, set[Hashable]]:
        """How long until the last client worth waiting for gets to a key, and who is on the way; 0 if nobody."""
        members = [self._clients[client] for client in here if client in self._clients]
        limit_s = min((client.budget_s for client in members), default=0.0)
        tokens = max((client.tokens for client in members), default=0)
        etas = {
            name: eta_s
            for name, client in self._clients.items()
            if name not in here
            and tokens <= client.tokens * ALIKE
            and client.tokens <= tokens * ALIKE
            and (eta_s := self._eta(client, key, now_s, min(limit_s, self.max_wait_s))) is not None
        }
        return max(etas.values(), default=0.0), set(etas)

    @staticmethod
    def _eta(client: _Client, key: Hashable, now_s: float, limit_s: float) -> float | None:
        """Seconds until a client asks for a key, if that is foreseen within limit_s."""
        elapsed_s, total_s, at = now_s - client.seen_s, 0.0, client.key
        for _ in range(HORIZON_CALLS):
            step = client.steps.get(at)
            if step is None:
                return None
            total_s += step.gap_s
            at = step.next
            if total_s - elapsed_s > limit_s:
                return None
            if at == key:
                return max(1e-6, total_s - elapsed_s) if elapsed_s <= total_s * OVERDUE + SLACK_S else None
        return None

    def _forget(self, now_s: float) -> None:
        for name in [name for name, client in self._clients.items() if now_s - client.seen_s > FORGET_S]:
            del self._clients[name]
