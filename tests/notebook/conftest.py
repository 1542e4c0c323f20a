"""An IPython shell in this process, with the magics loaded, and what it displayed."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from torch import nn
from traitlets.config import Config

from symbiosis.connection import Connection
from symbiosis.flight.server import Server


class Notebook:
    """A shell as a kernel has it: outputs are published, not printed."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        shell.display_pub = CapturingDisplayPublisher(parent=shell)
        shell.kernel = object()  # type: ignore[attr-defined]  # what tells a kernel from a terminal

    def run(self, cell: str) -> ExecutionResult:
        return self.shell.run_cell(cell)

    def ok(self, cell: str) -> ExecutionResult:
        result = self.run(cell)
        result.raise_error()
        return result

    @property
    def outputs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.shell.display_pub.outputs
        return found

    def texts(self) -> str:
        return "\n".join(output["data"]["text/plain"] for output in self.outputs)


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config, colors="nocolor")
    try:
        made = Notebook(shell)
        made.ok("%load_ext symbiosis")
        yield made
    finally:
        for value in list(shell.user_ns.values()):
            if isinstance(value, Connection):
                value.close()
        atexit.unregister(shell.atexit_operations)
        shell.atexit_operations()
        InteractiveShell.clear_instance()


@pytest.fixture
def url(start_server: Callable[..., Server], tiny_llama: Callable[..., nn.Module]) -> str:
    return start_server(tiny_llama()).url
