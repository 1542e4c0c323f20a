"""The file of tokens: what it holds, who may use it, and how changes reach a server that runs."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from symbiosis.errors import AuthError, ConfigError
from symbiosis.flight.quota import Quota
from symbiosis.flight.tokens import RELOAD_S, Grant, TokenBook, TokenFile


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def later(self) -> None:
        self.now_s += RELOAD_S


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "tokens.json")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_token_is_good_for_its_tenant(file: TokenFile) -> None:
    alice, bob = file.create("alice"), file.create("bob")
    book = TokenBook(file.path)

    assert book.grant(alice) == Grant("alice", alice.split("_")[1])
    assert book.grant(bob) == Grant("bob", bob.split("_")[1])


def test_the_file_holds_no_token_and_belongs_to_its_owner(file: TokenFile) -> None:
    token = file.create("alice")

    assert token.split("_", 2)[2] not in file.path.read_text()
    assert len(token) > 48
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_whatever_is_not_exactly_a_token_is_refused(file: TokenFile) -> None:
    token, other = file.create("alice"), file.create("bob")
    book = TokenBook(file.path)
    flipped = token[:-1] + ("A" if token[-1] != "A" else "B")
    swapped = "_".join([*token.split("_", 2)[:2], other.split("_", 2)[2]])
    hashed = json.loads(file.path.read_text())["tokens"][0]["sha256"]

    wrong = [
        "",
        "_",
        "__",
        token[:-1],
        token + "A",
        flipped,
        swapped,
        token.upper(),
        " " + token,
        hashed,
        "é",
        "\ud800",
    ]
    assert [book.grant(candidate) for candidate in wrong] == [None] * len(wrong)


def test_a_revoked_token_is_refused_without_a_restart(file: TokenFile, clock: Clock) -> None:
    token, second, other = file.create("alice"), file.create("alice"), file.create("bob")
    book = TokenBook(file.path, clock)
    grant = book.grant(token)
    assert grant is not None
    book.check(grant)

    file.revoke(grant.token_id)
    clock.later()

    assert book.grant(token) is None
    with pytest.raises(AuthError, match=r"^the credentials were refused$"):
        book.check(grant)
    assert book.grant(second) is not None

    assert len(file.revoke("alice")) == 1
    clock.later()
    assert book.grant(second) is None
    assert book.grant(other) is not None


def test_a_new_token_and_quota_are_seen_without_a_restart(file: TokenFile, clock: Clock) -> None:
    file.create("alice")
    book = TokenBook(file.path, clock)
    token = file.create("bob")
    file.set_quota("bob", Quota(tokens_per_s=5))
    file.set_weight("bob", 4.0)
    assert book.grant(token) is None
    assert book.weight("bob") == 1.0

    clock.later()

    assert book.grant(token) is not None
    assert book.quota("bob") == Quota(tokens_per_s=5)
    assert book.quota("alice") == Quota()
    assert (book.weight("bob"), book.weight("alice")) == (4.0, 1.0)


def test_a_reload_looks_at_once(file: TokenFile, clock: Clock) -> None:
    file.create("alice")
    book = TokenBook(file.path, clock)
    file.set_weight("alice", 3.0)

    book.reload()

    assert book.weight("alice") == 3.0


def test_an_expired_token_is_refused(file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    token = file.create("alice", expires_s=time.time() + 100)
    book = TokenBook(file.path)
    grant = book.grant(token)
    assert grant is not None
    later_s = time.time() + 101
    monkeypatch.setattr("symbiosis.flight.tokens.time.time", lambda: later_s)

    assert book.grant(token) is None
    with pytest.raises(AuthError):
        book.check(grant)


def test_a_file_that_is_gone_refuses_everybody(file: TokenFile, clock: Clock) -> None:
    token = file.create("alice")
    book = TokenBook(file.path, clock)
    file.path.unlink()
    clock.later()

    assert book.grant(token) is None


def test_a_spoilt_file_is_reported_and_changes_nothing(
    file: TokenFile, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    token = file.create("alice")
    book = TokenBook(file.path, clock)
    file.path.write_text("{ half")
    clock.later()

    assert book.grant(token) is not None
    assert "the tokens read before stay in force" in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{ half", "tokens .*JSON"),
        ('{"version": 2}', "version"),
        ('{"tokens": [{"id": "a", "tenant": "no spaces", "sha256": "0", "created_s": 1}]}', "tenant"),
        ('{"quotas": {"alice": {"tokens_per_s": 0}}}', "tokens_per_s"),
        ('{"quotas": {"alice": {"tokens": 1}}}', "unknown field"),
        ('{"weights": {"alice": 0}}', "weights"),
    ],
)
def test_a_file_that_is_none_is_refused_at_start(file: TokenFile, content: str, words: str) -> None:
    file.path.write_text(content)

    with pytest.raises(ConfigError, match=words):
        TokenBook(file.path)


def test_a_file_that_others_may_change_is_refused_at_start(file: TokenFile) -> None:
    with pytest.raises(ConfigError, match="token create TENANT"):
        TokenBook(file.path)
    file.create("alice")
    file.path.chmod(0o666)

    with pytest.raises(ConfigError, match="others can change it"):
        TokenBook(file.path)


def test_two_operators_at_once_lose_nothing(file: TokenFile) -> None:
    threads = [threading.Thread(target=file.create, args=(f"tenant-{number}",)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(entry.tenant for entry in file.read().tokens) == sorted(f"tenant-{n}" for n in range(12))
    assert not [name for name in os.listdir(file.path.parent) if name.endswith(".part")]


@pytest.mark.parametrize("name", ["", "no spaces", "../up", "-dash", "x" * 65, "a\n"])
def test_a_name_that_is_none_is_refused(file: TokenFile, name: str) -> None:
    with pytest.raises(ConfigError, match="is no name"):
        file.create(name)


def test_what_is_not_there_cannot_be_revoked(file: TokenFile) -> None:
    with pytest.raises(ConfigError, match="no token with the id 'alice'"):
        file.revoke("alice")
