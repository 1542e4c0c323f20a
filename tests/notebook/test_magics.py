"""The magics as a user types them: what they print, what they bind, and how they fail."""

from __future__ import annotations

import subprocess
import sys
import types
from xml.etree import ElementTree

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError

import symbiosis.connection
from symbiosis.errors import AuthError, ConfigError, ConnectError
from symbiosis.notebook.verbs import VERBS
from tests.notebook.conftest import Notebook

USE_MODEL = """
import torch
model = conn.load_model()
with torch.no_grad():
    model(input_ids=torch.ones(2, 9, dtype=torch.long))
"""


def connected(notebook: Notebook, url: str) -> Notebook:
    notebook.ok(f"%symbiosis connect {url}")
    return notebook


def test_loading_prints_nothing_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "before = set(sys.modules)\n"
        "shell.run_line_magic('load_ext', 'symbiosis')\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'ipywidgets', 'numpy'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)

    assert done.stdout == "[]\n"
    assert done.stderr == ""


def test_reloading_keeps_the_session_and_registers_once(notebook: Notebook, url: str) -> None:
    connected(notebook, url)
    session = notebook.shell.magics_manager.registry["SymbiosisMagics"].session
    matchers = len(notebook.shell.Completer.custom_matchers)

    notebook.ok("%reload_ext symbiosis")

    assert notebook.shell.magics_manager.registry["SymbiosisMagics"].session is session
    assert len(notebook.shell.Completer.custom_matchers) == matchers


def test_unloading_takes_the_names_back_and_leaves_the_connection(notebook: Notebook, url: str) -> None:
    connected(notebook, url)

    notebook.ok("%unload_ext symbiosis")

    assert "symbiosis" not in notebook.shell.magics_manager.magics["line"]
    assert not notebook.shell.user_ns["conn"].closed


