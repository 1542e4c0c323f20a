"""Ctrl-C, deadlines and other owners of the wake-up descriptor, against calls that really block."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from symbiosis.errors import DeadlineExceededError
from symbiosis.flight import protocol
from symbiosis.flight.channel import FlightChannel
from symbiosis.interrupts import Watch

ROOT = Path(__file__).parents[1]
NOTICED_S = 1.0  # the promise of the README: Ctrl-C returns within a second


@pytest.fixture
def peer() -> Iterator[Any]:
    """The echo server of tests/flight/peer.py; `sleep S` as a header makes it wait first."""
    spec = importlib.util.spec_from_file_location("symbiosis_test_peer", ROOT / "tests/flight/peer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = module.Peer()
    yield server
    server.stop.set()
    threading.Thread(target=server.shutdown, daemon=True).start()


@pytest.fixture
def channel(peer: Any) -> Iterator[FlightChannel]:
    opened = FlightChannel(peer.url)
    yield opened
    opened.close()


def echo(channel: FlightChannel, data: bytes = b"abc", header: bytes = b"call", deadline_s: float = 30.0) -> bytes:
    reply = channel.exchange(header, protocol.batch_of(pa.py_buffer(data)), time.monotonic() + deadline_s)
    return protocol.body_of(reply.data).to_pybytes()


@contextlib.contextmanager
def signalled(number: int = signal.SIGINT, after_s: float = 0.2) -> Iterator[Callable[[], float]]:
    """Send a signal to this process in a while; the function tells how long ago that was."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    timer = threading.Timer(after_s, send)
    timer.start()
    try:
        yield lambda: time.monotonic() - sent[0]
    finally:
        timer.join()


@pytest.fixture
def handler() -> Iterator[Callable[..., list[int]]]:
    """handler(number): handle a signal without raising; the list gets what arrived."""
    with contextlib.ExitStack() as stack:

        def install(number: int) -> list[int]:
            arrived: list[int] = []
            previous = signal.signal(number, lambda received, frame: arrived.append(received))
            stack.callback(signal.signal, number, previous)
            return arrived

        yield install


@pytest.fixture
def wakeup() -> Iterator[socket.socket]:
    """A wake-up descriptor of somebody else, as asyncio installs it; the end to read from."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    yield reader
    installed = signal.set_wakeup_fd(previous)
    assert installed == writer.fileno()
    reader.close()
    writer.close()


def received_by(reader: socket.socket, within_s: float = 2.0) -> bytes:
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        with contextlib.suppress(BlockingIOError):
            return reader.recv(64)
        time.sleep(0.01)
    return b""


# --- Ctrl-C ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True], ids=["first_call", "later_call"])
def test_ctrl_c_ends_a_blocked_call_and_the_next_one_works(warm: bool, channel: FlightChannel) -> None:
    if warm:
        echo(channel)

    with signalled() as ago, pytest.raises(KeyboardInterrupt):
        echo(channel, b"interrupted", b"sleep 30")

    assert ago() < NOTICED_S
    assert echo(channel, b"next") == b"next"
    assert echo(channel, b"after") == b"after"


def test_ctrl_c_again_and_again(channel: FlightChannel) -> None:
    for i in range(10):  # more often than there are streams
        with signalled(after_s=0.05), pytest.raises(KeyboardInterrupt):
            echo(channel, b"interrupted", b"sleep 30")
        assert echo(channel, bytes([i])) == bytes([i])


def test_ctrl_c_ends_a_call_after_the_watch_has_gone_to_sleep(
    channel: FlightChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("symbiosis.interrupts.LINGER_S", 0.05)
    echo(channel)
    time.sleep(0.4)

    with signalled() as ago, pytest.raises(KeyboardInterrupt):
        echo(channel, header=b"sleep 30")

    assert ago() < NOTICED_S


def test_ctrl_c_ends_an_action(channel: FlightChannel) -> None:
    with signalled() as ago, pytest.raises(KeyboardInterrupt):
        channel.action("sleep", b"", 30.0)

    assert ago() < NOTICED_S
    assert channel.action("answer", b"", 5.0) == b"answer"


def test_ctrl_c_ends_a_call_where_nothing_answers() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(1)
        channel = FlightChannel(f"grpc://127.0.0.1:{mute.getsockname()[1]}")

        with signalled() as ago, pytest.raises(KeyboardInterrupt):
            echo(channel)

        assert ago() < NOTICED_S
        channel.close()


def test_ctrl_c_ends_the_wait_for_a_free_stream(peer: Any) -> None:
    channel = FlightChannel(peer.url, max_streams=1)
    busy = threading.Thread(target=lambda: echo(channel, header=b"sleep 30"))
    busy.start()
    while not peer.calls:
        time.sleep(0.01)

    with signalled() as ago, pytest.raises(KeyboardInterrupt):
        echo(channel)

    assert ago() < NOTICED_S
    peer.stop.set()
    busy.join(5)
    channel.close()


def test_ctrl_c_at_any_moment_leaves_a_channel_that_works(channel: FlightChannel) -> None:
    # Signals that fall between the calls, into their beginnings and their ends.
    for i in range(60):
        with contextlib.suppress(KeyboardInterrupt), signalled(after_s=0.0005 * (i % 8)):
            for _ in range(200):
                echo(channel)

    assert [echo(channel, bytes([i])) for i in range(20)] == [bytes([i]) for i in range(20)]
    assert signal.set_wakeup_fd(-1) == -1


CTRL_C = """
import sys, time
import pyarrow as pa
from symbiosis.flight import protocol
from symbiosis.flight.channel import FlightChannel

