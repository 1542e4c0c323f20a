"""`python -m symbiosis demo`: two clients fine-tune different adapters on one shared model, at the same time.

    server: SmolLM2-135M-Instruct, once        client 1: LoRA r=8 on q_proj, v_proj
                                               client 2: IA3

Four processes that a user could start in four terminals; this one only starts them, shows their progress and
compares what they found. One rule: it does no work on a model itself, and leaves no process behind.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from symbiosis.config import ServerOptions
from symbiosis.errors import ConnectError, DeadlineExceededError, SymbiosisError, from_wire
from symbiosis.flight.demo_model import LICENSE_NOTE, demo_model_path
from symbiosis.integrations import demo_data
from symbiosis.integrations.demo_events import Event, Failure, Progress, Result, decode
from symbiosis.integrations.demo_progress import Board
from symbiosis.integrations.demo_report import NAMES, Outcome, report
from symbiosis.integrations.processes import Child, Children, signals_as_interrupts, wait_for_end, wait_for_file
from symbiosis.settings import Setting

QUESTIONS = ("Do you eat", "Robots are stupid")  # of the held-out pairs
ANSWER_TOKENS = 20
HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0  # the first start converts the model: 30 s on a quiet machine
SILENCE_TIMEOUT_S = 300.0  # longest time without news from any client
LOCAL_TIMEOUT_S = 300.0
INTRODUCTION = f"""\
symbiosis: one frozen base model in one process, two adapters trained on it at once by two others

  model  {LICENSE_NOTE}
  data   {demo_data.CORPUS_PACKAGE}, English question-answer pairs, {demo_data.CORPUS_LICENSE}
"""
Inbox = queue.Queue[tuple[str, Event]]
EXIT_OK, EXIT_DIFFERENT = 0, 1


@dataclass(frozen=True)
class Options:
    """What the command line of the demo says."""

    out: Path = Path("adapters")
    steps: int = 30
    held_out_pairs: int = 48


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and print its report; 0 if the saved adapters do the same without us.

    Raises:
        MissingExtraError: the demo model or the demo data is not installed.
        SymbiosisError: a child failed; the message has its reason.
    """
    outcome = run(_parse(argv))
    print(f"\n{report(outcome)}\n\nDone in {outcome.wall_s:.0f} s.")
    return EXIT_OK if all(map(outcome.same_locally, outcome.results)) else EXIT_DIFFERENT


def run(options: Options) -> Outcome:
    """The demo in three steps; all processes have ended when it returns or raises."""
    started_s = time.monotonic()
    demo_data.load_pairs()  # a missing package is named now, not in two minutes
    cache_dir = _cache_dir()
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    _say(INTRODUCTION)
    with signals_as_interrupts():
        with Children(logs, _environment()) as children:
            server, url = _start_server(children, cache_dir)
            results = _fine_tune(children, server, url, options)
        with Children(logs, _environment()) as children:
            local_answers = _ask_locally(children, cache_dir, [result.adapter_dir for result in results])
    return Outcome(results, QUESTIONS, local_answers, time.monotonic() - started_s)


def _start_server(children: Children, cache_dir: Path) -> tuple[Child, str]:
    _say("[1/3] Starting symbiosis-flight-server --model demo")
    with tempfile.TemporaryDirectory(prefix="symbiosis-demo-") as folder:
        port_file = Path(folder, "port")
        where = (
            "--host",
            HOST,
            "--port",
            "0",
            "--port-file",
            str(port_file),
            "--cache-dir",
            str(cache_dir),
            "--tokens",
            "off",
        )
        server = children.start("server", "symbiosis.flight.cli", "--model", "demo", *where)
        with _waiting("loading the model (the first time, it is converted: about a minute)") as tick:
            url = f"grpc://{HOST}:{wait_for_file(port_file, server, START_TIMEOUT_S, tick).strip()}"
    _say(f"  listening on {url}\n")
    return server, url


