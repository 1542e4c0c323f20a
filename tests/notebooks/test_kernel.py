"""A real kernel with a connection in it keeps its manners: interrupts, asyncio, shell commands, workers, reloads."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from symbiosis.flight.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]
ROOT = Path(__file__).parents[2]
CELL_TIMEOUT_S = 120.0
PREPARE = """
import asyncio, time, torch, symbiosis
before = asyncio.get_running_loop(), asyncio.get_event_loop_policy()
conn = symbiosis.connect(URL)
model = conn.load_model()
ids = torch.ones(2, 9, dtype=torch.long)
conn.dashboard()
"""


class Kernel:
    """A kernel of its own process; `run` returns what a cell printed."""

    def __init__(self, client: Any, manager: Any) -> None:
        self.client, self.manager = client, manager

    def run(self, code: str) -> str:
        return self.finish(self.client.execute(code))

    def finish(self, message_id: str, timeout_s: float = CELL_TIMEOUT_S) -> str:
        printed, deadline_s = "", time.monotonic() + timeout_s
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.1, deadline_s - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"the cell did not end within {timeout_s:.0f} s; it printed {printed!r}")
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "stream":
                printed += content["text"]
            elif kind == "error":
                printed += f"{content['ename']}: {content['evalue']}"
            elif kind == "status" and content["execution_state"] == "idle":
                return printed


@pytest.fixture(scope="module")
def kernel(tiny_llama: Callable[..., nn.Module]) -> Iterator[Kernel]:
    from jupyter_client.manager import start_new_kernel

    from symbiosis.config import ServerOptions
    from symbiosis.flight.base_model import BaseModel

    base = BaseModel(tiny_llama())
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with Server(base, ServerOptions(model=base.name, port=0, drain_timeout_s=2.0)) as server:
        manager, client = start_new_kernel(kernel_name="python3", startup_timeout=120, env=environ)
        try:
            made = Kernel(client, manager)
            made.run(f"URL = {server.url!r}")
            assert "Error" not in made.run(PREPARE)
            yield made
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def test_an_interrupt_ends_a_training_cell_at_once_and_leaves_the_connection_usable(kernel: Kernel) -> None:
    running = kernel.client.execute("while True:\n    model(input_ids=ids, labels=ids)")
    time.sleep(2)
    interrupted_s = time.monotonic()
    kernel.manager.interrupt_kernel()

    assert "KeyboardInterrupt" in kernel.finish(running)
    assert time.monotonic() - interrupted_s < 20  # a second, on a machine that does nothing else
    assert kernel.run("print(model(input_ids=ids).logits.shape)") == "torch.Size([2, 9, 96])\n"


def test_asyncio_is_untouched(kernel: Kernel) -> None:
    code = """
await asyncio.sleep(0.01)
model(input_ids=ids)
await asyncio.gather(asyncio.to_thread(model, input_ids=ids), asyncio.sleep(0.01))
print(before == (asyncio.get_running_loop(), asyncio.get_event_loop_policy()))
"""
    assert kernel.run(code) == "True\n"


def test_a_shell_command_does_not_hang(kernel: Kernel) -> None:
    assert "from the shell" in kernel.run("!echo from the shell")


def test_workers_of_a_data_loader_do_not_hang(kernel: Kernel) -> None:
    code = """
import warnings; warnings.simplefilter("ignore")
loader = torch.utils.data.DataLoader(torch.arange(8).reshape(4, 2) + 3, batch_size=2, num_workers=2)
print([tuple(model(input_ids=batch).logits.shape) for batch in loader])
"""
    assert kernel.run(code).endswith("[(2, 2, 96), (2, 2, 96)]\n")


def test_the_package_can_be_reloaded_under_a_connection(kernel: Kernel) -> None:
    kernel.run("%load_ext symbiosis\n%load_ext autoreload\n%autoreload 2")
    kernel.run("import os, symbiosis.tables, symbiosis.notebook.panels as panels")
    kernel.run("for module in (symbiosis.tables, panels): os.utime(module.__file__)")
    try:
        printed = kernel.run("calls = conn.stats().calls\nmodel(input_ids=ids)\nprint(conn.stats().calls > calls)")
        assert printed == "True\n"
        assert "Error" not in kernel.run("%reload_ext symbiosis\n%symbiosis stats")
        assert kernel.run("print('throughput' in str(conn.dashboard()))") == "True\n"
    finally:
        kernel.run("%autoreload 0")


def test_a_variable_inspector_asks_the_server_nothing(kernel: Kernel) -> None:
    code = """
import sys, reprlib
calls = conn.stats().calls
for value in (conn, model, conn.dashboard(), conn.plan, conn.stats()):
    repr(value), reprlib.repr(value), sys.getsizeof(value), dir(value), hasattr(value, "shape")
print(conn.stats().calls - calls)
"""
    assert kernel.run(code) == "0\n"


def test_a_user_s_thread_is_drawn_by_the_kernel_s_loop(kernel: Kernel) -> None:
    """Redraws come while no cell runs: as messages that no cell of ours asked for."""
    code = """
import threading
def train():
    for _ in range(40):
        model(input_ids=ids, labels=ids)
        time.sleep(0.1)
thread = threading.Thread(target=train)
thread.start()
"""
    kernel.run(code)
    deadline_s = time.monotonic() + 60
    updates = 0
    while updates < 2 and time.monotonic() < deadline_s:
        try:
            message = kernel.client.get_iopub_msg(timeout=5)
        except queue.Empty:
            break
        updates += message["header"]["msg_type"] == "update_display_data"
    assert updates >= 2
    kernel.run("thread.join()")
