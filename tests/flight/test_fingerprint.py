from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.pytorch_utils import Conv1D

from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.fingerprint import hash_tensors, model_fingerprint, module_hashes

Factory = Callable[..., Any]


def test_a_hash_is_the_sha256_of_the_row_major_values() -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    assert hash_tensors([weight], torch.float32) == hashlib.sha256(struct.pack("<4f", 1, 2, 3, 4)).hexdigest()
    assert hash_tensors([weight], torch.bfloat16) == hashlib.sha256(bytes.fromhex("803f004040408040")).hexdigest()


def test_a_fingerprint_is_the_sha256_of_sorted_lines() -> None:
    expected = hashlib.sha256(b"a 11\nb 22\n").hexdigest()

    assert model_fingerprint({"b": "22", "a": "11"}) == expected
    assert model_fingerprint({"a": "11", "b": "22"}) == expected


def test_all_published_dtypes_are_hashed() -> None:
    assert set(module_hashes([torch.zeros(2, 2)])) == {"F32", "F16", "BF16"}


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 1000))
def test_the_layout_in_memory_does_not_matter(rows: int, columns: int, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    transposed = weight.t().contiguous().t()
    sliced = torch.nn.functional.pad(weight, (1, 2, 3, 4))[3 : 3 + rows, 1 : 1 + columns]

    assert module_hashes([transposed]) == module_hashes([sliced]) == module_hashes([weight])


def test_conv1d_and_linear_of_the_same_matrix_have_one_hash(tiny_gpt2: Factory) -> None:
    model = tiny_gpt2()
    base = BaseModel(model)
    conv = model.transformer.h[0].attn.c_attn
    assert isinstance(conv, Conv1D)

    as_linear = conv.weight.detach().t().contiguous()  # [d_out, d_in]

    assert base.hashes["transformer.h.0.attn.c_attn"] == module_hashes([as_linear])


def test_a_transposed_matrix_is_another_one() -> None:
    weight = torch.randn(4, 4)

    assert hash_tensors([weight], torch.float32) != hash_tensors([weight.t()], torch.float32)


def test_hashing_in_steps_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 7)
    whole = module_hashes([weight])
    monkeypatch.setattr("symbiosis.flight.fingerprint.HASH_ROWS_BYTES", 100)

    assert module_hashes([weight]) == whole


@pytest.mark.parametrize("place", [(0, 0), (3, 2), (49, 6)])
def test_one_changed_value_changes_every_hash(place: tuple[int, int]) -> None:
    weight = torch.randn(50, 7)
    before = module_hashes([weight])

    weight[place] = weight[place] * 1.5 + 1

    after = module_hashes([weight])
    assert all(before[tag] != after[tag] for tag in before)


def test_one_flipped_bit_changes_the_hash_of_full_precision() -> None:
    weight = torch.randn(5, 5)
    before = module_hashes([weight])

    weight.view(torch.int32)[2, 3] ^= 1

    assert module_hashes([weight])["F32"] != before["F32"]


def test_one_changed_weight_changes_the_fingerprint(tiny_llama: Factory) -> None:
    model = tiny_llama()
    before = BaseModel(model).fingerprint
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] += 0.5

    assert BaseModel(model).fingerprint != before


def test_the_same_model_twice_has_one_fingerprint(tiny_llama: Factory) -> None:
    assert BaseModel(tiny_llama()).fingerprint == BaseModel(tiny_llama()).fingerprint
    assert BaseModel(tiny_llama(seed=1)).fingerprint != BaseModel(tiny_llama()).fingerprint


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gpt2"])
def test_full_and_half_precision_loads_of_one_checkpoint_share_a_hash(
    family: str, request: pytest.FixtureRequest
) -> None:
    build = request.getfixturevalue(family)
    full, half = BaseModel(build()), BaseModel(build().to(torch.bfloat16))

    assert full.hashes.keys() == half.hashes.keys()
    for name in full.hashes:
        assert full.hashes[name]["BF16"] == half.hashes[name]["BF16"], name
        assert full.hashes[name]["F32"] != half.hashes[name]["F32"], name


def test_a_half_precision_checkpoint_loaded_wide_has_all_hashes_in_common(tiny_llama: Factory) -> None:
    half = tiny_llama().to(torch.bfloat16)
    wide = tiny_llama().to(torch.bfloat16).to(torch.float32)

    assert BaseModel(wide).hashes == BaseModel(half).hashes


def test_the_fingerprint_is_of_the_dtype_that_the_server_holds(tiny_llama: Factory) -> None:
    base = BaseModel(tiny_llama())

    assert base.fingerprint == model_fingerprint({name: hashes["F32"] for name, hashes in base.hashes.items()})


def test_the_hash_of_a_block_covers_each_of_its_parameters(tiny_gpt2: Factory) -> None:
    name = "transformer.h.0.mlp"
    before = BaseModel(tiny_gpt2()).hashes[name]
    for parameter_name, _ in tiny_gpt2().get_submodule(name).named_parameters():
        model = tiny_gpt2()
        with torch.no_grad():
            model.get_submodule(name).get_parameter(parameter_name).flatten()[0] += 1.0
        assert BaseModel(model).hashes[name] != before, parameter_name
