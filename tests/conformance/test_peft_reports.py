"""What users reported to peft, and what must therefore hold here: each test says which report it is about.

peft's #859, #1577 and #1515 are also covered by whole Trainer runs in tests/client/test_training.py. #1711 could not
be found in any store that we can search, and has no test.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import symbiosis
from symbiosis.connection import Connection
from symbiosis.errors import ModelMismatchError, UnsupportedMethodError
from tests.client.conftest import assert_same_step, difference, greedy, run_step
from tests.conformance.adapters import llama, tied
from tests.conformance.architectures import MOE
from tests.conformance.harness import Bench, perturb

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.fixture
def base(request: pytest.FixtureRequest, bench: Bench) -> nn.Module:
    return bench.serve(getattr(request, "param", llama))[0]


@pytest.fixture
def connection(base: nn.Module, request: pytest.FixtureRequest, bench: Bench) -> Iterator[Connection]:
    with symbiosis.connect(bench.serve(getattr(request, "param", None) or _built(bench))[1]) as conn:
        yield conn


def _built(bench: Bench) -> Any:
    return bench._key[0]


def adapted(model: nn.Module, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        made = peft.get_peft_model(model, peft.LoraConfig(**{**LORA, **options}))
        perturb(made)
    return made


def both(base: nn.Module, connection: Connection, **options: Any) -> tuple[Any, Any]:
    """The same adapter on the local and on the wrapped model."""
    return adapted(copy.deepcopy(base), **options), adapted(connection.wrap(copy.deepcopy(base)), **options)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids).logits
    return found


def test_1678_a_loaded_adapter_is_not_random(
    base: nn.Module, connection: Connection, tokens: Any, tmp_path: Path
) -> None:
    """Loading trained peft model results in random adapter weights each time."""
    _, remote = both(base, connection)
    remote.save_pretrained(tmp_path, save_embedding_layers=False)

    for _ in range(2):
        loaded = peft.PeftModel.from_pretrained(connection.load_model(), tmp_path)
        assert difference(logits(loaded.eval(), tokens()), logits(remote, tokens())) <= 1e-5
    file = tmp_path / "adapter_model.safetensors"
    save_file(dict(list(load_file(file).items())[2:]), file)
    with pytest.raises(ModelMismatchError, match="lacks 2 tensors"):
        connection.load_adapter(connection.load_model(), tmp_path)


@pytest.mark.parametrize("saved_as", ["default", "style", "v_proj_x"])
@pytest.mark.parametrize("loaded_as", ["default", "other"])
def test_2699_an_adapter_is_found_under_any_name(
    base: nn.Module, connection: Connection, tokens: Any, tmp_path: Path, saved_as: str, loaded_as: str
) -> None:
    """Found missing adapter keys while loading the checkpoint: saved under one adapter name, loaded under another."""
    remote = peft.get_peft_model(connection.load_model(), peft.LoraConfig(**LORA), adapter_name=saved_as).eval()
    with torch.random.fork_rng(devices=[]):
        perturb(remote)

    folder = connection.save_adapter(remote, tmp_path, saved_as)

    loaded = connection.load_adapter(connection.load_model(), folder, loaded_as)
    plain = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder, adapter_name=loaded_as)  # warnings are errors
    for model in (loaded, plain):
        assert difference(logits(model.eval(), tokens()), logits(remote, tokens())) <= 1e-5


TIED = {
    "lora-head": {"target_modules": ["q_proj", "lm_head"]},
    "lora-embedding": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [5, 27]},
    # A head that is trained stays here: the next test.
    "saved-head": {"modules_to_save": ["lm_head"]},
    "saved-embedding": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize("base", [tied], indirect=True)
@pytest.mark.parametrize(
    ("method", "head"),
    [(method, head) for head in ("local", "remote") for method in TIED if head == "local" or "saved" not in method],
)
def test_2777_adapters_on_tied_embeddings(
    base: nn.Module, connection: Connection, tokens: Any, tmp_path: Path, method: str, head: Any
) -> None:
    """Training a tied head or embedding unties it in memory, not in the config: reloaded, it must be what it was."""
    options = TIED[method]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model has .tie_word_embeddings=True")  # that is what this is about
        local = adapted(copy.deepcopy(base), **options)
        remote = adapted(connection.wrap(copy.deepcopy(base), lm_head=head), **options)
        assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))
        connection.save_adapter(remote, tmp_path)
        plain = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
        loaded = connection.load_adapter(connection.load_model(lm_head=head), tmp_path).eval()

    for model in (plain, loaded):
        assert difference(logits(model, tokens()), logits(remote, tokens())) <= 1e-5
        assert torch.equal(greedy(model, tokens(1, 4)), greedy(remote, tokens(1, 4)))


@pytest.mark.parametrize("base", [tied], indirect=True)
def test_2777_a_remote_tied_head_is_not_trained(base: nn.Module, connection: Connection) -> None:
    wrapped = connection.wrap(copy.deepcopy(base), lm_head="remote")
    warnings.filterwarnings("ignore", "Model has .tie_word_embeddings=True")

    with pytest.raises(UnsupportedMethodError, match=r"trainable copy of lm_head.*Instead"):
        adapted(wrapped, modules_to_save=["lm_head"])


QWEN = next(row.build for row in MOE if row.name == "Qwen3-MoE")
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize("base", [QWEN], indirect=True)
@pytest.mark.parametrize("order", ["wrap first", "peft first"])
@pytest.mark.parametrize("options", [EXPERTS, {"target_modules": "all-linear"}], ids=["parameters", "all-linear"])
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
def test_3009_lora_on_fused_experts_is_refused_or_trained_but_never_dropped(
    base: nn.Module, connection: Connection, tokens: Any, order: str, options: dict[str, Any]
) -> None:
    """transformers 5 fuses experts into one parameter, on which peft's adapters were silently not applied."""
    if order == "wrap first":
        remote = adapted(connection.wrap(copy.deepcopy(base)), **options)
    else:
        remote = connection.wrap(adapted(copy.deepcopy(base), **options))

    with pytest.raises(UnsupportedMethodError, match=r'experts.*Instead.*local=\["\*experts\*"\]'):
        run_step(remote, tokens())
    local = adapted(copy.deepcopy(base), **options)
    here = connection.wrap(adapted(copy.deepcopy(base), **options), local=["*experts*"])
    before = connection.stats()
    assert_same_step(run_step(here, tokens()), run_step(local, tokens()))
    assert (connection.stats() - before).calls > 0


