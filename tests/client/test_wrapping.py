"""What is wrapped, what is refused and why, and that a refused model is left as it was."""

from __future__ import annotations

import copy
import gc
import sys
import types
import weakref
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import symbiosis
from symbiosis.connection import Connection
from symbiosis.errors import ConfigError, ModelMismatchError, UnsupportedMethodError
from symbiosis.hollow import HollowWeight
from symbiosis.remote import RemoteLinear, RemoteMixin
from symbiosis.wrapping import plan_of
from tests.client.conftest import (
    FAMILIES,
    Served,
    adapt,
    assert_same_step,
    base_weights,
    difference,
    greedy,
    remote_layers,
    run_step,
    train,
)


def untouched(model: Any, served: Served, tokens: Any) -> None:
    """The model holds all its weights and answers as before."""
    assert plan_of(model) is None
    assert not remote_layers(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens()).logits, served.base(input_ids=tokens()).logits)


# --- the plan -------------------------------------------------------------------------------------


def test_untied_head_is_remote_and_tied_head_is_here(serve_family: Any) -> None:
    for family, where in (("llama", "remote"), ("qwen2", "local"), ("gpt2", "local")):
        served = serve_family(family)
        with symbiosis.connect(served.server.url) as conn:
            conn.wrap(served.model())
        assert conn.plan is not None
        (head,) = [entry for entry in conn.plan.entries if entry.name == "lm_head"]
        assert head.where == where


@pytest.mark.parametrize("served", ["qwen2"], indirect=True)
@pytest.mark.parametrize("source", ["wrap", "load"])
def test_a_tied_head_may_be_remote(served: Served, connection: Connection, tokens: Any, source: str) -> None:
    if source == "wrap":
        remote = connection.wrap(served.model(), lm_head="remote")
    else:
        remote = connection.load_model(lm_head="remote")

    assert isinstance(remote.lm_head, RemoteLinear)
    with torch.no_grad():
        before = connection.stats().calls
        assert difference(remote(input_ids=tokens()).logits, served.base(input_ids=tokens()).logits) <= 1e-5
    assert connection.stats().calls > before


def test_an_untied_head_may_stay(served: Served, connection: Connection, tokens: Any) -> None:
    model = served.model()
    head = model.lm_head

    remote = connection.wrap(model, lm_head="local")

    assert remote.lm_head is head
    with torch.no_grad():
        assert difference(remote(input_ids=tokens()).logits, served.base(input_ids=tokens()).logits) <= 1e-5


def test_layers_asked_for_stay_here(served: Served, connection: Connection, tokens: Any) -> None:
    local = adapt(served.model(), served.config("lora"))
    for granularity in ("linear", "module", "auto"):
        model = connection.wrap(served.model(), local=["model.layers.0.*", "*.k_proj"], granularity=granularity)
        names = {layer.layer.name for layer in remote_layers(model)}

        assert not any("layers.0." in name or "k_proj" in name for name in names)
        assert "model.layers.1.self_attn.q_proj" in names
        remote = adapt(model, served.config("lora"))
        assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))


def test_adapters_are_no_part_of_the_plan(served: Served, connection: Connection) -> None:
    connection.wrap(served.model())
    assert connection.plan is not None
    bare = {(entry.name, entry.where) for entry in connection.plan.entries}

    for method in ("lora", "ia3"):
        connection.wrap(adapt(served.model(), served.config(method)))
        assert {(entry.name, entry.where) for entry in connection.plan.entries} == bare


def test_modules_saved_in_full_are_trained_here(served: Served, connection: Connection, tokens: Any) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    local, remote = adapt(served.model(), config), connection.wrap(adapt(served.model(), config))

    steps = [run_step(model, tokens()) for model in (remote, local)]

    assert any("modules_to_save" in name for name in steps[0].gradients)
    assert_same_step(*steps)


def test_a_remote_layer_cannot_be_a_module_to_save(served: Served, connection: Connection) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")

    with pytest.raises(UnsupportedMethodError, match=r"modules_to_save.*lm_head.*local="):
        peft.get_peft_model(connection.wrap(served.model()), config)


def test_a_module_that_hangs_in_two_places_is_replaced_in_both(served: Served, connection: Connection) -> None:
    model = served.model()
    model.also = nn.ModuleDict({"up": model.model.layers[0].mlp.up_proj})

    connection.wrap(model)

    assert model.also["up"] is model.model.layers[0].mlp.up_proj
    assert isinstance(model.also["up"], RemoteLinear)


