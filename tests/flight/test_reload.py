"""What changes while a server runs, what does not, and that weights reach the scheduler."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from symbiosis.config import ServerOptions
from symbiosis.errors import ConfigError
from symbiosis.flight.reload import LIVE, changes
from symbiosis.flight.scheduler import Key, Task
from symbiosis.flight.server import Server
from symbiosis.flight.tokens import TokenFile

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"


def test_limits_change_and_the_rest_waits_for_a_restart() -> None:
    now = ServerOptions(model="m", port=1, max_batch_tokens=5)
    wanted = ServerOptions(model="m", port=2, max_batch_tokens=6, watchdog_s=7, dtype="bfloat16")

    options, live, later = changes(now, wanted)

    assert options == ServerOptions(model="m", port=1, max_batch_tokens=6, watchdog_s=7)
    assert (sorted(live), sorted(later)) == (["max_batch_tokens", "watchdog_s"], ["dtype", "port"])


def test_a_queue_too_small_for_the_messages_that_stay_is_refused() -> None:
    now = ServerOptions(model="m")
    wanted = ServerOptions(model="m", max_message_bytes="1MiB", max_queue_bytes="2MiB")  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="a full message would never fit"):
        changes(now, wanted)


def test_the_options_that_change_are_documented() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("## Changing limits")[2].partition("\n## ")[0]

    assert set(re.findall(r"`(\w+)`", section)) >= LIVE
    assert set(ServerOptions.model_fields) >= LIVE


def test_a_server_follows_its_limits(tiny_llama: Any, start_server: Callable[..., Server]) -> None:
    server = start_server(tiny_llama())
    limits = {
        "max_batch_tokens": 11, "max_queue_tokens": 12, "max_streams_per_client": 3, "watchdog_s": 4.0,
        "idle_timeout_s": 5.0, "write_timeout_s": 6.0, "max_wait_us": 7, "drain_timeout_s": 1.0, "log_level": "error",
        "max_queue_bytes": 2**30 + 1,
    }  # fmt: skip
    assert set(limits) == LIVE
    level = logging.getLogger("symbiosis").level

    server.reload(server.options.model_copy(update=limits))

    scheduler, streams = server._scheduler, server._streams
    assert (scheduler.max_batch_tokens, scheduler.max_queue_tokens, scheduler.max_queue_bytes) == (11, 12, 2**30 + 1)
    assert scheduler._rendezvous.max_wait_s == 7e-6
    assert (streams._max_per_client, streams._limits_s) == (3, {"reading": 5.0, "writing": 6.0})
    assert server._caretaker.watchdog_s == 4.0
    assert server.options.drain_timeout_s == 1.0
    assert logging.getLogger("symbiosis").level == logging.ERROR
    logging.getLogger("symbiosis").setLevel(level)


def test_the_weights_of_the_file_are_those_of_the_scheduler(
    tmp_path: Path, tiny_llama: Any, start_server: Callable[..., Server]
) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    file.create("alice")
    server = start_server(tiny_llama(), tokens=str(file.path))
    shares = server._scheduler._shares
    file.set_weight("alice", 4.0)

    server.reload(server.options)
    shares.served("alice", 400)
    shares.served("bob", 400)

    assert (shares._served["alice"], shares._served["bob"]) == (100.0, 400.0)


def test_without_tokens_everybody_weighs_the_same(tiny_llama: Any, start_server: Callable[..., Server]) -> None:
    server = start_server(tiny_llama())
    key = Key("forward", ("model.layers.0.self_attn.q_proj",), "F32")
    server._scheduler._shares.served(Task(key, 1, 1, [], client="anybody").account, 100)

    assert server._scheduler._shares._served == {"anybody": 100.0}
