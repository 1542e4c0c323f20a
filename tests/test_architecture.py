"""Rules about imports that import-linter cannot express; the others are its contracts in pyproject.toml."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "symbiosis").rglob("*.py"))
# import-linter sees an external package only as a whole, and pyarrow itself is welcome elsewhere.
FLIGHT_HOMES = {f"symbiosis.flight.{name}" for name in ("auth", "channel", "server", "service")}


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def listed_in_layers() -> set[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    rows = next(contract["layers"] for contract in settings["contracts"] if contract["id"] == "layers")
    return {name.strip(" ()") for row in rows for name in row.split("|")}


@pytest.mark.parametrize("path", SOURCES, ids=dotted)
def test_flight_is_imported_only_where_the_wire_ends(path: Path) -> None:
    uses_flight = any(name.startswith("pyarrow.flight") for name in imported(path))

    assert not uses_flight or dotted(path) in FLIGHT_HOMES


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name != "__init__.py"], ids=dotted)
def test_every_module_has_a_place_in_the_layer_table(path: Path) -> None:
    name = dotted(path)

    # import-linter says nothing about a module that no row names.
    assert any(name == row or name.startswith(f"{row}.") for row in listed_in_layers()), f"{name} is in no layer"
