"""A model from the server: what it holds, what it does not, and what a wrong server cannot do to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import symbiosis
from symbiosis import skeleton
from symbiosis.adapters import base_of
from symbiosis.connection import Connection
from symbiosis.errors import ConfigError, ModelMismatchError, ProtocolError
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.protocol import ParameterInfo
from symbiosis.wrapping import has_meta
from tests.client.conftest import FAMILIES, Served, adapt, difference, greedy, remote_layers, run_step

BEAM = {"num_beams": 3, "num_return_sequences": 2}


@pytest.mark.parametrize("served", FAMILIES, indirect=True)
def test_generation_from_a_skeleton(served: Served, connection: Connection, tokens: Any) -> None:
    model = connection.load_model()

    for options in ({}, BEAM):
        assert torch.equal(greedy(model, tokens(2, 5), **options), greedy(served.base, tokens(2, 5), **options))


@pytest.mark.parametrize("served", FAMILIES, indirect=True)
def test_it_is_like_the_model_that_is_served(served: Served, connection: Connection) -> None:
    model = connection.load_model()

    assert type(model) is type(served.base)
    assert not model.training
    assert not has_meta(model)
    # from_pretrained writes the dtype into the config too; a model made from a config has none there.
    assert model.config.to_dict() == {**served.base.config.to_dict(), "dtype": "float32"}
    assert model.config._name_or_path == served.base.config._name_or_path  # what adapters record as their base
    expected = served.base.state_dict()
    state = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    assert expected.keys() - state.keys() == {
        f"{name}.weight" for name, module in served.base.named_modules() if name in names_of_remote(model)
    }
    if served.base.config.tie_word_embeddings:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for (name, ours), (_, theirs) in zip(model.named_buffers(), served.base.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def names_of_remote(model: nn.Module) -> set[str]:
    layers = remote_layers(model)
    return {name for name, module in model.named_modules() if module in layers}


def test_the_generation_config_travels(tiny_llama: Any, start_server: Any) -> None:
    base = tiny_llama(seed=4)
    base.generation_config.max_new_tokens = 3
    base.generation_config.eos_token_id = [2, 5]
    with symbiosis.connect(start_server(base).url) as conn:
        generated = conn.load_model().generation_config

    assert (generated.max_new_tokens, generated.eos_token_id) == (3, [2, 5])


@pytest.mark.parametrize("server_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_the_dtype_is_the_servers_or_ours(
    tiny_llama: Any, start_server: Any, tokens: Any, server_dtype: str, dtype: torch.dtype | None
) -> None:
    base = tiny_llama(seed=5).to(getattr(torch, server_dtype))
    with symbiosis.connect(start_server(base).url) as conn:
        model = conn.load_model(dtype=dtype)
        with torch.no_grad():
            logits = model(input_ids=tokens()).logits

    assert {p.dtype for p in model.parameters()} == {logits.dtype} == {dtype or base.dtype}
    assert difference(logits, base.float()(input_ids=tokens()).logits) <= 5e-2


def test_adapters_belong_on_top_of_a_model_with_values(served: Served, connection: Connection) -> None:
    with torch.device("meta"):
        adapted = adapt(type(served.base)(served.base.config), served.config("lora"))

    with pytest.raises(ModelMismatchError, match=r"first .*lora_A.*wrap the base first"):
        connection.wrap(adapted)


def test_a_meta_model_with_adapters_that_have_values(served: Served, connection: Connection, tokens: Any) -> None:
    with torch.device("meta"):
        empty = type(served.base)(served.base.config).eval()
    adapted = adapt(empty, served.config("lora"))
    local = adapt(served.model(), served.config("lora"))
    values = {name: parameter for name, parameter in local.named_parameters() if "lora" in name}
    for name, parameter in values.items():
        path, _, key = name.rpartition(".")
        setattr(adapted.get_submodule(path), key, nn.Parameter(parameter.detach().clone()))

    remote = connection.wrap(adapted)

    assert not has_meta(base_of(remote))
    assert difference(run_step(remote, tokens()).logits, run_step(local, tokens()).logits) <= 1e-5


def test_an_untied_head_cannot_be_had(connection: Connection, served: Served) -> None:
    with pytest.raises(ConfigError, match=r"lm_head.*server keeps"):
        connection.load_model(lm_head="local")
    with torch.device("meta"):
        empty = type(served.base)(served.base.config)
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_proj.*server keeps"):
        connection.wrap(empty, local=["*.layers.0.*"])
    assert not remote_layers(empty)


def test_other_threads_make_real_modules_meanwhile(served: Served, connection: Connection) -> None:
    """accelerate's init_empty_weights, used here before, put the parameters of every thread on meta."""
    built, made = threading.Event(), []

    def make() -> None:
        while not built.is_set():
            made.append(nn.Linear(2, 2).weight.is_meta)

    thread = threading.Thread(target=make)
    thread.start()
    for _ in range(3):
        skeleton.build(connection.manifest, torch.float32)
    built.set()
    thread.join()

    assert len(made) > 10
    assert not any(made)
    assert not nn.Linear(2, 2).weight.is_meta


