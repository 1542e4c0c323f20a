"""One row of the compatibility table: a model and an adapter, remote against local.

One rule: a row declares what docs/compatibility.md says of it (what stays local, what it costs, how it is refused), and
`check` proves every word of that. Nothing is skipped: a row works, is refused by a named error, or says that it was
not tried.

Tolerances, both sides fp32. The server multiplies the same numbers, but in products of other shapes (siblings in
one call, biases apart), and the rounding of a product depends on its shape: about 1e-7 a layer. Outputs and losses
therefore agree to 1e-5, gradients, which add up over tokens, to 1e-4, greedy text exactly. After five steps
of AdamW, which divides by the size of each gradient, losses agree to 1e-4.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import peft
import pytest
import torch
from torch import nn

import symbiosis
from symbiosis.adapters import base_modules, canonical_name
from symbiosis.connection import Connection
from symbiosis.errors import SymbiosisError
from symbiosis.expression import Expression
from symbiosis.flight.server import Server
from symbiosis.lazy import Deferred
from symbiosis.wrapping import plan_of
from tests.client.conftest import difference, remote_layers

OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
TRAINING_TOLERANCE = 1e-4  # of each loss of five steps
TRAINING_STEPS = 5
NEW_TOKENS = 6

Batch = dict[str, Any]
Build = Callable[[], nn.Module]
Adapt = Callable[[nn.Module], Any]


def lora(*targets: str, r: int = 4, **options: Any) -> Adapt:
    """LoRA on these layers (q_proj and v_proj unless told), every matrix of it off its initial value."""
    return adapter(lambda: peft.LoraConfig(r=r, target_modules=list(targets) or ["q_proj", "v_proj"], **options))


def adapter(config: Callable[[], peft.PeftConfig], scale: float = 0.05) -> Adapt:
    """get_peft_model with the same adapter each time, every parameter of it away from its initial value."""

    def adapt(model: nn.Module) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            adapted = peft.get_peft_model(model, config())
            perturb(adapted, scale)
        return adapted

    return adapt


@torch.no_grad()
def perturb(model: nn.Module, scale: float = 0.05) -> None:
    """Move every trainable parameter: at initialisation LoRA's B is zero, which hides every error in A."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(scale * torch.randn_like(parameter))


def text_batch(model: Any) -> Batch:
    """Two sequences of nine tokens, the second with two of padding, each token its own label."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(3, vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def prompt(model: Any) -> Batch:
    """What generation starts from: one sequence of five tokens."""
    ids = torch.randint(
        3, model.config.get_text_config().vocab_size, (1, 5), generator=torch.Generator().manual_seed(1)
    )
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def own_loss(output: Any) -> torch.Tensor:
    """The loss of a model that was given labels."""
    loss: torch.Tensor = output.loss
    return loss


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)


@dataclass(frozen=True)
class Line:
    """What the table says of anything that was tried.

    Args:
        name: unique in its section.
        note: shown in the table.
        refused: the error that a user gets, as a regular expression; the line is then a refusal.
        untried: why this was not tried.
        slow: left out of the fast tests.
        local: what stays on the client beside embeddings, a tied head and vectors: folded name to the plan's reason.
        calls: of one step with gradients (forward and backward), and of one pass without once the
            stand-ins have learnt; None is not checked.
    """

    name: str
    note: str = field(default="", kw_only=True)
    refused: str = field(default="", kw_only=True)
    untried: str = field(default="", kw_only=True)
    slow: bool = field(default=False, kw_only=True)
    local: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    calls: tuple[int, int] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Row(Line):
    """A model and an adapter.

    Args:
        build: the model that the server serves, the same one each time; rows that share it share a server.
        adapt: makes a PEFT model of the client's model, before or after `wrap`.
        client: the client's model, made from the served one; None is a copy.
        batch: arguments of a training step, made from the client's model.
        loss: of its output.
        prompt: arguments of generate() beside the usual ones; None if the model does not generate.
        orders: "wrap first", "peft first", "skeleton", "meta": the ways to make a wrapped model that this row goes.
        no_gradient: substrings of the names of trainable parameters that have none, locally as well.
        context: entered around everything on the client.
        options: of `connect`.
        optimizer: for the five steps, made from the model.
        trains: whether it works in training mode at all, locally as well; the note says why not.
        tolerance: multiplies all tolerances; the note says why.
    """

    build: Build | None = None
    adapt: Adapt = field(default_factory=lora)
    client: Callable[[nn.Module], nn.Module] | None = None
    batch: Callable[[Any], Batch] = text_batch
    loss: Callable[[Any], torch.Tensor] = own_loss
    prompt: Callable[[Any], Batch] | None = prompt
    orders: tuple[str, ...] = ("wrap first", "peft first", "skeleton", "meta")
    no_gradient: tuple[str, ...] = ()
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    trains: bool = True
    tolerance: float = 1.0

    def __post_init__(self) -> None:
        if self.build is None and not self.untried:
            raise ValueError(f"row {self.name} has neither a model nor a reason why it was not tried")


@dataclass(frozen=True)
class Section:
    """A part of the table."""

    title: str
    rows: Sequence[Line]
    intro: str = ""


@dataclass
class Measured:
    """What a row turned out to be; `check` compares it with what the row declares."""

    local: dict[str, str]
    calls: tuple[int, int]


@dataclass(frozen=True)
class Step:
    """What one forward and backward pass gave."""

    loss: float
    outputs: dict[str, torch.Tensor] = field(repr=False)
    gradients: dict[str, torch.Tensor] = field(repr=False)


def params(sections: Sequence[Section]) -> list[Any]:
    """The rows as pytest's parameters."""
    slow = [pytest.mark.slow, pytest.mark.timeout(1800)]
    return [
        pytest.param(row, id=f"{section.title}-{row.name}".replace(" ", "_"), marks=slow if row.slow else [])
        for section in sections
        for row in section.rows
        if not row.untried  # which the table says; a test of it could not fail
    ]


