"""Every architecture of the table, remote against local."""

from __future__ import annotations

import pytest

from tests.conformance.architectures import SECTIONS
from tests.conformance.harness import Bench, Row, check, params


@pytest.mark.parametrize("row", params(SECTIONS))
def test_row(row: Row, bench: Bench) -> None:
    check(row, bench)