def test_another_head_on_the_same_base(served: Served, connection: Connection, tokens: Any) -> None:
    config = copy.deepcopy(served.base.config)
    config.num_labels = 3
    local = transformers.LlamaForSequenceClassification(config).eval()
    local.model.load_state_dict(served.base.model.state_dict())
    remote = connection.wrap(copy.deepcopy(local))

    assert {type(m) for m in (remote.score, remote.model.layers[0].mlp.up_proj)} == {nn.Linear, RemoteLinear}
    labels = torch.tensor([0, 2])
    losses = [model(input_ids=tokens(), labels=labels).loss for model in (remote, local)]
    for loss in losses:
        loss.backward()
    assert difference(*losses) <= 1e-5
    assert difference(remote.score.weight.grad, local.score.weight.grad) <= 1e-4


def test_the_bare_model_without_a_head(served: Served, connection: Connection, tokens: Any) -> None:
    with torch.device("meta"):
        empty = transformers.LlamaModel(served.base.config).eval()
    for remote in (connection.wrap(served.model().model), connection.wrap(empty)):
        with torch.no_grad():
            got, expected = (model(input_ids=tokens()).last_hidden_state for model in (remote, served.base.model))
        assert difference(got, expected) <= 1e-5


# --- freeing and putting back ---------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["module", "auto"])
@pytest.mark.parametrize("served", ["llama", "gpt2"], indirect=True)
def test_wrapping_frees_the_weights(served: Served, connection: Connection, granularity: Any) -> None:
    model = served.model()
    embedding = model.get_input_embeddings().weight
    weights = [weakref.ref(w) for w in base_weights(model) if w is not embedding]

    connection.wrap(model, granularity=granularity)
    gc.collect()

    assert weights
    assert all(weight() is None for weight in weights)


@pytest.mark.parametrize("granularity", ["linear", "module", "auto"])
@pytest.mark.parametrize("served", FAMILIES, indirect=True)
def test_unwrap_puts_back_what_was_kept(served: Served, connection: Connection, tokens: Any, granularity: Any) -> None:
    model = served.model()
    originals = dict(model.named_modules())
    connection.wrap(model, keep_weights=True, granularity=granularity)
    assert remote_layers(model)

    assert connection.unwrap(model) is model

    assert dict(model.named_modules()) == originals
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all("forward" not in vars(module) for module in model.modules())
    before = connection.stats().calls
    untouched(model, served, tokens)
    assert connection.stats().calls == before
    connection.wrap(model)  # and it can be wrapped again
    assert remote_layers(model)


@pytest.mark.parametrize("adapted_first", [True, False])
def test_unwrap_under_an_adapter(served: Served, connection: Connection, tokens: Any, adapted_first: bool) -> None:
    if adapted_first:
        model = connection.wrap(adapt(served.model(), served.config("lora")), keep_weights=True)
    else:
        model = adapt(connection.wrap(served.model(), keep_weights=True), served.config("lora"))
    losses = train(model, tokens(), steps=3, lr=0.05)

    connection.unwrap(model)
    calls = connection.stats().calls

    local = adapt(served.model(), served.config("lora"))
    assert losses == pytest.approx(train(local, tokens(), steps=3, lr=0.05), abs=1e-4)
    assert_same_step(run_step(model, tokens()), run_step(local, tokens()))
    assert connection.stats().calls == calls


def test_unwrap_after_the_adapter_was_taken_off(served: Served, connection: Connection, tokens: Any) -> None:
    adapted = adapt(connection.wrap(served.model(), keep_weights=True), served.config("lora"))
    model = adapted.unload()

    connection.unwrap(model)

    untouched(model, served, tokens)


@pytest.mark.parametrize("served", ["gpt2"], indirect=True)
def test_unwrap_follows_where_the_model_was_moved(served: Served, connection: Connection, tokens: Any) -> None:
    model = connection.wrap(served.model(), keep_weights=True).to(torch.bfloat16).train()

    connection.unwrap(model)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(module.training for module in model.modules())


