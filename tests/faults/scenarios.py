"""The ways to break it, each as a function of its size that returns figures.

The tests run them small, `make faults` and `make soak` at full size (`python -m tests.faults`). Each figure is
measured in the run; a scenario that loses a step or gets a wrong number says so in its figures.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import symbiosis
from tests.faults.proxy import Proxy
from tests.faults.servers import Nursery, ServerProcess
from tests.faults.work import AtRandomCalls, largest_difference, percentile, train_locally, train_remotely

Figures = dict[str, Any]
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
    with Proxy(server.port) as proxy, symbiosis.connect(proxy.url) as conn:
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
