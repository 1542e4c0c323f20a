"""DP-SGD: each step is the clipped mean of per-record gradients, or is refused; nothing silently wrong."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import symbiosis
from symbiosis.errors import ConfigError, PrivacyCheckError, UnsupportedMethodError
from symbiosis.privacy import dp
from symbiosis.privacy.dp import PrivateOptimizer, make_private, record_loss
from tests.client.conftest import adapt, difference
from tests.privacy.conftest import Pair

pytestmark = [
    # Opacus registers full backward hooks; the first module's input, token ids, needs no gradient.
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    # peft hands its prefix over under the name that transformers 5.24 deprecated.
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*lora_bias=True:peft.utils.warning.PeftWarning"),  # about merging
]

QV = ["q_proj", "v_proj"]
LORA = {"r": 4, "target_modules": QV, "task_type": "CAUSAL_LM"}
BUDGET = {"target_epsilon": 8.0, "target_delta": 1e-3, "epochs": 2, "accountant": "rdp"}


def records(count: int = 12, length: int = 9, vocabulary: int = 96) -> list[dict[str, torch.Tensor]]:
    """Records of one length, of which the first labels are unset for a number that differs."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for number in range(count):
        ids = torch.randint(3, vocabulary, (length,), generator=generator)
        labels = ids.clone()
        labels[: number % 6] = -100
        made.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return made


def private(model: Any, data: Any = None, batch: int = 4, lr: float = 0.1, **options: Any) -> tuple[Any, Any, Any]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    loader = DataLoader(records() if data is None else data, batch_size=batch)
    return make_private(model.train(), optimizer, loader, **{**BUDGET, "seed": 1, **options})


def clipped_mean(model: nn.Module, batch: dict[str, torch.Tensor], max_grad_norm: float, size: int) -> dict[str, Any]:
    """The step's gradient without noise, found record by record with autograd alone."""
    total: dict[str, torch.Tensor] = {}
    for row in range(len(batch["input_ids"])):
        model.zero_grad()
        one = {key: value[row : row + 1] for key, value in batch.items()}
        record_loss(model(**{k: v for k, v in one.items() if k != "labels"}).logits, one["labels"]).backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        for name, grad in grads.items():
            total[name] = total.get(name, 0) + grad * min(1.0, max_grad_norm / (norm.item() + 1e-6)) / size
    return total


def assert_step_is_clipped_mean(model: Any, reference: Any, max_grad_norm: float = 0.3) -> None:
    model, optimizer, loader = private(model, max_grad_norm=max_grad_norm)
    optimizer.noise_multiplier = 0.0
    batch = loader.collate_fn(records()[:5])

    model(**batch).loss.backward()
    optimizer.step()

    expected = clipped_mean(reference.train(), batch, max_grad_norm, optimizer.expected_batch_size)
    got = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert value.norm() > 0, name
        assert difference(got[name], value) <= 1e-4, name


NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
CONFIGS = {
    "lora": lambda: peft.LoraConfig(**LORA),
    "rslora": lambda: peft.LoraConfig(**LORA, use_rslora=True),
    "lora-bias": lambda: peft.LoraConfig(**LORA, lora_bias=True),
    "modules-to-save": lambda: peft.LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("method", CONFIGS)
def test_a_step_is_the_clipped_mean_of_the_records_gradients(tiny_llama: Any, method: str) -> None:
    made = [adapt(tiny_llama(), CONFIGS[method]()) for _ in range(2)]

    assert_step_is_clipped_mean(*made)


def test_gpt2_and_its_conv1d(tiny_gpt2: Any) -> None:
    config = {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    made = [adapt(tiny_gpt2(**NO_DROPOUT), peft.LoraConfig(**config)) for _ in range(2)]  # type: ignore[arg-type]

    assert_step_is_clipped_mean(*made)


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_a_remote_base_gives_the_same_step(pair: Pair, masked: bool) -> None:
    with symbiosis.connect(pair.server.url, privacy=pair.masking() if masked else None) as conn:
        remote = adapt(conn.wrap(pair.model()), peft.LoraConfig(**LORA))

        assert_step_is_clipped_mean(remote, adapt(pair.model(), peft.LoraConfig(**LORA)))


def test_a_trained_bias_of_a_frozen_remote_linear(pair_of: Callable[[str], Pair]) -> None:
    """opacus issue 542: a frozen weight beside a trained bias."""
    pair = pair_of("qwen2")
    config = peft.LoraConfig(**LORA, bias="all")
    with symbiosis.connect(pair.server.url) as conn:
        remote = adapt(conn.wrap(pair.model()), config)
        assert any(n.endswith("q_proj.base_layer.bias") and p.requires_grad for n, p in remote.named_parameters())

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft, about biases that it will not turn off
            assert_step_is_clipped_mean(remote, adapt(pair.model(), config))


def test_another_records_length_changes_nothing_for_a_record() -> None:
    logits = torch.randn(2, 6, 11, requires_grad=True)
    labels = torch.randint(0, 11, (2, 6))

    grads = []
    for ignored in (0, 4):
        changed = labels.clone()
        changed[1, 1 : 1 + ignored] = -100
        (grad,) = torch.autograd.grad(record_loss(logits, changed), logits)
        grads.append(grad[0])

    assert torch.equal(*grads)


def test_a_loss_of_another_kind_is_caught(tiny_llama: Any) -> None:
    model, optimizer, loader = private(adapt(tiny_llama(), peft.LoraConfig(**LORA)))
    batch = loader.collate_fn(records()[:4])
    logits = model(input_ids=batch["input_ids"]).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten()).backward()

    with pytest.raises(PrivacyCheckError, match="no loss was computed with record_loss"):
        optimizer.step()


# --- empty batches: opacus issue 161 ----------------------------------------------------------------


def test_an_empty_batch_adds_noise_and_counts(tiny_llama: Any) -> None:
    model, optimizer, loader = private(adapt(tiny_llama(), peft.LoraConfig(**LORA)))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    batch = loader.collate_fn([])
    loss = model(**batch).loss
    loss.backward()
    assert all(p.grad_sample.abs().max() == 0 for p in model.parameters() if p.requires_grad)
    optimizer.step()

    assert loss.item() == 0
    assert optimizer.spent().steps == 1
    moved = torch.cat([(p - before[n]).flatten() for n, p in model.named_parameters() if p.requires_grad])
    noise = 0.1 * optimizer.noise_multiplier * optimizer.max_grad_norm / optimizer.expected_batch_size
    assert moved.std().item() == pytest.approx(noise, rel=0.1)


def test_a_first_batch_may_be_empty(tiny_llama: Any) -> None:
    model, optimizer, loader = private(adapt(tiny_llama(), peft.LoraConfig(**LORA)), batch=1, target_epsilon=50.0)
    sizes = []
    for _ in range(2):
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            sizes.append(int((batch["labels"] != -100).any(1).sum()))
            model.zero_grad()  # all that Trainer does

    assert 0 in sizes
    assert max(sizes) > 1
    assert len(sizes) == optimizer.spent().steps == 24


def test_batches_must_say_what_is_learnt(tiny_llama: Any) -> None:
    with pytest.raises(ConfigError, match="batches of list; expected a dict with input_ids and labels"):
        private(adapt(tiny_llama(), peft.LoraConfig(**LORA)), list(zip(range(12), range(12), strict=True)))


# --- refusals ---------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "prompt": (lambda: peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"), "PROMPT_TUNING"),
    "p-tuning": (
        lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM"),
        "P_TUNING",
    ),
    "ia3": (lambda: peft.IA3Config(target_modules=QV, feedforward_modules=[], task_type="CAUSAL_LM"), "IA3"),
    "adalora": (lambda: peft.AdaLoraConfig(target_modules=QV, total_step=9, task_type="CAUSAL_LM"), "ADALORA"),
    "loha": (lambda: peft.LoHaConfig(r=2, target_modules=QV, task_type="CAUSAL_LM"), "LOHA"),
    "vera": (lambda: peft.VeraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), "VERA"),
    "dora": (lambda: peft.LoraConfig(**LORA, use_dora=True), "DoRA"),
    "embedding": (
        lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens"], task_type="CAUSAL_LM"),
        "LoRA on the embedding",
    ),
    "tokens": (lambda: peft.LoraConfig(**LORA, trainable_token_indices=[3, 4]), "trainable tokens"),
}


