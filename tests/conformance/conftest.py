"""The servers of the conformance rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.harness import Bench


@pytest.fixture(scope="session")
def bench() -> Iterator[Bench]:
    """Serves the model of a row; rows that follow each other and share it share the server."""
    bench = Bench()
    yield bench
    bench.close()
