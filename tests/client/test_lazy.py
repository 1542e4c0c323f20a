"""Deferred results: fewer calls, the same values, and the real tensor for everybody who looks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import symbiosis
from symbiosis.connection import Connection
from symbiosis.lazy import Deferred, Laziness
from tests.client.conftest import OUTPUT_TOLERANCE, Served, adapt
from tests.conftest import GATED, seeded


def lora(model: nn.Module, served: Served) -> Any:
    return adapt(model, served.config("lora")).eval()


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= OUTPUT_TOLERANCE * b.abs().max())


def calls(connection: Connection, run: Callable[[], Any]) -> int:
    before = connection.stats()
    run()
    return (connection.stats() - before).calls


@torch.no_grad()
def test_a_layer_costs_one_call_once_the_stand_ins_have_learnt(
    served: Served, connection: Connection, tokens: Any
) -> None:
    local, remote = (lora(m, served) for m in (served.model(), connection.wrap(served.model())))
    ids = tokens()

    for _ in range(4):
        assert close(remote(ids).logits, local(ids).logits)

    layers = served.base.config.num_hidden_layers
    # q/k/v of the first layer, a segment per layer, the untied head.
    assert calls(connection, lambda: remote(ids)) == 1 + layers + 1


@torch.no_grad()
def test_what_a_user_gets_is_a_plain_tensor(served: Served, connection: Connection, tokens: Any) -> None:
    remote = lora(connection.wrap(served.model()), served)

    for _ in range(3):
        assert type(remote(tokens()).logits) is torch.Tensor


@torch.no_grad()
def test_hidden_states_and_hooks_see_the_values(served: Served, connection: Connection, tokens: Any) -> None:
    local, remote = (lora(m, served) for m in (served.model(), connection.wrap(served.model())))
    seen: dict[str, list[torch.Tensor]] = {"local": [], "remote": []}
    for name, model in (("local", local), ("remote", remote)):
        for layer in model.get_base_model().model.layers:
            layer.register_forward_hook(lambda m, args, out, name=name: seen[name].append(out * 1.0))
            layer.mlp.register_forward_hook(lambda m, args, out, name=name: seen[name].append(out.clone()))

    for _ in range(3):
        ours = remote(tokens(), output_hidden_states=True).hidden_states
        theirs = local(tokens(), output_hidden_states=True).hidden_states
        assert all(close(a + 0, b) for a, b in zip(ours, theirs, strict=True))

    assert len(seen["local"]) == len(seen["remote"]) == 12
    assert all(close(a, b) for a, b in zip(seen["remote"], seen["local"], strict=True))


@torch.no_grad()
def test_a_hook_that_replaces_an_output_counts(served: Served, connection: Connection, tokens: Any) -> None:
    local, remote = (lora(m, served) for m in (served.model(), connection.wrap(served.model())))
    for model in (local, remote):
        model.get_base_model().model.layers[0].mlp.register_forward_hook(lambda m, args, out: out * 2)
        model.get_base_model().model.layers[1].post_attention_layernorm.register_forward_pre_hook(
            lambda m, args: (args[0] + 1,)
        )

    for _ in range(3):
        assert close(remote(tokens()).logits, local(tokens()).logits)


@torch.no_grad()
def test_a_norm_that_was_trained_is_computed_here(served: Served, connection: Connection, tokens: Any) -> None:
    local, remote = (lora(m, served) for m in (served.model(), connection.wrap(served.model())))
    for change in (lambda p: p.mul_(1.5), lambda p: p.data.add_(0.25), lambda p: setattr(p, "data", p.data * 0.5)):
        for _ in range(3):
            assert close(remote(tokens()).logits, local(tokens()).logits)
        for model in (local, remote):
            change(model.get_base_model().model.layers[1].input_layernorm.weight)
            change(model.get_base_model().model.layers[0].post_attention_layernorm.weight)
    assert close(remote(tokens()).logits, local(tokens()).logits)


@torch.no_grad()
def test_the_output_of_an_adapter_is_not_sent(
    served: Served, connection: Connection, tokens: Any, monkeypatch: Any
) -> None:
    """Only the residual stream and attention's context go into a segment, as they would without it."""
    config = peft.LoraConfig(r=4, target_modules=["o_proj", "down_proj"], task_type="CAUSAL_LM")
    remote = adapt(connection.wrap(served.model()), config).eval()
    outputs: list[torch.Tensor] = []
    for name, module in remote.named_modules():
        if name.endswith("lora_B.default"):
            module.register_forward_hook(lambda m, args, out: outputs.append(out))
    sent: list[torch.Tensor] = []
    original = connection._caller.segment

    def spy(steps: Any, outputs: Any, tensors: Any, kept: Any = None) -> Any:
        sent.extend(tensor.clone() for tensor in tensors)
        return original(steps, outputs, tensors, kept)

    monkeypatch.setattr(connection._caller, "segment", spy)
    for _ in range(3):
        remote(tokens())

    assert outputs
    assert sent
    for output in outputs:
        scaled = (output * 2).reshape(-1, output.shape[-1])  # lora_alpha / r = 2
        for tensor in sent:
            assert tensor.shape != scaled.shape or not torch.allclose(tensor, scaled, atol=1e-6)


