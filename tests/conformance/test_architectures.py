"""Every architecture of the table, remote against local."""

from __future__ import annotations

import pytest

from tests.conformance.architectures import SECTIONS
from tests.conformance.harness import Bench, Row, check

ROWS = [row for section in SECTIONS for row in section.rows]


def params(rows: list[Row]) -> list[object]:
    return [pytest.param(row, id=row.name, marks=[pytest.mark.slow] if row.slow else []) for row in rows]


@pytest.mark.parametrize("row", params(ROWS))
def test_row(row: Row, bench: Bench) -> None:
    check(row, bench)
