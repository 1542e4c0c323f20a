"""Activation checkpointing, in both forms and wherever it is enabled, for the compatibility table."""

from __future__ import annotations

from typing import Any

from symbiosis.telemetry import CallEvent
from tests.conformance.harness import Section
from tests.conformance.loops import plain
from tests.conformance.trainers import trainer
from tests.conformance.training import STEPS, Make, Training, Wrap, adapted

REENTRANT = {True: "reentrant", False: "not reentrant"}
PLACES = {"first": "enabled first", "after wrap": "enabled after wrap", "last": "enabled after get_peft_model"}


def checkpoint(model: Any, use_reentrant: bool) -> None:
    model.enable_input_require_grads()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})


def checkpointed(enabled: str, use_reentrant: bool) -> Make:
    """Checkpointing enabled at this place of the making."""

    def make(model: Any, wrap: Wrap) -> Any:
        if enabled == "first":
            checkpoint(model, use_reentrant)
        model = wrap(model)
        if enabled == "after wrap":
            checkpoint(model, use_reentrant)
        model = adapted(model)
        if enabled == "last":
            checkpoint(model, use_reentrant)
        return model

    return make


def peft_first(use_reentrant: bool) -> Make:
    """On the PEFT model, which is wrapped last."""

    def make(model: Any, wrap: Wrap) -> Any:
        model = adapted(model)
        checkpoint(model, use_reentrant)
        return wrap(model)

    return make


def twice_forward(calls: list[CallEvent]) -> None:
    """A layer that is checkpointed is computed twice a step: else nothing was shown."""
    found = [
        call
        for call in calls
        if call.op == "forward" and any(name.endswith("layers.1.self_attn.q_proj") for name in call.modules)
    ]
    assert len(found) == 2 * STEPS, f"{len(found)} calls of the last layer's q"


CHECKPOINTING: tuple[Training, ...] = (
    *(
        Training(
            f"{REENTRANT[form].capitalize()}, {PLACES[place]}",
            loop=plain,
            make=checkpointed(place, form),
            watch=twice_forward,
        )
        for form in (True, False)
        for place in PLACES
    ),
    *(
        Training(
            f"{REENTRANT[form].capitalize()}, on a PEFT model, then wrap",
            loop=plain,
            make=peft_first(form),
            watch=twice_forward,
        )
        for form in (True, False)
    ),
    *(
        Training(
            f"{REENTRANT[form].capitalize()}, by Trainer",
            loop=trainer(activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": form}),
            watch=twice_forward,
        )
        for form in (True, False)
    ),
)

SECTIONS = (Section("Training: activation checkpointing", CHECKPOINTING),)