def test_a_copy_is_unwrapped_by_itself(served: Served, connection: Connection, tokens: Any) -> None:
    model = connection.wrap(served.model(), keep_weights=True)
    copied = copy.deepcopy(model)

    connection.unwrap(copied)

    untouched(copied, served, tokens)
    assert remote_layers(model)
    assert plan_of(model) is not None


def test_unwrap_without_weights_is_refused(served: Served, connection: Connection, tokens: Any) -> None:
    model = connection.wrap(served.model())
    with pytest.raises(UnsupportedMethodError, match="keep_weights=True"):
        connection.unwrap(model)
    with pytest.raises(UnsupportedMethodError, match="not wrapped"):
        connection.unwrap(served.model())

    assert torch.equal(greedy(model, tokens(1, 4)), greedy(served.base, tokens(1, 4)))


def test_weights_that_are_not_there_cannot_be_kept(served: Served, connection: Connection) -> None:
    with torch.device("meta"):
        empty = type(served.base)(served.base.config)

    with pytest.raises(ConfigError, match="no weights to keep"):
        connection.wrap(empty, keep_weights=True)


# --- refusals of a model ---------------------------------------------------------------------------


def test_wrapping_twice(served: Served, connection: Connection, tokens: Any) -> None:
    model = connection.wrap(served.model())
    for again in (model, adapt(model, served.config("lora"))):
        with pytest.raises(UnsupportedMethodError, match="wrapped already"):
            connection.wrap(again)

    assert run_step(model, tokens()).gradients


@pytest.mark.parametrize("granularity", ["linear", "module", "auto"])
def test_another_checkpoint(served: Served, connection: Connection, tokens: Any, granularity: Any) -> None:
    model = served.model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
        model.lm_head.weight[0, 0] += 1
    changed = copy.deepcopy(model.state_dict())

    with pytest.raises(ModelMismatchError, match=r"^model\.layers\.1\.mlp\S* has other values") as caught:
        connection.wrap(model, granularity=granularity)

    assert served.base.config.name_or_path in str(caught.value)
    assert not remote_layers(model)
    assert all(torch.equal(value, changed[name]) for name, value in model.state_dict().items())
    assert remote_layers(connection.wrap(model, granularity=granularity, verify=False))


def test_other_shapes(connection: Connection, tiny_llama: Any) -> None:
    model = tiny_llama(intermediate_size=64)

    with pytest.raises(ModelMismatchError, match=r"mlp\.gate_proj is \[64, 32\] here and \[56, 32\] in the server's"):
        connection.wrap(model, verify=False)

    assert not remote_layers(model)


@pytest.mark.parametrize("meta", [True, False])
def test_another_architecture(connection: Connection, tiny_gpt2: Any, tiny_qwen2: Any, meta: bool) -> None:
    for other in (tiny_gpt2(), tiny_qwen2(), tiny_qwen2(tied=False, num_key_value_heads=4)):
        if meta:
            with torch.device("meta"):
                model = type(other)(other.config)
        else:
            model = other
        with pytest.raises(ModelMismatchError):
            connection.wrap(model)
        assert not any(isinstance(module, RemoteMixin) for module in model.modules())


@pytest.mark.parametrize("granularity", ["linear", "module", "auto"])
@pytest.mark.parametrize("served", ["gpt2"], indirect=True)
def test_biases_of_another_checkpoint_are_ours(
    served: Served, connection: Connection, tokens: Any, granularity: Any
) -> None:
    """The server would add its own biases inside a block: ours must not be lost."""
    model = served.model()
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.bias[0] += 1
        expected = model(input_ids=tokens()).logits
        connection.wrap(model, granularity=granularity)
        logits = [model(input_ids=tokens()).logits for _ in range(3)]

    assert all(difference(found, expected) <= 1e-5 for found in logits)
    assert difference(expected, served.base(input_ids=tokens()).logits) > 1e-3


def test_bad_options(served: Served, connection: Connection, tokens: Any) -> None:
    model = served.model()
    with pytest.raises(ConfigError, match=r"granularity='layer'; expected .*linear"):
        connection.wrap(model, granularity="layer")
    untouched(model, served, tokens)


def test_a_quantised_or_otherwise_special_linear_stays(served: Served, connection: Connection) -> None:
    class Special(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    model = served.model()
    layer = model.model.layers[0].mlp.up_proj
    layer.__class__ = Special

    connection.wrap(model)

    assert model.model.layers[0].mlp.up_proj is layer
    assert connection.plan is not None
    assert any("Special" in entry.reason for entry in connection.plan.local)


# --- refusals of a method ---------------------------------------------------------------------------


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)


