"""Exact masks: the local results within a stated error, and numbers on the wire that have nothing to do with the rows.

Tolerances of exact against local: weights are off by half a unit of 2^-k, of which a row of magnitudes adds up to 2^31,
so 1e-7 of a product at these widths; rows are off by 2^-32 of their largest. What remains is float32's own rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import peft
import pytest
import torch

import symbiosis
from symbiosis.connection import Connection
from symbiosis.errors import (
    ConfigError,
    MasksExhaustedError,
    ModelMismatchError,
    UnsupportedMethodError,
    WrongReplyError,
)
from symbiosis.flight import ring
from symbiosis.flight.base_model import BaseModel
from symbiosis.privacy import Masking
from symbiosis.privacy.dealer import Key
from symbiosis.privacy.draws import RING, draw
from symbiosis.privacy.exact import ExactRemote, in_whole_numbers
from symbiosis.privacy.verify import RingVerifier
from tests.client.conftest import adapt, assert_same_step, difference, greedy, run_step, train
from tests.privacy.conftest import Pair

QV = ["q_proj", "v_proj"]
METHODS = {
    "lora": peft.LoraConfig(r=4, target_modules=QV, task_type="CAUSAL_LM"),
    "lora-all": peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    "ia3": peft.IA3Config(target_modules=[*QV, "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    "dora": peft.LoraConfig(r=4, target_modules=QV, use_dora=True, task_type="CAUSAL_LM"),
}
Q = "model.layers.0.self_attn.q_proj"
Tapped = Callable[..., tuple[Connection, Any]]


def exactly(conn: Connection) -> ExactRemote:
    assert isinstance(conn.privacy, ExactRemote)
    return conn.privacy


@pytest.mark.parametrize("method", METHODS)
def test_a_masked_step_is_the_local_one(pair: Pair, tokens: Any, method: str) -> None:
    with symbiosis.connect(pair.server.url, privacy=pair.masking(mode="exact")) as conn:
        remote, local = (adapt(m, METHODS[method]) for m in (conn.wrap(pair.model()), pair.model()))
        for seed in range(3):  # the second step knows the groups, the third is dealt ahead
            ids = tokens(seed=seed)
            assert_same_step(run_step(remote, ids), run_step(local, ids))


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2"])
def test_other_families_and_their_biases(pair_of: Callable[[str], Pair], tokens: Any, family: str) -> None:
    pair = pair_of(family)
    with symbiosis.connect(pair.server.url, privacy=pair.masking(mode="exact")) as conn, torch.no_grad():
        assert difference(conn.wrap(pair.model())(tokens()).logits, pair.base(tokens()).logits) <= 1e-5


def test_training_and_text_are_the_unmasked_ones(pair: Pair, tokens: Any) -> None:
    with symbiosis.connect(pair.server.url, privacy=pair.masking(mode="exact")) as conn:
        loaded, config = conn.load_model(), copy.deepcopy(METHODS["lora"])  # peft writes the model's name into it
        remote, local = adapt(loaded, config), adapt(pair.model(), METHODS["lora"])
        there, here = train(remote, tokens()), train(local, tokens())

        assert here[0] - here[-1] > 0.02
        assert max(abs(a - b) for a, b in zip(there, here, strict=True)) <= 1e-4
        ids = tokens(batch=1)
        assert torch.equal(greedy(conn.wrap(pair.model()), ids), greedy(pair.base, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_travels_in_whole_numbers(
    start_server: Any, tokens: Any, tiny_llama: Any, dtype: torch.dtype
) -> None:
    base = tiny_llama(seed=21).to(dtype)
    server, dealer = start_server(base), start_server(base)
    privacy = Masking(dealer=dealer.url, mode="exact")
    with symbiosis.connect(server.url, privacy=privacy) as conn, torch.no_grad():
        got = conn.wrap(copy.deepcopy(base))(tokens()).logits

        assert got.dtype == dtype
        assert difference(got, base(tokens()).logits) <= 2e-2  # bfloat16 keeps 8 bits


# --- what is sent -----------------------------------------------------------------------------------


def test_what_the_server_sees_is_uniform_and_has_nothing_of_the_rows(pair: Pair, tapped: Tapped, tokens: Any) -> None:
    runs = {}
    for name, privacy in (("plain", None), ("exact", pair.masking(mode="exact"))):
        conn, tap = tapped(pair.server.url, privacy)
        run_step(adapt(conn.wrap(pair.model(), granularity="linear"), METHODS["lora-all"]), tokens())
        runs[name] = [e for e in tap.exchanges if e.tensors[0].numel()]  # without questions for exponents

    assert [(e.op, e.modules, e.tensors[0].shape) for e in runs["plain"]] == [
        (e.op, e.modules, e.tensors[0].shape) for e in runs["exact"]
    ]
    assert {e.request.tensors[0].dtype for e in runs["exact"]} == {"Z64"}
    sent = torch.cat([e.tensors[0].flatten() for e in runs["exact"]])
    for shift in (0, 21, 42, 60):  # four bits here and there: chi-squared of 16 cells, six deviations of luck
        cells = torch.bincount((sent >> shift) & 15, minlength=16).double()
        expected = len(sent) / 16
        assert ((cells - expected).square() / expected).sum() < 15 + 6 * 30**0.5
    plain = torch.cat([e.tensors[0].flatten() for e in runs["plain"]]).double()
    for bits in (sent.double(), (sent & 1).double()):
        assert abs(torch.corrcoef(torch.stack([plain, bits]))[0, 1]) < 5 / len(sent) ** 0.5
    rows = [row.numpy().tobytes() for e in runs["exact"] for row in e.tensors[0]]
    assert len(set(rows)) == len(rows)


def test_a_row_may_come_again_as_often_as_it_likes(pair: Pair, tapped: Tapped) -> None:
    """Each bit of it was sent a thousand times and stays a coin toss: there is no mean to take."""
    conn, tap = tapped(pair.server.url, pair.masking(mode="exact"))
    x = torch.randn(1, 32).expand(1000, 32)

    y = exactly(conn).call("forward", [Q], [x])

    assert difference(y, x @ pair.base.get_submodule(Q).weight.t()) <= 1e-6
    sent = tap.exchanges[-1].tensors[0]
    for bit in (0, 10, 31, 62):
        share = ((sent >> bit) & 1).double().mean(0)  # of ones, in each of 32 places
        assert (share - 0.5).abs().max() < 5 * 0.5 / 1000**0.5


def test_the_sum_with_a_mask_is_the_masks_own_distribution(pair: Pair, tapped: Tapped) -> None:
    """For any two rows there are masks that send the same numbers: what a one-time pad is."""
    whole, _ = in_whole_numbers(torch.randn(2, 32, dtype=torch.float64))
    mask = draw(bytes(32), 1, 32, RING)

    sent = whole[:1] + mask
    other_mask = sent - whole[1:]

    assert torch.equal(whole[1:] + other_mask, sent)
    assert not torch.equal(other_mask, mask)


# --- error ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 3, 16])
@pytest.mark.parametrize("size", [0.0, 1e-140, 1e-38, 1.0, 3e38])
def test_whole_numbers_are_within_the_stated_error(size: float, parts: int) -> None:
    x = size * torch.randn(6, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[0] = 0
    whole, steps = in_whole_numbers(x, parts)

    rounded_up = 1 << (parts - 1).bit_length()
    assert whole.abs().max() <= (1 << 31) // rounded_up
    allowed = 2.0**-32 * 2 * rounded_up * x.abs().amax(dim=1, keepdim=True)  # 2: up to the next power of two
    assert ((whole * steps - x).abs() <= allowed).all()


def test_the_error_is_what_docs_say(pair: Pair) -> None:
    """|y - exact| <= |x|_1 2^-(k+1) + |w|_1 step / 2, for rows over eighty orders of magnitude."""
    with symbiosis.connect(pair.server.url, privacy=pair.masking(mode="exact")) as conn:
        scales = torch.logspace(-40, 40, 64, dtype=torch.float64)[:, None]
        x = scales * torch.randn(64, 32, dtype=torch.float64)
        y = exactly(conn).call("forward", [Q], [x])

        weight = pair.base.get_submodule(Q).weight.detach().double()
        (k,) = conn._caller.exponents([Q])
        _, steps = in_whole_numbers(x)
        bound = x.abs().sum(1, keepdim=True) * 2.0 ** -(k + 1) + weight.abs().sum(1) * steps / 2
        assert ((y - x @ weight.t()).abs() <= bound * 1.001).all()  # and float64's own rounding
        assert difference(y, x @ weight.t()) <= 1e-7


def test_gradients_of_modules_of_different_scales_add_up(start_server: Any, tiny_llama: Any) -> None:
    base = tiny_llama(seed=8)
    attention = base.model.layers[0].self_attn
    attention.q_proj.weight.data *= 1e4
    attention.v_proj.weight.data *= 1e-5
    names = [f"model.layers.0.self_attn.{end}_proj" for end in "qkv"]
    weights = torch.cat([base.get_submodule(name).weight.detach() for name in names]).double()
    server, dealer = start_server(copy.deepcopy(base)), start_server(base)
    with symbiosis.connect(server.url, privacy=Masking(dealer=dealer.url, mode="exact")) as conn:
        assert len(set(conn._caller.exponents(names))) == 3
        dy, x = torch.randn(9, len(weights), dtype=torch.float64), torch.randn(9, 32, dtype=torch.float64)

        assert difference(exactly(conn).call("grad_input", names, [dy]), dy @ weights) <= 1e-7
        y = exactly(conn).call("forward", names, [x])
        for got, expected in zip(y.split([48, 24, 24], 1), (x @ weights.t()).split([48, 24, 24], 1), strict=True):
            assert difference(got, expected) <= 1e-7


def test_no_rows_and_rows_that_are_not_finite(pair: Pair, tapped: Tapped) -> None:
    conn, tap = tapped(pair.server.url, pair.masking(mode="exact"))
    q = conn.wrap(pair.model()).model.layers[0].self_attn.q_proj
    x = torch.randn(4, 32)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    with torch.no_grad():
        assert q(torch.empty(0, 32)).shape == (0, 48)
        y = q(x)

    expected = pair.base.model.layers[0].self_attn.q_proj(x).detach()
    assert difference(y[[0, 3]], expected[[0, 3]]) <= 1e-6
    assert y[1:3].isnan().all()
    assert len(tap.exchanges[-1].tensors[0]) == 4  # under masks like the others


# --- masks, and who deals ---------------------------------------------------------------------------


def test_a_dealer_sees_seeds_only(pair: Pair, tapped: Tapped, tokens: Any) -> None:
    dealer, tap = tapped(pair.dealer.url)
    with symbiosis.connect(pair.server.url, privacy=Masking(dealer=dealer, mode="exact")) as conn:
        run_step(adapt(conn.wrap(pair.model()), METHODS["lora"]), tokens())

    asked = [e for e in tap.exchanges if e.request.seed is None]
    dealt = [e for e in tap.exchanges if e.request.seed is not None]
    assert all(e.tensors[0].shape[0] == 0 for e in asked)  # only for exponents
    assert len({e.request.seed for e in dealt}) == len(dealt) > 0
    assert all(e.tensors == [] for e in dealt)


def test_an_empty_pool_raises_and_sends_nothing(pair: Pair, tapped: Tapped) -> None:
    conn, tap = tapped(pair.server.url, pair.masking(mode="exact", when_empty="raise", pool_bytes=0))
    remote, x = exactly(conn), torch.randn(3, 32)
    for _ in range(2):  # which wait in any case
        remote.call("forward", [Q], [x])
    sent = len(tap.exchanges)

    with pytest.raises(MasksExhaustedError):
        remote.call("forward", [Q], [torch.randn(1000, 32)])

    assert len(tap.exchanges) == sent


def test_no_mask_is_used_twice(pair: Pair) -> None:
    with symbiosis.connect(pair.server.url, privacy=pair.masking(mode="exact")) as conn:
        pool = exactly(conn)._pool
        taken = [pool.take(Key("forward", (Q,)), rows, 32).masks for rows in (1, 5, 100, 3, 70)]
        rows = {row.numpy().tobytes() for masks in taken for row in masks}

        assert len(rows) == 179
        assert "masks ahead" in str(conn.stats())
        assert "masked (exact)" in repr(conn)
        assert "checked" in exactly(conn).stats()._repr_html_()


def test_a_dealer_with_other_integers_is_found_out(pair: Pair, start_server: Any) -> None:
    dealer = start_server(BaseModel(pair.model()))
    dealer.base.exponents([Q])
    dealer.base._exponents[Q] -= 1
    with (
        symbiosis.connect(pair.server.url, privacy=Masking(dealer=dealer.url, mode="exact")) as conn,
        pytest.raises(ModelMismatchError, match=r"scaled by 2\^\d+ on the server and by 2\^\d+ on the dealer"),
    ):
        exactly(conn).call("forward", [Q], [torch.randn(2, 32)])


# --- replies that lie -------------------------------------------------------------------------------


class Integers:
    """A dealer, or a server, that holds integer weights."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.weights = {n: torch.randn(w, 48, generator=generator).double() for n, w in (("q", 40), ("k", 24))}

    def whole(self, op: str, modules: Sequence[str], x: torch.Tensor) -> torch.Tensor:
        product = ring.forward if op == "forward" else ring.grad_input
        return product(x, [self.weights[name] for name in modules], [20 for _ in modules])


