"""The audit: plain traffic, weak masks and little noise give everything away, dealt masks nothing but lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from symbiosis.integrations import audit
from symbiosis.privacy.audit import Finding, Report


def is_luck(finding: Finding) -> bool:
    """Within twice the 99% margin: a test of this many findings would else fail once in fifty runs."""
    return finding.success <= finding.chance + 2 * finding.margin


def check(report: Report) -> None:
    for setting in ("plain", "weak"):  # what a server can do who may take off masks that it drew
        assert report.of(setting, "unmask").success >= 0.95, report
        assert report.of(setting, "adapter").success >= 0.95, report
    assert report.of("plain", "tokens").success >= 0.95, report
    assert report.of("client", "weights").success >= 0.999, report
    assert next(f for f in report.findings if f.setting.endswith("masks again")).success >= 0.5, report
    for attack in ("tokens", "unmask", "projection", "adapter"):
        for setting in ("shares", "exact", "noise, epsilon 1"):
            assert is_luck(report.of(setting, attack)), str(report)
    assert report.of("noise, epsilon 100000", "tokens").success >= 0.95, report
    assert is_luck(report.of("noise, epsilon 1", "repetition x1")), str(report)
    for attack in (
        "tokens",
        "unmask",
        "projection",
        "adapter",
        "repetition x1",
        "repetition x100",
        "repetition x1,000",
    ):
        assert is_luck(report.of("dealer", attack)), str(report)
    for times in ("1", "100", "1,000"):  # there is no budget that this would be beyond
        assert is_luck(report.of("exact", f"repetition x{times}")), str(report)
    # Sizes are hidden by no setting.
    assert all(f.success == 1 for f in report.findings if f.attack == "lengths")


@pytest.mark.filterwarnings("ignore:.*weak.*:UserWarning")
def test_the_audit_of_a_tiny_model(tiny_llama: Any) -> None:
    model = tiny_llama(num_hidden_layers=1)
    generator = torch.Generator().manual_seed(2)
    # Frequencies as in text: few tokens are most of it.
    weights = 1 / torch.arange(3, 97).float()
    public, private = (
        3 + torch.multinomial(weights[:93], count, replacement=True, generator=generator) for count in (4000, 600)
    )

    report = audit.run(model, public, private.view(20, 30))

    check(report)
    assert "broken" in str(report)
    assert "dealer" in report._repr_html_()


def test_a_finding_is_at_chance_within_its_margin() -> None:
    assert Finding("s", "tokens", 0.055, 0.05, 2000).at_chance
    assert not Finding("s", "tokens", 0.07, 0.05, 2000).at_chance
    assert Finding("s", "adapter", 0.02, 0.0, 5000).at_chance
    assert not Finding("s", "adapter", 0.1, 0.0, 5000).at_chance


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_audit_of_the_demo_model() -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("chatterbot_corpus")
    report = audit.run(*audit.demo_parts(16, 128))

    print(report)
    check(report)
    # Noise stays, and is averaged away all the same.
    assert report.of("noise, epsilon 1", "repetition x100,000").success >= 0.5
    # In single precision masks are weak enough for a thousand repetitions, beyond any budget, to show the row.
    assert not report.of("dealer, single", "repetition x1,000").at_chance
