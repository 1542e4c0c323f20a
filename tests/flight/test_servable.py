"""What can be served is found by trying: these are the modules that a wrong test would let pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.servable import Experts, find_blocks, find_experts, find_linears, find_norms
from tests.conftest import GATED

D = 8


class Affine(nn.Linear):
    """A subclass that computes what nn.Linear does, as Falcon's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Pair(nn.Linear):
    """A router: the logits, and something else."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


class Chunks(nn.Module):
    """Experts that take their tokens by their place, as Llama 4's: the first share is the first expert's."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, D, 2 * D))
        self.down = nn.Parameter(torch.randn(experts, 2 * D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x.view(len(self.up), -1, D) @ self.up).relu() @ self.down).view(x.shape)


class MLP(nn.Module):
    def __init__(self, d_in: int = D) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d_in, 2 * d_in), nn.Linear(2 * d_in, d_in)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.up(x)))  # type: ignore[no-any-return]


class Averaged(MLP):
    """Divided by how many tokens there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / x.shape[1]


class Scale(nn.Module):
    """A norm without parameters, by its name or not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],))


class ScaleNorm(Scale):
    pass


@pytest.fixture(scope="module")
def mixtral() -> Any:
    config = transformers.MixtralConfig(**GATED, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config).eval()


def test_a_subclass_is_a_linear_if_it_computes_one() -> None:
    model = nn.ModuleDict({"affine": Affine(D, 3), "doubled": Doubled(D, 3), "pair": Pair(D, 3)})

    assert [name for name, _ in find_linears(model)] == ["affine"]


@pytest.mark.parametrize(("module", "served"), [(MLP(), True), (Averaged(), False), (Chunks(), False)])
def test_a_block_is_the_same_wherever_a_token_stands(module: nn.Module, served: bool) -> None:
    found = dict(find_blocks(nn.ModuleDict({"inner": module}), D, set()))

    assert ("inner" in found) == served


def test_each_tower_has_a_width_of_its_own() -> None:
    found = dict(find_blocks(nn.ModuleDict({"text": MLP(), "vision": MLP(12)}), D, set()))

    assert [(name, block.d_in, block.d_out) for name, block in found.items()] == [("text", 8, 8), ("vision", 12, 12)]


def test_what_holds_a_tied_head_is_no_block() -> None:
    """Its output would be as wide as the vocabulary, and its weight is here anyway."""
    config = transformers.BertConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    base = BaseModel(transformers.BertForMaskedLM(config))

    assert not [name for name in base.blocks if name.startswith("cls")]


def test_a_norm_without_parameters_is_known_by_its_name_only() -> None:
    model = nn.ModuleDict({"norm": ScaleNorm(), "other": Scale(), "activation": nn.SiLU()})

    assert [(name, norm.d_in) for name, norm in find_norms(model, D)] == [("norm", D)]
    assert not list(find_norms(model, None))


def test_experts_are_served_without_their_router(mixtral: Any) -> None:
    found = dict(find_experts(mixtral, 32))

    assert list(found) == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert {(e.d_in, e.d_out, e.kind) for e in found.values()} == {(32 + 4, 32, "experts")}


def test_experts_get_a_weight_for_each_of_them(mixtral: Any) -> None:
    """Tokens of clients that choose more or fewer experts, or none, can share a call."""
    experts = Experts("", mixtral.model.layers[0].mlp.experts, 36, 32)
    x = torch.randn(3, 32)
    index = torch.tensor([[0, 3], [1, 2]])
    weights = torch.tensor([[0.7, 0.3], [1.2, -0.2]])
    dense = torch.zeros(3, 4).scatter(
        1, torch.cat([index, torch.tensor([[0, 1]])]), torch.cat([weights, torch.zeros(1, 2)])
    )

    got = experts.forward(torch.cat([x, dense], dim=1))

    torch.testing.assert_close(got[:2], experts.module(x[:2], index, weights))
    assert torch.equal(got[2], torch.zeros(32))
    assert experts.forward(torch.empty(0, 36)).shape == (0, 32)


def test_experts_give_the_gradients_of_tokens_and_of_weights(mixtral: Any) -> None:
    experts = Experts("", mixtral.model.layers[0].mlp.experts, 36, 32)
    x, weights = torch.randn(2, 32, requires_grad=True), torch.rand(2, 2, requires_grad=True)
    index, grad = torch.tensor([[0, 3], [1, 2]]), torch.randn(2, 32)
    dense = torch.zeros(2, 4).scatter(1, index, weights)
    expected = torch.autograd.grad(experts.module(x, index, weights), (x, weights), grad)

    got = experts.grad_input(torch.cat([x, dense], dim=1), grad)

    torch.testing.assert_close(got[:, :32], expected[0])
    torch.testing.assert_close(got[:, 32:].gather(1, index), expected[1])


def test_modules_of_one_class_and_other_shapes_are_tried_each() -> None:
    wide = MLP()
    wide.down = nn.Linear(2 * D, 3)
    found = dict(find_blocks(nn.ModuleDict({"narrow": MLP(), "wide": copy.deepcopy(wide)}), D, set()))

    assert {name: block.d_out for name, block in found.items()} == {"narrow": D, "wide": 3}