def echo(channel, header=b"call"):
    reply = channel.exchange(header, protocol.batch_of(pa.py_buffer(b"echo")), time.monotonic() + 60)
    return protocol.body_of(reply.data).to_pybytes().decode()

channel = FlightChannel(sys.argv[1])
echo(channel)
print("ready", flush=True)
try:
    echo(channel, b"sleep 60")
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(echo(channel), flush=True)
"""


def test_ctrl_c_from_a_terminal(peer: Any) -> None:
    command = [sys.executable, "-c", CTRL_C, peer.url]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while peer.calls < 2:
            time.sleep(0.01)
        started_s = time.monotonic()

        process.send_signal(signal.SIGINT)

        assert process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - started_s < NOTICED_S
        assert process.stdout.readline() == "echo\n"
        assert process.wait(20) == 0


# --- signals that are no reason to stop ----------------------------------------------------------------------------


def test_a_handler_that_does_not_raise_lets_the_call_succeed(
    channel: FlightChannel, handler: Callable[..., list[int]]
) -> None:
    arrived = handler(signal.SIGINT)

    with signalled(after_s=0.1):
        assert echo(channel, b"answer", b"sleep 0.5") == b"answer"

    assert arrived == [signal.SIGINT]


def test_another_signal_does_not_end_the_call(
    peer: Any, channel: FlightChannel, handler: Callable[..., list[int]]
) -> None:
    arrived = handler(signal.SIGUSR1)

    with signalled(signal.SIGUSR1, after_s=0.1):
        assert echo(channel, b"answer", b"sleep 0.4") == b"answer"

    assert arrived == [signal.SIGUSR1]
    assert peer.calls == 1


# --- other threads -------------------------------------------------------------------------------------------------


def test_a_worker_thread_leaves_signals_alone(channel: FlightChannel, wakeup: socket.socket) -> None:
    seen: list[Any] = []

    def work() -> None:
        seen.append(echo(channel, b"worker", b"sleep 0.4"))

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.2)
    during = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(during, warn_on_full_buffer=False)
    thread.join()

    assert seen == [b"worker"]
    assert during != -1
    assert during != channel._watch._writer


def test_ctrl_c_in_the_main_thread_does_not_end_calls_of_workers(channel: FlightChannel) -> None:
    seen: list[bytes] = []
    thread = threading.Thread(target=lambda: seen.append(echo(channel, b"worker", b"sleep 0.6")))
    thread.start()

    with signalled(after_s=0.1), pytest.raises(KeyboardInterrupt):
        echo(channel, b"main", b"sleep 30")
    thread.join()

    assert seen == [b"worker"]


def test_deadline_of_a_worker_thread(channel: FlightChannel) -> None:
    seen: list[BaseException] = []

    def work() -> None:
        try:
            echo(channel, header=b"sleep 30", deadline_s=0.2)
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(2)

    assert isinstance(seen[0], DeadlineExceededError)


# --- the wake-up descriptor ---------------------------------------------------------------------------------------


def test_the_descriptor_of_another_owner_is_given_back(channel: FlightChannel, wakeup: socket.socket) -> None:
    for _ in range(3):
        echo(channel)

    # The fixture checks after the test that its own descriptor is installed.


def test_the_descriptor_is_given_back_after_ctrl_c(channel: FlightChannel, wakeup: socket.socket) -> None:
    with signalled(), pytest.raises(KeyboardInterrupt):
        echo(channel, header=b"sleep 30")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_signals_in_a_call_reach_the_other_owner(
    number: signal.Signals, channel: FlightChannel, wakeup: socket.socket, handler: Callable[..., list[int]]
) -> None:
    handler(number)

    with signalled(number, after_s=0.1):
        echo(channel, header=b"sleep 0.4")

    assert received_by(wakeup) == bytes([number])


def test_signals_at_the_very_end_of_a_call_reach_the_other_owner(
    wakeup: socket.socket, handler: Callable[..., list[int]]
) -> None:
    handler(signal.SIGUSR1)
    watch = Watch()

    for _ in range(50):
        with watch.call(lambda: None, time.monotonic() + 10):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert received_by(wakeup) == bytes([signal.SIGUSR1])

    watch.close()


def test_asyncio_gets_its_signals_during_a_call(channel: FlightChannel) -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        happened: list[str] = []
        loop.add_signal_handler(signal.SIGUSR1, happened.append, "signal")
        with signalled(signal.SIGUSR1, after_s=0.05):
            happened.append(echo(channel, b"answer", b"sleep 0.2").decode())
        await asyncio.sleep(0.3)
        loop.remove_signal_handler(signal.SIGUSR1)
        return happened

    assert asyncio.run(main()) == ["answer", "signal"]


def test_asyncio_run_is_ended_by_ctrl_c_in_a_call(channel: FlightChannel) -> None:
    # asyncio.run has a handler of its own, which cancels the task and does not raise in the first place.
    async def main() -> None:
        with signalled(after_s=0.1):
            echo(channel, b"answer", b"sleep 0.4")
        await asyncio.sleep(30)

    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())

    assert time.monotonic() - started_s < 5.0
    assert echo(channel) == b"abc"


def test_two_connections_take_turns_with_the_descriptor(peer: Any, wakeup: socket.socket) -> None:
    first, second = FlightChannel(peer.url), FlightChannel(peer.url)

    for _ in range(5):
        echo(first)
        echo(second)
    first.close()
    echo(second)
    with signalled(), pytest.raises(KeyboardInterrupt):
        echo(second, header=b"sleep 30")

    second.close()


def test_a_watch_works_with_descriptors_above_1023(peer: Any) -> None:
    # A notebook with many files open; select() would refuse such a descriptor.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    channel = FlightChannel(peer.url)
    try:
        echo(channel)
        with pytest.raises(DeadlineExceededError):
            echo(channel, header=b"sleep 30", deadline_s=0.2)
        assert channel._watch._reader > 1023
    finally:
        channel.close()
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- a watch by itself --------------------------------------------------------------------------------------------


def test_a_call_in_time_is_left_alone() -> None:
    watch = Watch()
    cancelled: list[str] = []

    with watch.call(lambda: cancelled.append("cancelled"), time.monotonic() + 0.3) as call:
        time.sleep(0.05)
    time.sleep(0.5)

    assert (cancelled, call.stopped) == ([], "")
    watch.close()


def test_a_late_call_is_cancelled_once() -> None:
    watch = Watch()
    cancelled: list[str] = []

    with watch.call(lambda: cancelled.append("cancelled"), time.monotonic() + 0.1) as call:
        time.sleep(0.6)

    assert (cancelled, call.stopped) == (["cancelled"], "expired")
    watch.close()


def test_closing_stops_what_is_under_way_and_what_comes_later() -> None:
    watch = Watch()
    cancelled: list[str] = []

    with watch.call(lambda: cancelled.append("first"), time.monotonic() + 10) as first:
        watch.close()
        with watch.call(lambda: cancelled.append("second"), time.monotonic() + 10) as second:
            pass

    assert cancelled == ["first", "second"]
    assert (first.stopped, second.stopped) == ("closed", "closed")
    assert signal.set_wakeup_fd(-1) == -1


def test_the_thread_sleeps_while_there_are_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.interrupts.LINGER_S", 0.05)
    watch = Watch()
    with watch.call(lambda: None, time.monotonic() + 10):
        pass
    time.sleep(0.4)

    assert watch._asleep
    watch.close()


def test_ctrl_c_while_the_thread_is_started_leaves_one_thread_and_one_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    def watching() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "symbiosis-watch"} - others

    others: set[threading.Thread] = set()
    others = watching()
    watch = Watch()
    with monkeypatch.context() as once:
        once.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt), watch.call(lambda: None, time.monotonic() + 10):
            pass

    with watch.call(lambda: None, time.monotonic() + 10):
        pass

    time.sleep(0.3)  # the first thread finds out within 0.1 s that it is not the one
    assert len(watching()) == 1
    watch.close()
    time.sleep(0.2)
    assert not watching()


def test_closing_twice_writes_to_nobody_elses_descriptor() -> None:
    watch = Watch()
    with watch.call(lambda: None, time.monotonic() + 10):
        pass
    watch.close()
    time.sleep(0.3)
    reader, writer = os.pipe2(os.O_NONBLOCK)  # takes the numbers that the watch gave back

    watch.close()

    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    os.close(reader)
    os.close(writer)


def test_closing_an_unused_watch_is_fine() -> None:
    Watch().close()