class Bench:
    """The servers of the rows: one at a time, kept while rows ask for the same model."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._base: nn.Module | None = None
        self._server: Server | None = None

    def serve(self, build: Build, **options: Any) -> tuple[nn.Module, str]:
        """The model, and where it is served, with options of the server."""
        key = (build, options)
        if key != self._key:
            self.close()
            self._base = build().eval()
            self._server = symbiosis.serve(self._base, port=0, drain_timeout_s=2.0, **options)
            self._key = key
        assert self._base is not None
        assert self._server is not None
        return self._base, self._server.url

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._key, self._base, self._server = (), None, None


def check(row: Row, bench: Bench) -> Measured | None:
    """Prove a row.

    Raises:
        AssertionError: something differs from local, or from what the row declares.
    """
    assert row.build is not None
    base, url = bench.serve(row.build)
    with row.context(), symbiosis.connect(url, **row.options) as connection:
        if row.refused:
            _check_refusal(row, base, connection)
            return None
        return _Comparison(row, base, connection).run()


def client_model(row: Row, base: nn.Module) -> nn.Module:
    """The client's model, with weights of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = copy.deepcopy(base) if row.client is None else row.client(copy.deepcopy(base))
    return model.eval()


def _check_refusal(row: Row, base: nn.Module, connection: Connection) -> None:
    """Each way must end in an error of our tree, with the words that the row declares."""
    for order in row.orders:
        with pytest.raises(SymbiosisError, match=row.refused):
            step(row, make(row, base, connection, order))


def make(row: Row, base: nn.Module, connection: Connection, order: str) -> Any:
    """A wrapped and adapted model, in eval mode, made one of the ways."""
    if order == "wrap first":
        model = row.adapt(connection.wrap(client_model(row, base)))
    elif order == "peft first":
        model = connection.wrap(row.adapt(client_model(row, base)))
    elif order == "skeleton":
        model = row.adapt(connection.load_model())
    elif order == "meta":
        with torch.device("meta"):
            empty: Any = type(base)(base.config)
        model = row.adapt(connection.wrap(empty))
    else:
        raise ValueError(order)
    return model.eval()


