"""The package as a whole: what it exports, what importing it costs, and the command line in front of it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import symbiosis
from symbiosis import __main__ as command
from symbiosis.errors import ServerBusyError

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "peft", "numpy", "pyarrow", "pydantic", "ipywidgets", "IPython")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = python(f"import sys, symbiosis; print([name for name in {HEAVY} if name in sys.modules])")

    assert loaded == "[]"


def test_the_public_names_are_exactly_these() -> None:
    assert symbiosis.__all__ == ["Connection", "SymbiosisError", "__version__", "connect", "errors", "serve"]
    assert dir(symbiosis) == sorted(symbiosis.__all__)


def test_each_public_name_resolves() -> None:
    from symbiosis.connection import Connection, connect
    from symbiosis.flight.server import serve

    assert symbiosis.Connection is Connection
    assert symbiosis.connect is connect
    assert symbiosis.serve is serve


def test_an_unknown_name_says_which_names_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'conect'; public names: .*connect"):
        symbiosis.conect  # noqa: B018


def test_the_installed_distribution_has_the_version_of_the_source() -> None:
    try:
        installed = importlib.metadata.version("symbiosis-flight")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from the source tree, not installed")
    assert installed == symbiosis.__version__


def test_the_changelog_has_a_section_for_this_version() -> None:
    assert f"\n## [{symbiosis.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [line for line in script if line.startswith("make ")]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert commands == ["make check"]
    assert [command for command in commands if f"`{command}`" not in readme] == []


def test_a_mistyped_verb_is_answered_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["dmeo"]) == 2
    assert "unknown verb 'dmeo'; did you mean 'demo'?" in capsys.readouterr().err


def test_a_verb_like_no_other_is_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["zzz"]) == 2
    assert "unknown verb 'zzz'; verbs: demo" in capsys.readouterr().err


def test_no_verb_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert "two clients fine-tune" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["--version"])
    assert capsys.readouterr().out == f"symbiosis {symbiosis.__version__}\n"


def test_help_and_wrong_verbs_load_nothing_heavy() -> None:
    code = f"""
import contextlib, io, sys
from symbiosis.__main__ import main
with contextlib.redirect_stderr(io.StringIO()):
    main([]), main(["dmeo"])
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert python(code) == "[]"


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch):
    """A verb `fails` that raises whatever it is told to."""

    def install(error: BaseException) -> None:
        def run(_words):
            raise error

        monkeypatch.setattr(command, "VERBS", {"fails": command.Verb("raises", run)})

    return install


def test_a_failed_verb_prints_code_and_message_without_a_traceback(fails, capsys) -> None:
    fails(ServerBusyError("the queue is full"))

    assert command.main(["fails"]) == 1
    assert capsys.readouterr().err == "python -m symbiosis: SERVER_BUSY: the queue is full\n"


def test_an_interrupted_verb_exits_as_the_shell_expects(fails, capsys) -> None:
    fails(KeyboardInterrupt())

    assert command.main(["fails"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_words_after_the_verb_go_to_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(command, "VERBS", {"demo": command.Verb("", lambda words: seen.append(words) or 0)})

    assert command.main(["demo", "--steps", "3"]) == 0
    assert seen == [["--steps", "3"]]