@pytest.mark.parametrize("base", [QWEN], indirect=True)
def test_3009_lora_beside_fused_experts(base: nn.Module, connection: Connection, tokens: Any) -> None:
    local, remote = both(base, connection, target_modules=["q_proj", "gate"])

    assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))


def test_2821_prefix_tuning_of_a_model_with_a_device_map(base: nn.Module, connection: Connection, tokens: Any) -> None:
    """Prefix tuning moved the cache onto the model's device map, by an attribute that caches no longer have."""
    outputs = []
    for model in (copy.deepcopy(base), connection.wrap(copy.deepcopy(base))):
        model.hf_device_map = {"": torch.device("cpu")}  # "cpu" by name is for offloading
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".past_key_values|Position ids|Both .past_key_values")
            torch.manual_seed(11)
            prefixed = peft.get_peft_model(model, peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
            step = run_step(prefixed, tokens())
            outputs.append((step, greedy(prefixed.eval(), tokens(1, 4))))

    assert_same_step(outputs[1][0], outputs[0][0])
    assert torch.equal(outputs[1][1], outputs[0][1])


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("enabled", ["before wrap", "before peft", "last"])
def test_1577_checkpointed_layers_get_gradients(
    base: nn.Module, connection: Connection, tokens: Any, use_reentrant: bool, enabled: str
) -> None:
    """With the embedding frozen, the input of a checkpointed layer needs no gradient, and reentrant ones had none."""
    options = {"activation_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    local = adapted(copy.deepcopy(base)).train()
    model: Any = copy.deepcopy(base)
    if enabled == "before wrap":
        _checkpoint(model, options)
    model = connection.wrap(model)
    if enabled == "before peft":
        _checkpoint(model, options)
    remote = adapted(model).train()
    if enabled == "last":
        _checkpoint(remote, options)

    step = run_step(remote, tokens(), use_cache=False)

    assert_same_step(step, run_step(local, tokens(), use_cache=False))


def _checkpoint(model: Any, options: dict[str, Any]) -> None:
    model.enable_input_require_grads()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(*options.values())


class GenerateWhileTraining(transformers.TrainerCallback):
    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        self.texts: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.texts.append(greedy(model, self.ids, 4))


def test_1515_generating_while_training_in_bfloat16(
    base: nn.Module, connection: Connection, tokens: Any, tmp_path: Path
) -> None:
    """bf16 training and model.generate() in a TrainerCallback met in "mat1 and mat2 must have the same dtype"."""
    remote = adapted(connection.wrap(copy.deepcopy(base).to(torch.bfloat16)))
    assert {p.dtype for p in remote.parameters() if p.requires_grad} == {torch.float32}
    callback = GenerateWhileTraining(tokens(1, 4))
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, bf16=True, use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens(4, 8)]

    transformers.Trainer(remote, arguments, train_dataset=data, callbacks=[callback]).train()

    assert [text.shape for text in callback.texts] == [(1, 8)] * 2


@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")  # peft asks the hub, when Trainer saves
def test_859_a_resumed_run_has_its_adapter_and_optimizer(
    base: nn.Module, connection: Connection, tokens: Any, tmp_path: Path
) -> None:
    """resume_from_checkpoint loaded neither the adapter nor the states of optimizer and schedule."""

    def run(name: str, resume: str | None = None, **options: Any) -> list[float]:
        arguments = transformers.TrainingArguments(
            str(tmp_path / name), max_steps=4, per_device_train_batch_size=2, use_cpu=True, report_to=[], seed=1,
            logging_steps=1, learning_rate=5e-3, warmup_steps=2, disable_tqdm=True, save_steps=2, **options,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in tokens(8, 8)]
        trainer = transformers.Trainer(adapted(connection.load_model()), arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    whole = run("whole")
    resumed = run("resumed", resume=str(tmp_path / "whole" / "checkpoint-2"))

    assert resumed == pytest.approx(whole, rel=1e-4)
    assert whole[3] != pytest.approx(whole[2], rel=1e-3)
