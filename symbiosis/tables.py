"""Small tables for `__str__` and `_repr_html_`: escaped, valid XML, no I/O."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Rows of cells as an HTML table; without a head, the first cell of each row is its heading."""
    lines = []
    if head:
        lines.append("".join(_cell("th", cell) for cell in head))
    for row in rows:
        tags = ["td" if head else "th", *(["td"] * (len(row) - 1))]
        lines.append("".join(_cell(tag, cell) for tag, cell in zip(tags, row, strict=True)))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cell(tag: str, text: str) -> str:
    return f'<{tag} style="text-align:left">{html.escape(text)}</{tag}>'
