"""record_loss: the loss to use under DP-SGD, and how a transformers model gets it.

One rule: a mean over records of each record's mean over its labels. transformers' own, a mean over all tokens of a
batch, lets one record's length rescale the others, so that clipping each record's gradient would bound nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from symbiosis.errors import UnsupportedMethodError

# By transformers' name of a loss: whether token t predicts label t + 1.
SHIFTS: dict[str | None, bool] = {
    "ForCausalLM": True,
    None: True,  # what transformers takes for a class whose name says nothing, such as GPT2LMHeadModel
    "ForMaskedLM": False,
    "ForTokenClassification": False,
    "ForSequenceClassification": False,
}
IGNORED = -100  # the label of what is not to be predicted


class _Losses:
    """What record_loss was called for: how often, and with how many records the last time."""

    count = 0
    records = 0


record_losses = _Losses()


def use_record_loss(base: Any) -> None:
    """Let a transformers model return record_loss.

    Raises:
        UnsupportedMethodError: its own loss is of a kind that record_loss does not stand for.
    """
    use_loss_of_records(base, _mean)


def use_loss_of_records(base: Any, reduce: Callable[[torch.Tensor], Any]) -> None:
    """Let a transformers model return what `reduce` makes of its records' losses [B].

    Raises:
        UnsupportedMethodError: its own loss is of a kind that record_loss does not stand for.
    """
    kind = getattr(base, "loss_type", None)
    if kind not in SHIFTS:
        raise UnsupportedMethodError(
            f"the loss of {type(base).__name__} ({kind}) is not known to be a mean over records; known are "
            f"{', '.join(filter(None, SHIFTS))}"
        )
    base.loss_function = partial(_model_loss, SHIFTS[kind], reduce)


def _model_loss(
    shift: bool,
    reduce: Callable[[torch.Tensor], Any],
    logits: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    *args: Any,
    pooled_logits: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """As transformers' models call their loss; classifiers of whole records pass pooled_logits [B, V]."""
    scores = pooled_logits if pooled_logits is not None else logits
    if scores is None or labels is None or labels.is_floating_point():
        raise UnsupportedMethodError("DP-SGD knows losses of classes only: labels must be whole numbers")
    return reduce(losses_of_records(scores, labels, shift))


def record_loss(logits: torch.Tensor, labels: torch.Tensor, *, shift: bool = True) -> torch.Tensor:
    """The loss to use under DP-SGD: a mean over records of each record's mean over its labels.

    Args:
        logits: [B, T, V], or [B, V] with one label for a record.
        labels: [B, T] or [B], -100 where there is nothing to predict; a record without any counts as 0.
        shift: whether token t predicts label t + 1, as in causal models.
    """
    return _mean(losses_of_records(logits, labels, shift))


def losses_of_records(logits: torch.Tensor, labels: torch.Tensor, shift: bool) -> torch.Tensor:
    """Each record's mean over its labels, [B]; arguments as of `record_loss`."""
    record_losses.count += 1
    record_losses.records = len(labels)
    if logits.dim() == 2:
        logits, labels, shift = logits[:, None], labels[:, None], False
    if shift:
        labels = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    labels = labels.to(logits.device)
    # [B, V, T], [B, T] -> [B, T]
    losses = functional.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    counted = (labels != IGNORED).sum(1).clamp_min(1)
    return losses.sum(1) / counted


def _mean(losses: torch.Tensor) -> torch.Tensor:
    return losses.sum() / max(1, len(losses))
