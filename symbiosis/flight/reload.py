"""Which options a server follows while it runs, at SIGHUP: its limits. Everything else needs a restart.

One rule: nothing changes for calls that were admitted already; what is lowered holds for the next ones.
"""

from __future__ import annotations

from typing import Any

from symbiosis.config import ServerOptions

LIVE = frozenset(
    {
        "max_batch_tokens",
        "max_queue_bytes",
        "max_queue_tokens",
        "max_streams_per_client",
        "max_wait_us",
        "idle_timeout_s",
        "write_timeout_s",
        "watchdog_s",
        "drain_timeout_s",
        "log_level",
    }
)


def changes(now: ServerOptions, wanted: ServerOptions) -> tuple[ServerOptions, list[str], list[str]]:
    """The options to follow from now on, which of them changed, and which have to wait for a restart.

    Raises:
        ConfigError: what may change does not fit what may not.
    """
    differ = [name for name in ServerOptions.model_fields if getattr(now, name) != getattr(wanted, name)]
    live = [name for name in differ if name in LIVE]
    fields: dict[str, Any] = {name: getattr(now, name) for name in now.model_fields_set}
    options = ServerOptions(**{**fields, **{name: getattr(wanted, name) for name in live}})
    return options, live, [name for name in differ if name not in LIVE]
