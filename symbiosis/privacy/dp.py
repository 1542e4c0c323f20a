"""make_private: DP-SGD on the adapter, here, with Opacus, and with checks that it does what it says.

    each step   per-sample gradients -> clipped to max_grad_norm -> summed -> noise -> the optimizer's step

It bounds what a released adapter tells about any one record (epsilon, delta). It hides nothing from a server.

One rule: a step that cannot be shown to be right is not taken. Per-sample gradients come from hooks, and where a
method computes in a way that hooks do not see, they are missing or, worse, wrong, without an error (prompt
tuning; opacus issues 732 and 820). So before every step each trained parameter must have per-sample gradients,
one for each record of the batch, whose mean is the gradient that autograd found. Methods that are known to fail
are refused by name before that.

The model stays the object it was: hooks on it, no wrapper around it, so generate() and save_pretrained() work.
Its loss becomes the mean over records of each record's mean over tokens: a mean over all tokens, as transformers
has it, would let one record's length rescale the others, and no bound would hold.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from opacus.accountants.utils import get_noise_multiplier
from opacus.data_loader import DPDataLoader
from opacus.grad_sample import GradSampleHooks
from torch import nn
from torch.utils.data import DataLoader

from symbiosis.adapters import base_of
from symbiosis.errors import ConfigError, PrivacyCheckError, UnsupportedMethodError
from symbiosis.privacy.ghost import GhostOptimizer, ghost_hooks
from symbiosis.privacy.ledger import CountedOptimizer, Ledger, PrivacySpent, quiet_accountant
from symbiosis.privacy.record_loss import IGNORED, record_loss, record_losses, use_record_loss
from symbiosis.privacy.samples import check_parameters, check_samples, refuse_methods
from symbiosis.remote import RemoteMixin

__all__ = ["PrivacySpent", "PrivateOptimizer", "make_private", "record_loss"]


def make_private(
    model: Any,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    target_epsilon: float,
    target_delta: float,
    epochs: int,
    max_grad_norm: float = 1.0,
    accountant: Literal["prv", "rdp"] = "prv",
    clipping: Literal["per_sample", "ghost"] = "per_sample",
    seed: int | None = None,
) -> tuple[Any, PrivateOptimizer | GhostOptimizer, DPDataLoader]:
    """Make training differentially private: each record of the data is one unit of privacy.

    Args:
        model: a PeftModel or other transformers model, remote or not; its trained parameters get hooks.
        optimizer: over exactly the trained parameters of the model, made after the model was on its device.
        loader: its batch size over the size of the data is the chance of each record to be in a batch.
        target_epsilon, target_delta: the budget, spent after `epochs` passes; delta well below 1 / records.
        epochs: passes that are planned.
        max_grad_norm: to which each record's gradient is clipped.
        accountant: "prv" is tighter, "rdp" faster.
        clipping: "ghost" holds no gradients of single records, and takes a second backward pass; LoRA on linears only,
            and the loss that the model returns, whose backward() clips.
        seed: for tests. Whoever knows it can take the noise off again.

    Returns:
        The same model; an optimizer that clips, checks and adds noise, whose `spent()` says how much of the
        budget is gone and whose state_dict carries that along; a loader of Poisson batches; for an
        empty one it gives one record that counts for nothing, so that its noise is added all the same.

    Raises:
        UnsupportedMethodError: an adapter or a loss without right per-sample gradients.
        ConfigError: an optimizer that does not fit the model, or a bad budget.
    """
    _check_budget(target_epsilon, target_delta, epochs, max_grad_norm, loader)
    refuse_methods(model)
    check_parameters(model, optimizer)
    if clipping not in ("per_sample", "ghost"):
        raise ConfigError(f"clipping={clipping!r}; expected 'per_sample' or 'ghost'")
    private_loader = _poisson(loader, _generator("cpu", seed))
    sample_rate = 1 / len(loader)
    with quiet_accountant():
        noise_multiplier = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=sample_rate,
            epochs=epochs,
            accountant=accountant,
        )
    device = next(p for p in model.parameters() if p.requires_grad).device
    options: dict[str, Any] = {
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": max_grad_norm,
        "expected_batch_size": max(1, int(len(loader.dataset) * sample_rate)),  # type: ignore[arg-type]
        "generator": _generator(device, seed),
        "ledger": Ledger(accountant, noise_multiplier, sample_rate, target_epsilon, target_delta),
    }
    base = base_of(model)
    private_optimizer: PrivateOptimizer | GhostOptimizer
    if clipping == "ghost":
        private_optimizer = GhostOptimizer(optimizer, model, base, ghost_hooks(model, max_grad_norm), **options)
    else:
        use_record_loss(base)
        private_optimizer = PrivateOptimizer(optimizer, model, _add_hooks(model), **options)
    return model, private_optimizer, private_loader


class PrivateOptimizer(CountedOptimizer):
    """An optimizer that checks per-sample gradients, clips them and adds noise. `make_private` makes one."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, hooks: GradSampleHooks, *, ledger: Ledger, **rest: Any
    ) -> None:
        super().__init__(optimizer, **rest)
        self._model = model
        self._hooks = hooks
        self._losses_before = record_losses.count
        self.ledger = ledger
        self.attach_step_hook(ledger.accountant.get_optimizer_hook_fn(sample_rate=ledger.sample_rate))

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One private step.

        Raises:
            PrivacyCheckError: per-sample gradients are missing or wrong; no weight was changed.
        """
        if closure is not None:
            raise ConfigError("a private step takes no closure: it would see the batch more than once")
        check_parameters(self._model, self.original_optimizer)
        if record_losses.count == self._losses_before:
            raise PrivacyCheckError(
                "no loss was computed with record_loss since the last step: this model or training loop has a loss of "
                "its own, which may not be a mean over records. Use symbiosis.privacy.dp.record_loss(logits, labels)"
            )
        check_samples(self._model, record_losses.records)
        before = [(p, p._version) for p in self.params]
        super().step()
        if any(p._version == version for p, version in before):
            raise PrivacyCheckError("the optimizer's step left a trained parameter as it was (opacus issue 820)")
        self._losses_before = record_losses.count
        for parameter in self.params:  # whoever trains may clear only .grad, as transformers' Trainer does
            parameter.grad_sample = parameter.summed_grad = None
        return None

    def detach(self) -> None:
        """Take the hooks off the model, and give it its own loss back; then train on without privacy, if at all."""
        self._hooks.remove_hooks()
        vars(base_of(self._model)).pop("_loss_function", None)


# --- checks -----------------------------------------------------------------------------------------


def _check_budget(epsilon: float, delta: float, epochs: int, max_grad_norm: float, loader: DataLoader[Any]) -> None:
    if not (epsilon > 0 and 0 < delta < 1 and epochs >= 1 and max_grad_norm > 0):
        raise ConfigError(
            f"target_epsilon={epsilon}, target_delta={delta}, epochs={epochs}, max_grad_norm={max_grad_norm}; expected "
            "positive numbers, and a delta below 1"
        )
    records = len(loader.dataset)  # type: ignore[arg-type]
    if delta >= 1 / records:
        raise ConfigError(
            f"target_delta={delta:g} would allow giving one of the {records:,} records away; take it well below "
            f"{1 / records:.2g}"
        )


# --- parts ------------------------------------------------------------------------------------------


def _add_hooks(model: nn.Module) -> GradSampleHooks:
    for module in model.modules():
        if isinstance(module, RemoteMixin):  # it may train a bias; its weight is not here (opacus issue 542)
            GradSampleHooks.GRAD_SAMPLERS.setdefault(type(module), _remote_samples)
    try:
        hooks = GradSampleHooks(model, loss_reduction="mean")
    except NotImplementedError as error:
        raise UnsupportedMethodError(f"Opacus cannot find per-sample gradients in this model: {error}") from None
    hooks.forbid_grad_accumulation()
    return hooks


def _remote_samples(
    layer: Any, activations: list[torch.Tensor], grad_output: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Of the bias of a remote layer: grad_output [B, ..., d_out] -> [B, d_out]."""
    return {layer.bias: torch.einsum("n...k->nk", grad_output)}