@pytest.mark.parametrize("op", ["forward", "grad_input"])
def test_a_change_of_one_in_two_to_the_64_is_caught_in_each_trial(op: str) -> None:
    infos: Any = {n: type("Info", (), {"d_in": 48, "d_out": w}) for n, w in (("q", 40), ("k", 24))}
    server, caught = Integers(), 0
    generator = torch.Generator().manual_seed(7)
    for trial in range(200):
        verifier = RingVerifier(server, infos)
        sent = torch.randint(-(1 << 62), 1 << 62, (4, 48 if op == "forward" else 64), generator=generator)
        reply = server.whole(op, ("q", "k"), sent)
        verifier.check(op, ("q", "k"), sent, reply)
        lie = reply.clone()
        if trial % 2:
            lie[trial % 4, trial % lie.shape[1]] += 1
        else:
            lie[[0, 1]] = lie[[1, 0]]
        with pytest.raises(WrongReplyError, match=f"the reply to {op} of (q|k|q, k) is not what"):
            verifier.check(op, ("q", "k"), sent, lie)
        caught += 1

    assert caught == 200


def test_an_honest_server_passes_and_another_weight_does_not(pair: Pair, start_server: Any, tiny_llama: Any) -> None:
    liar = start_server(tiny_llama(seed=20))
    for server in (pair.server, liar):
        with symbiosis.connect(server.url, privacy=pair.masking(mode="exact", verify=True)) as conn:
            remote = exactly(conn)
            for op, width in (("forward", 32), ("grad_input", 48)):
                remote.call(op, [Q], [torch.randn(5, width)])
            assert remote.stats().checked_rows == 10
            if server is liar:
                liar.base.linears[Q].weight[3, 5] *= 1.001  # after the fingerprint was taken
                with pytest.raises(WrongReplyError, match=f"the reply to forward of {Q}"):
                    remote.call("forward", [Q], [torch.randn(5, 32)])


