"""The command line of the server: flags, precedence, messages and exit codes. No server is started."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from symbiosis._version import __version__
from symbiosis.config import ServerOptions
from symbiosis.errors import ConfigError, ConnectError
from symbiosis.flight.cli import build_parser, load_server_options, main

ROOT = Path(__file__).parents[2]
SECRET = "s3cret-word"


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch):
    """No SYMBIOSIS_* of the developer's own, and no trace of main() in this process afterwards."""
    for name in [name for name in os.environ if name.startswith("SYMBIOSIS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_WAIT_POLICY", "for monkeypatch to restore")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    logger = logging.getLogger("symbiosis")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    """Put a `run` in place of the real server, which would import torch; returns what it was called with."""

    def install(run: Any = lambda options: 0) -> list[ServerOptions]:
        seen: list[ServerOptions] = []
        module = ModuleType("symbiosis.flight.server")
        module.run = lambda options, again: seen.append(options) or run(options)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return seen

    return install


def raises(error: BaseException) -> Any:
    def run(_options: ServerOptions) -> int:
        raise error

    return run


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """The error lines of a command line that is refused."""
    assert main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("error [CONFIG]: ") for line in lines)
    return [line.removeprefix("error [CONFIG]: ") for line in lines]


# --------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize("argv", [["demo", "--port", "0"], ["--port=0", "demo"], ["--model", "demo", "--port=0"]])
def test_the_model_may_be_given_with_or_without_its_flag(argv: list[str]) -> None:
    assert load_server_options(argv) == ServerOptions(model="demo", port=0)


def test_every_option_has_a_flag() -> None:
    values = {
        "model": "a/b", "revision": "main", "dtype": "bfloat16", "device": "cuda:1", "host": "::1", "quantize": "int8",
        "port": "1", "port_file": "p", "threads": "2", "max_message_bytes": "32MiB",
        "max_batch_tokens": "3", "max_queue_bytes": "64MiB", "max_wait_us": "4", "drain_timeout_s": "0.5",
        "max_queue_tokens": "5", "max_streams_per_client": "6", "idle_timeout_s": "7", "write_timeout_s": "8",
        "watchdog_s": "9", "metrics_port": "10", "metrics_host": "::1", "log_format": "json",
        "soft_cache_bytes": "5MiB",
        "name": "n", "cache_dir": "c", "log_level": "error",
        "tls": "auto", "tls_client_ca": "a", "tls_names": "b.example,c.example",
        "payload": "offer", "expect_fingerprint": "0123456789ab",
        "tokens": "t", "audit_log": "l", "audit_log_bytes": "1MiB", "audit_log_files": "3", "extraction_budget": "9.5",
    }  # fmt: skip
    argv = [word for name, value in values.items() for word in ("--" + name.replace("_", "-"), value)]

    options = load_server_options([*argv, "--local-files-only", "--prepack", "--no-same-host"])

    assert set(values) | {"prepack", "same_host", "local_files_only", "tls_cert", "tls_key", "insecure"} == set(
        ServerOptions.model_fields
    )
    assert options == ServerOptions(**values, local_files_only=True, prepack=True, same_host=False)  # type: ignore[arg-type]


def test_each_source_wins_over_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "server.toml"
    path.write_text('model = "file"\nhost = "file"\nport = 1\nlocal_files_only = true', encoding="utf-8")
    monkeypatch.setenv("SYMBIOSIS_HOST", "environment")
    monkeypatch.setenv("SYMBIOSIS_MODEL", "environment")

    options = load_server_options(["flag", "--config", str(path), "--no-local-files-only"])

    assert (options.model, options.host, options.port) == ("flag", "environment", 1)
    assert options.local_files_only is False
    assert options.max_batch_tokens == 8192


def test_help_lists_every_option_with_default_and_variable() -> None:
    text = " ".join(build_parser().format_help().split())

    for name, field in ServerOptions.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert " ".join(str(field.description).split()) in text
        assert re.search(rf"\[(required|default: [^\[]+); env: {ServerOptions.env_name(name)}\]", text)
    assert "[default: 8815; env: SYMBIOSIS_PORT]" in text
    assert "--max-message-bytes BYTES" in text
    assert "[default: 64.0MiB; env: SYMBIOSIS_MAX_MESSAGE_BYTES]" in text


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"symbiosis-flight-server {__version__}\n"


def test_the_options_in_force_are_printed_and_no_server_starts(server: Any, capsys: Any) -> None:
    seen = server()

    assert main(["demo", "--port", "0", "--print-config"]) == 0

    printed = tomllib.loads(capsys.readouterr().out)
    assert (printed["model"], printed["port"], printed["host"]) == ("demo", 0, "127.0.0.1")
    assert seen == []


# ------------------------------------------------------------------------------------------ refusals


def test_an_unknown_flag_is_refused_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "demo", "--prot", "1", "--max_wait_us=3") == [
        "--prot on the command line: unknown flag; did you mean --port?",
        "--max_wait_us on the command line: unknown flag; did you mean --max-wait-us?",
    ]


