"""Ghost clipping: norms of the records' gradients without the gradients, for adapters made of linears.

    first backward    of the mean loss: hooks find each record's norm (Li et al. 2022, arXiv 2110.05679)
    second backward   of the losses, each times its clipping factor: the sum of the clipped gradients

It never holds one gradient per record, and pays with the second pass, which goes through the server as well.

One rule: what is stepped on is what the second pass left, and nothing else. Norms cannot be seen to be wrong as
per-sample gradients can; so only linears are taken, and the first step compares one record's norm, chosen by chance,
with that of its gradient.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooksFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import nn

from symbiosis.errors import ConfigError, PrivacyCheckError, UnsupportedMethodError
from symbiosis.privacy.ledger import CountedOptimizer, Ledger
from symbiosis.privacy.record_loss import use_loss_of_records
from symbiosis.privacy.samples import check_parameters

NORM_TOLERANCE = 2e-2  # of a norm against that of the record's gradient; bfloat16 keeps 8 bits
PER_SAMPLE = "use clipping='per_sample'"


class GhostOptimizer(CountedOptimizer, DPOptimizerFastGradientClipping):  # type: ignore[misc]
    """An optimizer for losses that were clipped on their way back. `make_private(clipping="ghost")` makes one."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        base: Any,
        hooks: GhostHooks,
        *,
        ledger: Ledger,
        **rest: Any,
    ) -> None:
        super().__init__(optimizer, **rest)
        self._model = model
        self._base = base
        self.hooks = hooks
        self.ledger = ledger
        self._left: list[tuple[torch.Tensor, int]] = []  # the gradients of a second pass, as it left them
        self._compared = False
        self.attach_step_hook(ledger.accountant.get_optimizer_hook_fn(sample_rate=ledger.sample_rate))
        use_loss_of_records(base, lambda losses: GhostLoss(hooks, self, losses, "mean"))

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One private step.

        Raises:
            PrivacyCheckError: the gradients are not those of one clipped backward pass; no weight was changed.
        """
        if closure is not None:
            raise ConfigError("a private step takes no closure: it would see the batch more than once")
        check_parameters(self._model, self.original_optimizer)
        if not self._left:
            raise PrivacyCheckError(
                "no clipped backward pass since the last step: call backward() on the loss that the model returned for "
                f"labels, as it is, and then step(); for a loss of your own {PER_SAMPLE}"
            )
        left, self._left = self._left, []
        if any(
            p.grad is not grad or grad._version != version for p, (grad, version) in zip(self.params, left, strict=True)
        ):
            raise PrivacyCheckError(
                "gradients were changed between backward() and step(), by another backward pass or by clipping; "
                "nothing may be added to what was clipped"
            )
        before = [(p, p._version) for p in self.params]
        super().step()
        if any(p._version == version for p, version in before):
            raise PrivacyCheckError("the optimizer's step left a trained parameter as it was (opacus issue 820)")
        for parameter in self.params:
            parameter.summed_grad = parameter._norm_sample = None
        return None

    def detach(self) -> None:
        """Take the hooks off the model, and give it its own loss back; then train on without privacy, if at all."""
        self.hooks.remove_hooks()
        vars(self._base).pop("_loss_function", None)

    # --- around a backward pass ---------------------------------------------------------------------

    def expected_norm(self, losses: torch.Tensor) -> tuple[int, float] | None:
        """Before a clipped pass: of one record, the norm of its gradient, found by autograd; None but for the first."""
        if self._left:
            raise PrivacyCheckError(
                "two backward passes for one step: the first one's records would be lost; call step()"
            )
        for parameter in self.params:
            parameter._norm_sample = None
        self.hooks.records = len(losses)
        if self._compared:
            return None
        record = secrets.randbelow(len(losses))
        self.hooks.disable_hooks()
        try:
            grads = torch.autograd.grad(losses[record], self.params, retain_graph=True, materialize_grads=True)
        finally:
            self.hooks.enable_hooks()
        return record, torch.stack([grad.norm() for grad in grads]).norm().item()

    def took(self, expected: tuple[int, float] | None) -> None:
        """After a clipped pass."""
        self.hooks.records = 0
        if expected is not None:
            record, right = expected
            norm = self.hooks.per_sample_gradient_norms[record].item()
            if abs(norm - right) > NORM_TOLERANCE * right:
                raise PrivacyCheckError(
                    f"a record's gradient has the norm {right:.4g}, ghost clipping found {norm:.4g}; {PER_SAMPLE}"
                )
            self._compared = True
        self._left = [(p.grad, p.grad._version) for p in self.params]


class GhostLoss(DPTensorFastGradientClipping):  # type: ignore[misc]
    """The losses of a batch's records [B], whose backward() clips. Not a tensor: what it counts may not be changed."""

    def backward(self) -> None:
        """Both passes.

        Raises:
            PrivacyCheckError: norms are missing or wrong, or the last pass was not stepped on.
        """
        expected = self.optimizer.expected_norm(self.loss_per_sample)
        super().backward()
        self.optimizer.took(expected)

    def detach(self) -> torch.Tensor:
        """The mean, without its history."""
        losses: torch.Tensor = self.loss_per_sample
        return losses.detach().mean()

    def __float__(self) -> float:
        return float(self.item())


class GhostHooks(GradSampleHooksFastGradientClipping):  # type: ignore[misc]
    """Opacus' hooks, which must have found a norm for each record of each trained parameter."""

    records = 0  # of the batch that is on its way back; 0 where none of ours is

    def get_norm_sample(self) -> torch.Tensor:
        """Norms of the records' gradients [B], before anything is clipped by them.

        Raises:
            PrivacyCheckError: some are missing, or it is not GhostLoss that asks.
        """
        if not self.records:
            raise PrivacyCheckError(
                "the loss was added to or scaled before backward(): what is not the mean over records is not counted; "
                "call backward() on the loss that the model returned"
            )
        for name, parameter in self._module.named_parameters():
            norms = getattr(parameter, "_norm_sample", None)
            if parameter.requires_grad and (norms is None or norms.shape != (self.records,)):
                found = "no norms" if norms is None else f"norms of shape {list(norms.shape)}"
                raise PrivacyCheckError(f"{name} has {found} of {self.records} records' gradients; {PER_SAMPLE}")
        found_norms: torch.Tensor = super().get_norm_sample()
        return found_norms


def ghost_hooks(model: nn.Module, max_grad_norm: float) -> GhostHooks:
    """Hooks that find norms.

    Raises:
        UnsupportedMethodError: something is trained that is no weight or bias of an `nn.Linear`.
    """
    for name, module in model.named_modules():
        if type(module) is not nn.Linear and any(p.requires_grad for p in module.parameters(recurse=False)):
            raise UnsupportedMethodError(
                f"ghost clipping of {name}, a {type(module).__name__}: it is for adapters made of nn.Linear, such as "
                f"LoRA; {PER_SAMPLE}"
            )
    try:
        return GhostHooks(model, loss_reduction="mean", max_grad_norm=max_grad_norm)
    except NotImplementedError as error:
        raise UnsupportedMethodError(f"Opacus cannot find gradient norms in this model: {error}") from None
