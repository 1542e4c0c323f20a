from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from symbiosis.errors import ClosedError, ConfigError, ConnectError, DeadlineExceededError, SymbiosisError
from symbiosis.flight import protocol
from symbiosis.flight.channel import FlightChannel, check_url

Echo = Callable[..., bytes]
Start = Callable[..., Any]
ROOT = Path(__file__).parents[2]
LATE_S = 0.5  # a deadline is noticed within 0.1 s; the rest is for a busy machine


def in_thread(run: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run in a thread; the list gets what it returned or raised."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(run())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, outcome


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    end_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def mute_port() -> Iterator[int]:
    """A port where connections are accepted by the kernel and never answered."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield int(listener.getsockname()[1])


@pytest.fixture
def slow_port() -> Iterator[Callable[[int], int]]:
    """slow_port(port): another port that leads there, and takes 0.4 s until the first byte passes."""
    with contextlib.ExitStack() as stack:

        def pump(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    sink.sendall(data)

        def serve(listener: socket.socket, port: int) -> None:
            with contextlib.suppress(OSError):
                near = stack.enter_context(listener.accept()[0])
                time.sleep(0.4)
                far = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                threading.Thread(target=pump, args=(near, far), daemon=True).start()
                pump(far, near)

        def open_to(port: int) -> int:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            threading.Thread(target=serve, args=(listener, port), daemon=True).start()
            return int(listener.getsockname()[1])

        yield open_to


# --- URLs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["grpc://127.0.0.1:8815", "grpc+tls://host:1", "grpc+tcp://host:1", "grpc://[::1]:8815", "grpc+unix:///tmp/s"],
)
def test_url_is_accepted(url: str) -> None:
    assert check_url(url) == url
    assert check_url(url + "/") == url


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("127.0.0.1:8815", "expected grpc\\+tls://HOST:PORT, or grpc://HOST:PORT"),
        ("http://127.0.0.1:8815", "expected grpc\\+tls://HOST:PORT, or grpc://HOST:PORT"),
        ("grpc://127.0.0.1", "no host and port"),
        ("grpc://:8815", "no host and port"),
        ("grpc://host:port", "no host and port"),
        ("grpc://", "no host and port"),
        ("", "expected grpc\\+tls://HOST:PORT, or grpc://HOST:PORT"),
    ],
)
def test_bad_url_is_a_config_error_that_shows_a_good_one(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        FlightChannel(url)


# --- streams -----------------------------------------------------------------------------------------------------


def test_calls_share_one_stream(peer: Any, channel_to: Start, echo: Echo) -> None:
    channel = channel_to(peer.url)

    assert [echo(channel, bytes([i])) for i in range(5)] == [bytes([i]) for i in range(5)]
    assert len(peer.commands) == 1


def test_streams_are_opened_with_the_open_header(peer: Any, channel_to: Start, echo: Echo) -> None:
    channel = channel_to(peer.url)
    channel.open_header = b"an open header"

    echo(channel)

    assert peer.commands == [b"an open header"]


def test_eight_threads_share_two_streams(peer: Any, channel_to: Start, echo: Echo) -> None:
    channel = channel_to(peer.url, max_streams=2)

    def work(thread: int) -> list[bytes]:
        return [echo(channel, f"{thread}-{i}".encode(), b"sleep 0.001") for i in range(10)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(work, range(8)))

    assert answers == [[f"{thread}-{i}".encode() for i in range(10)] for thread in range(8)]
    assert 1 <= len(peer.commands) <= 2


def test_no_stream_in_time_says_to_raise_max_streams(peer: Any, channel_to: Start, echo: Echo) -> None:
    channel = channel_to(peer.url, max_streams=1)
    busy, _ = in_thread(lambda: echo(channel, header=b"sleep 5"))
    assert eventually(lambda: peer.calls == 1)

    with pytest.raises(DeadlineExceededError, match="raise max_streams"):
        echo(channel, deadline_s=0.2)

    peer.stop.set()
    busy.join(5)


def test_a_large_message_passes_whole(peer: Any, channel_to: Start, echo: Echo) -> None:
    data = os.urandom(5 << 20)  # larger than gRPC's default limit of 4 MiB

    assert echo(channel_to(peer.url), data) == data


# --- deadlines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True], ids=["first_call", "later_call"])
def test_deadline_ends_the_call(warm: bool, peer: Any, channel_to: Start, echo: Echo) -> None:
    channel = channel_to(peer.url)
    if warm:
        echo(channel)
    started_s = time.monotonic()

    with pytest.raises(DeadlineExceededError, match="request_timeout_s"):
        echo(channel, header=b"sleep 30", deadline_s=0.3)

    assert 0.3 <= time.monotonic() - started_s < 0.3 + LATE_S


def test_the_call_after_a_deadline_gets_its_own_reply(peer: Any, channel_to: Start, echo: Echo) -> None:
    channel = channel_to(peer.url)
    with pytest.raises(DeadlineExceededError):
        echo(channel, b"late", header=b"sleep 0.6", deadline_s=0.2)

    assert echo(channel, b"next") == b"next"
    time.sleep(0.6)  # the late reply would be there by now
    assert echo(channel, b"after") == b"after"


def test_deadline_holds_after_the_watch_has_gone_to_sleep(
    peer: Any, channel_to: Start, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("symbiosis.interrupts.LINGER_S", 0.05)
    channel = channel_to(peer.url)
    echo(channel)
    time.sleep(0.4)
    started_s = time.monotonic()

    with pytest.raises(DeadlineExceededError):
        echo(channel, header=b"sleep 30", deadline_s=0.3)

    assert time.monotonic() - started_s < 0.3 + LATE_S


def test_deadline_holds_where_the_server_does_not_read(peer: Any, channel_to: Start, echo: Echo) -> None:
    channel = channel_to(peer.url)
    deaf, _ = in_thread(lambda: echo(channel, header=b"deaf"))
    assert eventually(lambda: peer.calls == 1)
    stream = channel._checkout(time.monotonic() + 5)
    stream._writer.write_with_metadata(protocol.batch_of(pa.py_buffer(b"x")), b"deaf")  # this stream is not read either
    started_s = time.monotonic()

    with pytest.raises(DeadlineExceededError):  # 32 MiB are more than flow control lets through unread
        channel._exchange_on(stream, b"call", protocol.batch_of(pa.py_buffer(bytes(32 << 20))), time.monotonic() + 0.3)

    assert time.monotonic() - started_s < 0.3 + LATE_S
    peer.stop.set()
    deaf.join(5)


def test_deadline_holds_where_nothing_answers_at_all(mute_port: int, channel_to: Start, echo: Echo) -> None:
    channel = channel_to(f"grpc://127.0.0.1:{mute_port}")
    started_s = time.monotonic()

    with pytest.raises(DeadlineExceededError):
        echo(channel, deadline_s=0.3)

    assert time.monotonic() - started_s < 0.3 + LATE_S


@pytest.mark.parametrize("thread", [False, True], ids=["main_thread", "worker_thread"])
def test_deadline_of_an_action(thread: bool, peer: Any, channel_to: Start) -> None:
    channel = channel_to(peer.url)
    started_s = time.monotonic()

    def act() -> bytes:
        return bytes(channel.action("sleep", b"", 0.3))

    if thread:
        worker, outcome = in_thread(act)
        worker.join(5)
        assert isinstance(outcome[0], DeadlineExceededError)
    else:
        with pytest.raises(DeadlineExceededError):
            act()
    assert time.monotonic() - started_s < 0.3 + LATE_S


def test_action_on_a_port_where_nothing_answers(mute_port: int, channel_to: Start) -> None:
    started_s = time.monotonic()

    with pytest.raises(DeadlineExceededError):
        channel_to(f"grpc://127.0.0.1:{mute_port}").action("hello", b"", 0.3)

    assert time.monotonic() - started_s < 0.3 + LATE_S


def test_a_server_that_is_slow_to_answer_the_connection_is_reached(
    peer: Any, slow_port: Callable[[int], int], channel_to: Start, echo: Echo
) -> None:
    # A transatlantic connection, or a server whose cores are busy.
    channel = channel_to(f"grpc://127.0.0.1:{slow_port(peer.port)}")

    assert echo(channel) == b"abc"


# --- servers that go away ------------------------------------------------------------------------------------------


def test_no_server_is_a_connect_error_that_says_where(free_port: int, channel_to: Start, echo: Echo) -> None:
    channel = channel_to(f"grpc://127.0.0.1:{free_port}")
    started_s = time.monotonic()

    with pytest.raises(ConnectError, match=f"127.0.0.1:{free_port}.*symbiosis-flight-server") as caught:
        echo(channel)
    with pytest.raises(ConnectError):
        channel.action("hello", b"", 5.0)
    with pytest.raises(ConnectError):
        list(channel.download(b"ticket", 5.0))

    assert time.monotonic() - started_s < 3.0
    assert "debug" not in str(caught.value)
    assert caught.value.retryable


@pytest.mark.parametrize("warm", [False, True], ids=["first_call", "later_call"])
def test_server_killed_in_the_middle_of_a_call_is_noticed_at_once(
    warm: bool, peer_process: Start, channel_to: Start, echo: Echo
) -> None:
    process, url = peer_process()
    channel = channel_to(url)
    if warm:
        echo(channel)
    call, outcome = in_thread(lambda: echo(channel, header=b"sleep 60", deadline_s=60))
    time.sleep(0.3)
    started_s = time.monotonic()

    os.kill(process.pid, signal.SIGKILL)
    call.join(10)

    assert isinstance(outcome[0], ConnectError)
    assert time.monotonic() - started_s < 3.0


def test_a_call_after_the_server_died_is_a_connect_error(peer_process: Start, channel_to: Start, echo: Echo) -> None:
    process, url = peer_process()
    channel = channel_to(url)
    echo(channel)

    process.kill()
    process.wait()

    for data in (b"small", bytes(8 << 20)):
        with pytest.raises(ConnectError):
            echo(channel, data)


def test_the_next_call_works_after_the_server_was_restarted(peer_process: Start, channel_to: Start, echo: Echo) -> None:
    process, url = peer_process()
    channel = channel_to(url, max_streams=4)
    with ThreadPoolExecutor(4) as pool:  # so that the pool is full of streams that will be stale
        list(pool.map(lambda i: echo(channel, header=b"sleep 0.05"), range(4)))

    process.kill()
    process.wait()
    peer_process(int(url.rpartition(":")[2]))

    assert [echo(channel, bytes([i])) for i in range(6)] == [bytes([i]) for i in range(6)]


def test_the_next_call_works_after_failed_ones(peer_process: Start, channel_to: Start, echo: Echo) -> None:
    process, url = peer_process()
    channel = channel_to(url)
    echo(channel)
    process.kill()
    process.wait()
    for _ in range(3):
        with pytest.raises(ConnectError):
            echo(channel)
    peer_process(int(url.rpartition(":")[2]))

    def works() -> bool:
        try:
            return echo(channel) == b"abc"
        except ConnectError:
            return False

    assert eventually(works, within_s=5.0)  # gRPC waits up to 2 s between two attempts


def test_a_stream_that_the_server_ends_in_a_call_is_tried_once_more(peer: Any, channel_to: Start, echo: Echo) -> None:
    channel = channel_to(peer.url)
    with pytest.raises(ConnectError):
        echo(channel, header=b"end")  # the first call of a stream: not tried again

    echo(channel)
    with pytest.raises(ConnectError):
        echo(channel, header=b"end")

    assert len(peer.commands) == 3  # end | echo, end | end


def test_an_error_of_the_server_carries_no_internals(peer: Any, channel_to: Start, echo: Echo) -> None:
    with pytest.raises(SymbiosisError) as caught:
        echo(channel_to(peer.url), header=b"sleep forever")  # float("forever") raises in the handler

    assert "Traceback" not in str(caught.value)
    assert ".py" not in str(caught.value)
    assert "debug context" not in str(caught.value)


# --- closing ----------------------------------------------------------------------------------------------------


def test_a_call_after_close_is_a_closed_error(peer: Any, channel_to: Start, echo: Echo) -> None:
    channel = channel_to(peer.url)
    echo(channel)

    channel.close()
    channel.close()

    with pytest.raises(ClosedError, match=r"closed; call symbiosis\.connect again"):
        echo(channel)
    with pytest.raises(ClosedError):
        channel.action("answer", b"", 1.0)
    with pytest.raises(ClosedError):
        list(channel.download(b"ticket", 1.0))


def test_close_ends_the_streams(peer: Any, channel_to: Start, echo: Echo) -> None:
    ended = threading.Event()
    answer = peer.do_exchange

    def watched(*arguments: Any) -> None:
        answer(*arguments)
        ended.set()

    peer.do_exchange = watched
    channel = channel_to(peer.url)
    echo(channel)

    channel.close()

    assert ended.wait(5)


def test_close_ends_a_call_that_is_under_way(peer: Any, channel_to: Start, echo: Echo) -> None:
    channel = channel_to(peer.url)
    echo(channel)
    call, outcome = in_thread(lambda: echo(channel, header=b"sleep 30", deadline_s=60))
    assert eventually(lambda: peer.calls == 2)

    channel.close()
    call.join(2)

    assert outcome
    assert isinstance(outcome[0], ClosedError)


def test_close_before_any_call(peer: Any, channel_to: Start) -> None:
    channel_to(peer.url).close()


def test_threads_and_descriptors_are_given_back_on_close(peer: Any, echo: Echo) -> None:
    def held() -> int:
        return sum(thread.name == "symbiosis-watch" for thread in threading.enumerate())

    before = held()
    channels = [FlightChannel(peer.url) for _ in range(5)]
    for channel in channels:
        echo(channel)
    assert held() == before + 5

    for channel in channels:
        channel.close()

    assert eventually(lambda: held() == before)


# --- actions and downloads -----------------------------------------------------------------------------------------


def test_action_gives_the_one_answer(peer: Any, channel_to: Start) -> None:
    assert channel_to(peer.url).action("anything", b"", 5.0) == b"answer"


def test_download_gives_each_message(peer: Any, channel_to: Start) -> None:
    chunks = list(channel_to(peer.url).download(b"ticket", 5.0))

    assert [bytes(chunk.app_metadata) for chunk in chunks] == [b"first", b"second"]


def test_a_download_may_be_left_early(peer: Any, channel_to: Start, echo: Echo) -> None:
    channel = channel_to(peer.url)
    for _ in channel.download(b"ticket", 5.0):
        break

    assert echo(channel) == b"abc"


# --- processes ----------------------------------------------------------------------------------------------------

PROCESSES = """
import os, sys, threading, time
from symbiosis.flight import protocol
from symbiosis.flight.channel import FlightChannel
import pyarrow as pa

def attempt(run):
    try:
        return run()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

def echo(channel):
    reply = channel.exchange(b"call", protocol.batch_of(pa.py_buffer(b"echo")), time.monotonic() + 5)
    return protocol.body_of(reply.data).to_pybytes().decode()

def say(key, value):
    print(key, value, sep=" = ", flush=True)

def forked(key, run, leave=os._exit):
    child = os.fork()
    if child == 0:
        say(key, attempt(run))
        leave(0)
    say(key + " exits", os.waitpid(child, 0)[1])

say("threads after import", threading.active_count())
channel = FlightChannel(sys.argv[1])
forked("child of unused", lambda: echo(channel))
say("parent", echo(channel))
forked("child of used", lambda: echo(channel), leave=sys.exit)
forked("child that closes", channel.close)
forked("child that connects", lambda: FlightChannel(sys.argv[1]).action("answer", b"", 0.3))
say("parent after all", echo(channel))
"""


@pytest.fixture(scope="module")
def processes(peer_process_of_module: str) -> dict[str, str]:
    """What PROCESSES says, as key -> value. One run for all: importing torch takes seconds."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROCESSES, peer_process_of_module]
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)
    said = dict(line.split(" = ", 1) for line in ended.stdout.splitlines())
    return {**said, "exit code": str(ended.returncode), "errors": ended.stderr}


