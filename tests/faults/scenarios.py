"""The ways to break it, each as a function of its size that returns figures.

The tests run them small, `make faults` and `make soak` at full size (`python -m tests.faults`). Each figure is
measured in the run; a scenario that loses a step or gets a wrong number says so in its figures.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

import symbiosis
from symbiosis.errors import ConnectError, DeadlineExceededError, ServerBusyError, SymbiosisError
from tests.faults.nursery import tiny_model
from tests.faults.proxy import Proxy
from tests.faults.servers import Nursery, ServerProcess
from tests.faults.work import AtRandomCalls, largest_difference, percentile, train_locally, train_remotely

Figures = dict[str, Any]
Q, MLP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp"
HEAVY_TOKENS = 4000
EPISODE_STEPS = 100  # over thousands of steps, rounding alone leads two runs apart


def restarts(nursery: Nursery, steps: int, times: int, down_s: float = 0.0) -> Figures:
    """The server is killed (-9) and restarted at random calls of a training run."""
    expected = train_locally(steps)
    server = nursery.start()
    with symbiosis.connect(server.url) as conn:
        calls = _calls_of_a_step(conn)
        accident = AtRandomCalls(lambda: server.restart(down_s), times, steps * calls)
        conn.bus.subscribe(accident)
        run = train_remotely(conn, steps)
        for thread in accident.threads:
            thread.join(30)
        retries = conn.stats().retries
    server.kill()
    return {
        "steps": len(run.losses),
        "restarts": server.starts - 1,
        "retries": retries,
        "steps_lost": steps - len(run.losses),
        "largest_loss_difference": largest_difference(run.losses, expected),
        "p99_step_s": run.percentile_s(99),
    }


def two_replicas(nursery: Nursery, seconds: float, every_s: float, down_s: float = 1.0) -> Figures:
    """Two servers; every `every_s` the one in use is killed, and is back `down_s` later."""
    servers = {server.url: server for server in (nursery.start(), nursery.start())}
    with symbiosis.connect(list(servers)) as conn:
        train_remotely(conn, 1)
        ended = threading.Event()
        killer = threading.Thread(target=_kill_in_turn, args=(conn, servers, every_s, down_s, ended), daemon=True)
        killer.start()
        end_s = time.monotonic() + seconds
        runs = []
        while time.monotonic() < end_s:
            runs.append(train_remotely(conn, lambda done: done < EPISODE_STEPS and time.monotonic() < end_s))
        ended.set()
        killer.join(60)
        retries = conn.stats().retries
    for server in servers.values():
        server.kill()
    expected = train_locally(EPISODE_STEPS)
    step_s = [seconds for run in runs for seconds in run.step_s]
    return {
        "steps": len(step_s),
        "kills": sum(server.starts - 1 for server in servers.values()),
        "retries": retries,
        "failed_steps": 0,  # a failed step would have raised
        "largest_loss_difference": max(largest_difference(run.losses, expected[: len(run.losses)]) for run in runs),
        "p50_step_s": percentile(step_s, 50),
        "p99_step_s": percentile(step_s, 99),
        "longest_step_s": max(step_s),
    }


def bad_network(
    nursery: Nursery, steps: int, delay_s: float, reset_chance: float, outages: int, outage_s: float
) -> Figures:
    """A path that delays everything, resets connections, and now and then lets nothing through."""
    expected = train_locally(steps)
    server = nursery.start()
    with Proxy(server.port) as proxy, symbiosis.connect(proxy.url, same_host=False) as conn:
        calls = _calls_of_a_step(conn)
        proxy.delay_s, proxy.reset_chance = delay_s, reset_chance

        def outage() -> None:
            proxy.down = True
            proxy.reset_all()
            time.sleep(outage_s)
            proxy.down = False

        accident = AtRandomCalls(outage, outages, steps * calls)
        conn.bus.subscribe(accident)
        run = train_remotely(conn, steps)
        for thread in accident.threads:
            thread.join(60)
        retries = conn.stats().retries
        resets, connections = proxy.resets, proxy.connections
    server.kill()
    return {
        "steps": len(run.losses),
        "resets": resets,
        "outages": outages,
        "connections": connections,
        "retries": retries,
        "largest_loss_difference": largest_difference(run.losses, expected),
        "p99_step_s": run.percentile_s(99),
    }


def _calls_of_a_step(conn: symbiosis.Connection) -> int:
    counts = [conn.stats().calls]
    for steps in (1, 2):  # the first step makes more: it learns which layers share a call
        train_remotely(conn, steps)
        counts.append(conn.stats().calls)
    return (counts[2] - counts[1]) - (counts[1] - counts[0])


def _kill_in_turn(
    conn: symbiosis.Connection,
    servers: dict[str, ServerProcess],
    every_s: float,
    down_s: float,
    ended: threading.Event,
) -> None:
    chance = random.Random(4)
    while not ended.wait(every_s * chance.uniform(0.8, 1.2)):
        servers[conn._replicas.home.url].restart(down_s)


def tenants(nursery: Nursery, seconds: float) -> Figures:
    """A light client that decodes, alone and then beside ten that send large batches without a pause."""
    server = nursery.start()
    with symbiosis.connect(server.url) as light:
        alone_s = _decode(light, seconds)
        stop = threading.Event()
        heavy = [threading.Thread(target=_flood, args=(server.url, HEAVY_TOKENS, stop), daemon=True) for _ in range(10)]
        for thread in heavy:
            thread.start()
        time.sleep(0.5)
        beside_s = _decode(light, seconds)
        stop.set()
        for thread in heavy:
            thread.join(60)
    server.kill()
    return {
        "alone_calls": len(alone_s),
        "beside_calls": len(beside_s),
        "alone_p99_s": percentile(alone_s, 99),
        "beside_p50_s": percentile(beside_s, 50),
        "beside_p99_s": percentile(beside_s, 99),
        "p99_ratio": percentile(beside_s, 99) / percentile(alone_s, 99),
    }


def overload(nursery: Nursery, seconds: float, clients: int = 40) -> Figures:
    """Far more work than a small queue takes: what is admitted stays quick, what is not is refused by its name."""
    server = nursery.start(max_queue_tokens=4 * HEAVY_TOKENS)
    best = _load(server.url, 4, seconds)
    over = _load(server.url, clients, seconds)
    with symbiosis.connect(server.url) as conn:
        right = bool(torch.allclose(_product(conn), local_product(), rtol=1e-5, atol=1e-6))
    server.kill()
    return {
        "clients": clients,
        "best_calls_per_s": best.calls / seconds,
        "goodput_ratio": over.calls / max(1, best.calls),
        "admitted_p99_s": percentile(over.seconds, 99),
        "refusals": over.refusals,
        "other_errors": best.other_errors + over.other_errors,
        "right_afterwards": right,
    }


def soak(nursery: Nursery, seconds: float, clients: int = 16) -> Figures:
    """Mixed work of many clients, each result checked, while one of two servers is killed and connections are cut."""
    steady, shaky = nursery.start(), nursery.start()
    stop, outcome, model = threading.Event(), Outcome(), tiny_model()
    with Proxy(steady.port) as proxy:
        urls = [[proxy.url], [shaky.url, proxy.url], [proxy.url, shaky.url]]
        workers = [
            threading.Thread(target=_soak_client, args=(urls[i % 3], i, model, stop, outcome), daemon=True)
            for i in range(clients)
        ]
        for worker in workers:
            worker.start()
        memory = _disturb(steady, shaky, proxy, seconds)
        stop.set()
        end_s = time.monotonic() + 150
        for worker in workers:
            worker.join(max(0.0, end_s - time.monotonic()))
        stuck = sum(worker.is_alive() for worker in workers)
    for server in (steady, shaky):
        server.kill()
    third = max(1, len(memory) // 3)
    early, late = percentile(memory[third : 2 * third], 50), percentile(memory[2 * third :], 50)
    return {
        "seconds": seconds,
        "results_checked": outcome.right + outcome.wrong,
        "wrong_results": outcome.wrong,
        "failed_calls": outcome.failed,
        "stuck_clients": stuck,
        "server_kills": shaky.starts - 1,
        "memory_middle_mb": early / 1e6,
        "memory_end_mb": late / 1e6,
        "memory_growth": late / early - 1.0,
    }


@dataclass
class Outcome:
    """What several threads count together."""

    right: int = 0
    wrong: int = 0
    failed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, right: bool) -> None:
        with self.lock:
            self.right += right
            self.wrong += not right

    def fail(self) -> None:
        with self.lock:
            self.failed += 1


@dataclass
class Load:
    """What clients that call without a pause got."""

    calls: int = 0
    refusals: int = 0
    other_errors: int = 0
    seconds: list[float] = field(default_factory=list)


def local_product(tokens: int = 3) -> torch.Tensor:
    return torch.ones(tokens, 32) @ tiny_model().get_submodule(Q).weight.detach().T


def _product(conn: symbiosis.Connection, tokens: int = 3) -> torch.Tensor:
    return conn._caller.call("forward", [Q], [torch.ones(tokens, 32)])


def _decode(conn: symbiosis.Connection, seconds: float) -> list[float]:
    """Single tokens, one after another; how long each took."""
    times_s, end_s = [], time.monotonic() + seconds
    while time.monotonic() < end_s:
        started_s = time.monotonic()
        _product(conn, 1)
        times_s.append(time.monotonic() - started_s)
    return times_s


def _flood(url: str, tokens: int, stop: threading.Event) -> None:
    with symbiosis.connect(url) as conn:
        while not stop.is_set():
            conn._caller.call("forward", [MLP], [torch.ones(tokens, 32)])


def _load(url: str, clients: int, seconds: float) -> Load:
    found, lock, end_s = Load(), threading.Lock(), time.monotonic() + seconds

    def work() -> None:
        with symbiosis.connect(url, retry_s=0) as conn:
            while time.monotonic() < end_s:
                started_s = time.monotonic()
                try:
                    conn._caller.call("forward", [MLP], [torch.ones(HEAVY_TOKENS, 32)])
                except ServerBusyError as error:
                    with lock:
                        found.refusals += 1
                    time.sleep(error.retry_after_s or 0.0)
                except SymbiosisError:
                    with lock:
                        found.other_errors += 1
                else:
                    with lock:
                        found.calls += 1
                        found.seconds.append(time.monotonic() - started_s)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
    return found


def _soak_client(urls: list[str], seed: int, model: Any, stop: threading.Event, outcome: Outcome) -> None:
    """Connects, works, leaves, comes back; a call that fails is counted, and ends that session."""
    chance = random.Random(seed)
    while not stop.is_set():
        try:
            with symbiosis.connect(urls, request_timeout_s=60, connect_timeout_s=20) as conn:
                for _ in range(chance.randrange(20, 200)):
                    if stop.is_set():
                        return
                    outcome.add(_checked_call(conn, model, chance))
                    time.sleep(chance.uniform(0, 0.02))
        except SymbiosisError as error:
            if not isinstance(error, ConnectError | DeadlineExceededError) or not stop.is_set():
                outcome.fail()


def _checked_call(conn: symbiosis.Connection, model: Any, chance: random.Random) -> bool:
    """A forward or a backward of a linear or a block, of any size, against the same computed here."""
    tokens = chance.choice((1, 1, 2, 16, 100, 700))
    name = chance.choice((Q, MLP))
    module = model.get_submodule(name)
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    x = torch.randn(tokens, 32, generator=generator).requires_grad_()
    expected = module(x)
    if chance.random() < 0.5:
        got = conn._caller.call("forward", [name], [x])
        return bool(torch.allclose(got, expected, rtol=1e-4, atol=1e-5))
    g = torch.randn(expected.shape, generator=generator)
    (wanted,) = torch.autograd.grad(expected, x, g)
    got = conn._caller.call("grad_input", [name], [x, g] if name == MLP else [g])
    return bool(torch.allclose(got, wanted, rtol=1e-4, atol=1e-5))


def _disturb(steady: ServerProcess, shaky: ServerProcess, proxy: Proxy, seconds: float) -> list[float]:
    """Kills and resets at random; the resident memory of the steady server, sampled meanwhile."""
    chance, memory, end_s = random.Random(5), [], time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(min(2.0, seconds / 30))
        memory.append(float(psutil.Process(steady.pid).memory_info().rss))
        if chance.random() < 0.15:
            shaky.restart(chance.uniform(0, 2))
        if chance.random() < 0.15:
            proxy.reset_all()
    return memory
