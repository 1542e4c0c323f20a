"""Ghost clipping: the same steps as per-sample clipping, without the samples; or refused, or caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import symbiosis
from symbiosis.errors import ConfigError, PrivacyCheckError, UnsupportedMethodError
from symbiosis.privacy.dp import record_loss
from symbiosis.privacy.ghost import GhostOptimizer
from tests.client.conftest import adapt, difference
from tests.privacy.conftest import Pair
from tests.privacy.test_dp import CONFIGS, LORA, NO_DROPOUT, clipped_mean, private, records

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*lora_bias=True:peft.utils.warning.PeftWarning"),  # about merging
]
TOLERANCE = 1e-4  # relative, float32: norms come of products of products, and both passes round
C = 0.3  # below most of the records' norms, and above some


def stepped(model: Any, clipping: str) -> dict[str, torch.Tensor]:
    """The gradient of one step without noise."""
    model, optimizer, loader = private(model, max_grad_norm=C, clipping=clipping)
    optimizer.noise_multiplier = 0.0
    model(**loader.collate_fn(records()[:5])).loss.backward()
    optimizer.step()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def assert_same(ghost: Any, samples: Any, reference: Any) -> None:
    got, expected = stepped(ghost, "ghost"), stepped(samples, "per_sample")
    batch = {key: torch.stack([record[key] for record in records()[:5]]) for key in records()[0]}
    by_hand = clipped_mean(reference.train(), batch, C, 4)
    assert got.keys() == expected.keys() == by_hand.keys()
    for name, value in expected.items():
        assert value.norm() > 0, name
        assert difference(got[name], value) <= TOLERANCE, name
        assert difference(got[name], by_hand[name]) <= TOLERANCE, name


@pytest.mark.parametrize("method", ["lora", "rslora", "lora-bias", "modules-to-save"])
def test_a_step_is_that_of_per_sample_clipping(tiny_llama: Any, method: str) -> None:
    assert_same(*(adapt(tiny_llama(), CONFIGS[method]()) for _ in range(3)))


def test_gpt2_and_its_conv1d(tiny_gpt2: Any) -> None:
    config = {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    made = [adapt(tiny_gpt2(**NO_DROPOUT), peft.LoraConfig(**config)) for _ in range(3)]  # type: ignore[arg-type]

    assert_same(*made)


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_a_remote_base_gives_the_same_step(pair: Pair, masked: bool) -> None:
    with symbiosis.connect(pair.server.url, privacy=pair.masking() if masked else None) as conn:
        remote = adapt(conn.wrap(pair.model()), peft.LoraConfig(**LORA))

        assert_same(remote, *(adapt(pair.model(), peft.LoraConfig(**LORA)) for _ in range(2)))


def ghostly(model: Any, **options: Any) -> tuple[Any, GhostOptimizer, Any]:
    return private(adapt(model, peft.LoraConfig(**LORA)), clipping="ghost", **options)


def test_it_trains_within_its_budget_and_goes_on_from_a_saved_state(tiny_llama: Any, tmp_path: Path) -> None:
    model, optimizer, loader = ghostly(tiny_llama(), target_epsilon=3.0)
    for batch in [*loader, *loader]:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        assert float(loss) == loss.detach().item() >= 0
        assert all(getattr(p, "grad_sample", None) is None for p in model.parameters())
    assert 2.5 < optimizer.spent().epsilon <= 3.0

    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    _, resumed, _ = ghostly(tiny_llama(), target_epsilon=3.0)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert resumed.spent() == optimizer.spent()


def test_an_empty_batch_adds_noise_and_counts(tiny_llama: Any) -> None:
    model, optimizer, loader = ghostly(tiny_llama())
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    model(**loader.collate_fn([])).loss.backward()
    optimizer.step()

    assert optimizer.spent().steps == 1
    moved = torch.cat([(p - before[n]).flatten() for n, p in model.named_parameters() if p.requires_grad])
    noise = 0.1 * optimizer.noise_multiplier * optimizer.max_grad_norm / optimizer.expected_batch_size
    assert moved.std().item() == pytest.approx(noise, rel=0.1)


# --- refused, or caught -----------------------------------------------------------------------------


def test_what_is_no_linear_is_refused_by_name(tiny_llama: Any) -> None:
    with pytest.raises(UnsupportedMethodError, match=r"ghost clipping of .*prompt_encoder.*, a .*nn.Linear"):
        private(adapt(tiny_llama(), CONFIGS["prefix"]()), clipping="ghost")
    model = adapt(tiny_llama(), peft.LoraConfig(**LORA))
    norm = next(m for m in model.modules() if type(m).__name__.endswith("RMSNorm"))
    norm.requires_grad_(True)
    with pytest.raises(UnsupportedMethodError, match=r"ghost clipping of .*norm.*, a LlamaRMSNorm"):
        private(model, clipping="ghost")
    with pytest.raises(ConfigError, match="clipping='flat'"):
        private(adapt(tiny_llama(), peft.LoraConfig(**LORA)), clipping="flat")


def test_gradients_that_were_not_clipped_are_no_step(tiny_llama: Any) -> None:
    model, optimizer, loader = ghostly(tiny_llama())
    batch = loader.collate_fn(records()[:4])
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}

    record_loss(model(**inputs).logits, batch["labels"]).backward()
    with pytest.raises(PrivacyCheckError, match="no clipped backward pass"):
        optimizer.step()
    optimizer.zero_grad()

    model(**batch).loss.backward()
    record_loss(model(**inputs).logits, batch["labels"]).backward()
    with pytest.raises(PrivacyCheckError, match="gradients were changed between"):
        optimizer.step()
    optimizer.zero_grad()

    model(**batch).loss.backward()
    nn.utils.clip_grad_norm_(optimizer.params, 1e-3)
    with pytest.raises(PrivacyCheckError, match="gradients were changed between"):
        optimizer.step()

    model(**batch).loss.backward()
    with pytest.raises(PrivacyCheckError, match="two backward passes for one step"):
        model(**batch).loss.backward()
    assert optimizer.spent().steps == 0
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_scaled_loss_is_no_step(tiny_llama: Any) -> None:
    model, optimizer, loader = ghostly(tiny_llama())
    for _ in range(2):
        with pytest.raises(PrivacyCheckError, match="the loss was added to or scaled"):
            (model(**loader.collate_fn(records()[:4])).loss + 1.0).backward()  # a loss of Opacus, not of ours
        with pytest.raises(PrivacyCheckError, match="no clipped backward pass"):
            optimizer.step()
        model(**loader.collate_fn(records()[:4])).loss.backward()
        optimizer.step()


def test_wrong_norms_are_caught(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, loader = ghostly(tiny_llama())
    right = optimizer.hooks.NORM_SAMPLERS[nn.Linear]
    batch = loader.collate_fn(records()[:4])

    def halved(*args: Any) -> Any:
        return {parameter: norms / 2 for parameter, norms in right(*args).items()}

    monkeypatch.setitem(optimizer.hooks.NORM_SAMPLERS, nn.Linear, halved)
    with pytest.raises(PrivacyCheckError, match="ghost clipping found"):
        model(**batch).loss.backward()
    model, optimizer, loader = ghostly(tiny_llama())
    monkeypatch.setitem(optimizer.hooks.NORM_SAMPLERS, nn.Linear, lambda *args: {})
    with pytest.raises(PrivacyCheckError, match=r"lora_A.* has no norms of 4 records' gradients"):
        model(**batch).loss.backward()
    with pytest.raises(PrivacyCheckError, match="no clipped backward pass"):
        optimizer.step()


def test_detached_it_is_the_model_that_it_was(tiny_llama: Any) -> None:
    model, optimizer, _ = ghostly(tiny_llama())
    ids = records()[0]["input_ids"][None]

    optimizer.detach()

    loss = model(input_ids=ids, labels=ids).loss
    assert isinstance(loss, torch.Tensor)
    loss.backward()
