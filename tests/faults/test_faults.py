"""The short forms of what `make faults` shows at length: nothing is lost, nothing is wrong, nothing hangs."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest
import torch

import symbiosis
from symbiosis.connection import Connection
from symbiosis.errors import (
    ConnectError,
    DeadlineExceededError,
    InvalidInputError,
    ModelMismatchError,
    ProtocolError,
    SymbiosisError,
)
from symbiosis.flight import protocol
from tests.faults import scenarios
from tests.faults.nursery import tiny_model
from tests.faults.proxy import Proxy
from tests.faults.servers import Nursery, ServerProcess
from tests.faults.work import TOLERANCE

Serve = Callable[..., ServerProcess]
Connect = Callable[..., Connection]
ROOT = Path(__file__).parents[2]
Q = "model.layers.0.self_attn.q_proj"
LATE_S = 0.5


def product(conn: Connection, tokens: int = 3) -> torch.Tensor:
    """One call: x W of the first linear."""
    return conn._caller.call("forward", [Q], [torch.ones(tokens, 32)])


def expected_product(tokens: int = 3) -> torch.Tensor:
    return torch.ones(tokens, 32) @ tiny_model().get_submodule(Q).weight.detach().T


def assert_right(conn: Connection) -> None:
    torch.testing.assert_close(product(conn), expected_product(), rtol=1e-5, atol=1e-6)


def later(seconds: float, act: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    end_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)
    return condition()


# --- training goes on ----------------------------------------------------------------------------------------------


def test_restarts_at_random_moments_change_no_loss(nursery: Nursery) -> None:
    figures = scenarios.restarts(nursery, steps=12, times=4, down_s=0.1)

    assert figures["restarts"] == 4
    assert figures["retries"] > 0
    assert figures["steps_lost"] == 0
    assert figures["largest_loss_difference"] <= TOLERANCE


def test_two_replicas_of_which_one_dies_again_and_again(nursery: Nursery) -> None:
    figures = scenarios.two_replicas(nursery, seconds=5.0, every_s=1.0, down_s=0.3)

    assert figures["kills"] >= 2
    assert figures["largest_loss_difference"] <= TOLERANCE


def test_resets_delays_and_an_outage(nursery: Nursery) -> None:
    figures = scenarios.bad_network(nursery, steps=8, delay_s=0.002, reset_chance=0.02, outages=1, outage_s=0.5)

    assert figures["retries"] > 0
    assert figures["largest_loss_difference"] <= TOLERANCE


def test_a_little_of_the_soak(nursery: Nursery) -> None:
    figures = scenarios.soak(nursery, seconds=6.0, clients=6)

    assert figures["results_checked"] > 50
    assert (figures["wrong_results"], figures["failed_calls"], figures["stuck_clients"]) == (0, 0, 0)


def test_overload_is_refused_by_name_and_harms_nothing(nursery: Nursery) -> None:
    figures = scenarios.overload(nursery, seconds=2.0, clients=16)

    assert figures["refusals"] > 0
    assert figures["other_errors"] == 0
    assert figures["right_afterwards"]


def test_a_light_client_is_served_beside_ten_heavy_ones(nursery: Nursery) -> None:
    figures = scenarios.tenants(nursery, seconds=1.5)

    assert figures["beside_calls"] > 0.02 * figures["alone_calls"]  # how well is a figure of `make faults`


def test_a_server_that_comes_back_with_another_model_ends_the_training(
    serve: Serve, connect: Connect, start_server: Any, tiny_llama: Any
) -> None:
    first = serve()
    conn = connect(first.url)
    product(conn)
    first.kill()
    start_server(tiny_llama(seed=5), port=first.port)

    with pytest.raises(ModelMismatchError, match="connect again"):
        product(conn)


# --- a peer that stops, a network that swallows --------------------------------------------------------------------


def test_a_server_that_was_stopped_for_a_while_answers_late_and_right(serve: Serve, connect: Connect) -> None:
    server = serve()
    conn = connect(server.url)
    product(conn)

    server.signal(signal.SIGSTOP)
    later(0.7, lambda: server.signal(signal.SIGCONT))

    assert_right(conn)


@pytest.mark.parametrize("how", ["stopped", "cut off"])
def test_a_silent_server_is_given_up_for_another_before_the_deadline(how: str, serve: Serve, connect: Connect) -> None:
    with Proxy(serve().port) as first, Proxy(serve().port) as second:
        conn = connect([first.url, second.url], keepalive_s=1, same_host=False)
        product(conn)
        used = {proxy.url: proxy for proxy in (first, second)}[conn._replicas.home.url]
        started_s = time.monotonic()

        used.swallow = True  # for what is asked, a stopped process and a cut cable look the same
        if how == "cut off":
            used.down = True
        assert_right(conn)

        assert time.monotonic() - started_s < 10.0
        assert not all(state.up for state in conn.stats().servers)


def test_a_stopped_process_is_given_up_too(serve: Serve, connect: Connect) -> None:
    first, second = serve(), serve()
    conn = connect([first.url, second.url], keepalive_s=1)
    product(conn)
    used = first if conn._replicas.home.url == first.url else second

    used.signal(signal.SIGSTOP)

    assert_right(conn)  # which only the other can have computed


def test_a_throttled_path_is_slow_and_right(serve: Serve, connect: Connect) -> None:
    with Proxy(serve().port) as proxy:
        conn = connect(proxy.url, same_host=False)
        product(conn)
        proxy.bytes_per_s = 200_000.0

        torch.testing.assert_close(product(conn, 500), expected_product(500), rtol=1e-5, atol=1e-6)


def test_flipped_bits_break_calls_and_never_the_server(serve: Serve, connect: Connect) -> None:
    """TCP's checksum, or TLS, is what keeps bits from flipping. Here nothing does, so a value may be wrong."""
    server = serve()
    with Proxy(server.port) as proxy:
        conn = connect(proxy.url, retry_s=0, request_timeout_s=2, same_host=False)
        proxy.flip_chance = 0.3
        errors = []
        for _ in range(40):
            try:
                product(conn, 50)
            except SymbiosisError as error:  # nothing else may come out
                errors.append(str(error))
        assert proxy.flips > 0
        assert not any("Traceback" in error for error in errors)
    assert_right(connect(server.url))


