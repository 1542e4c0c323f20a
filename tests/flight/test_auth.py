"""Tokens between a real server and real clients: who is let in, what is counted, what is never said."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.flight as fl
import pytest
import torch
from pydantic import SecretStr

import symbiosis
from symbiosis.errors import AuthError, BudgetExceededError, ConfigError, QuotaExceededError, SymbiosisError
from symbiosis.flight.channel import FlightChannel
from symbiosis.flight.quota import Quota
from symbiosis.flight.server import Server
from symbiosis.flight.service import EMPTY_BATCH
from symbiosis.flight.tokens import RELOAD_S, TokenFile

Factory = Callable[..., Any]
NAME = "model.layers.0.self_attn.q_proj"
SECRET = "sym_00000000_s3cret-word"


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "tokens.json")


@pytest.fixture
def alice(file: TokenFile) -> str:
    return file.create("alice")


@pytest.fixture
def server(tiny_llama: Factory, start_server: Factory, file: TokenFile, alice: str, tmp_path: Path) -> Server:
    return start_server(tiny_llama(), tokens=str(file.path), audit_log=tmp_path / "audit")


@pytest.fixture
def reload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of the file are seen at once."""
    monkeypatch.setattr("symbiosis.flight.tokens.RELOAD_S", 0.0)


def call(conn: symbiosis.Connection, tokens: int = 2) -> torch.Tensor:
    return conn._caller.call("forward", [NAME], [torch.ones(tokens, 32)])


