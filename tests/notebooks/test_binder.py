"""What Binder builds is what the notebooks need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BINDER = ROOT / "binder"


def test_the_environment_is_made_of_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r"^-e \.\[(.*)\]$", (BINDER / "requirements.txt").read_text(), re.MULTILINE)

    assert set(wanted.split(",")) <= set(extras)
    assert "-c ../constraints.txt" in (BINDER / "requirements.txt").read_text()


@pytest.mark.parametrize("name", ["postBuild", "start"])
def test_its_scripts_can_be_run(name: str) -> None:
    assert os.access(BINDER / name, os.X_OK)
    subprocess.run(["bash", "-n", BINDER / name], check=True, timeout=30)


def test_start_runs_what_it_is_given() -> None:
    words = [BINDER / "start", sys.executable, "-c", "import os; print(os.environ['OMP_WAIT_POLICY'])"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout == "PASSIVE\n"
