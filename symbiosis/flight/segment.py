"""Segments: a few published modules and whitelisted operations, run as one call.

What lies between two attentions of a decoder is frozen and treats each token on its own: o_proj, add, norm,
MLP, add, norm, q/k/v. A client names these steps, and the values it wants back; nothing of it is code.

One rule: every step is checked against the modules it names before anything is computed: that they are
served, take the width that they are given, and refer to earlier values only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from symbiosis.errors import InvalidInputError
from symbiosis.flight import gemm
from symbiosis.flight.base_model import BaseModel, Linear
from symbiosis.flight.protocol import Step
from symbiosis.flight.quantized import Weight


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
    widths = _widths(base, steps, shapes)
    if not outputs or not all(0 <= output < len(widths) for output in outputs):
        raise InvalidInputError(f"a segment of {len(widths)} values cannot send back {list(outputs)}")
    return max(sum(widths[output] for output in outputs), *widths)


def check_grad(
    base: BaseModel,
    steps: Sequence[Step],
    outputs: Sequence[int],
    wrt: Sequence[int],
    shapes: Sequence[Sequence[int]],
    inputs: Sequence[Sequence[int]],
) -> int:
    """Check the gradient of a segment; the width of the most that it holds at once.

    Args:
        base: the model whose modules the steps name.
        steps: as in `check`.
        outputs: indices of the values whose gradients are given.
        wrt: indices of the inputs whose gradients are asked for.
        shapes: of the given gradients, each [N, d].
        inputs: shapes of the segment's inputs, each [N, d].

    Raises:
        InvalidInputError: steps that do not fit together, or gradients that are not those of the outputs.
    """
    widest = check(base, steps, outputs, inputs)
    widths = _widths(base, steps, inputs)
    expected = [[inputs[0][0], widths[output]] for output in outputs]
    if [list(shape) for shape in shapes] != expected:
        raise InvalidInputError(f"gradients of a segment have shapes {list(shapes)}, expected {expected}")
    if not wrt or len(set(wrt)) != len(wrt) or not all(0 <= place < len(inputs) for place in wrt):
        raise InvalidInputError(f"a segment of {len(inputs)} inputs has no gradients for {list(wrt)}")
    return max(widest, sum(widths[place] for place in wrt))


def run(
    base: BaseModel, steps: Sequence[Step], outputs: Sequence[int], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Run a checked segment on inputs [N, d]; its outputs, each [N, d]."""
    values = _values(base, steps, tensors, gemm.forward)
    return [values[output] for output in outputs]


def run_and_keep(
    base: BaseModel, steps: Sequence[Step], outputs: Sequence[int], tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """As `run`, and the products that `grad` will want, each [N, d]; none if they cannot be told apart by tokens."""
    tape = gemm.Tape(tensors[0].shape[0])
    with tape.running():
        values = _values(base, steps, tensors, gemm.product, gemm.forward)
    return [values[output] for output in outputs], tape.recorded() or []


def grad(
    base: BaseModel,
    steps: Sequence[Step],
    outputs: Sequence[int],
    wrt: Sequence[int],
    grads: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    products: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Gradients of a checked segment, for the inputs that `wrt` names, each [N, d].

    Args:
        base: the model whose modules the steps name.
        steps: as in `check`.
        outputs: indices of the values whose gradients are given.
        wrt: indices of the inputs whose gradients are asked for.
        grads: of the outputs, each [N, d].
        inputs: of the segment, each [N, d].
        products: what `run_and_keep` gave beside the outputs; without them they are computed again.
    """
    leaves = [x.detach().requires_grad_(place in wrt) for place, x in enumerate(inputs)]
    tape = gemm.Tape(inputs[0].shape[0], products or None)
    with torch.enable_grad(), tape.running():
        values = _values(base, steps, leaves, gemm.product, gemm.unneeded)
        given = [(values[output], g) for output, g in zip(outputs, grads, strict=True) if values[output].requires_grad]
    asked = [leaves[place] for place in wrt]
    if not given:
        return [torch.zeros_like(leaf) for leaf in asked]
    found = torch.autograd.grad([v for v, _ in given], asked, [g for _, g in given], materialize_grads=True)
    return list(found)


Product = Callable[[torch.Tensor, Sequence[Weight]], torch.Tensor]


def _values(
    base: BaseModel,
    steps: Sequence[Step],
    tensors: Sequence[torch.Tensor],
    product: Product,
    last_product: Product | None = None,
) -> list[torch.Tensor]:
    """All values of a segment; the products that no other step uses are computed by `last_product`."""
    values = list(tensors)
    used = {arg for step in steps for arg in step.args}
    for step in steps:
        multiply = product if len(values) in used else last_product or product
        values.append(_run_step(base, step, [values[arg] for arg in step.args], multiply))
    return values


def _widths(base: BaseModel, steps: Sequence[Step], shapes: Sequence[Sequence[int]]) -> list[int]:
    """The width of every value, inputs first."""
    if any(len(shape) != 2 or shape[0] != shapes[0][0] for shape in shapes):
        raise InvalidInputError(f"inputs of a segment have shapes {list(shapes)}; expected [N, d], with one N")
    widths = [shape[1] for shape in shapes]
    for number, step in enumerate(steps):
        if not all(0 <= arg < len(widths) for arg in step.args):
            raise InvalidInputError(f"step {number} ({step.do}) uses values {list(step.args)} of {len(widths)}")
        widths.append(_width(base, number, step, [widths[arg] for arg in step.args]))
    return widths


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


def _run_step(base: BaseModel, step: Step, args: list[torch.Tensor], product: Product) -> torch.Tensor:
    if step.do == "add":
        return args[0] + args[1]
    if step.do == "scale":
        return args[0] * step.factor
    if step.do == "bias":
        bias = base.linears[step.modules[0]].bias
        assert bias is not None
        return args[0] + bias
    if step.do == "linears":
        return product(args[0], [base.linears[name].weight for name in step.modules])
    return base.run("forward", step.modules, args)
