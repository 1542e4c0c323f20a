"""Replies that lie are caught, honest ones never: Freivalds' check with a tolerance that bounds rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import peft
import pytest
import torch

import symbiosis
from symbiosis.errors import ConfigError, WrongReplyError
from symbiosis.privacy import Masking
from symbiosis.privacy.verify import Verifier
from tests.client.conftest import adapt, assert_same_step, run_step
from tests.privacy.conftest import Pair

D_IN, WIDTHS = 48, {"q": 40, "k": 24}
NAMES = tuple(WIDTHS)
TRIALS = 200


class Weights:
    """A dealer, or a server, that holds weights; `change` may spoil what it answers."""

    def __init__(self, seed: int = 0, scale: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = {n: scale * torch.randn(w, D_IN, generator=generator) for n, w in WIDTHS.items()}

    def call(self, op: str, modules: Sequence[str], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        stacked = torch.cat([self.weights[name] for name in modules]).double()
        return tensors[0] @ (stacked.t() if op == "forward" else stacked)

    def weight_norms(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weights[module].norm(dim=0), self.weights[module].norm(dim=1)

    def segment(self, *args: Any) -> Any:
        raise NotImplementedError


def rows(op: str, count: int, seed: int) -> torch.Tensor:
    """As they travel: a mask thousands of times as large as what it hides, and rows of very different norms."""
    generator = torch.Generator().manual_seed(seed)
    width = D_IN if op == "forward" else sum(WIDTHS.values())
    scales = torch.exp2(torch.randint(-20, 20, (count, 1), generator=generator).double())
    return 1e4 * torch.randn(count, width, generator=generator, dtype=torch.float64) * scales


@pytest.mark.parametrize("op", ["forward", "grad_input"])
def test_no_honest_row_is_called_a_lie(op: str) -> None:
    server, verifier = Weights(), Verifier(Weights())
    for seed in range(10):
        sent = rows(op, 10_000, seed)
        verifier.check(op, NAMES, sent, server.call(op, NAMES, [sent]))

    assert verifier.checked_rows == 100_000


def change_a_weight(server: Weights, op: str, sent: torch.Tensor, trial: int) -> torch.Tensor:
    liar = Weights()
    # 1e-4 of an element: what it moves is some 1e-6 of a reply.
    liar.weights["k"][trial % WIDTHS["k"], (7 * trial) % D_IN] *= 1.0001
    return liar.call(op, NAMES, [sent])


def swap_rows(server: Weights, op: str, sent: torch.Tensor, trial: int) -> torch.Tensor:
    reply = server.call(op, NAMES, [sent]).clone()
    reply[[0, 1 + trial % (len(sent) - 1)]] = reply[[1 + trial % (len(sent) - 1), 0]]
    return reply


def replay_an_old_reply(server: Weights, op: str, sent: torch.Tensor, trial: int) -> torch.Tensor:
    return server.call(op, NAMES, [rows(op, len(sent), 10_000 + trial)])


def change_two_elements_alike(server: Weights, op: str, sent: torch.Tensor, trial: int) -> torch.Tensor:
    """The hardest for one check, which misses it half of the time."""
    reply = server.call(op, NAMES, [sent]).clone()
    reply[trial % len(sent), [1, 2]] *= 1 - 1e-6
    reply[trial % len(sent), 2] = reply[trial % len(sent), 1]
    return reply


def send_nothing(server: Weights, op: str, sent: torch.Tensor, trial: int) -> torch.Tensor:
    return torch.full_like(server.call(op, NAMES, [sent]), torch.nan)


LIES = (change_a_weight, swap_rows, replay_an_old_reply, change_two_elements_alike, send_nothing)


@pytest.mark.parametrize("op", ["forward", "grad_input"])
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_each_lie_is_caught_in_each_trial(op: str, lie: Callable[..., torch.Tensor]) -> None:
    server, caught = Weights(), 0
    for trial in range(TRIALS):
        verifier = Verifier(Weights())  # with secrets of its own
        sent = rows(op, 6, trial)
        with pytest.raises(WrongReplyError, match=f"the reply to {op} of (q|k|q, k) is not what"):
            verifier.check(op, NAMES, sent, lie(server, op, sent, trial))
        caught += 1

    assert caught == TRIALS


def test_a_module_that_lies_is_named() -> None:
    sent = rows("forward", 6, 0)
    reply = change_a_weight(Weights(), "forward", sent, 3)

    with pytest.raises(WrongReplyError, match="forward of k is not"):
        Verifier(Weights()).check("forward", NAMES, sent, reply)


# --- over the wire ----------------------------------------------------------------------------------


def test_an_honest_server_passes(pair: Pair, tokens: Any) -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    with symbiosis.connect(pair.server.url, privacy=pair.masking(verify=True)) as conn:
        remote, local = adapt(conn.wrap(pair.model()), config), adapt(pair.model(), config)
        for _ in range(2):
            assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))

        assert conn.privacy is not None
        assert conn.privacy.stats().checked_rows > 300


@pytest.mark.parametrize("op", ["forward", "grad_input"])
def test_a_server_with_another_weight_than_it_announced_is_caught(
    pair: Pair, start_server: Any, tokens: Any, tiny_llama: Any, op: str
) -> None:
    liar = start_server(tiny_llama(seed=20))  # the pair's base
    name = "model.layers.1.mlp.down_proj"
    liar.base.linears[name].weight[3, 5] *= 1.001  # after the fingerprint was taken
    with symbiosis.connect(liar.url, privacy=pair.masking(verify=True)) as conn:
        model = adapt(conn.wrap(pair.model()), peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        if op == "grad_input":  # honest on the way there
            remote, honest = conn.privacy, symbiosis.connect(pair.server.url)
            real = remote._inner.call
            remote._inner.call = lambda o, *rest: (honest._caller.call if o == "forward" else real)(o, *rest)
        with pytest.raises(WrongReplyError, match=f"the reply to {op} of {name} is not"):
            run_step(model, tokens())
        if op == "grad_input":
            honest.close()


def test_verify_needs_a_dealer_and_double_precision() -> None:
    for options in ({}, {"dealer": "grpc://127.0.0.1:1", "precision": "single"}):
        with pytest.raises(ConfigError, match="verify=True needs a dealer"):
            Masking(verify=True, **options)