# --- waits end ------------------------------------------------------------------------------------------------------


def test_the_deadline_holds_while_the_server_is_away(serve: Serve, connect: Connect) -> None:
    server = serve()
    conn = connect(server.url, request_timeout_s=1.0)
    product(conn)
    server.kill()
    started_s = time.monotonic()

    with pytest.raises((ConnectError, DeadlineExceededError)):
        product(conn)

    assert time.monotonic() - started_s < 1.0 + LATE_S


@pytest.mark.parametrize("state", ["away", "stopped"])
def test_ctrl_c_ends_a_call_at_once_whatever_the_server_does(state: str, serve: Serve, connect: Connect) -> None:
    server = serve()
    conn = connect(server.url)
    product(conn)
    server.kill() if state == "away" else server.signal(signal.SIGSTOP)
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = later(0.5, press)
    with pytest.raises(KeyboardInterrupt):
        product(conn)

    assert time.monotonic() - pressed[0] < 1.0
    timer.join()


HELD_OPEN = """
import sys, threading, time
import symbiosis, torch
conn = symbiosis.connect(sys.argv[1])
x = torch.ones(3, 32)
conn._caller.call("forward", [sys.argv[2]], [x])
print("stop", flush=True)
sys.stdin.readline()
thread = threading.Thread(target=conn._caller.call, args=("forward", [sys.argv[2]], [x]), daemon=True)
thread.start()
time.sleep(0.3)
"""


@pytest.mark.slow
def test_the_interpreter_ends_cleanly_with_a_call_open(serve: Serve) -> None:
    server = serve()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", HELD_OPEN, server.url, Q]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environ, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "stop\n"
        server.signal(signal.SIGSTOP)
        started_s = time.monotonic()
        _, errors = process.communicate("\n", timeout=30)
    server.signal(signal.SIGCONT)

    assert (process.returncode, errors) == (0, "")
    assert time.monotonic() - started_s < 10.0


