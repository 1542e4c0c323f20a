"""PrivacyCallback: transformers' Trainer with `make_private`.

    model, optimizer, loader = make_private(model, optimizer, loader, ...)
    trainer = Trainer(model, args, train_dataset=loader.dataset, optimizers=(optimizer, None))
    PrivacyCallback.attach(trainer, optimizer, loader)

One rule: training stops before it is wrong. Trainer makes loaders of its own, and may add up gradients of several
batches before a step; both would break the accounting, so both are checked when training begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from symbiosis.errors import ConfigError
from symbiosis.privacy.ghost import GhostOptimizer

if TYPE_CHECKING:
    from opacus.data_loader import DPDataLoader
    from transformers import Trainer

    from symbiosis.privacy.dp import PrivateOptimizer


class PrivacyCallback(TrainerCallback):
    """Checks that a Trainer trains privately, and logs what was spent as `epsilon`; ends training over the budget."""

    def __init__(self, optimizer: PrivateOptimizer, loader: DPDataLoader) -> None:
        self._optimizer = optimizer
        self._loader = loader

    @classmethod
    def attach(cls, trainer: Trainer, optimizer: PrivateOptimizer, loader: DPDataLoader) -> PrivacyCallback:
        """Let a trainer use the private loader, and watch it."""
        callback = cls(optimizer, loader)
        trainer.__dict__["get_train_dataloader"] = lambda: loader
        trainer.add_callback(callback)
        return callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.gradient_accumulation_steps != 1:
            raise ConfigError(
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}; a private step is one Poisson batch: "
                "use 1, and set the batch size in the loader given to make_private"
            )
        if kwargs.get("train_dataloader") is not self._loader:
            raise ConfigError(
                "this Trainer does not use the loader that make_private returned, so its batches are no Poisson "
                "samples; call PrivacyCallback.attach(trainer, optimizer, loader)"
            )
        if isinstance(self._optimizer, GhostOptimizer):
            raise ConfigError(
                "Trainer scales the loss and calls backward() in its own way, and the loss of ghost clipping is no "
                "tensor; use make_private(..., clipping='per_sample'), or a loop of your own"
            )
        inner = getattr(kwargs.get("optimizer"), "optimizer", kwargs.get("optimizer"))
        if inner is not self._optimizer:
            raise ConfigError(
                "this Trainer does not use the optimizer that make_private returned; give it as "
                "Trainer(optimizers=(optimizer, None))"
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        epsilon = self._optimizer.spent().epsilon
        for record in (logs, state.log_history[-1] if state.log_history else None):  # Trainer has filed a copy already
            if record is not None:
                record["epsilon"] = epsilon

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        spent = self._optimizer.spent() if state.global_step % 50 == 0 else None
        if spent is not None and spent.epsilon > spent.target_epsilon:
            control.should_training_stop = True
