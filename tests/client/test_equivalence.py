"""The wrapped model gives the same answers as the local one: the promise that everything else stands on.

Each row perturbs the adapter first, so that no zero hides an error; shows that calls were made and that the
client holds no base weight; and compares the loss, the logits, every gradient and the greedy continuation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, get_args

import pytest
import torch

import symbiosis
from symbiosis.connection import Connection
from symbiosis.plan import Granularity
from tests.client.conftest import (
    FAMILIES,
    Served,
    Step,
    adapt,
    assert_holds_no_base,
    assert_same_step,
    greedy,
    remote_layers,
    run_step,
    train,
)

METHODS = ("lora", "lora-all", "ia3", "adalora")
# Every method at the default granularity, and every granularity with few and with many adapted layers.
ROWS = [*((method, "auto") for method in METHODS), ("lora", "linear"), ("lora-all", "linear"), ("lora", "module")]
ROWS += [("ia3", "module"), ("lora", "segment"), ("lora-all", "segment")]
LEARNING_RATES = {"lora": 5e-3, "lora-all": 5e-3, "ia3": 1e-1}
LOSS_TOLERANCE = 1e-3  # after 20 steps, in which each step's rounding moves the next one's start


@pytest.fixture(scope="module")
def expected(serve_family: Callable[[str], Served], tokens: Any) -> Callable[[str, str], tuple[Step, torch.Tensor]]:
    """expected("gpt2", "lora"): one step and the greedy continuation of the local model."""

    @cache
    def find(family: str, method: str) -> tuple[Step, torch.Tensor]:
        served = serve_family(family)
        local = adapt(served.model(), served.config(method))
        return run_step(local, tokens()), greedy(local, tokens(1, 5))

    return find


def check(remote: Any, connection: Connection, tokens: Any, expected: tuple[Step, torch.Tensor]) -> None:
    before = connection.stats()
    for _ in range(2):  # the first pass learns who shares calls, the second uses it
        assert_same_step(run_step(remote, tokens()), expected[0])
    assert (connection.stats() - before).calls > 0
    assert torch.equal(greedy(remote, tokens(1, 5)), expected[1])
    layers = remote_layers(remote)
    assert layers
    assert all(layer.weight.numel() == 0 and layer.weight.untyped_storage().nbytes() == 0 for layer in layers)


def test_every_granularity_is_in_a_row() -> None:
    assert {granularity for _, granularity in ROWS} == set(get_args(Granularity))


@pytest.mark.parametrize(("method", "granularity"), ROWS)
@pytest.mark.parametrize("served", FAMILIES, indirect=True)
def test_wrap_then_peft(
    served: Served, connection: Connection, tokens: Any, expected: Any, method: str, granularity: Granularity
) -> None:
    remote = adapt(connection.wrap(served.model(), granularity=granularity), served.config(method))

    check(remote, connection, tokens, expected(served.family, method))


@pytest.mark.parametrize(
    ("method", "granularity"), [("lora", "auto"), ("lora-all", "linear"), ("ia3", "module"), ("adalora", "auto")]
)
@pytest.mark.parametrize("served", ["llama", "gpt2"], indirect=True)
def test_peft_then_wrap(
    served: Served, connection: Connection, tokens: Any, expected: Any, method: str, granularity: Granularity
) -> None:
    adapted = adapt(served.model(), served.config(method))

    remote = connection.wrap(adapted, granularity=granularity)

    assert remote is adapted
    check(remote, connection, tokens, expected(served.family, method))


@pytest.mark.parametrize("method", ["lora", "ia3"])
@pytest.mark.parametrize("served", FAMILIES, indirect=True)
def test_skeleton_from_the_server(
    served: Served, connection: Connection, tokens: Any, expected: Any, method: str
) -> None:
    remote = adapt(connection.load_model(), served.config(method))

    check(remote, connection, tokens, expected(served.family, method))


@pytest.mark.parametrize("granularity", ["module", "auto"])
@pytest.mark.parametrize("served", FAMILIES, indirect=True)
def test_model_on_the_meta_device(
    served: Served, connection: Connection, tokens: Any, expected: Any, granularity: Granularity
) -> None:
    # torch.device, unlike accelerate's init_empty_weights, leaves buffers without values too.
    with torch.device("meta"):
        empty = type(served.base)(served.base.config).eval()

    remote = adapt(connection.wrap(empty, granularity=granularity), served.config("lora"))

    check(remote, connection, tokens, expected(served.family, "lora"))


@pytest.mark.parametrize(
    ("served", "method"),
    [(family, method) for family in FAMILIES for method in ("lora", "ia3")]
    + [("llama", "lora-all"), ("gpt2", "lora-all")],
    indirect=["served"],
)
def test_twenty_steps_of_training(served: Served, connection: Connection, tokens: Any, method: str) -> None:
    local = adapt(served.model(), served.config(method))
    remote = adapt(connection.wrap(served.model()), served.config(method))

    there, here = (train(model, tokens(4, 12), lr=LEARNING_RATES[method]) for model in (remote, local))

    assert here[0] - here[-1] > 20 * LOSS_TOLERANCE, "the loss must move for its curve to say something"
    assert max(abs(a - b) for a, b in zip(there, here, strict=True)) <= LOSS_TOLERANCE
    assert torch.equal(greedy(remote, tokens(1, 5)), greedy(local, tokens(1, 5)))


@pytest.mark.parametrize(
    ("served", "granularity"),
    [*((family, "auto") for family in FAMILIES), ("llama", "module"), ("gpt2", "module")],
    indirect=["served"],
)
def test_no_base_weight_is_left_in_the_process(
    served: Served, connection: Connection, tokens: Any, granularity: Granularity
) -> None:
    first = connection.wrap(adapt(served.model(), served.config("lora")), granularity=granularity)
    second = connection.load_model(granularity=granularity)

    for model in (first, second):
        run_step(model, tokens())
        assert_holds_no_base(model, served.base)


def test_the_search_for_base_weights_finds_one(served: Served, connection: Connection) -> None:
    remote = connection.wrap(served.model())
    kept = served.base.model.layers[0].mlp.up_proj.weight.detach().t().clone()

    with pytest.raises(AssertionError, match="a base weight"):
        assert_holds_no_base(remote, served.base)
    del kept
    assert_holds_no_base(remote, served.base)


@pytest.mark.parametrize("client_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("server_dtype", ["float32", "bfloat16"])
def test_checkpoints_match_across_dtypes(
    tiny_llama: Any, start_server: Any, server_dtype: str, client_dtype: torch.dtype, tokens: Any
) -> None:
    checkpoint = tiny_llama(seed=3)
    with symbiosis.connect(start_server(tiny_llama(seed=3).to(getattr(torch, server_dtype))).url) as conn:
        remote = conn.wrap(tiny_llama(seed=3).to(client_dtype))

        with torch.no_grad():
            logits = remote(input_ids=tokens()).logits
            expected = checkpoint(input_ids=tokens()).logits

    assert logits.dtype == client_dtype
    # bfloat16 has 8 bits: about 0.4% for each of some ten roundings in a row.
    lowest = torch.bfloat16 in (client_dtype, getattr(torch, server_dtype))
    assert torch.allclose(logits.float(), expected, atol=5e-2 if lowest else 1e-5)
    assert torch.allclose(logits.float(), expected, rtol=0.1, atol=1e-2)