@pytest.mark.parametrize("method", REFUSED)
def test_methods_without_right_samples_are_refused_by_name(tiny_llama: Any, method: str) -> None:
    config, name = REFUSED[method]

    with pytest.raises(UnsupportedMethodError, match=f"DP-SGD of {name}.*use LoRA"):
        private(adapt(tiny_llama(), config()))


def test_gradient_checkpointing_is_refused(tiny_llama: Any) -> None:
    model = adapt(tiny_llama(), peft.LoraConfig(**LORA))
    model.base_model.model.activation_checkpointing_enable()

    with pytest.raises(UnsupportedMethodError, match="gradient checkpointing"):
        private(model)


@pytest.mark.parametrize("method", ["prompt", "ia3", "vera", "tokens"])
def test_what_is_not_refused_by_name_is_caught_at_the_step(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """opacus issue 732: missing per-sample gradients; and prompt tuning, whose are wrong without an error."""
    monkeypatch.setattr(dp, "refuse_methods", lambda model: None)
    try:
        model, optimizer, loader = private(adapt(tiny_llama(), REFUSED[method][0]()))
    except UnsupportedMethodError:
        return  # Opacus itself says so
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    batch = loader.collate_fn(records()[:3])
    with pytest.raises((PrivacyCheckError, ValueError, RuntimeError)):  # Opacus' own, or ours
        _step(model, optimizer, batch)

    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def _step(model: Any, optimizer: PrivateOptimizer, batch: Any) -> None:
    optimizer.zero_grad()
    model(**batch).loss.backward()
    optimizer.step()


def test_wrong_samples_are_caught(tiny_llama: Any) -> None:
    model, optimizer, loader = private(adapt(tiny_llama(), peft.LoraConfig(**LORA)))
    trained = [p for p in model.parameters() if p.requires_grad]
    batch = loader.collate_fn(records()[:4])
    spoilers: dict[str, Callable[[nn.Parameter], Any]] = {
        "do not add up": lambda p: p.grad_sample.copy_(torch.randn_like(p.grad_sample)),
        "of another size": lambda p: p.grad_sample.mul_(3),
        "has 2 per-sample gradients, of a batch of 4 records": lambda p: setattr(
            p, "grad_sample", p.grad_sample[:2].clone()
        ),
        "has no per-sample gradients": lambda p: setattr(p, "grad_sample", None),
        "of shape": lambda p: setattr(p, "grad_sample", p.grad_sample[..., :1].clone()),
    }
    for message, spoil in spoilers.items():
        optimizer.zero_grad()
        model(**batch).loss.backward()
        spoil(trained[1])
        with pytest.raises(PrivacyCheckError, match=message):
            optimizer.step()
    assert optimizer.spent().steps == 0

    optimizer.zero_grad()
    model(**batch).loss.backward()
    nn.utils.clip_grad_norm_(trained, 1e-3)  # as Trainer does, to no effect
    optimizer.step()
    assert optimizer.spent().steps == 1


def test_an_unused_adapter_is_caught(tiny_llama: Any) -> None:
    model = adapt(tiny_llama(), peft.LoraConfig(**LORA))
    model.base_model.model.extra = nn.Linear(3, 3)
    model, optimizer, loader = private(model)

    with pytest.raises(PrivacyCheckError, match=r"extra.weight has no per-sample gradients"):
        _step(model, optimizer, loader.collate_fn(records()[:3]))


def test_two_backward_passes_for_one_step_are_refused(tiny_llama: Any) -> None:
    model, _, loader = private(adapt(tiny_llama(), peft.LoraConfig(**LORA)))
    batch = loader.collate_fn(records()[:3])
    model(**batch).loss.backward()

    with pytest.raises(ValueError, match="grad accumulation"):
        model(**batch).loss.backward()


def test_an_optimizer_of_other_parameters_is_refused(tiny_llama: Any) -> None:
    """opacus issue 820: the optimizer was made, then the model's parameters were replaced; training seemed to go on."""
    model = adapt(tiny_llama(), peft.LoraConfig(**LORA))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loader = DataLoader(records(), batch_size=4)
    with pytest.raises(ConfigError, match="trained parameters that are not the model's"):
        make_private(copy.deepcopy(model), optimizer, loader, **BUDGET)
    fewer = torch.optim.SGD(list(optimizer.param_groups[0]["params"])[1:], lr=0.1)
    with pytest.raises(ConfigError, match=r"1 trained parameters are not the optimizer's, first .*lora_A"):
        make_private(model, fewer, loader, **BUDGET)

    model, optimizer, private_loader = make_private(model.train(), optimizer, loader, **BUDGET)
    layer = next(m for m in model.modules() if hasattr(m, "lora_A") and len(m.lora_A))
    model(**private_loader.collate_fn(records()[:3])).loss.backward()
    layer.lora_A["default"].weight = nn.Parameter(layer.lora_A["default"].weight.detach().clone())
    with pytest.raises(ConfigError, match="issue 820"):
        optimizer.step()


def test_a_budget_that_is_none_is_refused(tiny_llama: Any) -> None:
    model = adapt(tiny_llama(), peft.LoraConfig(**LORA))
    for options in ({"target_epsilon": 0.0}, {"target_delta": 1.5}, {"epochs": 0}, {"max_grad_norm": -1.0}):
        with pytest.raises(ConfigError, match="expected positive numbers"):
            private(model, **options)
    with pytest.raises(ConfigError, match="would allow giving one of the 12 records away"):
        private(model, target_delta=0.1)


# --- around it --------------------------------------------------------------------------------------


def test_the_budget_is_what_was_asked_for(tiny_llama: Any) -> None:
    model, optimizer, loader = private(adapt(tiny_llama(), peft.LoraConfig(**LORA)), target_epsilon=3.0)
    for _ in range(BUDGET["epochs"]):  # type: ignore[arg-type]
        for batch in loader:
            _step(model, optimizer, batch)

    spent = optimizer.spent()
    assert 2.5 < spent.epsilon <= 3.0
    assert "3" in str(spent)
    assert "epsilon" in spent._repr_html_()


def test_training_goes_on_from_a_saved_state(tiny_llama: Any, tmp_path: Path) -> None:
    """opacus issue 373: what was spent is part of the optimizer's state."""
    model, optimizer, loader = private(adapt(tiny_llama(), peft.LoraConfig(**LORA)))
    _step(model, optimizer, loader.collate_fn(records()[:3]))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")

    model, resumed, _ = private(adapt(tiny_llama(), peft.LoraConfig(**LORA)))
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    resumed.load_state_dict(state)
    assert resumed.spent() == optimizer.spent()
    _step(model, resumed, loader.collate_fn(records()[:3]))
    assert resumed.spent().steps == 2
    assert resumed.spent().epsilon > optimizer.spent().epsilon

    with pytest.raises(ConfigError, match="does not say what was spent"):
        resumed.load_state_dict({k: v for k, v in state.items() if k != "privacy"})
    _, other, _ = private(adapt(tiny_llama(), peft.LoraConfig(**LORA)), accountant="prv")
    with pytest.raises(ConfigError, match="counted by the accountant 'rdp'"):
        other.load_state_dict(state)


def test_the_model_stays_itself(tiny_llama: Any, tmp_path: Path) -> None:
    model = adapt(tiny_llama(), peft.LoraConfig(**LORA))
    ids = records()[0]["input_ids"][None]
    expected = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)

    returned, optimizer, _ = private(model)
    assert returned is model
    assert torch.equal(model.eval().generate(input_ids=ids, max_new_tokens=4, do_sample=False), expected)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()

    optimizer.detach()
    model.train()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(getattr(p, "grad_sample", None) is None for p in model.parameters() if p.requires_grad)


def test_noise_does_not_follow_a_global_seed(tiny_llama: Any) -> None:
    steps = []
    for _ in range(2):
        torch.manual_seed(0)
        model, optimizer, loader = private(adapt(tiny_llama(), peft.LoraConfig(**LORA)), seed=None)
        torch.manual_seed(0)
        _step(model, optimizer, loader.collate_fn(records()[:3]))
        steps.append(torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad]))

    assert not torch.equal(*steps)