METHODS = {
    "DoRA": {"use_dora": True},
    "PiSSA": {"init_lora_weights": "pissa"},
    "PiSSA-niter": {"init_lora_weights": "pissa_niter_2"},
    "OLoRA": {"init_lora_weights": "olora"},
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_need_base_weights_before_wrap(
    served: Served, connection: Connection, tokens: Any, method: str
) -> None:
    model = peft.get_peft_model(served.model(), lora(**METHODS[method]))
    before = run_step(model, tokens())

    with pytest.raises(UnsupportedMethodError, match=rf"{method.partition('-')[0]}.*Instead, use") as caught:
        connection.wrap(model)

    assert "base weights" in str(caught.value)
    assert not remote_layers(model)
    assert torch.equal(run_step(model, tokens()).logits, before.logits)


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_need_base_weights_after_wrap(
    served: Served, connection: Connection, tokens: Any, method: str
) -> None:
    model = connection.wrap(served.model())

    with pytest.raises(UnsupportedMethodError, match=rf"{method.partition('-')[0]}.*Instead, use"):
        peft.get_peft_model(model, lora(**METHODS[method]))

    local = adapt(served.model(), served.config("lora"))
    remote = adapt(model, served.config("lora"))
    assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))


def test_loftq_before_wrap(served: Served, connection: Connection) -> None:
    model = adapt(served.model(), served.config("lora"))
    model.peft_config["default"].init_lora_weights = "loftq"  # peft itself needs bitsandbytes and a GPU for it

    with pytest.raises(UnsupportedMethodError, match=r"LoftQ.*changed the base weights.*Instead, use"):
        connection.wrap(model)
    assert not remote_layers(model)


def test_loftq_after_wrap(served: Served, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_bnb_available", "is_bnb_4bit_available"):
        monkeypatch.setattr(peft.utils.loftq_utils, name, lambda: True)
    bitsandbytes: Any = types.ModuleType("bitsandbytes")
    bitsandbytes.nn = types.SimpleNamespace(Params4bit=lambda weight, **_: weight.round())  # any use of the values
    monkeypatch.setitem(sys.modules, "bitsandbytes", bitsandbytes)
    monkeypatch.setattr(HollowWeight, "to", lambda self, *args, **kwargs: self, raising=False)  # to the GPU
    model = connection.wrap(served.model())

    with pytest.raises(UnsupportedMethodError, match=r"LoftQ initialisation.*Instead, use"):
        peft.get_peft_model(
            model, lora(init_lora_weights="loftq", loftq_config=peft.LoftQConfig(loftq_bits=4, loftq_iter=1))
        )


@pytest.mark.parametrize("method", ["lora", "ia3", "adalora"])
@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_merging(served: Served, connection: Connection, tokens: Any, method: str, merge: str) -> None:
    model = adapt(connection.wrap(served.model()), served.config(method))
    before = run_step(model, tokens())

    with pytest.raises(UnsupportedMethodError, match=r"merging.*Instead, .*save_pretrained"):
        getattr(model, merge)()

    assert_same_step(run_step(model, tokens()), before)


@pytest.mark.parametrize("served", ["gpt2"], indirect=True)
def test_merging_into_conv1d(served: Served, connection: Connection, tokens: Any) -> None:
    model = adapt(connection.wrap(served.model()), served.config("lora"))
    before = run_step(model, tokens())

    for safe in (True, False):
        with pytest.raises(UnsupportedMethodError, match="merging"):
            model.merge_and_unload(safe_merge=safe)

    assert_same_step(run_step(model, tokens()), before)


def test_a_merged_adapter(served: Served, connection: Connection, tokens: Any) -> None:
    model = adapt(served.model(), served.config("lora"))
    expected = run_step(model, tokens())
    model.merge_adapter()

    with pytest.raises(UnsupportedMethodError, match=r"merged adapters.*unmerge_adapter\(\)"):
        connection.wrap(model)

    # Unmerging leaves a rounding error in the weights, so the exact ones are taken for the rest.
    assert not remote_layers(model)
    fresh = connection.wrap(adapt(served.model(), served.config("lora")))
    assert_same_step(run_step(fresh, tokens()), expected)
