"""The operator's commands, as they are typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from symbiosis.config import ServerOptions
from symbiosis.flight.cli import main
from symbiosis.flight.tokens import TokenBook
from symbiosis.privacy import certificates

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """run(*words): the exit code, and what was printed."""
    monkeypatch.setenv("SYMBIOSIS_CACHE_DIR", str(tmp_path))

    def typed(*words: str) -> tuple[int, str, str]:
        code = main(words)
        output = capsys.readouterr()
        return code, output.out, output.err

    return typed


def test_a_token_is_made_listed_and_revoked(run: Any, tmp_path: Path) -> None:
    code, token, hints = run("token", "create", "alice")
    assert (code, token.count("\n")) == (0, 1)
    token = token.strip()
    assert token not in hints
    grant = TokenBook(tmp_path / "tokens.json").grant(token)
    assert grant is not None

    assert run("token", "quota", "alice", "--tokens-per-s", "500", "--concurrent-calls", "2")[0] == 0
    run("token", "create", "bob", "--expires-days", "1e-9")
    code, listed, _ = run("token", "list")
    header, first, second = listed.splitlines()
    assert header.split() == ["ID", "TENANT", "CREATED", "EXPIRES", "WEIGHT", "QUOTA"]
    assert first.startswith(f"{grant.token_id}  alice")
    assert "never" in first
    assert first.endswith("1       tokens_per_s=500, concurrent_calls=2")
    assert "(expired)" in second
    assert token.split("_", 2)[2] not in listed

    assert run("token", "revoke", grant.token_id)[0] == 0
    assert TokenBook(tmp_path / "tokens.json").grant(token) is None


def test_a_weight_is_given_with_a_token_or_later(run: Any, tmp_path: Path) -> None:
    run("token", "create", "alice", "--weight", "2.5")
    run("token", "create", "bob")
    code, output, _ = run("token", "weight", "bob", "0.5")
    assert (code, output) == (0, "weight of bob: 0.5; servers follow within a second or two\n")

    book = TokenBook(tmp_path / "tokens.json")
    assert [book.weight(tenant) for tenant in ("alice", "bob", "carol")] == [2.5, 0.5, 1.0]
    assert [line.split()[-2] for line in run("token", "list")[1].splitlines()[1:]] == ["2.5", "0.5"]


def test_a_weight_that_is_none_makes_no_token(run: Any, tmp_path: Path) -> None:
    assert run("token", "create", "alice", "--weight", "0")[0] == 2
    assert not (tmp_path / "tokens.json").exists()


def test_another_file_may_be_named(run: Any, tmp_path: Path) -> None:
    token = run("token", "create", "alice", "--tokens", str(tmp_path / "sub" / "mine.json"))[1].strip()

    assert TokenBook(tmp_path / "sub" / "mine.json").grant(token) is not None
    assert not (tmp_path / "tokens.json").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["token"], "arguments are required: action"),
        (["token", "make"], "invalid choice: 'make'"),
        (["token", "create"], "arguments are required: TENANT"),
        (["token", "create", "a b"], "is no name"),
        (["token", "create", "a", "--expires-days", "0"], "expected more than 0"),
        (["token", "revoke", "nobody"], "no token with the id"),
        (["token", "quota", "a", "--tokens-per-s", "-1"], "tokens_per_s"),
        (["token", "weight", "a", "0.001"], "weight of a: got 0.001; Expected `float` >= 0.01"),
        (["token", "weight", "a", "1e9"], "<= 100"),
        (["token", "weight", "a", "nan"], "weight of a: got nan"),
        (["token", "list", "--tokens", "off"], "no file to change"),
        (["certificate", "alice"], "has no CA yet"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(run: Any, words: list[str], says: str) -> None:
    code, output, errors = run(*words)

    assert (code, output) == (2, "")
    assert says in errors
    assert errors.startswith("error [CONFIG]: ")


def test_a_client_certificate_is_made(run: Any, tmp_path: Path) -> None:
    certificates.identity(ServerOptions(model="demo", tls="auto", cache_dir=tmp_path))

    code, output, hints = run("certificate", "alice", "--out", str(tmp_path / "out"))

    assert code == 0
    assert [Path(line).name for line in output.splitlines()] == ["alice.pem", "alice.key"]
    assert "--tls-client-ca" in hints


def test_the_commands_start_without_torch() -> None:
    code = "import sys; from symbiosis.flight import admin; print('torch' in sys.modules or 'pyarrow' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={}, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
