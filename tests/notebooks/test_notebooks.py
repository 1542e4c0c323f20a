"""Every notebook and tutorial runs from a clean kernel, is committed without outputs, and is the pair of its .py.

make notebooks          # all of them, whole
make notebooks-short    # NOTEBOOKS_SHORT=1: fewer steps, in all but the quickstart
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jupytext
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted([*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("tutorials/*.ipynb")])
CELL_TIMEOUT_S = 900


def name(path: Path) -> str:
    return path.stem


def cells(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


def test_they_are_all_there() -> None:
    names = {path.stem for path in NOTEBOOKS}
    assert {"01", "02", "03", "04", "05", "06", "07"} <= {name[:2] for name in names}
    assert {"remote_linear", "from_peft", "time_breakdown", "noise", "long_context"} <= names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_outputs_are_not_committed(path: Path) -> None:
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]

    assert code
    assert [cell["source"] for cell in code if cell["outputs"] or cell["execution_count"]] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_the_pair_is_the_same(path: Path) -> None:
    script = jupytext.read(path.with_suffix(".py"))

    ours = [("".join(cell["source"]), cell["cell_type"]) for cell in cells(path)]
    assert ours == [(cell.source, cell.cell_type) for cell in script.cells], "run: make pairs"


@pytest.mark.slow
@pytest.mark.timeout(2 * CELL_TIMEOUT_S)
@pytest.mark.filterwarnings("default")  # of the machinery that runs notebooks
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()

    if "conn.dashboard()" in path.with_suffix(".py").read_text(encoding="utf-8"):
        _check_saved_dashboard(notebook)


def _check_saved_dashboard(notebook: Any) -> None:
    """What is saved is the last state, as a picture that needs neither a kernel nor a network."""
    import nbconvert

    html, _ = nbconvert.HTMLExporter(template_name="basic").from_notebook_node(notebook)

    assert 'data-symbiosis="calls"' in html
    assert "closed, as of" in html
    assert "data:image/svg+xml;base64," in html
    shown = next(
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "symbiosis dashboard" in output.get("data", {}).get("text/html", "")
    )
    assert set(shown["data"]) == {"text/plain", "text/html"}
    assert "throughput" in shown["data"]["text/plain"]
    assert "http://" not in shown["data"]["text/html"].replace("http://www.w3.org/2000/svg", "")
