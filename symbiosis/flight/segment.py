"""Segments: a few published modules and whitelisted operations, run as one call.

What lies between two attentions of a decoder is frozen and treats each token on its own: o_proj, add, norm,
MLP, add, norm, q/k/v. A client names these steps, and the values it wants back; nothing of it is code.

One rule: every step is checked against the modules it names before anything is computed: that they are
served, take the width that they are given, and refer to earlier values only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symbiosis.errors import InvalidInputError
from symbiosis.flight.base_model import BaseModel, Linear
from symbiosis.flight.protocol import Step


def check(base: BaseModel, steps: Sequence[Step], outputs: Sequence[int], shapes: Sequence[Sequence[int]]) -> int:
    """Check a segment; the width of the most that it holds at once: all its outputs, or one value on the way.

    Args:
        base: the model whose modules the steps name.
        steps: each appends one value to the inputs; `args` are indices of values.
        outputs: indices of the values that are sent back.
        shapes: of the inputs, each [N, d].

    Raises:
        UnknownModuleError: a module that is not served.
        InvalidInputError: steps that do not fit together.
    """
    if any(shape[0] != shapes[0][0] for shape in shapes):
        raise InvalidInputError(f"inputs of a segment have {[s[0] for s in shapes]} tokens; expected one number")
    widths = [shape[1] for shape in shapes]
    for number, step in enumerate(steps):
        if not all(0 <= arg < len(widths) for arg in step.args):
            raise InvalidInputError(f"step {number} ({step.do}) uses values {list(step.args)} of {len(widths)}")
        widths.append(_width(base, number, step, [widths[arg] for arg in step.args]))
    if not outputs or not all(0 <= output < len(widths) for output in outputs):
        raise InvalidInputError(f"a segment of {len(widths)} values cannot send back {list(outputs)}")
    return max(sum(widths[output] for output in outputs), *widths)


def run(
    base: BaseModel, steps: Sequence[Step], outputs: Sequence[int], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Run a checked segment on inputs [N, d]; its outputs, each [N, d]."""
    values = list(tensors)
    for step in steps:
        values.append(_run_step(base, step, [values[arg] for arg in step.args]))
    return [values[output] for output in outputs]


def _width(base: BaseModel, number: int, step: Step, args: list[int]) -> int:
    """The width of a step's value, from those of its arguments."""
    where = f"step {number} ({step.do} {', '.join(step.modules)})"
    if len(args) != (2 if step.do == "add" else 1):
        raise InvalidInputError(f"{where} got {len(args)} arguments")
    if bool(step.modules) != (step.do in ("linears", "call", "bias")):
        raise InvalidInputError(f"{where} names {len(step.modules)} modules")
    if step.do == "add" and args[0] != args[1]:
        raise InvalidInputError(f"{where} got values of widths {args}, expected equal ones")
    if step.do in ("linears", "call"):
        _, d_out = base.check("forward", step.modules, [[0, args[0]]])
        if (step.do == "linears") != isinstance(base.modules[step.modules[0]], Linear):
            raise InvalidInputError(f"{where} names a module of another kind")
        return d_out
    if step.do == "bias":
        linear = base.linears.get(step.modules[0]) if len(step.modules) == 1 else None
        if linear is None or linear.bias is None or linear.d_out != args[0]:
            raise InvalidInputError(f"{where} got a value of width {args[0]}, which is no output of a linear with bias")
    return args[0]


def _run_step(base: BaseModel, step: Step, args: list[torch.Tensor]) -> torch.Tensor:
    if step.do == "add":
        return args[0] + args[1]
    if step.do == "scale":
        return args[0] * step.factor
    if step.do == "bias":
        bias = base.linears[step.modules[0]].bias
        assert bias is not None
        return args[0] + bias
    return base.run("forward", step.modules, args)
