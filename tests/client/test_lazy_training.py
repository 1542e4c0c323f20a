"""Deferred results with gradients: one call forward and one back for each decoder layer, and the gradients of local."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import symbiosis
from symbiosis.connection import Connection
from symbiosis.lazy import Deferred
from tests.client.conftest import (
    FAMILIES,
    Served,
    adapt,
    assert_same_step,
    difference,
    run_step,
)
from tests.conftest import GATED


def both(served: Served, connection: Connection, method: str = "lora") -> tuple[Any, Any]:
    """(remote, local), in training mode, after the passes in which the stand-ins learn."""
    remote, local = (
        adapt(model, served.config(method)).train() for model in (connection.wrap(served.model()), served.model())
    )
    for dropout in (m for model in (remote, local) for m in model.modules() if isinstance(m, nn.Dropout)):
        dropout.p = 0.0  # which is none, and so puts nothing in the way
    return remote, local


def ops(connection: Connection, run: Callable[[], Any]) -> Counter[str]:
    """How many calls of each kind."""
    seen: list[str] = []
    unsubscribe = connection.bus.subscribe(lambda event: seen.append(event.op))
    run()
    unsubscribe()
    return Counter(seen)


def test_a_layer_costs_one_call_each_way(served: Served, connection: Connection, tokens: Any) -> None:
    remote, local = both(served, connection)
    for _ in range(4):
        assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))

    layers = served.base.config.num_hidden_layers
    # q, k, v of the first layer, whose input needs no gradient, and the untied head.
    assert ops(connection, lambda: run_step(remote, tokens())) == {
        "forward": 1 + 1,
        "segment": layers,
        "grad_input": 1,
        "segment_grad": layers,
    }


@pytest.mark.parametrize("served", FAMILIES, indirect=True)
@pytest.mark.parametrize("method", ["lora", "lora-all", "ia3", "adalora"])
def test_nothing_depends_on_what_the_server_keeps(served: Served, start_server: Any, tokens: Any, method: str) -> None:
    """Half the gradients find nothing kept: their inputs travel again."""
    server = start_server(served.base, soft_cache_bytes=20_000)
    with symbiosis.connect(server.url) as connection:
        remote, local = both(served, connection, method)
        for _ in range(4):
            assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))
    assert server._service.errors or method == "lora-all"  # which has an adapter at every linear, and no segments


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("odd", [True, False])
def test_layers_under_a_checkpoint_and_beside_one(
    served: Served, connection: Connection, tokens: Any, reentrant: bool, odd: bool
) -> None:
    """A result put off in one layer must not be computed inside the checkpoint of the next."""
    remote, local = both(served, connection)
    for model in (remote, local):
        layer = model.get_base_model().model.layers[int(odd)]

        def forward(x: Any, own: Any = layer.forward, **kwargs: Any) -> Any:
            return checkpoint(lambda x: own(x, **kwargs), x, use_reentrant=reentrant)

        layer.forward = forward
        model.enable_input_require_grads()
    for _ in range(4):
        assert_same_step(run_step(remote, tokens(), use_cache=False), run_step(local, tokens(), use_cache=False))


class Passed(torch.autograd.Function):
    """Takes tensors as autograd hands them over, without asking `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def late_of(connection: Connection, served: Served) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """An input that needs a gradient, a deferred product of it, and the weight."""
    model: Any = connection.wrap(served.model())
    x = torch.randn(1, 3, 48, requires_grad=True)
    layer = model.model.layers[0].self_attn.o_proj
    late = layer(x * 1)
    assert isinstance(late, Deferred)
    assert late.requires_grad
    return x, late, served.base.model.layers[0].self_attn.o_proj.weight  # type: ignore[union-attr, return-value]


def gradient(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return found


def test_another_autograd_function_gets_the_gradient_right(served: Served, connection: Connection) -> None:
    x, late, weight = late_of(connection, served)
    assert difference(gradient(Passed.apply(late), x), gradient((x @ weight.T) * 2, x)) < 1e-5
    assert difference(gradient(Passed.apply(late) + late, x), gradient((x @ weight.T) * 3, x)) < 1e-5


def test_looked_at_without_gradients_it_keeps_them(served: Served, connection: Connection) -> None:
    x, late, weight = late_of(connection, served)
    with torch.no_grad():
        assert not late.sum().requires_grad
    with torch.inference_mode():
        late.mean()
    assert difference(gradient(late, x), gradient(x @ weight.T, x)) < 1e-5


def test_two_backward_passes_through_one_segment(served: Served, connection: Connection) -> None:
    x, late, weight = late_of(connection, served)
    y = late * 1
    assert difference(gradient(y, x), gradient(x @ weight.T, x)) < 1e-5
    assert difference(gradient(y * 3, x), gradient(3 * (x @ weight.T), x)) < 1e-5


def test_an_input_overwritten_before_the_backward_pass_is_an_error(served: Served, connection: Connection) -> None:
    model: Any = connection.wrap(served.model())
    x = torch.randn(1, 3, 48, requires_grad=True)
    twice = x * 2
    y = model.model.layers[0].self_attn.o_proj(twice) * 1
    twice.mul_(3)
    with pytest.raises(RuntimeError, match="in place"):
        y.sum().backward()


def test_adding_in_place_with_gradients(served: Served, connection: Connection) -> None:
    x, late, weight = late_of(connection, served)
    other = torch.randn(1, 3, 32, requires_grad=True)
    late += other
    assert difference(gradient(late, x), gradient(x @ weight.T, x)) < 1e-5
    assert torch.equal(gradient(late, other), torch.ones_like(other))


def test_what_was_put_off_without_gradients_gets_none(served: Served, connection: Connection) -> None:
    model: Any = connection.wrap(served.model()).eval()
    layer = model.model.layers[0]
    x = torch.randn(1, 3, 48, requires_grad=True)
    with torch.no_grad():
        late = layer.self_attn.o_proj(x)
    assert isinstance(late, Deferred)
    later = layer.mlp(layer.post_attention_layernorm(late)) + layer.self_attn.o_proj(x)
    expected = layer.self_attn.o_proj(x) + 0
    assert difference(gradient(later + 0, x), gradient(expected, x)) < 1e-5


@pytest.mark.parametrize("trained", ["norm", "bias"])
@pytest.mark.parametrize("served", ["qwen2", "gpt2"], indirect=True)
def test_what_is_trained_here_is_computed_here(
    served: Served, connection: Connection, tokens: Any, trained: str
) -> None:
    remote, local = both(served, connection)
    for model in (remote, local):
        for name, parameter in model.named_parameters():
            if trained in name.replace("ln_", "norm") and parameter.dim() == 1:
                parameter.requires_grad_(True)
    for _ in range(4):
        step = run_step(remote, tokens())
        assert_same_step(step, run_step(local, tokens()))
    assert any(trained in name.replace("ln_", "norm") for name in step.gradients)


def test_hooks_of_all_kinds_see_what_they_would(served: Served, connection: Connection, tokens: Any) -> None:
    remote, local = both(served, connection)
    seen: dict[str, list[torch.Tensor]] = {"remote": [], "local": []}
    for name, model in (("remote", remote), ("local", local)):
        model.enable_input_require_grads()
        for layer in model.get_base_model().model.layers:
            keep = seen[name]
            layer.mlp.register_forward_hook(lambda m, args, out, keep=keep: keep.append(out.detach() + 0))
            layer.register_full_backward_hook(lambda m, gi, go, keep=keep: keep.append(go[0] + 0))
            layer.self_attn.o_proj.register_full_backward_hook(lambda m, gi, go, keep=keep: keep.append(gi[0] + 0))
    for _ in range(3):
        assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))

    assert len(seen["remote"]) == len(seen["local"]) == 3 * 3 * len(local.get_base_model().model.layers)
    for ours, theirs in zip(seen["remote"], seen["local"], strict=True):
        assert difference(ours, theirs) < 1e-4


def test_messages_that_are_split_find_their_own_halves(served: Served, tokens: Any) -> None:
    with symbiosis.connect(served.server.url, max_message_bytes=4096) as connection:
        remote, local = both(served, connection)
        for _ in range(3):
            assert_same_step(run_step(remote, tokens(3, 20)), run_step(local, tokens(3, 20)))


def test_families_with_other_residuals(start_server: Any, connection: Connection, served: Served) -> None:
    """A residual that is scaled (Granite), and one added to attention and MLP at once (Cohere)."""
    import transformers

    kinds: dict[str, Any] = {
        "Granite": {**GATED, "residual_multiplier": 0.7},
        "Cohere": {**GATED, "tie_word_embeddings": True, "logit_scale": 1.0},
    }
    for name, options in kinds.items():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**options))
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        ids = torch.randint(3, 90, (2, 7))
        server = start_server(model)
        with symbiosis.connect(server.url) as conn:
            local = adapt(copy.deepcopy(model), config).train()
            remote = adapt(conn.wrap(copy.deepcopy(model)), config).train()
            for _ in range(4):
                assert_same_step(run_step(remote, ids), run_step(local, ids))


def test_a_model_that_is_trained_as_a_whole_around_it(served: Served, connection: Connection) -> None:
    """Remote layers as a part of somebody's own module."""
    x, late, weight = late_of(connection, served)
    head = nn.Linear(32, 2)
    head(late).sum().backward()
    assert head.weight.grad is not None
    assert difference(head.weight.grad[0], (x @ weight.T).sum((0, 1))) < 1e-5
    assert x.grad is not None


def test_what_training_looks_at_generation_still_puts_off(served: Served, connection: Connection, tokens: Any) -> None:
    remote, local = both(served, connection)
    for model in (remote, local):
        for layer in model.get_base_model().model.layers:
            layer.mlp.register_forward_hook(lambda m, args, out: out * 1.0 if torch.is_grad_enabled() else None)
    for _ in range(3):
        assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))
    with torch.no_grad():
        remote.eval()
        for _ in range(3):
            remote(tokens())
        counted = ops(connection, lambda: remote(tokens()))
    assert counted == {"forward": 2, "segment": served.base.config.num_hidden_layers}
