"""`DashboardCallback`: puts what a transformers or TRL trainer logs onto `conn.dashboard()`.

    trainer = Trainer(model, args, train_dataset=..., callbacks=[DashboardCallback(conn)])

One rule: it only listens. A training with it is the same, step for step, as one without.
"""

from __future__ import annotations

from typing import Any

import transformers

from symbiosis.connection import Connection


class DashboardCallback(transformers.TrainerCallback):
    """Tells a connection of every logged training step: loss, learning rate, tokens where they are counted.

    With the optimizer of `make_private`, epsilon as well.

    How often is the trainer's `logging_steps`.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tokens = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Called by the trainer; logs of evaluation and of the end have no `loss`."""
        if not logs or "loss" not in logs:
            return
        seen = int(logs.get("num_tokens") or state.num_input_tokens_seen or 0)  # TRL's name, and transformers' own
        self._connection.track(
            float(logs["loss"]),
            step=state.global_step,
            steps=state.max_steps if state.max_steps > 0 else None,
            learning_rate=logs.get("learning_rate"),
            tokens=max(0, seen - self._tokens) or None,
            spent=_spent(kwargs.get("optimizer")),
        )
        self._tokens = seen


def _spent(optimizer: Any) -> Any:
    """What a private optimizer, which accelerate may have wrapped, has spent; None of others."""
    spent = getattr(getattr(optimizer, "optimizer", optimizer), "spent", None)
    return spent() if callable(spent) else None
