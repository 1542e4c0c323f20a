"""What a demo client tells its parent: one JSON object per line on its standard output.

One rule: these lines are the only thing written there; what libraries print goes to standard error.
"""

from __future__ import annotations

import msgspec

from symbiosis.telemetry import Stats


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """`done` of `total` units of work are behind; `phase` is what comes now."""

    phase: str
    done: int
    total: int
    loss: float | None = None


class Measured(msgspec.Struct, frozen=True):
    """The model at one moment: mean loss per held-out answer token, and its answers to the demo's questions."""

    loss: float
    answers: list[str]


class Result(msgspec.Struct, frozen=True, tag="result", kw_only=True):
    """All that one client found out."""

    method: str
    adapter_dir: str
    training_pairs: int
    held_out_pairs: int
    before: Measured
    after: Measured
    steps: int
    started_s: float  # wall clock, so that two clients can be compared
    ended_s: float
    stats: Stats  # of the training steps alone
    loaded_bytes: int  # with the model loaded; this and the next are above what bare imports take
    peak_bytes: int
    base_bytes: int

    @property
    def change(self) -> float:
        """Relative change of the held-out answer loss; -0.3 means 30% lower."""
        return self.after.loss / self.before.loss - 1


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The client met an error of the tree; `code` names its class."""

    code: str
    message: str


Event = Progress | Result | Failure


def encode(event: Event) -> str:
    """One line, without its end."""
    return msgspec.json.encode(event).decode()


def decode(line: str) -> Event:
    """The event on one line.

    Raises:
        msgspec.DecodeError: the line is something else.
    """
    event: Event = msgspec.json.decode(line, type=Event)
    return event
