"""Noise that stays: what is sent is clipped and noisy, what it promises is shown, what takes none is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch

import symbiosis
from symbiosis.connection import Connection
from symbiosis.errors import ConfigError, UnsupportedMethodError
from symbiosis.privacy import ActivationNoise
from symbiosis.privacy.gaussian import mu_of
from symbiosis.privacy.noise import FINENESS_BITS, NoisyRemote
from tests.client.conftest import adapt, difference, run_step
from tests.privacy.conftest import Pair

Tapped = Callable[..., tuple[Connection, Any]]
LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
NEXT_TO_NOTHING = ActivationNoise(epsilon=1e6, delta=1e-5, clip=1e3)


def noisy(conn: Connection) -> NoisyRemote:
    assert isinstance(conn.privacy, NoisyRemote)
    return conn.privacy


def test_every_row_is_clipped_and_noisy_both_ways(pair: Pair, tapped: Tapped, tokens: Any) -> None:
    ids, seen = tokens(), {}
    privacy = ActivationNoise(epsilon=8, delta=1e-5, clip=2.0, grad_clip=0.01)
    for name, setting in (("plain", None), ("noisy", privacy)):
        conn, tap = tapped(pair.server.url, setting)
        run_step(adapt(conn.wrap(pair.model(), granularity="linear"), LORA), ids)
        seen[name] = tap.exchanges

    assert [(e.op, e.modules, e.tensors[0].dtype) for e in seen["plain"]] == [
        (e.op, e.modules, e.tensors[0].dtype) for e in seen["noisy"]
    ]
    assert {e.op for e in seen["noisy"]} == {"forward", "grad_input"}
    for op, clip in (("forward", 2.0), ("grad_input", 0.01)):
        sigma = 2 * clip / mu_of(8, 1e-5)
        rows = torch.cat([e.tensors[0].flatten() for e in seen["noisy"] if e.op == op])
        # Clipped rows are small beside this noise; five standard errors of a variance.
        signal = clip**2 * sum(e.tensors[0].shape[0] for e in seen["noisy"] if e.op == op) / len(rows)
        assert rows.var().item() == pytest.approx(
            sigma**2 + signal / 2, abs=signal / 2 + 5 * sigma**2 / len(rows) ** 0.5
        )


def test_noise_of_one_row_has_the_promised_width_around_the_clipped_row(pair: Pair, tapped: Tapped) -> None:
    conn, tap = tapped(pair.server.url, ActivationNoise(epsilon=3, delta=1e-6, clip=1.5))
    q = conn.wrap(pair.model()).model.layers[0].self_attn.q_proj
    x = torch.randn(32)
    row = 10 * x / x.norm()

    with torch.no_grad():
        q(row.expand(4000, 32))

    sent = tap.exchanges[-1].tensors[0].double()
    sigma = 3.0 / mu_of(3, 1e-6)
    error = 5 * sigma / 4000**0.5
    assert (sent.mean(0) - 0.15 * row).abs().max() <= error
    assert sent.std().item() == pytest.approx((sigma**2 + (0.15 * row).var().item()) ** 0.5, rel=0.02)
    assert len(sent.unique(dim=0)) == 4000


def test_what_is_sent_is_a_whole_number_of_steps(pair: Pair, tapped: Tapped) -> None:
    """In double precision nothing is rounded on the way, so the last bits can be looked at."""
    conn, tap = tapped(pair.server.url, ActivationNoise(epsilon=500, delta=1e-5, clip=4.0))
    noisy(conn).call("forward", ["model.layers.0.self_attn.q_proj"], [torch.randn(50, 32, dtype=torch.float64)])

    step = math.ldexp(1.0, math.floor(math.log2(noisy(conn).sigma["forward"])) - FINENESS_BITS)
    sent = tap.exchanges[-1].tensors[0]
    assert torch.equal(sent, (sent / step).round() * step)


def test_no_clipped_row_is_longer_than_the_clip(pair: Pair, tapped: Tapped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.privacy.noise.draw_normal", lambda *size: torch.zeros(size, dtype=torch.float64))
    conn, tap = tapped(pair.server.url, ActivationNoise(epsilon=1e5, delta=1e-5, clip=1.0))
    sizes = torch.logspace(-3, 6, 400, dtype=torch.float64)[:, None]
    noisy(conn).call("forward", ["model.layers.0.self_attn.q_proj"], [sizes * torch.randn(400, 32).double()])

    assert tap.exchanges[-1].tensors[0].norm(dim=1).max() <= 1.0
    assert tap.exchanges[-1].tensors[0].norm(dim=1).max() >= 0.999


def test_with_next_to_no_noise_it_is_the_local_model(pair: Pair, tokens: Any) -> None:
    with symbiosis.connect(pair.server.url, privacy=NEXT_TO_NOTHING) as conn, torch.no_grad():
        # mu is 1,400, so sigma is 1.4 beside rows of norm 6: only the shape of the computation is compared.
        assert conn.wrap(pair.model())(tokens()).logits.isfinite().all()
    fine = ActivationNoise(epsilon=1e6, delta=1e-5, clip=10.0)
    with symbiosis.connect(pair.server.url, privacy=fine) as conn:
        q = conn.wrap(pair.model()).model.layers[0].self_attn.q_proj
        x = torch.randn(200, 32, requires_grad=True)
        y = q(x)
        y.sum().backward()

        local = pair.base.model.layers[0].self_attn.q_proj
        expected = torch.autograd.grad(local(other := x.detach().requires_grad_()).sum(), other)[0]
        noise = noisy(conn).sigma["forward"] * 32**0.5  # of a row, beside a norm of some 5.6
        assert difference(y, local(x)) == pytest.approx(noise / 32**0.5, rel=0.2)
        assert difference(x.grad, expected) < 0.1


def test_what_it_promises_is_shown(pair: Pair, tokens: Any) -> None:
    privacy = ActivationNoise(epsilon=8, delta=1e-5, clip=2.0)
    with symbiosis.connect(pair.server.url, privacy=privacy) as conn:
        assert "no calls" in str(conn.stats())
        run_step(adapt(conn.wrap(pair.model()), LORA), tokens())
        stats = noisy(conn).stats()

        assert "noise of epsilon 8, delta 1e-05 per row and call" in repr(conn)
        for text in (str(conn.stats()), conn._repr_html_(), str(stats), stats._repr_html_()):
            assert "epsilon 8, delta 1e-05 per row and call" in text
            assert "times the rows" in text
        forward, grad = stats.directions
        assert forward.rows > grad.rows > 0
        assert 0 < forward.clipped <= forward.rows
        assert stats.calls >= 10  # two layers and a head, there and back
        assert stats.epsilon_after(1) == pytest.approx(8)
        assert stats.epsilon_after(stats.calls) > 20
        assert (conn.stats() - conn.stats()).privacy == conn.stats().privacy


def test_rows_that_are_not_finite_and_no_rows(pair: Pair, tapped: Tapped) -> None:
    conn, tap = tapped(pair.server.url, NEXT_TO_NOTHING)
    q = conn.wrap(pair.model()).model.layers[0].self_attn.q_proj
    x = torch.randn(4, 32)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    with torch.no_grad():
        assert q(torch.empty(0, 32)).shape == (0, 48)
        y = q(x)

    assert y[[0, 3]].isfinite().all()
    assert y[1:3].isnan().all()
    assert tap.exchanges[-1].tensors[0].isfinite().all()


# --- what takes no noise ------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["module", "segment"])
def test_calls_of_more_than_linears_are_refused(pair: Pair, granularity: Any) -> None:
    with symbiosis.connect(pair.server.url, privacy=NEXT_TO_NOTHING) as conn:
        with pytest.raises(UnsupportedMethodError, match=f"'{granularity}' was asked for: ActivationNoise goes with"):
            conn.wrap(pair.model(), granularity=granularity)
        conn.wrap(pair.model())

        assert conn.plan is not None
        assert conn.plan.granularity == "linear"


def test_blocks_segments_and_experts_are_refused(pair: Pair, tapped: Tapped, start_server: Any) -> None:
    conn, tap = tapped(pair.server.url, NEXT_TO_NOTHING)
    with pytest.raises(UnsupportedMethodError, match=r"mlp is a block: ActivationNoise goes with single linears"):
        noisy(conn).call("forward", ["model.layers.0.mlp"], [torch.randn(2, 32)])
    for call in (noisy(conn).segment, noisy(conn).segment_grad):
        with pytest.raises(UnsupportedMethodError, match="segments are not linear: ActivationNoise"):
            call([], [], [torch.randn(2, 32)])
    assert tap.exchanges == []

    import transformers

    from tests.conftest import GATED, seeded

    config = transformers.MixtralConfig(**{**GATED, "num_local_experts": 3, "num_experts_per_tok": 2})
    server = start_server(seeded(lambda: transformers.MixtralForCausalLM(config), 0))
    with pytest.raises(UnsupportedMethodError, match=r"is a mixture of experts: ActivationNoise"):
        symbiosis.connect(server.url, privacy=NEXT_TO_NOTHING)


def test_dora_is_refused_even_where_it_may_be_shown(pair: Pair) -> None:
    dora = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    with (
        symbiosis.connect(pair.server.url, privacy=NEXT_TO_NOTHING, reveal_adapter=True) as conn,
        pytest.raises(UnsupportedMethodError, match=r"uses DoRA, whose norms ActivationNoise would blur"),
    ):
        conn.wrap(adapt(pair.model(), dora))


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="clip is required"):
        ActivationNoise(epsilon=1.0, delta=1e-5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"delta: got 1.5"):
        ActivationNoise(epsilon=1.0, delta=1.5, clip=1.0)
    with pytest.raises(ConfigError, match=r"epsilon: got 0"):
        ActivationNoise(epsilon=0, delta=1e-5, clip=1.0)
