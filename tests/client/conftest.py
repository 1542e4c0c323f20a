"""What the client's tests share: one server per model family, adapters, one training step, and how close is equal.

Tolerances of remote against local, both fp32. The server multiplies the same numbers, but in GEMMs of other
shapes (siblings in one call, other threads' rows beside ours), and a GEMM's rounding depends on its shape:
about 1e-7 a layer. Outputs and losses agree to 1e-5 and gradients, which add up over tokens, to 1e-4.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import symbiosis
from symbiosis.config import ServerOptions
from symbiosis.connection import Connection
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.quantized import quantize
from symbiosis.flight.server import Server
from symbiosis.remote import RemoteMixin

OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
FAMILIES = ("llama", "qwen2", "gemma2", "gpt2")

RANDOM = threading.Lock()  # torch's generator is one for all threads

ATTENTION = {"gpt2": ["c_attn"]}
VALUES = {"gpt2": ["c_attn"]}
FEEDFORWARD = {"gpt2": ["mlp.c_proj"]}


@dataclass
class Served:
    """One model family: a pristine model, and the server that serves it."""

    family: str
    base: nn.Module
    server: Server

    def model(self) -> nn.Module:
        """A copy with weights of its own."""
        return copy.deepcopy(self.base)

    def config(self, method: str) -> peft.PeftConfig:
        """An adapter of this method that fits this family."""
        qv = ATTENTION.get(self.family, ["q_proj", "v_proj"])
        down = FEEDFORWARD.get(self.family, ["down_proj"])
        fan = self.family == "gpt2"  # as peft itself finds out, with a warning
        if method == "lora":
            return peft.LoraConfig(r=4, target_modules=qv, fan_in_fan_out=fan, task_type="CAUSAL_LM")
        if method == "lora-all":
            # GPT-2's Conv1D layers and a Linear head differ in fan_in_fan_out: peft warns whichever is said.
            return (
                peft.LoraConfig(r=4, target_modules=qv + down, fan_in_fan_out=fan, task_type="CAUSAL_LM")
                if fan
                else (peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
            )
        if method == "ia3":
            return peft.IA3Config(
                target_modules=qv + down, feedforward_modules=down, fan_in_fan_out=fan, task_type="CAUSAL_LM"
            )
        if method == "adalora":
            return peft.AdaLoraConfig(
                init_r=4, target_r=2, total_step=100, target_modules=qv, fan_in_fan_out=fan, task_type="CAUSAL_LM"
            )
        raise KeyError(method)


@pytest.fixture(scope="session")
def serve_family(
    tiny_llama: Any, tiny_qwen2: Any, tiny_gemma2: Any, tiny_gpt2: Any
) -> Iterator[Callable[[str], Served]]:
    """serve_family("llama"): the same server for every test that asks; no test may close it."""
    factories = {"llama": tiny_llama, "qwen2": tiny_qwen2, "gemma2": tiny_gemma2, "gpt2": tiny_gpt2}
    started: dict[str, Served] = {}
    with ExitStack() as stack:

        def find(family: str) -> Served:
            if family not in started:
                # A seed of its own: families of equal widths would otherwise share weights, to the bit.
                model = factories[family](seed=10 + FAMILIES.index(family))
                base = BaseModel(model)
                server = Server(base, ServerOptions(model=base.name, port=0, drain_timeout_s=2.0))
                started[family] = Served(family, model, stack.enter_context(server))
            return started[family]

        yield find


@pytest.fixture
def served(request: pytest.FixtureRequest, serve_family: Callable[[str], Served]) -> Served:
    """Llama, or the family that `indirect` parametrisation names."""
    return serve_family(getattr(request, "param", "llama"))


@pytest.fixture
def connection(served: Served) -> Iterator[Connection]:
    with symbiosis.connect(served.server.url) as conn:
        yield conn


def adapt(model: nn.Module, config: peft.PeftConfig, scale: float = 0.05) -> Any:
    """get_peft_model with the same adapter each time, every parameter of it away from its initial value."""
    with RANDOM, torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        adapted = peft.get_peft_model(model, config)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(scale * torch.randn_like(parameter))
    return adapted


@dataclass
class Step:
    """What one forward and backward pass gave."""

    loss: float
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor] = field(repr=False)


def run_step(model: nn.Module, ids: torch.Tensor, **inputs: Any) -> Step:
    model.zero_grad()
    output = model(input_ids=ids, labels=ids, **inputs)
    output.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    return Step(output.loss.item(), output.logits.detach().clone(), gradients)


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected|, over the whole tensor."""
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def assert_same_step(remote: Step, local: Step, gradient_tolerance: float = GRADIENT_TOLERANCE) -> None:
    assert abs(remote.loss - local.loss) <= OUTPUT_TOLERANCE * abs(local.loss)
    assert difference(remote.logits, local.logits) <= OUTPUT_TOLERANCE
    assert remote.gradients.keys() == local.gradients.keys()
    for name, expected in local.gradients.items():
        assert expected.abs().max() > 0, f"{name} has no gradient, so it proves nothing"
        assert difference(remote.gradients[name], expected) <= gradient_tolerance, name


def train(model: nn.Module, ids: torch.Tensor, steps: int = 20, lr: float = 5e-3) -> list[float]:
    """The loss of each step of AdamW on one batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def greedy(model: Any, ids: torch.Tensor, new_tokens: int = 8, **options: Any) -> torch.Tensor:
    options = {"do_sample": False, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens, **options}
    generated: torch.Tensor = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    return generated


def quantized_locally(model: nn.Module, width: Any) -> nn.Module:
    """A copy of which every linear but the head has the values that fewer bits stand for."""
    made: Any = copy.deepcopy(model)
    head = made.get_output_embeddings()
    for module in made.modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            weight = module.weight.detach()
            rows = weight.t() if isinstance(module, Conv1D) else weight
            values = quantize(rows, width).to(weight.dtype)
            module.weight.data = values.t() if isinstance(module, Conv1D) else values
    return made  # type: ignore[no-any-return]


def base_weights(model: nn.Module) -> list[torch.Tensor]:
    return [m.weight for m in model.modules() if isinstance(m, (nn.Linear, Conv1D))]


def remote_layers(model: nn.Module) -> list[RemoteMixin]:
    return [module for module in model.modules() if isinstance(module, RemoteMixin)]


def assert_holds_no_base(model: nn.Module, *owners: nn.Module) -> None:
    """No remote layer has elements, and no tensor in this process is a base weight but those of the owners."""
    layers = remote_layers(model)
    assert layers
    assert all(layer.weight.numel() == 0 and layer.weight.untyped_storage().nbytes() == 0 for layer in layers)
    gc.collect()
    # A tied head's weight is the embedding, which a client does hold.
    embeddings = {m.weight.data_ptr() for m in owners[0].modules() if isinstance(m, nn.Embedding)}
    weights = [w.detach() for w in base_weights(owners[0]) if w.data_ptr() not in embeddings]
    owned = {w.data_ptr() for owner in owners for w in owner.parameters()}
    by_size = {w.numel(): [other for other in weights if other.numel() == w.numel()] for w in weights}
    for found in (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)):
        if found.numel() in by_size and found.data_ptr() not in owned and found.is_floating_point():
            values = found.detach().flatten().float()
            for weight in by_size[found.numel()]:
                assert not torch.equal(values, weight.flatten()), f"a base weight {list(found.shape)} is still held"
                assert not torch.equal(values, weight.t().flatten()), f"a base weight {list(found.shape)} is held"
