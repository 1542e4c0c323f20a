"""Saved adapters are plain peft folders that know their base; what does not fit is not loaded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import symbiosis
from symbiosis.connection import Connection
from symbiosis.errors import ConfigError, ModelMismatchError, UnsupportedMethodError
from symbiosis.flight.base_model import BaseModel
from symbiosis.provenance import Base
from tests.client.conftest import adapt, assert_same_step, difference, run_step

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
NAME, REVISION = "org/tiny-llama", "0123abcd"


@pytest.fixture
def model(tiny_llama: Any) -> Any:
    return tiny_llama()


@pytest.fixture
def conn(tiny_llama: Any, start_server: Any) -> Iterator[Connection]:
    server = start_server(BaseModel(tiny_llama(), name=NAME, revision=REVISION))
    with symbiosis.connect(server.url) as connection:
        yield connection


@pytest.fixture
def other_conn(tiny_llama: Any, start_server: Any) -> Iterator[Connection]:
    server = start_server(BaseModel(tiny_llama(seed=1), name="org/other-llama"))
    with symbiosis.connect(server.url) as connection:
        yield connection


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{**LORA, **options})


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(input_ids=ids).logits
    return output


# --- what is saved --------------------------------------------------------------------------------------------


def test_plain_peft_opens_it(conn: Connection, model: Any, tokens: Any, tmp_path: Path) -> None:
    remote = adapt(conn.load_model(), lora())

    folder = conn.save_adapter(remote, tmp_path / "adapter")

    assert folder == tmp_path / "adapter"
    opened = peft.PeftModel.from_pretrained(model, folder, is_trainable=True).eval()
    assert_same_step(run_step(remote, tokens()), run_step(opened, tokens()))


def test_it_opens_where_this_package_is_not(conn: Connection, model: Any, tokens: Any, tmp_path: Path) -> None:
    remote = adapt(conn.load_model(), lora())
    conn.save_adapter(remote, tmp_path / "adapter")
    model.save_pretrained(tmp_path / "base")
    torch.save(tokens(), tmp_path / "ids.pt")
    script = f"""