class _Comparison:
    """One row, in all its ways, against the local model."""

    def __init__(self, row: Row, base: nn.Module, connection: Connection) -> None:
        self.row, self.base, self.connection = row, base, connection
        self.local = row.adapt(client_model(row, base)).eval()
        self.expected = step(row, self.local)
        self.expected_outputs = outputs_of(run(row, self.local, output_hidden_states=True))
        self.expected_text = generate(row, self.local)
        for name, gradient in self.expected.gradients.items():
            assert gradient.abs().max() > 0, f"{name} has no gradient, so it proves nothing"

    def run(self) -> Measured:
        measured = None
        for number, order in enumerate(self.row.orders):
            try:
                found = self._way(order, thorough=number == 0)
            except AssertionError as error:
                raise AssertionError(f"{self.row.name}, {order}: {error}") from error
            measured = measured or found
        assert measured is not None
        assert measured.local == dict(self.row.local), f"{self.row.name} keeps on the client: {measured.local}"
        if self.row.calls is not None:
            assert measured.calls == self.row.calls, f"{self.row.name} makes {measured.calls} calls"
        return measured

    def _way(self, order: str, thorough: bool) -> Measured:
        model = make(self.row, self.base, self.connection, order)
        # The first pass learns which layers share calls and what can be put off, the next ones use it.
        for _ in range(4 if thorough else 1):
            training_calls = self._counted(lambda: self._same_step(model))
        for _ in range(3 if thorough else 2):
            passing_calls = self._counted(lambda: self._same_outputs(model))
        assert training_calls > 0
        assert passing_calls > 0
        if self.row.prompt is not None:
            self._same_text(model)
        self._holds_no_base(model)
        if thorough:
            self._same_hidden_states(model)
            self._same_step(model)  # nothing of the passes without gradients may reach one with them
        if thorough and self.row.trains:
            self._same_training(model)
        return Measured(stays_local(model), (training_calls, passing_calls))

    def _counted(self, act: Callable[[], None]) -> int:
        before = self.connection.stats()
        act()
        return (self.connection.stats() - before).calls

    def _same_step(self, model: Any) -> None:
        found = step(self.row, model)
        same_number("loss", found.loss, self.expected.loss, OUTPUT_TOLERANCE * self.row.tolerance)
        same_tensors(found.outputs, self.expected.outputs, OUTPUT_TOLERANCE * self.row.tolerance)
        same_tensors(found.gradients, self.expected.gradients, GRADIENT_TOLERANCE * self.row.tolerance)

    def _same_outputs(self, model: Any) -> None:
        output = run(self.row, model)
        for name, value in leaves(output):
            assert not needs_call(value), f"{name} is still to be computed"
        same_tensors(outputs_of(output), self.expected.outputs, OUTPUT_TOLERANCE * self.row.tolerance)

    def _same_hidden_states(self, model: Any) -> None:
        for _ in range(2):
            found = outputs_of(run(self.row, model, output_hidden_states=True))
            same_tensors(found, self.expected_outputs, OUTPUT_TOLERANCE * self.row.tolerance)

    def _same_text(self, model: Any) -> None:
        found, expected = generate(self.row, model), self.expected_text
        assert torch.equal(found, expected), f"generated {found.tolist()}, not {expected.tolist()}"

    def _same_training(self, model: Any) -> None:
        local = self.row.adapt(client_model(self.row, self.base)).eval()  # a copy would lose hooks of parameters
        there, here = train(self.row, model), train(self.row, local)
        for got, expected in zip(there, here, strict=True):
            same_number("loss in training", got, expected, TRAINING_TOLERANCE * self.row.tolerance)
        assert abs(here[0] - here[-1]) > 10 * TRAINING_TOLERANCE * abs(here[0]), "the loss must move to say something"
        # The adapters have changed: what was learnt about calls must not remember the old ones. Five steps have
        # taken them apart a little, which is none of its business.
        trained = {name: p for name, p in local.named_parameters() if p.requires_grad}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data.copy_(trained[name])
        expected_outputs = outputs_of(run(self.row, local))
        for _ in range(2):
            same_tensors(outputs_of(run(self.row, model)), expected_outputs, OUTPUT_TOLERANCE * self.row.tolerance)

    def _holds_no_base(self, model: nn.Module) -> None:
        layers = remote_layers(model)
        assert layers
        for layer in (layer for layer in layers if not isinstance(layer.weight, Expression)):
            assert layer.weight.numel() == 0, f"{layer.layer.name} has elements"
            assert layer.weight.untyped_storage().nbytes() == 0, f"{layer.layer.name} has storage"
        planned = {entry.name for entry in plan_of(model).local}  # type: ignore[union-attr]
        unplanned = [name for name in held_matrices(model) if name.rpartition(".")[0] not in planned]
        assert not unplanned, f"{unplanned} are here, and the plan does not say so"


