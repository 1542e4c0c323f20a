"""Children end with their parent's block, whatever ends it, and a failure shows what the child said."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from symbiosis.errors import ConfigError, DeadlineExceededError, SymbiosisError
from symbiosis.integrations.processes import Child, Children, signals_as_interrupts, wait_for_end, wait_for_file

MODULES = {
    "sleeper": "import time; print('ready', flush=True); time.sleep(60)",
    "stubborn": "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)",
    "talker": "print('one'); print('two')",
    "crasher": "import sys; print(12, 99, sep='%\\r', end='%\\n', file=sys.stderr); raise ValueError('broken here')",
    "refuser": "import sys; print('error [CONFIG]: no such model', file=sys.stderr); sys.exit(2)",
}


@pytest.fixture
def children(tmp_path: Path) -> Children:
    for name, code in MODULES.items():
        (tmp_path / f"{name}.py").write_text(code)
    return Children(tmp_path, {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])})


def started(children: Children, name: str) -> Child:
    lines: queue.Queue[str] = queue.Queue()
    child = children.start(name, name, on_line=lines.put)
    assert lines.get(timeout=30) == "ready\n"
    return child


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process exists that is not a zombie: in a container nobody may collect an orphan."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_leaving_the_block_ends_every_child(children: Children) -> None:
    with children:
        both = [started(children, "sleeper"), started(children, "sleeper")]
    assert [child.code for child in both] == [-signal.SIGTERM] * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_ends_every_child(children: Children, error: type[BaseException]) -> None:
    seen: list[Child] = []

    def fail() -> None:
        with children:
            seen.append(started(children, "sleeper"))
            raise error

    with pytest.raises(error):
        fail()
    assert seen[0].code == -signal.SIGTERM


def test_a_child_that_will_not_end_is_killed(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.integrations.processes.GRACE_S", 0.2)
    with children:
        child = started(children, "stubborn")
    assert child.code == -signal.SIGKILL


def test_a_child_ends_when_its_parent_is_killed(children: Children, tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(
        "import os, sys, time; from pathlib import Path; from symbiosis.integrations.processes import Children\n"
        "child = Children(Path(sys.argv[1]), dict(os.environ)).start('grandchild', 'grandchild')\n"
        "time.sleep(60)"
    )
    (tmp_path / "grandchild.py").write_text(
        "import os, time; from pathlib import Path; Path('pid.part').write_text(str(os.getpid()))\n"
        "os.rename('pid.part', 'pid')\n"
        "time.sleep(60)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    parent = subprocess.Popen([sys.executable, "-m", "parent", str(tmp_path)], cwd=tmp_path, env=environ)
    wait_until((tmp_path / "pid").exists)
    parent.kill()
    parent.wait()
    pid = int((tmp_path / "pid").read_text())

    wait_until(lambda: not is_running(pid))


def test_an_interrupt_of_our_process_group_is_not_for_the_child(children: Children) -> None:
    with children:
        child = started(children, "sleeper")
        assert os.getpgid(child.pid) == child.pid  # Jupyter interrupts a kernel's whole group


def test_sigterm_takes_the_way_of_ctrl_c(children: Children) -> None:
    seen: list[Child] = []

    def be_told_to_end() -> None:
        with signals_as_interrupts(), children:
            seen.append(started(children, "sleeper"))
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for_end(seen[0], 30, lambda: None)

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        be_told_to_end()
    assert seen[0].code == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_lines_arrive_in_order_before_the_end_is_seen(children: Children) -> None:
    lines: list[str] = []
    with children:
        wait_for_end(children.start("talker", "talker", on_line=lines.append), 30, lambda: None)
    assert lines == ["one\n", "two\n"]


def test_a_crash_shows_the_end_of_the_log(children: Children) -> None:
    with children, pytest.raises(SymbiosisError, match=r"crasher ended with exit code 1") as caught:
        wait_for_end(children.start("crasher", "crasher"), 30, lambda: None)
    assert "ValueError: broken here" in str(caught.value)
    assert "99%" in str(caught.value)
    assert "12%" not in str(caught.value), "of a progress bar, only its last state"


def test_a_killed_child_names_the_signal(children: Children) -> None:
    with children:
        child = started(children, "sleeper")
        child.ask_to_end()
        with pytest.raises(SymbiosisError, match=r"sleeper was ended by SIGTERM; its log .*sleeper\.log is empty"):
            wait_for_end(child, 30, lambda: None)


def test_an_error_that_our_server_prints_keeps_its_class(children: Children, tmp_path: Path) -> None:
    with children, pytest.raises(ConfigError, match=r"^no such model$"):
        wait_for_file(tmp_path / "port", children.start("refuser", "refuser"), 30, lambda: None)


def test_waiting_is_bounded(children: Children, tmp_path: Path) -> None:
    with children:
        child = started(children, "sleeper")
        with pytest.raises(DeadlineExceededError, match="sleeper was not ready within 0 s"):
            wait_for_file(tmp_path / "port", child, 0.1, lambda: None)
        with pytest.raises(DeadlineExceededError, match="sleeper took more than 0 s"):
            wait_for_end(child, 0.1, lambda: None)