def events(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert condition()


# --- who is let in -------------------------------------------------------------------------------------------------


def test_a_good_token_is_let_in_and_its_tenant_is_counted(server: Server, alice: str, file: TokenFile) -> None:
    bob = file.create("bob")
    time.sleep(RELOAD_S)
    with symbiosis.connect(server.url, token=alice) as one, symbiosis.connect(server.url, token=bob) as two:
        call(one, 3)
        call(one, 5)
        call(two, 7)
        mine, theirs = one.server_stats().tenant, two.server_stats().tenant
        assert server._service.clients == 2

    assert mine is not None
    assert theirs is not None
    assert (mine.tenant, mine.requests, mine.tokens) == ("alice", 2, 8)
    assert (theirs.tenant, theirs.requests, theirs.tokens) == ("bob", 1, 7)
    assert server.ledger.tenants == ["alice", "bob"]


def test_the_tenant_reaches_the_scheduler_and_what_a_client_calls_itself_cannot_change_it(
    server: Server, alice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    submit = server._executor.submit
    monkeypatch.setattr(server._executor, "submit", lambda task: (seen.append(task), submit(task)))
    with symbiosis.connect(server.url, token=alice) as one, symbiosis.connect(server.url, token=alice) as two:
        two._channel.open_header = symbiosis.connection.protocol.encode_header(
            symbiosis.connection.protocol.Open(protocol=1, client="bob/notebook")
        )
        call(one)
        call(two)

    assert [task.tenant for task in seen] == ["alice", "alice"]
    assert [task.client.split("/")[0] for task in seen] == ["alice", "alice"]
    assert seen[0].client != seen[1].client


@pytest.mark.parametrize("kind", ["none", "wrong", "another server's"])
def test_without_a_good_token_everything_is_refused_in_the_same_words(
    kind: str, server: Server, alice: str, tmp_path: Path
) -> None:
    token = {"none": None, "wrong": alice[:-3] + "AAA", "another server's": TokenFile(tmp_path / "o").create("alice")}[
        kind
    ]
    headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
    options = fl.FlightCallOptions(timeout=10, headers=headers)
    client = fl.FlightClient(server.url)
    descriptor = fl.FlightDescriptor.for_command(b"")

    def exchange() -> None:
        writer, reader = client.do_exchange(descriptor, options)
        writer.begin(symbiosis.connection.protocol.SCHEMA)
        reader.read_chunk()

    attempts: list[Callable[[], Any]] = [
        exchange,
        lambda: list(client.do_action(fl.Action("hello", b""), options)),
        lambda: list(client.do_action(fl.Action("stats", b""), options)),
        lambda: client.do_get(fl.Ticket(b""), options).read_chunk(),
        lambda: client.list_actions(options),
        lambda: list(client.list_flights(b"", options)),
        lambda: client.get_flight_info(descriptor, options),
        lambda: client.get_schema(descriptor, options),
    ]
    said = set()
    for attempt in attempts:
        with pytest.raises((fl.FlightUnauthenticatedError, OSError)) as caught:  # pyarrow loses the class on streams
            attempt()
        said.add(str(caught.value).partition(" Detail:")[0].partition(". ")[0].rstrip("."))
        assert "Traceback" not in str(caught.value)
        assert ".py" not in str(caught.value)
    client.close()

    assert said == {"the credentials were refused"}
    assert [event["op"] for event in events(tmp_path)].count("refused do_action") == 2
    words = "refused the token" if token else "asks for a token"
    with pytest.raises(AuthError, match=words):
        symbiosis.connect(server.url, token=token)
    channel = FlightChannel(server.url, token=SecretStr(token) if token else None)
    with pytest.raises(AuthError, match=words):
        channel.exchange(b"", EMPTY_BATCH, time.monotonic() + 10)
    with pytest.raises(AuthError, match=words):
        list(channel.download(b"", 10))
    channel.close()


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Basic abc", "Bearer  ", "Bearer a b c", "x" * 4000])
def test_headers_that_are_no_credentials_are_refused(value: str, server: Server) -> None:
    options = fl.FlightCallOptions(timeout=10, headers=[(b"authorization", value.encode())])
    with fl.FlightClient(server.url) as client, pytest.raises(fl.FlightUnauthenticatedError):
        list(client.do_action(fl.Action("health", b""), options))


def test_two_authorization_headers_are_refused(server: Server, alice: str) -> None:
    header = (b"authorization", f"Bearer {alice}".encode())
    with fl.FlightClient(server.url) as client, pytest.raises(fl.FlightUnauthenticatedError):
        list(client.do_action(fl.Action("health", b""), fl.FlightCallOptions(timeout=10, headers=[header, header])))


def test_a_fault_of_ours_refuses_and_tells_nothing(server: Server, alice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(token: str) -> None:
        raise RuntimeError(f"broken at {token}")

    monkeypatch.setattr(server.ledger.book, "grant", broken)
    options = fl.FlightCallOptions(timeout=10, headers=[(b"authorization", f"Bearer {alice}".encode())])
    with fl.FlightClient(server.url) as client, pytest.raises(fl.FlightUnauthenticatedError) as caught:
        list(client.do_action(fl.Action("health", b""), options))
    assert "broken" not in str(caught.value)


@pytest.mark.usefixtures("reload")
def test_a_token_revoked_while_a_stream_is_open_is_refused_on_it(server: Server, alice: str, file: TokenFile) -> None:
    with symbiosis.connect(server.url, token=alice) as conn:
        call(conn)
        file.revoke("alice")

        with pytest.raises(AuthError, match="the credentials were refused"):
            call(conn)
        with pytest.raises(AuthError, match="refused the token"):
            conn.health()
    assert server.ledger.stats("alice").refused == 1


def test_a_token_is_never_sent_in_the_clear_to_another_machine() -> None:
    for url in ("grpc://192.0.2.1:8815", "grpc+tcp://gpu.example.org:8815"):
        with pytest.raises(ConfigError, match="could read the token") as caught:
            symbiosis.connect(url, token=SECRET)
        assert SECRET not in repr(caught.value)


def test_tokens_and_tls_go_together(
    tiny_llama: Factory, start_server: Factory, file: TokenFile, alice: str, tmp_path: Path, tokens: Factory
) -> None:
    server = start_server(tiny_llama(), tokens=str(file.path), tls="auto", cache_dir=tmp_path)
    assert server.identity is not None

    with symbiosis.connect(server.url, token=alice, tls_fingerprint=server.identity.fingerprint) as conn:
        model = conn.load_model()
        with torch.no_grad():
            assert torch.isfinite(model(tokens()).logits).all()
        stats = conn.server_stats().tenant
    assert stats is not None
    assert stats.tenant == "alice"


def test_serve_asks_for_no_tokens_unless_told(tiny_llama: Factory, start_server: Factory, tmp_path: Path) -> None:
    TokenFile(tmp_path / "tokens.json").create("alice")
    server = start_server(tiny_llama(), cache_dir=tmp_path)

    with symbiosis.connect(server.url) as conn:
        assert conn.health().status == "serving"


# --- quotas, budget, audit -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("reload")
def test_over_the_quota_a_call_is_refused_with_a_time_after_which_it_is_admitted(
    server: Server, alice: str, file: TokenFile
) -> None:
    file.set_quota("alice", Quota(tokens_per_s=50))
    with (
        symbiosis.connect(server.url, token=alice, retry_s=0) as hasty,
        symbiosis.connect(server.url, token=alice) as patient,
    ):
        call(hasty, 600)  # ten seconds' worth beyond what was saved up
        with pytest.raises(QuotaExceededError, match="50 tokens per second") as caught:
            call(hasty, 10)
        assert caught.value.retryable
        assert caught.value.retry_after_s is not None
        assert 0 < caught.value.retry_after_s <= 10.1

        file.set_quota("alice", Quota(tokens_per_s=51))  # begins anew
        call(hasty, 153)  # a second's worth beyond
        refused = server.ledger.stats("alice").refused
        call(patient, 10)

    # waited as it was told, not by trying again and again; the first wait may end a little early on another clock
    assert server.ledger.stats("alice").refused - refused <= 2


def test_the_extraction_budget_refuses_for_good(tiny_llama: Factory, start_server: Factory) -> None:
    server = start_server(tiny_llama(), extraction_budget=2.0)
    with symbiosis.connect(server.url) as conn:
        call(conn, 64)
        with pytest.raises(BudgetExceededError, match=NAME) as caught:
            call(conn, 1)
        stats = conn.server_stats().tenant

    assert not caught.value.retryable
    assert stats is not None
    assert (stats.extraction, stats.extracted_modules, stats.refused) == (2.0, 1, 1)


@pytest.mark.usefixtures("reload")
def test_the_audit_log_says_who_did_what_and_holds_no_data(
    server: Server, alice: str, file: TokenFile, tmp_path: Path
) -> None:
    with symbiosis.connect(server.url, token=alice) as conn:
        call(conn, 3)
        file.revoke("alice")
        with pytest.raises(AuthError):
            call(conn, 3)
    wait_for(lambda: len(events(tmp_path)) == 4)

    hello, plane, good, refused = events(tmp_path)
    assert (plane["op"], plane["tenant"]) == ("same_host", "alice")
    assert (hello["op"], hello["tenant"]) == ("hello", "alice")
    assert good["token"] == alice.split("_")[1]
    for event in (good, refused):
        assert set(event) == {
            "time", "tenant", "token", "client", "op", "modules", "call", "tokens", "bytes_in", "bytes_out", "outcome"
        }  # fmt: skip
        assert (event["tenant"], event["op"], event["modules"], event["tokens"]) == ("alice", "forward", [NAME], 3)
    assert (good["outcome"], good["bytes_in"], good["bytes_out"]) == ("OK", 3 * 32 * 4, 3 * 48 * 4)
    assert (refused["outcome"], refused["bytes_out"]) == ("AUTH", 0)


# --- what is never said --------------------------------------------------------------------------------------------


def test_no_token_in_any_log_repr_or_traceback_of_either_end(
    server: Server, alice: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG, "symbiosis")
    wrong = alice[:-4] + "AAAA"
    said: list[str] = []
    with symbiosis.connect(server.url, token=alice) as conn:
        call(conn)
        said += [repr(conn), str(conn._repr_html_()), repr(conn.options), str(conn.options), repr(vars(conn._channel))]
        said += [repr(server.options), repr(server.ledger.book), repr(conn.server_stats())]
    for token, url in ((wrong, server.url), (alice, "grpc://192.0.2.1:1"), (alice, "grpc://127.0.0.1:9")):
        try:
            symbiosis.connect(url, token=token, connect_timeout_s=10)
        except SymbiosisError as error:
            # What IPython's verbose mode and pytest -l show: the locals of our frames. The caller's are the caller's.
            frames = traceback.TracebackException.from_exception(error, capture_locals=True)
            said += [
                str(frame.locals)
                for frame in frames.stack
                if "symbiosis" in frame.filename and "tests" not in frame.filename
            ]
            said += [repr(error), "".join(traceback.format_exception(error))]
        else:
            pytest.fail(f"{url} let {token} in")
    wait_for(lambda: "stream of client alice/" in caplog.text and "refused a do_action" in caplog.text)
    output = capfd.readouterr()
    said += [caplog.text, output.out, output.err, (tmp_path / "audit").read_text()]

    for secret in (alice, wrong):
        assert not [text for text in said if secret.split("_", 2)[2][:-4] in text]