LEFT_OPEN = """
import symbiosis, torch, transformers
sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 1, "num_attention_heads": 4}
config = transformers.LlamaConfig(vocab_size=96, **sizes)
model = transformers.LlamaForCausalLM(config)
with symbiosis.serve(model, port=0) as server:
    connection = symbiosis.connect(server.url)
    connection.wrap(model)(torch.tensor([[3, 4]]))
print("left", flush=True)
"""


@pytest.mark.timeout(180)
def test_the_interpreter_ends_although_a_connection_to_its_own_server_was_left_open() -> None:
    """pyarrow's server waits at exit for streams that nobody will end."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, env=environ, timeout=150, text=True)

    assert (done.returncode, done.stdout) == (0, "left\n")


# --- nothing is left behind ------------------------------------------------------------------------------------------


def held() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def assert_settles(before: tuple[int, int], spare: int) -> None:
    """gRPC keeps a few threads of its own, whose number does not grow with use."""
    assert eventually(lambda: all(now <= was + spare for now, was in zip(held(), before, strict=True))), (
        f"threads and descriptors were {before}, and are {held()}"
    )


@pytest.mark.parametrize("cycles", [20, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_connecting_and_closing_leaves_no_threads_and_no_descriptors(cycles: int, serve: Serve) -> None:
    server = serve()

    def cycle() -> None:
        with symbiosis.connect([server.url, server.url + "/"]) as conn:
            product(conn)

    for _ in range(5):
        cycle()
    before = held()
    for _ in range(cycles):
        cycle()

    assert_settles(before, spare=6)


def test_failing_calls_whose_exceptions_are_kept_hold_no_streams(serve: Serve, connect: Connect) -> None:
    server = serve()
    conn = connect(server.url)
    kept: list[BaseException] = []

    def fail(tokens: int) -> None:
        try:
            conn._caller.call("forward", [Q], [torch.ones(tokens, 7)])  # 7 is not its width
        except InvalidInputError as error:
            kept.append(error)

    for _ in range(5):
        fail(1)
    before = held()
    for _ in range(200):
        fail(1)

    assert len(kept) == 205
    assert_settles(before, spare=6)
    assert_right(conn)


def test_calls_cut_off_again_and_again_leave_nothing(serve: Serve) -> None:
    server = serve()
    with Proxy(server.port) as proxy:
        conn = symbiosis.connect(proxy.url)
        for _ in range(5):
            product(conn)
            proxy.reset_all()
        before = held()
        for _ in range(20):
            product(conn)
            proxy.reset_all()

        assert_settles(before, spare=6)
        conn.close()


def test_a_client_that_never_reads_does_not_hinder_others(serve: Serve, connect: Connect) -> None:
    server = serve()
    client = fl.FlightClient(server.url)
    command = protocol.encode_header(protocol.Open(protocol=protocol.VERSION))
    writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(command))
    writer.begin(protocol.SCHEMA)
    x = torch.ones(20_000, 32)
    request = protocol.Request(id=1, op="forward", modules=[Q], tensors=[protocol.spec_of(x)], deadline_ms=60_000)

    def flood() -> None:
        while True:
            try:
                writer.write_with_metadata(protocol.encode_body([x]), protocol.encode_header(request))
            except (pa.ArrowException, OSError):
                return

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    conn = connect(server.url)
    for _ in range(5):
        assert_right(conn)
    reader.cancel()
    thread.join(10)
    assert not thread.is_alive()
    client.close()


def test_a_peer_that_speaks_another_protocol_is_a_typed_error(serve: Serve) -> None:
    import http.server

    page = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=page.serve_forever, daemon=True)
    thread.start()

    with pytest.raises((ConnectError, DeadlineExceededError, ProtocolError)):
        symbiosis.connect(f"grpc://127.0.0.1:{page.server_port}", connect_timeout_s=3)
    page.shutdown()
    page.server_close()
