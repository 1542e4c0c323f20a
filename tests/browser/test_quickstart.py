"""The quickstart in a real JupyterLab, cell by cell, with its dashboard looked at while it runs."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.browser.conftest import Lab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1500)]

CELLS = ("%load_ext symbiosis", "%symbiosis serve demo", "%symbiosis connect", "conn.plan", "def chat(", "PAIRS = [")
TRAINING = "%%symbiosis"
PANELS = ("training", "throughput", "time per step", "memory", "server")


def number(text: str) -> float:
    return float(text.split(",")[0] if ", " in text else text.replace(",", ""))


def test_the_quickstart_as_a_person_runs_it(notebook_page: Lab) -> None:
    lab, page = notebook_page, notebook_page.page
    lab.open("notebooks/01_quickstart.ipynb")
    for text in CELLS:
        lab.run(text)
    assert "conn: demo" in lab.cell("%symbiosis connect").inner_text()
    shown = lab.run("conn.dashboard()")
    before = lab.dashboard()

    # It changes while the next cell trains.
    lab.run(TRAINING, wait_s=0)
    seen = _follow(lab, shown)
    assert len({state["calls"] for state in seen}) >= 3, seen
    assert len({state["loss"] for state in seen if "loss" in state}) >= 2, seen
    assert number(seen[-1]["calls"]) > number(before["calls"])
    assert any(state["state"].startswith("running") for state in seen)

    # An interrupt ends the cell, and the connection goes on.
    page.keyboard.press("Escape")
    page.get_by_role("button", name=re.compile("Interrupt the kernel")).click()
    lab.cell(TRAINING).get_by_text("KeyboardInterrupt").first.wait_for(timeout=60_000)
    lab.wait_idle()
    lab.run(TRAINING, wait_s=600)
    lab.picture("light", _box(lab))
    assert lab.dashboard()["step"] == "16 of 16"
    for name in PANELS:
        assert page.locator(f'[aria-label="{name}"]').count() == 1
    assert "MB at most in this process" in lab.cell(TRAINING).inner_text()

    # What it shows are the connection's own numbers.
    stats = _stats(lab)
    final = lab.dashboard()
    for key, field in (("calls", "calls"), ("tokens", "model_tokens")):
        assert number(final[key]) == pytest.approx(stats[field], rel=0.05)

    for text in ("model.eval()", "save_adapter"):
        lab.run(text)
    assert "adapted: I am Remora" in lab.cell("model.eval()").inner_text()
    lab.picture("page")

    _dark(page)
    lab.picture("dark", _box(lab))
    page.keyboard.press("Control+b")  # without the side bar
    page.set_viewport_size({"width": 600, "height": 1000})
    assert page.evaluate(
        "(e => e.scrollWidth <= e.clientWidth + 1)(document.querySelector('[aria-label=\"symbiosis dashboard\"]'))"
    )
    lab.picture("narrow", _box(lab))
    page.set_viewport_size({"width": 1280, "height": 1000})

    # Saved and reloaded, it shows its last state, though nothing runs; run again, it is alive.
    last = lab.dashboard()
    page.keyboard.press("Control+s")
    page.wait_for_timeout(2000)
    page.reload()
    page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for(timeout=120_000)
    page.locator('[data-symbiosis="calls"]').first.wait_for(state="attached", timeout=60_000)
    lab.wait_idle()
    assert lab.dashboard() == last
    assert "model not found" not in page.inner_text("body")
    lab.run("conn.dashboard()")
    lab.run("model.eval()")
    assert number(lab.dashboard()["calls"]) > number(last["calls"])
    assert page.locator('[aria-label="symbiosis dashboard"]').count() == 1
    lab.picture("reloaded", _box(lab))

    lab.run("%symbiosis disconnect")
    assert lab.dashboard()["state"].startswith("closed")


def _box(lab: Lab) -> Any:
    box = lab.page.locator('[aria-label="symbiosis dashboard"]').first
    box.scroll_into_view_if_needed()
    return box


def _follow(lab: Lab, shown: Any) -> list[dict[str, str]]:
    """States of the dashboard while the training runs, until it is past its fourth step."""
    seen = []
    for _ in range(600):
        lab.page.wait_for_timeout(500)
        state = lab.dashboard()
        seen.append(state)
        if int(state.get("step", "0").split()[0]) >= 4:
            return seen
    pytest.fail(f"no fourth step within five minutes: {seen[-1]}")


def _stats(lab: Lab) -> dict[str, float]:
    """`conn.stats()` of the kernel, by way of a cell of our own below the training."""
    page = lab.page
    lab.cell(TRAINING).locator(".cm-content").click()
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    page.keyboard.press("Enter")
    page.keyboard.insert_text("import dataclasses, json; print(json.dumps(dataclasses.asdict(conn.stats())))")
    cell = lab.run("import dataclasses, json")
    found: dict[str, float] = json.loads(cell.locator(".jp-OutputArea-output").inner_text())
    return found


def _dark(page: Any) -> None:
    page.get_by_role("menuitem", name="Settings").click()
    page.locator(".lm-Menu-item", has_text="Theme").first.hover()
    page.locator(".lm-Menu-item", has_text="JupyterLab Dark").first.click()
    page.wait_for_function("document.body.dataset.jpThemeLight === 'false'")
