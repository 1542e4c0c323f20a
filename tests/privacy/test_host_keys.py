"""A dealer that has the server's own key is the server's own host, whatever its address and process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import symbiosis
from symbiosis.errors import ConfigError
from symbiosis.flight.server import Server
from symbiosis.privacy import Masking

Start = Callable[[Path], Server]


@pytest.fixture
def start(start_server: Any, tiny_llama: Any) -> Start:
    return lambda folder: start_server(tiny_llama(), tls="auto", payload="offer", cache_dir=folder)


def key_of(server: Server) -> str:
    assert server.payload is not None
    return server.payload.key.text


def ca(folder: Path) -> dict[str, Any]:
    return {"tls_ca": folder / "tls" / "ca.pem"}


def test_one_tls_key_is_one_host(start: Start, tmp_path: Path) -> None:
    server, dealer = start(tmp_path), start(tmp_path)  # as two of one host, which share its cache folder
    with (
        symbiosis.connect(dealer.url, **ca(tmp_path)) as second,
        pytest.raises(ConfigError, match="have the same TLS key: whoever holds it is both"),
    ):
        symbiosis.connect(server.url, privacy=Masking(dealer=second), **ca(tmp_path))


def test_one_payload_key_is_one_host(start: Start, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    server = start(folders[0])
    folders[1].mkdir()
    shutil.copy(folders[0] / "payload.key", folders[1])
    dealer = start(folders[1])
    with (
        symbiosis.connect(dealer.url, server_key=key_of(dealer), **ca(folders[1])) as second,
        pytest.raises(ConfigError, match="have the same payload key"),
    ):
        symbiosis.connect(server.url, server_key=key_of(server), privacy=Masking(dealer=second), **ca(folders[0]))


def test_two_keys_are_two_hosts(start: Start, tmp_path: Path) -> None:
    server, dealer = start(tmp_path / "a"), start(tmp_path / "b")
    with (
        symbiosis.connect(dealer.url, server_key=key_of(dealer), **ca(tmp_path / "b")) as second,
        symbiosis.connect(
            server.url, server_key=key_of(server), privacy=Masking(dealer=second), **ca(tmp_path / "a")
        ) as conn,
    ):
        assert len(conn.certificates()) == len(second.certificates()) == 1
        assert conn.certificates() != second.certificates()
