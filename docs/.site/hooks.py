"""What mkdocs shows besides docs/: the files of the repository's root, and the notebooks.

One rule: no page is written twice. README.md is the site's home as it stands, notebooks are made from their .py; links
between them are turned into links of the site, and what is not on the site becomes plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jupytext
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "benchmarks/README.md": "benchmarks.md",
    "deploy/README.md": "deploy.md",
}
NOTEBOOKS = sorted([*ROOT.glob("notebooks/*.py"), *ROOT.glob("tutorials/*.py")])
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/; mkdocs calls it."""
    for source, target in PAGES.items():
        if (ROOT / source).exists():
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, target, content=_linked(text, (ROOT / source).parent)))
    for path in NOTEBOOKS:
        target = f"{path.parent.name}/{path.stem}.md"
        files.append(File.generated(config, target, content=jupytext.writes(_cells(path), fmt="md")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn the links of a page of docs/; mkdocs calls it."""
    inside = page.file.generated_by is None
    return _linked(markdown, Path(page.file.abs_src_path).parent) if inside else markdown


def _cells(path: Path) -> Any:
    notebook = jupytext.read(path)
    notebook.metadata = {}
    return notebook


def _linked(text: str, folder: Path) -> str:
    def turn(match: re.Match[str]) -> str:
        picture, words, target, anchor = match.group(1), match.group(2), match.group(3), match.group(4) or ""
        if "://" in target or target.startswith("mailto:"):
            return match.group(0)
        name = os.path.relpath((folder / target).resolve(), ROOT)
        page = _page(name)
        return f"{picture}[{words}]({page}{anchor})" if page else words

    return LINK.sub(turn, text)


def _page(name: str) -> str | None:
    """Where a file of the repository is on the site, seen from its top folder; None if it is not there."""
    if name in PAGES:
        return PAGES[name]
    if name.startswith("docs/") and (ROOT / name).is_file():
        return name.removeprefix("docs/")
    notebook = Path(name).with_suffix(".py")
    return f"{notebook.parent}/{notebook.stem}.md" if ROOT / notebook in NOTEBOOKS else None
