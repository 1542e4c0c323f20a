"""The audit log: one JSON line for each thing that somebody did, without any data of theirs.

One rule: names, counts and times only. Nothing of a tensor, a token or a message's text is ever written.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import logging.handlers
import os
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from symbiosis.errors import ConfigError

logger = logging.getLogger(__name__)


class AuditLog:
    """Appends events to a file, which is renamed FILE.1, FILE.2, ... when it is full.

    Args:
        path: readable by its owner only.
        max_bytes: size at which a new file is begun.
        files: how many full ones are kept.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        try:
            self._handler = _Handler(path, maxBytes=max_bytes, backupCount=files, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"audit_log {path} cannot be opened: {error.strerror}; check its folder") from None

    def write(self, **event: Any) -> None:
        """One line; `time` is added."""
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, **event}, separators=(",", ":"), ensure_ascii=True)
        self._handler.handle(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written was told already
            self._handler.close()


class _Handler(logging.handlers.RotatingFileHandler):
    """The standard library's rotation, with files that only their owner can read."""

    _failed = False

    def _open(self) -> TextIOWrapper:
        def private(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=private)  # type: ignore[return-value]

    def handleError(self, record: logging.LogRecord) -> None:
        # A full disk must not stop the server, nor pass unnoticed.
        if not self._failed:
            self._failed = True
            logger.error("audit log %s cannot be written; events are being lost", self.baseFilename, exc_info=True)