def test_a_flag_is_not_guessed_from_its_first_letters(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag" in refusal(capsys, "demo", "--revis", "main")[0]


@pytest.mark.parametrize("argv", [["--tokn", SECRET], [f"--tokn={SECRET}"], ["demo", "--tokn", SECRET]])
def test_the_value_of_an_unknown_flag_is_not_repeated(capsys: Any, argv: list[str]) -> None:
    assert refusal(capsys, *argv) == ["--tokn on the command line: unknown flag; did you mean --tokens?"]


@pytest.mark.parametrize("argv", [["--token", SECRET], [f"--token={SECRET}"]])
def test_a_server_takes_no_token_and_does_not_repeat_it(capsys: Any, argv: list[str]) -> None:
    (line,) = refusal(capsys, "demo", *argv)

    assert line == "--token on the command line: unknown flag; did you mean --tokens?"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "model is required: give it as an argument, as SYMBIOSIS_MODEL in the environment or as model"),
        (["a", "b"], "command line: 'b' is one argument too many"),
        (["a", "--model", "b"], "model on the command line: given both as MODEL and as --model"),
        (["demo", "--port"], "command line: argument --port: expected one argument; see symbiosis-flight"),
        (["demo", "--port", "x"], "--port on the command line: got 'x', expected a valid integer"),
        (["demo", "--port", "-1"], "--port on the command line: got '-1', expected greater than"),
        (["demo", "--config", "absent.toml"], "config file absent.toml: cannot be read"),
    ],
)
def test_a_refusal_says_what_and_where(capsys: Any, argv: list[str], message: str) -> None:
    (line,) = refusal(capsys, *argv)

    assert line.startswith(message)


def test_every_problem_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(refusal(capsys, "--port", "x", "--dtype", "int8")) == 3  # and the model is missing


# --------------------------------------------------------------------------------------------- serve


def test_the_server_gets_the_options_and_gives_the_exit_code(server: Any) -> None:
    seen = server(lambda options: 7)

    assert main(["demo", "--port", "0"]) == 7
    assert seen == [ServerOptions(model="demo", port=0)]


def test_waiting_threads_are_told_to_sleep_before_the_server_is_imported(server: Any) -> None:
    policy = []
    server(lambda options: policy.append(os.environ["OMP_WAIT_POLICY"]) or 0)

    main(["demo"])

    assert policy == ["PASSIVE"]


def test_a_wait_policy_of_the_users_own_is_kept(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    server()

    main(["demo"])

    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_a_failure_is_one_line_without_a_traceback(server: Any, capsys: Any) -> None:
    server(raises(ConnectError("port 8815 is taken")))

    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "error [CONNECT]: port 8815 is taken\n"


def test_an_option_that_only_the_server_can_judge_exits_as_the_others(server: Any, capsys: Any) -> None:
    server(raises(ConfigError("device cuda:3: this machine has 1")))

    assert main(["demo"]) == 2


def test_debug_shows_the_traceback(server: Any, capsys: Any) -> None:
    server(raises(ConnectError("port 8815 is taken")))

    assert main(["demo", "--log-level", "debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_while_loading_exits_as_the_shell_expects(server: Any, capsys: Any) -> None:
    server(raises(KeyboardInterrupt()))

    assert main(["demo"]) == 130
    assert capsys.readouterr().err == ""


def test_a_missing_package_is_answered_with_the_command_that_brings_it(monkeypatch: Any, capsys: Any) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "symbiosis.flight.server":
                raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")

    monkeypatch.delitem(sys.modules, "symbiosis.flight.server", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])

    assert main(["demo"]) == 1
    assert capsys.readouterr().err.startswith("error [MISSING_EXTRA]: the server needs the package pyarrow")


def test_only_our_own_loggers_follow_the_log_level(server: Any) -> None:
    server()

    main(["demo", "--log-level", "debug"])

    assert logging.getLogger("symbiosis.flight").getEffectiveLevel() == logging.DEBUG
    assert logging.getLogger("urllib3").getEffectiveLevel() == logging.WARNING


# --------------------------------------------------------------------------------------- as a process


@pytest.mark.parametrize("flag", ["--help", "--version", "--print-config"])
def test_answers_that_need_no_model_do_not_import_torch(flag: str) -> None:
    code = f"""
import contextlib, sys
from symbiosis.flight.cli import main
with contextlib.suppress(SystemExit):
    main(["demo", "{flag}"])
heavy = ("torch", "transformers", "pyarrow", "numpy")
print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""
    done = process("-c", code)

    assert done.stderr.strip() == "[]"


def test_the_module_runs_as_a_program() -> None:
    done = process("-m", "symbiosis.flight.cli", "demo", "--prot", "1")

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error [CONFIG]: --prot on the command line: unknown flag; did you mean --port?"
    ]


def process(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, timeout=60)
