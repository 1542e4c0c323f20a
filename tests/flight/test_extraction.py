"""Extraction accounting, and the attack that it counts: a linear layer is read out with d_in rows."""

from __future__ import annotations

import pytest
import torch

from symbiosis.errors import BudgetExceededError
from symbiosis.flight.extraction import Extraction
from symbiosis.flight.server import Server

WIDTHS = {"q": (32, 48), "up": (32, 56)}
NAME = "model.layers.0.self_attn.q_proj"


def test_rows_are_counted_against_what_determines_the_weights() -> None:
    account = Extraction("alice", WIDTHS, None)
    account.count("forward", ["q", "up"], 8)
    assert account.share == pytest.approx(0.25)
    account.count("grad_input", ["up"], 28)

    assert account.share == pytest.approx(0.25 + 0.5)
    assert account.modules == 0
    account.count("segment", ["q", "a norm"], 24)
    assert account.modules == 1


def test_the_alarm_is_given_once_and_names_who_and_what(caplog: pytest.LogCaptureFixture) -> None:
    account = Extraction("alice", WIDTHS, None)
    for _ in range(10):
        account.count("forward", ["q"], 8)

    (record,) = caplog.records
    assert "tenant alice" in record.getMessage()
    assert "to q " in record.getMessage()


def test_over_the_budget_nothing_is_counted_and_the_module_is_named() -> None:
    account = Extraction("alice", WIDTHS, budget=1.5)
    account.count("forward", ["q"], 48)

    with pytest.raises(BudgetExceededError, match=r"budget of q .* the limit is 1\.5"):
        account.count("forward", ["up", "q"], 1)
    account.count("forward", ["up"], 48)


def test_a_layer_is_read_out_with_as_many_rows_as_it_is_wide_and_the_count_says_so(
    llama_server: Server, raw_stream
) -> None:
    weight = llama_server.base.linears[NAME].weight.detach()

    stolen = raw_stream(llama_server.url).forward(NAME, torch.eye(32)).T

    # one product of ones and zeros with float32 weights is exact
    torch.testing.assert_close(stolen, weight, rtol=0, atol=0)
    assert llama_server.ledger.stats("").extraction >= 1
