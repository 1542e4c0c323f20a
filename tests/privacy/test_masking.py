"""Masked calls: the same results, and a server that sees masks only.

Tolerances of masked against local: a row is rounded to steps of 1/8,000,000 of the longest ordinary row's norm or
less, twice a layer, so 1e-5 holds for outputs of these widths with a factor of ten to spare; gradients add up.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch

import symbiosis
from symbiosis.connection import Connection
from symbiosis.errors import (
    ConfigError,
    ConnectError,
    ModelMismatchError,
    PrivacyBudgetError,
    ServerBusyError,
    UnsupportedMethodError,
)
from symbiosis.privacy import Masking
from symbiosis.privacy.masking import MaskedRemote
from tests.client.conftest import adapt, assert_same_step, difference, greedy, run_step, train
from tests.privacy.conftest import Pair

TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
SINGLE_TOLERANCE = 1e-3  # rounding of float32 follows a mask some 300 times as large as the row
QV = ["q_proj", "v_proj"]
METHODS = {
    "lora": peft.LoraConfig(r=4, target_modules=QV, task_type="CAUSAL_LM"),
    "lora-all": peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    "ia3": peft.IA3Config(target_modules=[*QV, "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    "dora": peft.LoraConfig(r=4, target_modules=QV, use_dora=True, task_type="CAUSAL_LM"),
}
Tapped = Callable[..., tuple[Connection, Any]]


@pytest.mark.parametrize("method", METHODS)
def test_a_masked_step_is_the_local_one(pair: Pair, tokens: Any, method: str) -> None:
    with symbiosis.connect(pair.server.url, privacy=pair.masking()) as conn:
        remote = adapt(conn.wrap(pair.model()), METHODS[method])
        local = adapt(pair.model(), METHODS[method])

        for seed in range(3):  # the second step knows the groups, the third is dealt ahead
            ids = tokens(seed=seed)
            assert_same_step(run_step(remote, ids), run_step(local, ids))


def test_single_precision_is_close(pair: Pair, tapped: Tapped, tokens: Any) -> None:
    conn, tap = tapped(pair.server.url, pair.masking(precision="single"))
    remote, local = (adapt(m, METHODS["lora"]) for m in (conn.wrap(pair.model()), pair.model()))
    there, here = run_step(remote, tokens()), run_step(local, tokens())

    assert abs(there.loss - here.loss) <= SINGLE_TOLERANCE
    assert all(difference(there.gradients[n], g) <= SINGLE_TOLERANCE for n, g in here.gradients.items())
    assert {e.request.tensors[0].dtype for e in tap.exchanges} == {"F32"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_double_traffic(
    pair: Pair, start_server: Any, tokens: Any, tiny_llama: Any, dtype: torch.dtype
) -> None:
    """The base and the client may be anything, as long as what is masked travels in double precision."""
    base = tiny_llama(seed=21).to(dtype)
    server, dealer = start_server(base), start_server(base)
    with symbiosis.connect(server.url, privacy=Masking(dealer=dealer.url)) as conn, torch.no_grad():
        got = conn.wrap(copy.deepcopy(base))(tokens()).logits

        assert got.dtype == dtype
        assert difference(got, base(tokens()).logits) <= 2e-2  # bfloat16 keeps 8 bits


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2"])
def test_other_families_and_their_biases(pair_of: Callable[[str], Pair], tokens: Any, family: str) -> None:
    pair = pair_of(family)
    with symbiosis.connect(pair.server.url, privacy=pair.masking()) as conn:
        remote = conn.wrap(pair.model())
        ids = tokens()
        with torch.no_grad():
            assert difference(remote(ids).logits, pair.base(ids).logits) <= TOLERANCE


def test_training_and_text_are_the_unmasked_ones(pair: Pair, tokens: Any) -> None:
    with symbiosis.connect(pair.server.url, privacy=pair.masking()) as conn:
        loaded, config = conn.load_model(), copy.deepcopy(METHODS["lora"])  # peft writes the model's name into it
        remote, local = adapt(loaded, config), adapt(pair.model(), METHODS["lora"])
        there, here = train(remote, tokens()), train(local, tokens())

        assert here[0] - here[-1] > 0.02
        assert max(abs(a - b) for a, b in zip(there, here, strict=True)) <= 1e-3
        ids = tokens(batch=1)
        assert torch.equal(greedy(conn.wrap(pair.model()), ids), greedy(pair.base, ids))


def test_the_server_sees_no_row_of_the_client(pair: Pair, tapped: Tapped, tokens: Any) -> None:
    """Every row that is sent is far from every row of the unmasked run, and no two masks are alike."""
    ids, runs = tokens(), {}
    for name, privacy in (("plain", None), ("masked", pair.masking())):
        conn, tap = tapped(pair.server.url, privacy)
        run_step(adapt(conn.wrap(pair.model(), granularity="linear"), METHODS["lora-all"]), ids)
        runs[name] = tap.exchanges

    assert [(e.op, e.modules, e.tensors[0].shape) for e in runs["plain"]] == [
        (e.op, e.modules, e.tensors[0].shape) for e in runs["masked"]
    ]
    for plain, masked in zip(runs["plain"], runs["masked"], strict=True):
        x, sent = plain.tensors[0], masked.tensors[0]
        # The mask's elements alone are 256 times the norm of a row.
        assert (sent.norm(dim=1) > 100 * x.norm(dim=1).max()).all()
        correlation = torch.corrcoef(torch.stack([x.flatten().double(), sent.flatten()]))[0, 1]
        assert abs(correlation) < 5 / x.numel() ** 0.5 + 1 / 256
    rows = [row for e in runs["masked"] for row in e.tensors[0]]
    assert len({row.numpy().tobytes() for row in rows}) == len(rows)


def test_what_is_sent_is_a_whole_number_of_steps(pair: Pair, tapped: Tapped, tokens: Any) -> None:
    """The low bits of a masked value show nothing: all values of a call are multiples of one power of two."""
    conn, tap = tapped(pair.server.url, pair.masking())
    with torch.no_grad():
        conn.wrap(pair.model())(tokens())

    for exchange in tap.exchanges:
        sent = exchange.tensors[0].double()
        spread = sent.abs().amax(dim=1, keepdim=True)
        step = torch.exp2(torch.floor(torch.log2(spread)) - 34)  # below the last bit of the largest of a row
        assert torch.equal(sent, (sent / step).round() * step)


def test_the_first_layer_sends_no_token_a_third_time(pair: Pair, tapped: Tapped, tokens: Any) -> None:
    conn, tap = tapped(pair.server.url, pair.masking())
    model = conn.wrap(pair.model())
    ids = tokens().repeat(1, 3)
    with torch.no_grad():
        for _ in range(5):
            logits = model(ids).logits
        assert difference(logits, pair.base(ids).logits) <= TOLERANCE

    assert len({e.tensors[0].shape[0] for e in tap.exchanges}) == 1  # the number of rows says nothing of it
    stats = conn.privacy.stats()
    assert stats.answered_rows >= 4 * ids.numel() * 2 // 3
    assert stats.remembered_bytes > 0


def test_without_memory_the_budget_stops_a_row(pair: Pair, tokens: Any) -> None:
    privacy = pair.masking(remember_bytes=0, strength=16, row_budget=8 / 16**2)
    with symbiosis.connect(pair.server.url, privacy=privacy) as conn, torch.no_grad():
        model = conn.wrap(pair.model())
        for _ in range(3):  # an ordinary row shows some sixteenth part of 1/16², or all of it, each time
            model(tokens())

        with pytest.raises(PrivacyBudgetError, match=r"the input of forward of .*, over the budget of"):
            deque((model(tokens()) for _ in range(40)), maxlen=0)


def test_no_rows_and_rows_that_are_not_finite(pair: Pair, tapped: Tapped) -> None:
    conn, tap = tapped(pair.server.url, pair.masking())
    q = conn.wrap(pair.model()).model.layers[0].self_attn.q_proj
    x = torch.randn(4, 32)
    x[1, 3], x[2, 5] = torch.inf, torch.nan

    with torch.no_grad():
        assert q(torch.empty(0, 32)).shape == (0, 48)
        y = q(x)

    expected = pair.base.model.layers[0].self_attn.q_proj(x).detach()
    assert difference(y[[0, 3]], expected[[0, 3]]) <= TOLERANCE
    assert y[1:3].isnan().all()
    assert tap.exchanges[-1].tensors[0].isfinite().all()


def test_stats_show_pool_and_leakage(pair: Pair, tokens: Any) -> None:
    with symbiosis.connect(pair.server.url, privacy=pair.masking()) as conn:
        run_step(adapt(conn.wrap(pair.model()), METHODS["lora"]), tokens())
        stats = conn.privacy.stats()
        labels = [label for label, _ in stats.rows()]

        assert stats.pool.taken_rows > 0
        assert stats.pool.dealt_rows >= stats.pool.taken_rows
        assert stats.scales > 0
        assert "masks ahead" in str(stats)
        assert all(label in conn._repr_html_() for label in labels)


def test_copies_of_a_masked_model_share_its_connection(pair: Pair, tokens: Any) -> None:
    with symbiosis.connect(pair.server.url, privacy=pair.masking()) as conn, torch.no_grad():
        model = conn.wrap(pair.model())
        assert difference(copy.deepcopy(model)(tokens()).logits, pair.base(tokens()).logits) <= TOLERANCE


# --- who deals --------------------------------------------------------------------------------------


def test_without_a_dealer_it_works_and_says_that_it_is_weak(pair: Pair, tapped: Tapped, tokens: Any) -> None:
    with pytest.warns(UserWarning, match="weak: the server that sees the masked rows also draws the masks"):
        conn, tap = tapped(pair.server.url, Masking())
    with torch.no_grad():
        assert difference(conn.wrap(pair.model())(tokens()).logits, pair.base(tokens()).logits) <= TOLERANCE

    assert any(exchange.request.seed is not None for exchange in tap.exchanges)  # the server has all it needs


def test_a_dealer_sees_seeds_only(pair: Pair, tapped: Tapped, tokens: Any) -> None:
    dealer, tap = tapped(pair.dealer.url)
    with symbiosis.connect(pair.server.url, privacy=Masking(dealer=dealer)) as conn:
        run_step(adapt(conn.wrap(pair.model()), METHODS["lora"]), tokens())

    assert {e.op for e in tap.exchanges} == {"forward", "grad_input"}
    assert all(e.request.seed is not None and e.tensors == [] for e in tap.exchanges)
    assert len({e.request.seed for e in tap.exchanges}) == len(tap.exchanges)
    assert dealer.health().status == "serving"  # a connection that was handed over is not ours to close


def test_a_dealer_that_is_the_server_is_refused(pair: Pair) -> None:
    other_name = pair.server.url.replace("127.0.0.1", "localhost")
    for url in (pair.server.url, other_name):
        with pytest.raises(ConfigError, match="the dealer is the server itself"):
            symbiosis.connect(pair.server.url, privacy=Masking(dealer=url))


def test_a_dealer_of_another_base_is_refused(pair: Pair, pair_of: Callable[[str], Pair]) -> None:
    with pytest.raises(ModelMismatchError, match=r"the server holds .* the dealer"):
        symbiosis.connect(pair.server.url, privacy=Masking(dealer=pair_of("gpt2").server.url))


def test_a_bad_dealer_or_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="dealer: got 7, expected a URL"):
        Masking(dealer=7)
    with pytest.raises(ConfigError, match="strenght: unknown option of Masking; did you mean strength"):
        Masking(strenght=3)
    with pytest.raises(ConfigError, match=r"strength: got 0.5"):
        Masking(strength=0.5)


def test_privacy_must_be_one_of_ours(pair: Pair) -> None:
    with pytest.raises(ConfigError, match=r"expected symbiosis.privacy.Masking"):
        symbiosis.connect(pair.server.url, privacy="masking")  # type: ignore[arg-type]


# --- shares -----------------------------------------------------------------------------------------


def test_shares_give_the_same_step_and_keep_nothing_ahead(pair: Pair, tokens: Any) -> None:
    with symbiosis.connect(pair.server.url, privacy=pair.masking(mode="shares", verify=True)) as conn:
        remote, local = (adapt(m, METHODS["lora-all"]) for m in (conn.wrap(pair.model()), pair.model()))
        for _ in range(2):
            assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))

        assert conn.privacy is not None
        stats = conn.privacy.stats().pool
        assert stats.rows == 0
        assert stats.dealt_rows == stats.taken_rows > 0


def test_a_second_server_that_is_gone_fails_the_call(pair: Pair, start_server: Any) -> None:
    second = start_server(pair.model())
    privacy = Masking(dealer=second.url, mode="shares")
    with symbiosis.connect(pair.server.url, privacy=privacy, request_timeout_s=20, retry_s=0) as conn:
        q = conn.wrap(pair.model()).model.layers[0].self_attn.q_proj
        with torch.no_grad():
            q(torch.randn(2, 32))
            second.close()
            with pytest.raises((ConnectError, ServerBusyError)):
                q(torch.randn(2, 32))


def test_shares_larger_than_a_message(pair: Pair) -> None:
    privacy = pair.masking(mode="shares")
    with symbiosis.connect(pair.server.url, privacy=privacy, max_message_bytes=4096) as conn, torch.no_grad():
        assert conn.privacy is not None
        conn.privacy._pool._source._max_message_bytes = 4096
        q, x = conn.wrap(pair.model()).model.layers[0].self_attn.q_proj, torch.randn(100, 32)

        assert difference(q(x), pair.base.model.layers[0].self_attn.q_proj(x)) <= TOLERANCE


# --- what cannot be masked --------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["module", "segment"])
def test_calls_that_are_not_linear_are_refused(pair: Pair, granularity: Any) -> None:
    with symbiosis.connect(pair.server.url, privacy=pair.masking()) as conn:
        model = pair.model()
        with pytest.raises(
            UnsupportedMethodError, match=f"granularity='{granularity}' makes calls that are not linear"
        ):
            conn.wrap(model, granularity=granularity)
        conn.wrap(model)  # it was left as it was

        assert conn.plan is not None
        assert conn.plan.granularity == "linear"


def test_single_precision_refuses_what_is_less(pair: Pair, tiny_llama: Any, start_server: Any, tokens: Any) -> None:
    single = pair.masking(precision="single")
    half = start_server(tiny_llama().to(torch.bfloat16))
    with pytest.raises(UnsupportedMethodError, match=r"needs float32 everywhere.* served in BF16"):
        symbiosis.connect(half.url, privacy=single)

    with symbiosis.connect(pair.server.url, privacy=single) as conn:
        for model in (pair.model().to(torch.bfloat16), pair.model().half()):
            with pytest.raises(UnsupportedMethodError, match="needs float32 everywhere"):
                conn.wrap(model)
        with pytest.raises(UnsupportedMethodError, match=r"this model is torch.bfloat16"):
            conn.load_model(dtype=torch.bfloat16)
        model = conn.wrap(pair.model())
        with (
            pytest.raises(UnsupportedMethodError, match=r"got torch.bfloat16, and .*'single'\) sends float32"),
            torch.autocast("cpu", torch.bfloat16),
        ):
            model(tokens())


def test_a_mixture_of_experts_is_refused(pair: Pair, start_server: Any) -> None:
    import transformers

    from tests.conftest import GATED, seeded

    config = transformers.MixtralConfig(**{**GATED, "num_local_experts": 3, "num_experts_per_tok": 2})
    server = start_server(seeded(lambda: transformers.MixtralForCausalLM(config), 0))

    with pytest.raises(UnsupportedMethodError, match="is a mixture of experts, which is not linear"):
        symbiosis.connect(server.url, privacy=pair.masking())


def test_blocks_and_segments_never_reach_the_server(pair: Pair, tapped: Tapped) -> None:
    conn, tap = tapped(pair.server.url, pair.masking())
    remote = conn.privacy
    assert isinstance(remote, MaskedRemote)

    with pytest.raises(UnsupportedMethodError, match="mlp is a block: masks can be taken off linears only"):
        remote.call("forward", ["model.layers.0.mlp"], [torch.randn(2, 32)])
    with pytest.raises(UnsupportedMethodError, match="segments are not linear"):
        remote.segment([], [], [torch.randn(2, 32)])

    assert tap.exchanges == []


def test_dora_needs_permission_where_the_masks_are_weak(pair: Pair) -> None:
    with pytest.warns(UserWarning, match="weak"):
        conn = symbiosis.connect(pair.server.url, privacy=Masking())
    with conn, pytest.raises(UnsupportedMethodError, match="uses DoRA"):
        conn.wrap(adapt(pair.model(), METHODS["dora"]))
