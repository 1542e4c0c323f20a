"""One nursery for all fault tests: it loads torch once, and a server of it starts in 0.1 s."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import symbiosis
from tests.faults.servers import Nursery, ServerProcess


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as started:
        yield started


@pytest.fixture
def serve(nursery: Nursery) -> Iterator[Callable[..., ServerProcess]]:
    """serve(**options): a server in a process of its own; killed after the test."""
    servers: list[ServerProcess] = []

    def start(**options: object) -> ServerProcess:
        servers.append(nursery.start(**options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def connect() -> Iterator[Callable[..., symbiosis.Connection]]:
    """connect(url, **options): closed after the test."""
    opened: list[symbiosis.Connection] = []

    def to(*arguments: Any, **options: Any) -> symbiosis.Connection:
        opened.append(symbiosis.connect(*arguments, **options))
        return opened[-1]

    yield to
    for connection in opened:
        connection.close()
