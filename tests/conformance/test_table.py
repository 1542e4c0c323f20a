"""The table in the docs says what the rows say."""

from __future__ import annotations

from tests.conformance.table import DOCUMENT, render


def test_the_committed_table_is_that_of_the_rows() -> None:
    assert DOCUMENT.read_text() == render(), "run: python -m tests.conformance.table"