# --- what is refused --------------------------------------------------------------------------------


def test_options_that_mean_nothing_here_are_refused() -> None:
    with pytest.raises(ConfigError, match="mode='exact' hides rows from each of two servers; give the second one"):
        Masking(mode="exact")
    url = "grpc://127.0.0.1:1"
    for option in ({"precision": "single"}, {"strength": 16}, {"row_budget": 1.0}, {"remember_bytes": 0}):
        with pytest.raises(ConfigError, match=f"mode='exact' has no use for {next(iter(option))}"):
            Masking(dealer=url, mode="exact", **option)


def test_a_quantised_base_is_refused(start_server: Any, tiny_llama: Any) -> None:
    servers = [start_server(BaseModel(tiny_llama(), quantized="int8")) for _ in range(2)]
    with pytest.raises(UnsupportedMethodError, match="kept in int8, and mode='exact' needs weights"):
        symbiosis.connect(servers[0].url, privacy=Masking(dealer=servers[1].url, mode="exact"))


def test_what_is_not_linear_is_refused(pair: Pair, tapped: Tapped) -> None:
    conn, tap = tapped(pair.server.url, pair.masking(mode="exact"))
    for granularity in ("module", "segment"):
        with pytest.raises(
            UnsupportedMethodError, match=f"granularity='{granularity}' makes calls that are not linear"
        ):
            conn.wrap(pair.model(), granularity=granularity)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedMethodError, match="mlp is a block: masks can be taken off linears only"):
        exactly(conn).call("forward", ["model.layers.0.mlp"], [torch.randn(2, 32)])
    with pytest.raises(UnsupportedMethodError, match="segments are not linear"):
        exactly(conn).segment([], [], [torch.randn(2, 32)])

    assert tap.exchanges == []


def test_the_dealer_must_be_another_server(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="the dealer is the server itself"):
        symbiosis.connect(pair.server.url, privacy=Masking(dealer=pair.server.url, mode="exact"))