def _poisson(loader: DataLoader[Any], generator: torch.Generator) -> DPDataLoader:
    private = DPDataLoader.from_data_loader(loader, generator=generator)
    private.collate_fn = _Collate(loader)
    return private


class _Collate:
    """Collates records; for none of them, one record that counts for nothing.

    Poisson batches may be empty, the first too (opacus issue 161), and the step must still be taken: its noise is
    part of the bound. But transformers' models reshape in ways that no batch of zero rows survives.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._collate = loader.collate_fn
        example = self._collate([loader.dataset[0]])
        if not isinstance(example, Mapping) or "labels" not in example:
            raise ConfigError(
                f"the loader gives batches of {type(example).__name__}; expected a dict with input_ids and labels, as "
                "transformers' collators make them"
            )
        self._nothing = {name: _blank(name, value) for name, value in example.items()}

    def __call__(self, records: list[Any]) -> Any:
        return self._collate(records) if records else {name: value.clone() for name, value in self._nothing.items()}


def _blank(name: str, value: Any) -> torch.Tensor:
    """[1, ...] without anything of the record that it was made of but its shape."""
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{name} of a batch is a {type(value).__name__}; expected a tensor")
    return torch.full_like(value, {"labels": IGNORED, "attention_mask": 1}.get(name, 0))


def _generator(device: Any, seed: int | None) -> torch.Generator:
    """Noise and batches must not follow from a seed that was set for reproducibility."""
    return torch.Generator(device).manual_seed(secrets.randbits(63) if seed is None else seed)