def test_connect_binds_a_variable_and_names_the_next_step(
    notebook: Notebook, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook.ok(f"%symbiosis connect {url} --name base")

    assert notebook.shell.user_ns["base"].url == url
    assert "Next: model = base.load_model()" in capsys.readouterr().out


def test_connecting_again_keeps_the_connection_that_models_use(notebook: Notebook, url: str) -> None:
    connected(notebook, url)
    first = notebook.shell.user_ns["conn"]
    connected(notebook, url)
    assert notebook.shell.user_ns["conn"] is first

    notebook.ok("%symbiosis disconnect")
    connected(notebook, url)
    assert notebook.shell.user_ns["conn"] is not first


def test_connect_does_not_overwrite_what_is_not_a_connection(notebook: Notebook, url: str) -> None:
    notebook.ok("conn = [1, 2, 3]")

    with pytest.raises(ConfigError, match="conn is a variable of yours already, of type list"):
        notebook.ok(f"%symbiosis connect {url}")
    assert notebook.shell.user_ns["conn"] == [1, 2, 3]


def test_connect_reads_the_url_from_the_environment(
    notebook: Notebook, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYMBIOSIS_CLIENT_URL", url)
    notebook.ok("%symbiosis connect")

    assert notebook.shell.user_ns["conn"].url == url


def test_connect_without_any_url_asks_for_one(notebook: Notebook) -> None:
    with pytest.raises(ConfigError, match="no URL given"):
        notebook.ok("%symbiosis connect")


def test_a_token_comes_from_the_environment_and_is_not_shown(
    notebook: Notebook, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AuthError, match="BASE_TOKEN is not set"):
        notebook.ok(f"%symbiosis connect {url} --token-env BASE_TOKEN")

    monkeypatch.setenv("BASE_TOKEN", "s3cr3t")
    notebook.run(f"%symbiosis connect {url} --token-env BASE_TOKEN")  # refused in some versions, taken in others
    notebook.run("%symbiosis traceback")
    captured = capsys.readouterr()
    assert "s3cr3t" not in captured.out + captured.err + notebook.texts()


class Secrets:
    """What Colab's userdata does."""

    def __init__(self, **secrets: str) -> None:
        self._secrets = secrets

    def get(self, name: str) -> str:
        if name not in self._secrets:
            raise LookupError(name)
        return self._secrets[name]


def test_in_colab_a_token_may_be_a_secret(
    notebook: Notebook, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    colab = types.SimpleNamespace(userdata=Secrets(BASE_TOKEN="s3cr3t"))
    monkeypatch.setitem(sys.modules, "google.colab", colab)

    with pytest.raises(AuthError, match=r"Colab does not give the secret OTHER \(LookupError\)"):
        notebook.ok(f"%symbiosis connect {url} --token-env OTHER")
    given: list[object] = []
    monkeypatch.setattr(
        "symbiosis.connect", lambda url, token: given.append(token) or symbiosis.connection.connect(url)
    )
    notebook.ok(f"%symbiosis connect {url} --token-env BASE_TOKEN")
    assert given == ["s3cr3t"]


def test_a_failure_is_a_paragraph_and_its_traceback_is_there_on_demand(
    notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    result = notebook.run("%symbiosis connect grpc://127.0.0.1:9")

    shown = capsys.readouterr().out
    assert isinstance(result.error_in_exec, ConnectError)  # so "Run all" stops here
    assert shown.startswith("CONNECT: no connection to grpc://127.0.0.1:9")
    assert "Traceback" not in shown
    assert len(shown.splitlines()) == 2

    notebook.ok("%symbiosis traceback")
    assert "Traceback (most recent call last)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("conect", "no such verb; did you mean connect"),
        ("connect --name", "usage: %symbiosis connect"),
        ("connect a b", "unrecognized arguments: b; usage: %symbiosis connect"),
        ("serve", "MODEL"),
        ("connect 'a", "No closing quotation"),
    ],
)
def test_a_wrong_line_is_answered_with_the_right_form(notebook: Notebook, line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        notebook.ok(f"%symbiosis {line}")


@pytest.mark.parametrize("verb", ["plan", "stats", "dashboard", "disconnect"])
def test_without_a_connection_the_next_step_is_named(notebook: Notebook, verb: str) -> None:
    with pytest.raises(ConfigError, match="not connected; run: %symbiosis connect URL"):
        notebook.ok(f"%symbiosis {verb}")


def test_which_connection_is_meant(notebook: Notebook, url: str) -> None:
    notebook.ok(f"%symbiosis connect {url} --name one")
    notebook.ok("%symbiosis stats")  # the only one
    notebook.ok(f"%symbiosis connect {url} --name two")

    with pytest.raises(ConfigError, match="connections are: one, two; say which"):
        notebook.ok("%symbiosis stats")
    notebook.ok("%symbiosis stats --name two")
    with pytest.raises(ConfigError, match="no connection is called 'three'; connections are: one, two"):
        notebook.ok("%symbiosis stats --name three")


def test_status_says_whether_the_server_answers(notebook: Notebook, url: str) -> None:
    connected(notebook, url).ok(f"import symbiosis; other = symbiosis.connect('{url}'); other.close()")

    notebook.ok("%symbiosis status")

    text = notebook.outputs[-1]["data"]["text/plain"]
    assert f"conn   tiny-llama  {url}  serving" in text
    assert "closed" in text
    ElementTree.fromstring(notebook.outputs[-1]["data"]["text/html"])


def test_plan_and_stats_are_shown_as_text_and_html(notebook: Notebook, url: str) -> None:
    with pytest.raises(ConfigError, match="no model is wrapped yet"):
        connected(notebook, url).ok("%symbiosis plan")
    notebook.ok(USE_MODEL)
    notebook.ok("%symbiosis plan")
    notebook.ok("%symbiosis stats")

    plan, stats = (output["data"] for output in notebook.outputs[-2:])
    assert "model.layers.*.self_attn.q_proj" in plan["text/plain"]
    assert "18 through the model" in stats["text/plain"]  # 2 x 9, though every layer's calls carried them
    for data in (plan, stats):
        ElementTree.fromstring(data["text/html"])


def test_a_cell_is_reported(notebook: Notebook, url: str) -> None:
    connected(notebook, url).ok(f"%%symbiosis\n{USE_MODEL}")

    data = notebook.outputs[-1]["data"]
    assert "18, " in data["text/plain"]
    assert "MB at most in this process" in data["text/plain"]
    ElementTree.fromstring(data["text/html"])
    assert notebook.shell.user_ns["model"] is not None


def test_a_cell_that_connects_is_reported_too(notebook: Notebook, url: str) -> None:
    notebook.ok(
        f"%%symbiosis\nimport symbiosis\nmine = symbiosis.connect('{url}')\n{USE_MODEL.replace('conn', 'mine')}"
    )

    assert "18, " in notebook.outputs[-1]["data"]["text/plain"]


def test_a_cell_without_calls_says_so(notebook: Notebook, url: str) -> None:
    connected(notebook, url).ok("%%symbiosis\n1 + 1")

    assert "none: this cell asked the server nothing" in notebook.texts()


def test_a_cell_that_fails_fails(notebook: Notebook, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = connected(notebook, url).run("%%symbiosis\n1 / 0")

    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert capsys.readouterr().out.count("Traceback") == 1
    assert "cell" in notebook.texts()


def test_help_names_every_verb(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    notebook.ok("%symbiosis help")

    shown = capsys.readouterr().out
    assert [verb for verb in VERBS if f"\n  {verb}" not in shown] == []
    assert shown.strip() in notebook.shell.find_line_magic("symbiosis").__doc__  # %symbiosis?


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%symbiosis ", list(VERBS)),
        ("%symbiosis disc", ["disconnect"]),
        ("%symbiosis serve ", ["demo", "--"]),
        ("%symbiosis connect --name c ", ["grpc://", "grpc+tls://", "--token-env"]),
        ("%symbiosis stats --name ", ["conn"]),
        ("%%symbiosis ", ["--name"]),
    ],
)
def test_tab_offers_what_may_follow(notebook: Notebook, url: str, line: str, expected: list[str]) -> None:
    connected(notebook, url)
    with provisionalcompleter():
        offered = [completion.text for completion in notebook.shell.Completer.completions(line, len(line))]

    assert sorted(offered) == sorted(expected)