@torch.no_grad()
def test_an_input_overwritten_before_its_use_is_an_error_not_a_wrong_result(
    served: Served, connection: Connection
) -> None:
    model: Any = connection.wrap(served.model())
    model.eval()
    x = torch.randn(1, 3, 48)
    late = model.model.layers[0].self_attn.o_proj(x)
    assert isinstance(late, Deferred)
    x.add_(1)

    with pytest.raises(RuntimeError, match="in place"):
        late.sum()


@torch.no_grad()
def test_a_deferred_tensor_can_be_copied_pickled_shown_and_written_to(served: Served, connection: Connection) -> None:
    model: Any = connection.wrap(served.model())
    model.eval()
    x = torch.randn(1, 3, 48)
    expected = served.base.model.layers[0].self_attn.o_proj(x)  # type: ignore[union-attr, operator]

    def fresh() -> torch.Tensor:
        model.model.layers[0].self_attn.o_proj.__dict__["lazy"] = Laziness(True)
        late: torch.Tensor = model.model.layers[0].self_attn.o_proj(x)
        assert isinstance(late, Deferred)
        assert late.shape == expected.shape
        assert late.dtype == expected.dtype
        return late

    assert close(copy.deepcopy(fresh()), expected)
    assert close(pickle.loads(pickle.dumps(fresh())), expected)
    assert repr(fresh()) == repr(fresh() + 0)
    assert close(torch.tensor(fresh().tolist()), expected)
    assert close(torch.cat([fresh(), fresh()])[:1], expected)
    assert close(torch.from_numpy(fresh().numpy()), expected)
    changed = fresh()
    changed += 1
    assert close(changed, expected + 1)
    view = fresh()[:, 1:]
    assert close(view, expected[:, 1:])


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)])
def test_modes_that_hide_changes_or_cast_are_not_deferred(served: Served, connection: Connection, mode: Any) -> None:
    model: Any = connection.wrap(served.model())
    model.eval()
    with mode(), torch.no_grad():
        assert not isinstance(model.model.layers[0].self_attn.o_proj(torch.randn(1, 3, 48)), Deferred)


@torch.no_grad()
def test_linear_granularity_defers_nothing(served: Served, connection: Connection, tokens: Any) -> None:
    model: Any = connection.wrap(served.model(), granularity="linear")
    model.eval()
    for _ in range(3):
        model(tokens())

    assert calls(connection, lambda: model(tokens())) == 4 * served.base.config.num_hidden_layers + 1


@torch.no_grad()
def test_adding_in_place_changes_the_tensor_and_nothing_computed_from_it_before(
    served: Served, connection: Connection
) -> None:
    model: Any = connection.wrap(served.model())
    model.eval()
    layer, x, z = model.model.layers[0].self_attn.o_proj, torch.randn(1, 3, 48), torch.randn(1, 3, 48)
    weight = served.base.model.layers[0].self_attn.o_proj.weight  # type: ignore[union-attr]
    a, b = x @ weight.T, z @ weight.T

    late, other = layer(x), layer(z)
    same, doubled = late, late + late
    late += other
    late.add_(other)

    assert late is same
    assert isinstance(late, Deferred)
    assert close(doubled, 2 * a)
    assert close(late, a + 2 * b)
    assert close(other, b)


@torch.no_grad()
@pytest.mark.parametrize("late", [False, True])
def test_a_change_in_place_between_siblings_ends_their_sharing(
    served: Served, connection: Connection, tokens: Any, late: bool
) -> None:
    """k must not get what was fetched for it with q, of the tensor as it was before."""
    remote: Any = connection.wrap(served.model()).eval()
    for _ in range(3):
        remote(tokens())
    attention, plain = remote.model.layers[0].self_attn, served.base.model.layers[0].self_attn  # type: ignore[union-attr]
    given, change = torch.randn(1, 3, 48), torch.randn(1, 3, 48 if late else 32)
    x = attention.o_proj(given)

    attention.q_proj(x)
    x.add_(attention.o_proj(change) if late else change)

    changed = plain.o_proj(given) + (plain.o_proj(change) if late else change)
    assert close(attention.k_proj(x), plain.k_proj(changed))


@torch.no_grad()
def test_a_product_that_attention_norms_is_fetched_with_its_siblings(start_server: Any, tokens: Any) -> None:
    """The norm of k is looked at, and so k is: OLMo 2 norms q and k over their whole width."""
    config = transformers.Olmo2Config(**GATED | {"head_dim": 8, "num_key_value_heads": 4})
    base: Any = seeded(lambda: transformers.Olmo2ForCausalLM(config), 0)
    with symbiosis.connect(start_server(base).url) as conn:
        remote: Any = conn.wrap(copy.deepcopy(base))
        for _ in range(3):
            assert close(remote(tokens()).logits, base(tokens()).logits)

        # q, k, v of the first layer; a segment for each layer, though no norm is before its attention; the head.
        assert calls(conn, lambda: remote(tokens())) == 1 + config.num_hidden_layers + 1
