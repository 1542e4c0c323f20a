"""A JupyterLab server and a Chromium that a test drives as a person would.

    make browser        # installs what it needs, but for a browser: Debian's chromium, Chrome, or playwright's own

Screenshots go to the folder that BROWSER_OUT names, or to a temporary one.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
START_TIMEOUT_S = 120.0


@pytest.fixture(scope="session")
def chromium() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(f"no browser: install one of {', '.join(BROWSERS)}; on Debian: apt-get install chromium")
    return found


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("BROWSER_OUT")
    folder = Path(named) if named else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a JupyterLab, token included, whose folder holds a copy of the notebooks."""
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", home / "notebooks", ignore=shutil.ignore_patterns("adapters", "*.py", "*.toml"))
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = home / "config/lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"fetchNews": "false", "checkForUpdates": false}')  # they would cover what we look at
    token = secrets.token_hex(8)
    options = {"ServerApp.root_dir": str(home), "IdentityProvider.token": token, "ServerApp.port": port}
    words = [f"--{name}={value}" for name, value in options.items()]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
    }
    log = (home / "lab.log").open("wb")
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.port_retries=0", *words]
    process = subprocess.Popen(command, cwd=home, env=environ, stdout=log, stderr=log)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api/status?token={token}", process, home / "lab.log")
        yield f"http://127.0.0.1:{port}/lab?token={token}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, f"JupyterLab ended: {log.read_text()[-2000:]}"
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not answer within {START_TIMEOUT_S:.0f} s: {log.read_text()[-2000:]}")


class Lab:
    """One open notebook in one page."""

    def __init__(self, page: Any, url: str, pictures: Path) -> None:
        self.page, self._url, self._pictures = page, url, pictures

    def open(self, notebook: str) -> None:
        base, _, query = self._url.partition("?")
        self.page.goto(f"{base}/tree/{notebook}?{query}", timeout=120_000)
        self.page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for(timeout=120_000)
        self.wait_idle()

    def wait_idle(self, timeout_s: float = 120.0) -> None:
        """Until the kernel has nothing to do: the status bar says so."""
        self.page.locator("#jp-main-statusbar", has_text="| Idle").wait_for(timeout=timeout_s * 1e3)

    def cell(self, text: str) -> Any:
        """The code cell that holds this text."""
        return self.page.locator(".jp-CodeCell", has=self.page.locator(".cm-content", has_text=text)).first

    def run(self, text: str, *, wait_s: float = 120.0) -> Any:
        """Run one cell with Shift+Enter; with `wait_s` 0, do not wait for its end."""
        cell = self.cell(text)
        cell.scroll_into_view_if_needed()
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")
        if wait_s:
            cell.locator(".jp-InputPrompt", has_text=re.compile(r"\[\d+\]")).wait_for(timeout=wait_s * 1e3)
            self.wait_idle(wait_s)
        return cell

    def dashboard(self) -> dict[str, str]:
        """What the dashboard in the page says, by key."""
        found: dict[str, str] = self.page.evaluate(
            "Object.fromEntries([...document.querySelectorAll('[data-symbiosis]')]"
            ".map(e => [e.dataset.symbiosis, e.textContent]))"
        )
        return found

    def picture(self, name: str, of: Any = None) -> Path:
        path = self._pictures / f"{name}.png"
        (of or self.page).screenshot(path=str(path))
        return path


@pytest.fixture
def browser_page(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            yield browser.new_page(viewport={"width": 1280, "height": 1000})
        finally:
            browser.close()


@pytest.fixture
def notebook_page(browser_page: Any, lab: str, pictures: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    made = Lab(browser_page, lab, pictures)
    failed = request.session.testsfailed
    yield made
    if request.session.testsfailed > failed:
        made.picture(f"failed-{request.node.name}")