import sys
sys.modules["symbiosis"] = None  # an import of it would fail
import torch, transformers, peft
base = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / "base")!r})
model = peft.PeftModel.from_pretrained(base, {str(tmp_path / "adapter")!r}).eval()
with torch.no_grad():
    torch.save(model(input_ids=torch.load({str(tmp_path / "ids.pt")!r})).logits, {str(tmp_path / "logits.pt")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)

    assert difference(torch.load(tmp_path / "logits.pt"), logits(remote, tokens())) <= 1e-5


def test_the_base_is_recorded(conn: Connection, tmp_path: Path) -> None:
    folder = conn.save_adapter(adapt(conn.load_model(), lora()), tmp_path)

    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (NAME, REVISION)
    record = json.loads((folder / "symbiosis.json").read_text())
    assert record["symbiosis"] == symbiosis.__version__
    assert record["base"]["name"] == NAME
    assert record["base"]["revision"] == REVISION
    assert record["base"]["architecture"] == "LlamaForCausalLM"
    assert record["base"]["fingerprints"]["F32"] == conn.manifest.fingerprint


@pytest.mark.parametrize("source", ["skeleton", "wrapped", "peft first"])
def test_plain_save_pretrained_records_it_as_well(conn: Connection, model: Any, tmp_path: Path, source: str) -> None:
    if source == "peft first":
        adapted = conn.wrap(adapt(model, lora()))
    else:
        adapted = adapt(conn.load_model() if source == "skeleton" else conn.wrap(model), lora())

    adapted.save_pretrained(tmp_path, save_embedding_layers=False)

    served, recorded = Base.served(conn.manifest), Base.recorded(tmp_path)
    assert recorded.fingerprints["BF16"] == served.fingerprints["BF16"]
    assert not recorded.is_other(served)
    assert not (tmp_path / "symbiosis.json").exists()


def test_saving_asks_no_hub(conn: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft #1452: peft asks the hub whether the base's vocabulary is still its own."""

    def ask(*_: Any, **__: Any) -> None:
        raise AssertionError("asked the hub")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", ask)

    conn.save_adapter(adapt(conn.load_model(), lora()), tmp_path)


def test_a_resized_embedding_is_saved_too(conn: Connection, model: Any, tokens: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers: the new rows are drawn from the old ones' distribution
        model.resize_token_embeddings(104)
        remote = adapt(conn.wrap(model, lm_head="local"), lora())

    conn.save_adapter(remote, tmp_path)

    assert any("embed_tokens" in key for key in load_file(tmp_path / "adapter_model.safetensors"))


def test_several_adapters_have_folders_of_their_own(conn: Connection, tokens: Any, tmp_path: Path) -> None:
    remote = adapt(conn.load_model(), lora())
    remote.add_adapter("second", lora(r=2))

    folders = [conn.save_adapter(remote, tmp_path, name) for name in ("default", "second")]

    assert folders == [tmp_path, tmp_path / "second"]
    for folder, rank in zip(folders, (4, 2), strict=True):
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == rank
        assert (folder / "symbiosis.json").is_file()


def test_what_cannot_be_saved(conn: Connection, model: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not wrapped; call conn\.wrap"):
        conn.save_adapter(peft.get_peft_model(model, lora()), tmp_path)
    with pytest.raises(ConfigError, match="no adapters to save"):
        conn.save_adapter(conn.load_model(), tmp_path)
    with pytest.raises(ConfigError, match="no adapter 'third' in this model; it has default"):
        conn.save_adapter(adapt(conn.load_model(), lora()), tmp_path, "third")
    assert not list(tmp_path.iterdir())


# --- what is loaded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_by", ["us", "save_pretrained", "plain peft"])
def test_loading_is_the_reverse(
    conn: Connection, model: Any, tiny_llama: Any, tokens: Any, tmp_path: Path, saved_by: str
) -> None:
    if saved_by == "plain peft":
        original = adapt(tiny_llama(), lora())
        original.peft_config["default"].base_model_name_or_path = NAME
        original.save_pretrained(tmp_path, save_embedding_layers=False)
    else:
        original = adapt(conn.wrap(tiny_llama()), lora())
        conn.save_adapter(original, tmp_path) if saved_by == "us" else original.save_pretrained(
            tmp_path, save_embedding_layers=False
        )

    loaded = conn.load_adapter(conn.wrap(model), tmp_path, is_trainable=True)

    assert isinstance(loaded, peft.PeftModelForCausalLM)
    assert_same_step(run_step(loaded.eval(), tokens()), run_step(original, tokens()))


def test_for_inference_nothing_is_trained(conn: Connection, tokens: Any, tmp_path: Path) -> None:
    original = adapt(conn.load_model(), lora())
    conn.save_adapter(original, tmp_path)

    loaded = conn.load_adapter(conn.load_model(), tmp_path)

    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert difference(logits(loaded, tokens()), logits(original, tokens())) <= 1e-5


def test_a_second_adapter_beside_the_first(conn: Connection, tokens: Any, tmp_path: Path) -> None:
    original = adapt(conn.load_model(), lora(r=2))
    conn.save_adapter(original, tmp_path)
    model = adapt(conn.load_model(), lora())
    before = run_step(model, tokens())

    assert conn.load_adapter(model, tmp_path, "second") is model

    assert_same_step(run_step(model, tokens()), before)
    model.set_adapter("second")
    assert difference(logits(model, tokens()), logits(original, tokens())) <= 1e-5
    with pytest.raises(ConfigError, match="has an adapter 'second' already"):
        conn.load_adapter(model, tmp_path, "second")


METHODS = {
    "ia3": lambda: peft.IA3Config(
        target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "vblora": lambda: peft.VBLoRAConfig(
        r=2, num_vectors=8, vector_length=8, topk=2, target_modules=["q_proj"], task_type="CAUSAL_LM"
    ),
    "adalora": lambda: peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=9, target_modules=["q_proj"], task_type="CAUSAL_LM"
    ),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "ln": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"),
    "lora-bias": lambda: lora(bias="all"),
    "lora-saved-norm": lambda: lora(modules_to_save=["norm"]),
    "lora-tokens": lambda: lora(trainable_token_indices=[5, 6]),
    "lora-embedding": lambda: lora(target_modules=["q_proj", "embed_tokens"]),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
def test_every_kind_goes_there_and_back(conn: Connection, tokens: Any, tmp_path: Path, method: str) -> None:
    original = adapt(conn.load_model(), METHODS[method]())
    conn.save_adapter(original, tmp_path)

    loaded = conn.load_adapter(conn.load_model(), tmp_path)

    assert difference(logits(loaded.eval(), tokens()), logits(original, tokens())) <= 1e-5


# --- what does not fit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_by", ["us", "save_pretrained", "plain peft"])
def test_another_base_is_warned_of_with_both_names(
    conn: Connection, other_conn: Connection, tiny_llama: Any, tokens: Any, tmp_path: Path, saved_by: str
) -> None:
    if saved_by == "plain peft":
        original = adapt(tiny_llama(), lora())
        original.peft_config["default"].base_model_name_or_path = NAME
        original.save_pretrained(tmp_path, save_embedding_layers=False)
    else:
        original = adapt(conn.load_model(), lora())
        conn.save_adapter(original, tmp_path) if saved_by == "us" else original.save_pretrained(
            tmp_path, save_embedding_layers=False
        )

    with warnings.catch_warnings(record=True) as caught:  # pytest.warns would raise those of peft again
        warnings.simplefilter("always")
        loaded = other_conn.load_adapter(other_conn.load_model(), tmp_path)

    (warning,) = [warning for warning in caught if warning.category is UserWarning]
    assert re.search(f"made for {NAME}.*serves org/other-llama", str(warning.message))
    assert warning.filename == __file__
    assert logits(loaded, tokens()).isfinite().all()


def test_the_same_checkpoint_in_another_dtype_is_no_other_base(
    conn: Connection, tiny_llama: Any, start_server: Any, tmp_path: Path
) -> None:
    conn.save_adapter(adapt(conn.load_model(), lora()), tmp_path)
    server = start_server(BaseModel(tiny_llama().to(torch.bfloat16), name="/checkpoints/tiny"))

    with symbiosis.connect(server.url) as narrow:
        narrow.load_adapter(narrow.load_model(), tmp_path)  # warnings are errors here


def without_first(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(sorted(tensors.items())[1:])


def with_another(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = next(iter(tensors)).replace("layers.0", "layers.7")
    return {**tensors, name: torch.zeros(4, 32)}


def with_a_longer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = next(iter(tensors))
    return {**tensors, name: torch.zeros(4, 33)}


@pytest.mark.parametrize("beside_another", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_first, r"lacks 1 tensors, first .*layers\.0"),
        (with_another, r"has the unexpected 1 tensors, first .*layers\.7"),
        (with_a_longer, "size mismatch"),
    ],
    ids=["missing", "unexpected", "size"],
)
def test_tensors_that_do_not_fit_are_errors(
    conn: Connection, tokens: Any, tmp_path: Path, change: Any, words: str, beside_another: bool
) -> None:
    """peft #1678, #2699: loaded with a warning or none, such an adapter is random where it has no values."""
    conn.save_adapter(adapt(conn.load_model(), lora()), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    model = conn.load_model()
    if beside_another:
        model = adapt(model, lora())
    before = logits(model, tokens())

    with pytest.raises(ModelMismatchError, match=words) as caught:
        conn.load_adapter(model, tmp_path, "broken")

    assert NAME in str(caught.value)
    assert torch.equal(logits(model, tokens()), before)
    conn.save_adapter(adapt(conn.load_model(), lora()), tmp_path / "right")
    conn.load_adapter(model, tmp_path / "right", "right")  # and the model can be used


def test_an_adapter_for_other_layers(
    conn: Connection, tokens: Any, tiny_gpt2: Any, start_server: Any, tmp_path: Path
) -> None:
    conn.save_adapter(adapt(conn.load_model(), lora()), tmp_path)
    with symbiosis.connect(start_server(BaseModel(tiny_gpt2(), name="org/tiny-gpt2")).url) as gpt2:
        model = gpt2.load_model()
        before = logits(model, tokens())

        with (
            pytest.warns(UserWarning, match=f"made for {NAME}.*serves org/tiny-gpt2"),
            pytest.raises(ModelMismatchError, match=f"made for {NAME}.*on org/tiny-gpt2.*q_proj"),
        ):
            gpt2.load_adapter(model, tmp_path)

        assert torch.equal(logits(model, tokens()), before)


def test_a_refused_method_leaves_the_model_as_it_was(conn: Connection, model: Any, tokens: Any, tmp_path: Path) -> None:
    local = adapt(model, lora(target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]))
    local.save_pretrained(tmp_path, save_embedding_layers=False)
    remote = conn.load_model()
    names, before = [name for name, _ in remote.named_modules()], logits(remote, tokens())

    with pytest.raises(UnsupportedMethodError, match="lm_head"):
        conn.load_adapter(remote, tmp_path)

    assert [name for name, _ in remote.named_modules()] == names
    assert torch.equal(logits(remote, tokens()), before)
    assert not hasattr(remote, "peft_config")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("adapter_config.json", None, r"no adapter in .*adapter_config\.json"),
        ("adapter_config.json", "{", r"adapter_config\.json is damaged"),
        ("adapter_config.json", "[]", r"adapter_config\.json holds a list"),
        ("adapter_config.json", '{"peft_type": "FUTURE"}', "peft_type 'FUTURE', which peft .* does not know"),
        ("adapter_model.safetensors", None, "has no values: neither"),
        ("symbiosis.json", "{", r"symbiosis\.json is damaged"),
        ("symbiosis.json", '{"base": {"name": 3}}', r"symbiosis\.json does not describe a base"),
    ],
)
def test_a_damaged_folder_is_named(
    conn: Connection, tmp_path: Path, file: str, content: str | None, words: str
) -> None:
    conn.save_adapter(adapt(conn.load_model(), lora()), tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)

    with pytest.raises(ConfigError, match=words):
        conn.load_adapter(conn.load_model(), tmp_path)


def test_damaged_values_are_named(conn: Connection, tmp_path: Path) -> None:
    conn.save_adapter(adapt(conn.load_model(), lora()), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not a tensor in it")

    with pytest.raises(ModelMismatchError, match=f"{re.escape(str(tmp_path))}, made for {NAME}"):
        conn.load_adapter(conn.load_model(), tmp_path)


def test_only_for_wrapped_models(conn: Connection, model: Any, tmp_path: Path) -> None:
    conn.save_adapter(adapt(conn.load_model(), lora()), tmp_path)

    with pytest.raises(ConfigError, match="not wrapped"):
        conn.load_adapter(model, tmp_path)


def test_a_base_without_a_name_gets_the_servers(conn: Connection, model: Any, tmp_path: Path) -> None:
    model.config.name_or_path = model.name_or_path = ""

    conn.save_adapter(adapt(conn.wrap(model), lora()), tmp_path)

    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == NAME