def needs_call(tensor: torch.Tensor) -> bool:
    """Whether a tensor that a user got would still ask the server when it is looked at."""
    if not isinstance(tensor, Deferred) or tensor.node.value is not None:
        return False
    pending = [arg for arg in tensor.node.args if not isinstance(arg, torch.Tensor) and arg.value is None]
    return tensor.node.local is None or bool(pending)


def stays_local(model: nn.Module) -> dict[str, str]:
    """What a wrapped model computes with matrices of its own, beside a tied head: folded name to reason."""
    plan = plan_of(model)
    assert plan is not None
    return {name: why for where, name, _, why in plan.rows() if where == "local" and not why.startswith("tied to")}


def held_matrices(model: nn.Module) -> list[str]:
    """Frozen parameters of the base on the client, but vectors and embeddings; names without adapters."""
    return [
        f"{canonical_name(path)}.{key}"
        for path, module in base_modules(_base(model))
        if not isinstance(module, nn.Embedding)
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.dim() > 1 and parameter.numel() and not parameter.requires_grad
    ]


def step(row: Row, model: Any) -> Step:
    """One forward and backward pass in eval mode."""
    model.zero_grad()
    output = model(**row.batch(_base(model)))
    loss = row.loss(output)
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not any(part in name for part in row.no_gradient):
            assert parameter.grad is not None, f"{name} has no gradient"
            gradients[name] = parameter.grad.clone()
    assert gradients, "nothing is trained"
    return Step(loss.item(), outputs_of(output), gradients)


@torch.no_grad()
def run(row: Row, model: Any, **options: Any) -> Any:
    """One pass without gradients."""
    return model(**{**row.batch(_base(model)), **options})


@torch.no_grad()
def generate(row: Row, model: Any) -> torch.Tensor:
    """Greedy text; empty if the row does not generate."""
    if row.prompt is None:
        return torch.empty(0)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    text: torch.Tensor = model.generate(**{**options, **row.prompt(_base(model))})
    return text


def train(row: Row, model: Any) -> list[float]:
    """The loss of each of five steps in training mode, dropout and all."""
    model.train()
    optimizer = row.optimizer(model)
    losses = []
    with torch.random.fork_rng(devices=[]):
        for number in range(TRAINING_STEPS):
            torch.manual_seed(100 + number)
            optimizer.zero_grad()
            loss = row.loss(model(**row.batch(_base(model))))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    model.eval()
    return losses


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def leaves(output: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model's output but its caches, by path."""
    if isinstance(output, torch.Tensor):
        yield path, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            if "past_key_values" not in key and "cache" not in key:
                yield from leaves(value, f"{path}.{key}" if path else key)
    elif isinstance(output, (tuple, list)):
        for number, value in enumerate(output):
            yield from leaves(value, f"{path}.{number}" if path else str(number))


def outputs_of(output: Any) -> dict[str, torch.Tensor]:
    """Floating-point outputs by path, as plain tensors."""
    return {path: value.detach().clone() for path, value in leaves(output) if value.is_floating_point()}


def same_number(what: str, got: float, expected: float, tolerance: float) -> None:
    assert abs(got - expected) <= tolerance * abs(expected), f"{what} is {got!r}, not {expected!r}"


def same_tensors(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys(), f"{sorted(got.keys() ^ expected.keys())} only on one side"
    for name, value in expected.items():
        assert torch.isfinite(value).all(), f"{name} is not finite locally"
        assert got[name].shape == value.shape, f"{name} is {tuple(got[name].shape)}, not {tuple(value.shape)}"
        assert type(got[name]) is type(value), f"{name} is a {type(got[name])}"
        far = difference(got[name], value)
        assert far <= tolerance, f"{name} is {far:.1e} away, {tolerance:.0e} is allowed"
