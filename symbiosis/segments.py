"""Segments: several steps as one call and as one node of autograd (docs/protocol.md section 4).

One rule: what a segment was computed from is kept as it was. If an input was overwritten since, its gradient is an
error, not the gradient of something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from symbiosis.flight.protocol import Step
from symbiosis.rows import flat, joined_rows, owned, split_rows


class SegmentRemote(Protocol):
    """Where segments are computed."""

    def segment(
        self,
        steps: Sequence[Step],
        outputs: Sequence[int],
        tensors: Sequence[torch.Tensor],
        kept: list[int] | None = None,
    ) -> list[torch.Tensor]:
        """Run steps on inputs [N, d]; the chosen values, each [N, d]. `kept` is filled for `segment_grad`."""

    def segment_grad(
        self,
        steps: Sequence[Step],
        outputs: Sequence[int],
        wrt: Sequence[int],
        grads: Sequence[torch.Tensor | None],
        tensors: Sequence[torch.Tensor],
        kept: Sequence[int],
    ) -> list[torch.Tensor]:
        """Gradients for the inputs at the places `wrt`, each [N, d], from those of the outputs."""


class SegmentCall(NamedTuple):
    """A segment as it is sent."""

    remote: SegmentRemote
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    lead: tuple[int, ...]
    widths: tuple[int, ...]  # into which the last output is split; empty if it is not
    records: bool
    sources: tuple[Any, ...]  # what its inputs are the values of

    def shaped(self, results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Outputs [N, d] as the tensors of the model, [*lead, d]."""
        whole = results[:-1] if self.widths else results
        parts = split_rows(results[-1], self.widths, self.lead) if self.widths else ()
        return *(owned(value, (*self.lead, value.shape[1])) for value in whole), *parts

    def gradients(self, grads: Sequence[torch.Tensor | None], like: torch.Tensor) -> list[torch.Tensor | None]:
        """Gradients of the tensors of the model as those of the outputs, [N, d]."""
        whole = len(self.outputs) - bool(self.widths)
        found = [None if grad is None else flat(grad) for grad in grads[:whole]]
        parts = grads[whole:]
        if all(part is None for part in parts):
            return [*found, *([None] if self.widths else [])]
        zeros = [like.new_zeros(1).expand(*self.lead, width) for width in self.widths]
        return [*found, joined_rows([z if part is None else part for part, z in zip(parts, zeros, strict=True)])]


class Segment(torch.autograd.Function):
    """A segment as one node of autograd: one call forward, one back."""

    @staticmethod
    def forward(ctx: Any, call: SegmentCall, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.kept = call, [] if call.records and any(ctx.needs_input_grad) else None
        # Not saved for backward: a checkpoint must find the same tensors saved when a layer runs again, and
        # a segment may have begun in the layer before.
        ctx.inputs, ctx.versions = inputs, [x._version for x in inputs]
        results = call.shaped(call.remote.segment(call.steps, call.outputs, [flat(x) for x in inputs], ctx.kept))
        ctx.count = len(results)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *input_gradients(ctx, grads)


def input_gradients(ctx: Any, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Gradients of a segment's inputs, from those of what it returned."""
    call: SegmentCall = ctx.call
    wrt = [place for place, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
    given = call.gradients(grads, ctx.inputs[0])
    results: list[torch.Tensor | None] = [None] * len(ctx.inputs)
    if not wrt or all(grad is None for grad in given):
        return results
    if [x._version for x in ctx.inputs] != ctx.versions:
        raise RuntimeError(overwritten(call.steps[0]))
    inputs = [flat(x) for x in ctx.inputs]
    found = call.remote.segment_grad(call.steps, call.outputs, wrt, given, inputs, ctx.kept)
    for place, grad in zip(wrt, found, strict=True):
        results[place] = grad.view(ctx.inputs[place].shape)
    return results


def overwritten(step: Step) -> str:
    """What to tell somebody whose input changed under a step that was put off."""
    return (
        f"an input of {step.do} {', '.join(step.modules)} was changed in place before its value was used; "
        "wrap(model, granularity='linear') does not put calls off"
    )