def test_an_unknown_architecture(connection: Connection) -> None:
    import msgspec

    for name in ("NoSuchModel", "AutoConfig", "logging", "PreTrainedModel.x"):
        manifest = msgspec.structs.replace(connection.manifest, architecture=name)
        with pytest.raises(ModelMismatchError, match=f"no model {name!r}.*install the version"):
            skeleton.build(manifest, torch.float32)


# --- what the server sends --------------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.norm = nn.LayerNorm(3)

    def tie_weights(self) -> None:
        pass


INFOS = [ParameterInfo("norm.weight", "F32", [3]), ParameterInfo("norm.bias", "F32", [3])]
Chunk = tuple[str, int, int, memoryview]


def chunk(name: str, offset: int, total: int, data: bytes) -> Chunk:
    return name, offset, total, memoryview(data)


def values(*numbers: float) -> bytes:
    return bytes(torch.tensor(numbers, dtype=torch.float32).view(torch.uint8).tolist())


def fill(chunks: list[Chunk]) -> Tiny:
    model = Tiny()
    skeleton.fill(model, INFOS, iter(chunks), lambda name: name)
    return model


GOOD = [chunk("norm.weight", 0, 12, values(1, 2, 3)), chunk("norm.bias", 0, 12, values(4, 5, 6))]


def test_chunks_become_parameters() -> None:
    model = fill([chunk("norm.weight", 0, 12, values(1, 2)), chunk("norm.weight", 8, 12, values(3)), GOOD[1]])

    assert model.norm.weight.tolist() == [1, 2, 3]
    assert model.norm.bias.tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([chunk("other", 0, 12, values(1, 2, 3))], "not in the manifest"),
        ([chunk("norm.weight", 0, 16, values(1, 2, 3, 4))], "not in the manifest"),
        ([chunk("norm.weight", 4, 12, values(1))], "out of order"),
        ([chunk("norm.weight", 0, 12, values(1)), chunk("norm.weight", 8, 12, values(1))], "out of order"),
        ([chunk("norm.weight", 0, 12, values(1)), chunk("norm.bias", 4, 12, values(1))], "out of order"),
        ([chunk("norm.weight", 0, 12, values(1, 2)), chunk("norm.weight", 8, 12, values(3, 4))], "out of order"),
    ],
)
def test_chunks_that_do_not_fit(chunks: list[Chunk], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        fill(chunks)


def test_what_never_came_is_missed() -> None:
    for chunks in ([], GOOD[:1], [*GOOD[:1], chunk("norm.bias", 0, 12, values(1))]):
        with pytest.raises(ModelMismatchError, match=r"first 'norm\."):
            fill(chunks)


@pytest.mark.parametrize("name", ["../tokenizer.json", "a/b.json", "tokenizer.py", ".", "x" * 300 + ".json", ""])
def test_file_names_that_are_refused(name: str) -> None:
    with pytest.raises(ProtocolError, match="refused"):
        skeleton.load_files({name: b"{}"}, lambda folder: None)


# --- tokenizer ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "the", "cat", "sat"])}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture
def with_tokenizer(tiny_llama: Any, start_server: Any, tokenizer: Any) -> Iterator[Connection]:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with symbiosis.connect(start_server(BaseModel(tiny_llama(), tokenizer=tokenizer)).url) as conn:
        yield conn


def test_the_tokenizer_travels(with_tokenizer: Connection, tokenizer: Any) -> None:
    received = with_tokenizer.tokenizer()

    assert received("the cat sat").input_ids == tokenizer("the cat sat").input_ids
    assert received.pad_token_id == tokenizer.pad_token_id
    assert received.apply_chat_template([{"role": "user", "content": "cat"}], tokenize=False) == "cat"


def test_a_server_without_a_tokenizer_says_so(connection: Connection) -> None:
    with pytest.raises(ConfigError, match="publishes no tokenizer"):
        connection.tokenizer()


def test_a_config_may_hold_what_json_cannot(tiny_llama: Any, start_server: Any) -> None:
    base = tiny_llama()
    base.config.limits = [0.0, float("inf")]  # as Bamba's time_step_limit

    with symbiosis.connect(start_server(base).url) as conn:
        assert conn.load_model().config.limits == [0.0, float("inf")]
