"""Log lines as JSON objects, one a line, for collectors.

One rule: a line is valid JSON whatever was logged; a traceback is a field of it, never further lines.
"""

from __future__ import annotations

import datetime
import json
import logging


class JsonFormatter(logging.Formatter):
    """Fields: time (UTC, ISO 8601), level, logger, message, thread; `client` and `call` where it is about a call."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "thread": record.threadName,
        }
        line.update({name: getattr(record, name) for name in ("client", "call", "code") if hasattr(record, name)})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
