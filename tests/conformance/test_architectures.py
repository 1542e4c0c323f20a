"""Every architecture of the table, remote against local."""

from __future__ import annotations

import pytest

from tests.conformance import architectures, encoders, modalities, real_models
from tests.conformance.harness import Bench, Row, check, params

SECTIONS = (*architectures.SECTIONS, *encoders.SECTIONS, *modalities.SECTIONS, *real_models.SECTIONS)


@pytest.mark.parametrize("row", params(SECTIONS))
def test_row(row: Row, bench: Bench) -> None:
    check(row, bench)
