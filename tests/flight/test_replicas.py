"""Retries, failover and balance over channels that fail on cue; no network, but the real clock."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from symbiosis.errors import (
    ClosedError,
    ConnectError,
    DeadlineExceededError,
    InvalidInputError,
    ModelMismatchError,
    RemoteOutOfMemoryError,
    ServerBusyError,
    SymbiosisError,
)
from symbiosis.flight import protocol, replicas
from symbiosis.flight.channel import Channel
from symbiosis.flight.replicas import Replicas


class Chunk(NamedTuple):
    app_metadata: bytes
    data: None = None


class FakeChannel:
    """Raises `error`, if it has one, for as many calls as `times` says."""

    def __init__(self, name: str = "a", clients: int = 0) -> None:
        self.url = f"grpc://{name}:1"
        self.open_header = b""
        self.error: SymbiosisError | None = None
        self.times = 1 << 30
        self.calls = 0
        self.clients = clients
        self.fingerprint = "f"
        self.closed = False

    def fail(self, error: SymbiosisError | None, times: int = 1 << 30) -> None:
        self.error, self.times = error, times

    def call(self) -> str:
        self.calls += 1
        if self.closed:
            raise ClosedError("closed")
        if self.error is not None and self.times > 0:
            self.times -= 1
            raise self.error
        return self.url

    transport = "fake"

    def exchange(self, header: bytes, batch: Any, deadline_s: float, reply_bytes: int = 0) -> Any:
        raise NotImplementedError

    def action(self, name: str, body: bytes, timeout_s: float) -> bytes:
        if self.error is not None and self.times > 0:
            raise self.error
        counts = dict.fromkeys(("requests", "batches", "tokens", "errors", "queued", "memory_bytes"), 0)
        stats = protocol.ServerStats(
            uptime_s=1.0, compute_s=0.0, mean_batch=0.0, clients=self.clients, fingerprint=self.fingerprint, **counts
        )
        return protocol.encode_header(stats)

    def download(self, ticket: bytes, timeout_s: float) -> Iterator[Chunk]:
        for i in range(6):
            if i == 3:
                self.call()
            yield Chunk(bytes([i]))

    def close(self) -> None:
        self.closed = True


def run(pool: Replicas, within_s: float = 5.0) -> str:
    return pool.run(lambda channel: channel.call(), time.monotonic() + within_s)  # type: ignore[attr-defined]


def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    end_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)
    return condition()


GONE = ConnectError("gone")
BUSY = ServerBusyError("busy", retry_after_s=0.15)


@pytest.fixture
def pool_of() -> Iterator[Callable[..., Replicas]]:
    """pool_of(*channels, retry_s=30): opened, and closed after the test."""
    pools: list[Replicas] = []

    def build(*channels: Channel, retry_s: float = 30.0) -> Replicas:
        pools.append(Replicas(channels, retry_s))
        pools[-1].open(b"open", "f")
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


# --- one server ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [GONE, BUSY], ids=["gone", "busy"])
def test_a_call_is_tried_again_until_the_server_is_back(error: SymbiosisError, pool_of: Any) -> None:
    channel = FakeChannel()
    channel.fail(error, times=3)

    assert run(pool_of(channel)) == channel.url
    assert channel.calls == 4


def test_a_busy_server_is_left_alone_for_as_long_as_it_asks(pool_of: Any) -> None:
    channel = FakeChannel()
    channel.fail(ServerBusyError("busy", retry_after_s=0.4), times=1)
    started_s = time.monotonic()

    run(pool_of(channel))

    assert time.monotonic() - started_s >= 0.4


@pytest.mark.parametrize(
    "error",
    [
        InvalidInputError("no"),
        ModelMismatchError("another model"),
        DeadlineExceededError("late"),
        ClosedError("closed"),
    ],
    ids=lambda error: error.code,
)
def test_what_another_try_cannot_help_is_raised_at_once(error: SymbiosisError, pool_of: Any) -> None:
    channel = FakeChannel()
    channel.fail(error)

    with pytest.raises(type(error)):
        run(pool_of(channel))
    assert channel.calls == 1


def test_out_of_memory_is_tried_a_few_times_only(pool_of: Any) -> None:
    channel = FakeChannel()
    channel.fail(RemoteOutOfMemoryError("full"))

    with pytest.raises(RemoteOutOfMemoryError):
        run(pool_of(channel))
    assert channel.calls == replicas.OUT_OF_MEMORY_TRIES


@pytest.mark.parametrize(("retry_s", "within_s"), [(0.5, 30.0), (30.0, 0.5)], ids=["retry_s", "deadline"])
def test_it_ends_in_time_with_the_error_of_the_last_try(retry_s: float, within_s: float, pool_of: Any) -> None:
    channel = FakeChannel()
    channel.fail(GONE)
    started_s = time.monotonic()

    with pytest.raises(ConnectError, match="gone"):
        run(pool_of(channel, retry_s=retry_s), within_s)

    assert time.monotonic() - started_s < 1.0
    assert channel.calls > 1


def test_pauses_grow_and_differ_from_client_to_client() -> None:
    first = [replicas._pause_s(1, GONE) for _ in range(20)]
    tenth = [replicas._pause_s(10, GONE) for _ in range(20)]

    assert max(first) <= replicas.FIRST_PAUSE_S
    assert replicas.LONGEST_PAUSE_S / 2 <= min(tenth) <= max(tenth) <= replicas.LONGEST_PAUSE_S
    assert len(set(first)) > 10
    assert replicas._pause_s(10_000, GONE) <= replicas.LONGEST_PAUSE_S


def test_no_retry_if_told_so(pool_of: Any) -> None:
    channel = FakeChannel()
    channel.fail(GONE)

    with pytest.raises(ConnectError):
        run(pool_of(channel, retry_s=0.0))
    assert channel.calls == 1


def test_close_ends_a_pause(pool_of: Any) -> None:
    channel = FakeChannel()
    channel.fail(ServerBusyError("busy", retry_after_s=60.0))
    pool = pool_of(channel, retry_s=600.0)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            run(pool, within_s=600.0)
        except SymbiosisError as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert eventually(lambda: channel.calls == 1)
    pool.close()
    thread.join(5)

    assert [type(error) for error in raised] == [ClosedError]


def test_the_state_shows_an_outage_and_its_end(pool_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    channel = FakeChannel()
    pool = pool_of(channel, retry_s=0.0)
    channel.fail(GONE, times=2)
    for _ in range(2):
        with pytest.raises(ConnectError):
            run(pool)

    (down,) = pool.states()
    assert (down.up, down.failures, down.last_error) == (False, 2, "CONNECT: gone")
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # once, not per try

    run(pool)
    (up,) = pool.states()
    assert (up.up, up.failures, up.failed_in_all) == (True, 0, 2)


# --- several -------------------------------------------------------------------------------------------------------


def test_calls_go_to_the_server_with_the_fewest_clients_and_stay(pool_of: Any) -> None:
    a, b, c = FakeChannel("a", 3), FakeChannel("b", 1), FakeChannel("c", 2)
    pool = pool_of(a, b, c)

    assert {run(pool) for _ in range(10)} == {b.url}


def test_another_server_takes_over_at_once(pool_of: Any) -> None:
    a, b = FakeChannel("a"), FakeChannel("b", clients=9)
    pool = pool_of(a, b)
    assert run(pool) == a.url
    a.fail(ServerBusyError("draining", retry_after_s=20.0))
    started_s = time.monotonic()

    assert {run(pool) for _ in range(5)} == {b.url}
    assert time.monotonic() - started_s < 1.0
    assert a.calls == 2


def test_a_server_that_is_back_is_found_and_used_when_the_other_fails(pool_of: Any) -> None:
    a, b = FakeChannel("a"), FakeChannel("b", clients=9)
    pool = pool_of(a, b)
    a.fail(GONE)
    assert run(pool) == b.url
    a.fail(None)

    assert eventually(lambda: all(state.up for state in pool.states()))
    b.fail(GONE)
    assert run(pool) == a.url


def test_a_call_fails_only_if_all_servers_do(pool_of: Any) -> None:
    a, b = FakeChannel("a"), FakeChannel("b")
    pool = pool_of(a, b, retry_s=0.3)
    a.fail(GONE)
    b.fail(GONE)

    with pytest.raises(ConnectError):
        run(pool)
    assert a.calls > 1
    assert b.calls > 1


def test_a_server_that_came_back_with_another_model_is_left_alone(pool_of: Any) -> None:
    a, b = FakeChannel("a"), FakeChannel("b", clients=9)
    pool = pool_of(a, b)
    a.fail(GONE)
    run(pool)
    a.fail(None)
    a.fingerprint = "another"

    assert eventually(lambda: "MODEL_MISMATCH" in pool.states()[0].last_error)
    assert not pool.states()[0].up
    assert run(pool) == b.url


def test_clients_move_to_an_empty_server_in_time(pool_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "PROBE_S", 0.01)
    monkeypatch.setattr(replicas, "BALANCE_S", 0.0)
    a, b = FakeChannel("a", clients=1), FakeChannel("b", clients=4)
    pool = pool_of(a, b)
    assert run(pool) == a.url

    a.clients = 5  # one more than b: moving would only swap them
    time.sleep(0.3)
    assert run(pool) == a.url
    a.clients = 6
    assert eventually(lambda: run(pool) == b.url)


def test_the_probing_thread_ends_with_the_connection(pool_of: Any) -> None:
    def probing() -> int:
        return sum(thread.name == "symbiosis-replicas" for thread in threading.enumerate())

    assert eventually(lambda: probing() == 0)  # those of other tests
    pool = pool_of(FakeChannel("a"), FakeChannel("b"))
    assert probing() == 1
    pool_of(FakeChannel("alone"))
    assert probing() == 1

    pool.close()

    assert eventually(lambda: probing() == 0)


# --- downloads -----------------------------------------------------------------------------------------------------


def test_a_broken_download_goes_on_elsewhere_without_repeating(pool_of: Any) -> None:
    a, b = FakeChannel("a"), FakeChannel("b", clients=9)
    pool = pool_of(a, b)
    a.fail(GONE)

    assert [message.app_metadata for message in pool.download(b"ticket", 5.0)] == [bytes([i]) for i in range(6)]


def test_an_outage_keeps_nothing_of_its_calls_alive(pool_of: Any) -> None:
    class Body:
        pass

    channel = FakeChannel()
    pool = pool_of(channel, retry_s=0.0)

    def attempt(_: Channel) -> None:
        body = Body()  # on the stack when the call fails, as its tensors are
        alive.append(weakref.ref(body))
        raise ConnectError("gone")

    alive: list[weakref.ref[Body]] = []
    with contextlib.suppress(ConnectError):
        pool.run(attempt, time.monotonic() + 5)
    gc.collect()

    assert not pool.states()[0].up
    assert alive[0]() is None