@pytest.fixture(scope="module")
def peer_process_of_module() -> Iterator[str]:
    command = [sys.executable, str(ROOT / "tests/flight/peer.py"), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"grpc://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def test_importing_the_channel_starts_no_thread(processes: dict[str, str]) -> None:
    assert processes["threads after import"] == "1"


def test_a_forked_child_opens_its_own_streams(processes: dict[str, str]) -> None:
    assert processes["child of unused"] == "echo"
    assert processes["child of unused exits"] == "0"


def test_a_forked_child_may_not_use_a_connection_that_was_open(processes: dict[str, str]) -> None:
    # gRPC's threads stay in the parent: without the refusal the child would hang.
    assert processes["child of used"].startswith("ClosedError: the connection to grpc://127.0.0.1")
    assert "'spawn'" in processes["child of used"]


def test_a_forked_child_that_connects_anew_fails_in_time(processes: dict[str, str]) -> None:
    assert processes["child that connects"].startswith("DeadlineExceededError")


@pytest.mark.parametrize("child", ["child of used", "child that closes"])
def test_a_forked_child_of_an_open_connection_ends(child: str, processes: dict[str, str]) -> None:
    assert processes[f"{child} exits"] == "0"


def test_the_parent_goes_on_after_its_children(processes: dict[str, str]) -> None:
    assert processes["parent"] == processes["parent after all"] == "echo"


def test_a_process_that_forgets_to_close_still_ends(processes: dict[str, str]) -> None:
    assert (processes["exit code"], processes["errors"]) == ("0", "")
