"""The table in the docs says what the rows say, and enough of them."""

from __future__ import annotations

import re
from collections import Counter

from tests.conformance import adapters, architectures, encoders, modalities, real_models
from tests.conformance.harness import Section
from tests.conformance.table import DOCUMENT, MODULES, render, verdict


def without_versions(text: str) -> str:
    """Other versions than the table was made with are no reason to fail; another row is."""
    return re.sub(r"^Made with .*?\. ", "", text, flags=re.MULTILINE)


def working(sections: tuple[Section, ...]) -> int:
    found = Counter(verdict(row) for section in sections for row in section.rows)
    return found["works"] + found["works, part local"]


def test_the_committed_table_is_that_of_the_rows() -> None:
    committed = DOCUMENT.read_text()

    assert without_versions(committed) == without_versions(render()), "run: python -m tests.conformance.table"


def test_as_much_works_as_is_promised() -> None:
    assert sum(working(module.SECTIONS) for module in (architectures, encoders, modalities, real_models)) >= 30
    assert working(tuple(adapters.SECTIONS)) >= 25


def test_rows_have_names_of_their_own() -> None:
    for module in MODULES:
        for section in module.SECTIONS:
            names = [row.name for row in section.rows]
            assert len(set(names)) == len(names)