def _fine_tune(children: Children, server: Child, url: str, options: Options) -> list[Result]:
    _say("[2/3] Two clients fine-tune at the same time, one with LoRA (r=8, on q and v), one with IA3 (on k and v)")
    inbox: Inbox = queue.Queue()
    clients = {method: _start_client(children, inbox, method, url, options) for method in NAMES}
    board = Board(list(NAMES.values()), sys.stderr)
    results: dict[str, Result] = {}
    try:
        while len(results) < len(clients):
            busy = [client for method, client in clients.items() if method not in results]
            method, event = _next_event(inbox, [server, *busy], board.refresh)
            if isinstance(event, Progress):
                board.show(NAMES[method], event)
            elif isinstance(event, Failure):
                raise _cause(server, from_wire(event.code, f"the {NAMES[method]} client: {event.message}"))
            else:
                results[method] = event
    finally:
        board.close()
    return [results[method] for method in NAMES]


def _start_client(children: Children, inbox: Inbox, method: str, url: str, options: Options) -> Child:
    words = ["symbiosis.integrations.demo_client", "--url", url, "--method", method, "--out", str(options.out / method)]
    words += ["--steps", str(options.steps), "--held-out-pairs", str(options.held_out_pairs)]
    words += _questions()

    def on_line(line: str) -> None:
        inbox.put((method, decode(line)))

    return children.start(f"client-{method}", *words, on_line=on_line, environ=_client_threads())


def _next_event(inbox: Inbox, busy: Sequence[Child], tick: Callable[[], None]) -> tuple[str, Event]:
    """The next thing that a client says, or the error of the first process that ended instead."""
    deadline_s = time.monotonic() + SILENCE_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            return inbox.get(timeout=0.5)
        except queue.Empty:
            tick()
        for child in busy:
            if child.has_ended and inbox.empty():  # all it said was read, and its result was not there
                raise child.failure()
    raise DeadlineExceededError(
        f"no client reported anything for {SILENCE_TIMEOUT_S:.0f} s; the logs: "
        + ", ".join(str(child.log) for child in busy)
    )


def _cause(server: Child, error: SymbiosisError) -> SymbiosisError:
    """What to blame for a client's error: when the server is gone, its own reason."""
    return server.failure() if isinstance(error, ConnectError) and server.has_ended else error


def _ask_locally(children: Children, cache_dir: Path, adapters: Sequence[str]) -> dict[str, list[str]]:
    _say("\n[3/3] The server has ended. The same adapters, with transformers and PEFT alone on the local base")
    words = ["--model", str(demo_model_path(cache_dir)), *_questions()]
    for adapter in adapters:
        words += ["--adapter", adapter]
    lines: list[str] = []
    check = children.start("local-check", "symbiosis.integrations.demo_local", *words, on_line=lines.append)
    with _waiting("loading the model and generating") as tick:
        wait_for_end(check, LOCAL_TIMEOUT_S, tick)
    found: dict[str, list[str]] = json.loads(lines[-1])
    return found


def _questions() -> list[str]:
    return [*(word for text in QUESTIONS for word in ("--question", text)), "--answer-tokens", str(ANSWER_TOKENS)]


@contextmanager
def _waiting(what: str) -> Iterator[Callable[[], None]]:
    """A line that counts seconds on a terminal, and is printed once elsewhere; call what it yields now and then."""
    with tqdm(bar_format="  {desc} {elapsed}", desc=what, disable=not sys.stderr.isatty(), leave=False) as line:
        if line.disable:
            _say(f"  {what}")
        yield line.refresh


def _cache_dir() -> Path:
    """Where the server keeps the demo model, so that the local check finds the same one."""
    settings = ServerOptions.collect({"model": Setting("demo", "the demo")})
    return ServerOptions.from_settings(settings).cache_path


def _environment() -> dict[str, str]:
    """For all children: threads that wait must sleep, since every process computes on the same cores."""
    return {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", **os.environ}


def _client_threads() -> dict[str, str]:
    """An equal share of the cores each: the clients' own work runs beside each other and beside the server's."""
    threads = max(1, len(os.sched_getaffinity(0)) // len(NAMES))
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


def _say(text: str) -> None:
    print(text, flush=True)


def _parse(argv: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m symbiosis demo",
        description="Two clients fine-tune different adapters on one shared model, at the same time.",
    )
    parser.add_argument("--out", type=Path, default=Options.out, help="folder for adapters and logs (%(default)s)")
    parser.add_argument("--steps", type=_count, default=Options.steps, help="training steps (%(default)s)")
    parser.add_argument(
        "--held-out-pairs", type=_count, default=Options.held_out_pairs, help="pairs to measure on (%(default)s)"
    )
    return Options(**vars(parser.parse_args(argv)))


def _count(word: str) -> int:
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {word!r}")
    return int(word)
