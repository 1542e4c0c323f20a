"""The audit log: lines that a program can read, rotation, and a disk that is full."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from symbiosis.errors import ConfigError
from symbiosis.flight.audit_log import AuditLog


def test_each_event_is_a_line_of_json_with_its_time(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit", 10_000, 2)
    log.write(tenant="alice", op="forward", tokens=3, note='"\n%s é')
    log.close()

    (line,) = (tmp_path / "audit").read_text().splitlines()
    event = json.loads(line)
    assert event.pop("time").endswith("+00:00")
    assert event == {"tenant": "alice", "op": "forward", "tokens": 3, "note": '"\n%s é'}


def test_files_are_rotated_limited_and_private(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit", 4096, 2)
    for number in range(500):
        log.write(number=number, padding="x" * 100)
    log.close()

    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == ["audit", "audit.1", "audit.2"]
    assert all(path.stat().st_size <= 4096 for path in paths)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)
    assert json.loads(paths[0].read_text().splitlines()[-1])["number"] == 499


def test_a_log_goes_on_after_a_restart(tmp_path: Path) -> None:
    for number in range(2):
        log = AuditLog(tmp_path / "audit", 4096, 2)
        log.write(number=number)
        log.close()

    assert len((tmp_path / "audit").read_text().splitlines()) == 2


def test_a_log_that_cannot_be_opened_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        AuditLog(tmp_path / "missing" / "audit", 4096, 2)


def test_a_full_disk_is_told_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this machine has no /dev/full")
    log = AuditLog(Path("/dev/full"), 0, 1)  # 0: never rotated
    for number in range(3):
        log.write(number=number)
    log.close()

    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "events are being lost" in caplog.text
