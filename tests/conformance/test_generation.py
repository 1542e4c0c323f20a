"""Every mode of generation in the table, remote against local; and what users reported of others' generation."""

from __future__ import annotations

import pytest

from tests.conformance.generation import SECTIONS
from tests.conformance.harness import Bench, params
from tests.conformance.modes import Mode, check


@pytest.mark.parametrize("mode", params(SECTIONS))
def test_mode(mode: Mode, bench: Bench) -> None:
    check(mode, bench)
