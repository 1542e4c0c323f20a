"""Small charts as SVG inside an `<img>`, with their meaning as its alternative text.

One rule: a chart carries lines and areas, never text. Words stand beside it as HTML, so they take the font and the
colour of the page, light or dark; and an image survives where a front end shows saved output without trusting it,
which takes `<svg>` out of HTML but not `<img>`. The colours are those of Okabe and Ito, told apart by the
colour-blind, on white and on black.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence

from symbiosis.timeline import PARTS

WIDTH, HEIGHT = 300, 72
COLOURS = dict(zip(PARTS, ("#56B4E9", "#CC79A7", "#E69F00", "#D55E00", "#009E73", "#999999"), strict=True))
FIRST, SECOND = "#0084C8", "#E69F00"
Points = Sequence[tuple[float, float]]  # (x, y), x ascending


def line_chart(series: Sequence[Points], alternative: str, floor: float | None = 0.0) -> str:
    """Lines over one pair of axes, the first in FIRST, the second in SECOND.

    Args:
        floor: lowest y of the picture; None means the lowest of the points.
    """
    points = [point for one in series for point in one]
    if len(points) < 2:
        return _image("", alternative)
    low = min(y for _, y in points) if floor is None else floor
    scale = _Scale([x for x, _ in points], low, max(y for _, y in points))
    body = "".join(
        f'<polyline points="{scale.path(one)}" fill="none" stroke="{colour}" stroke-width="2" '
        'stroke-linejoin="round" vector-effect="non-scaling-stroke"/>'
        for one, colour in zip(series, (FIRST, SECOND), strict=False)
    )
    return _image(body, alternative)


def area_chart(xs: Sequence[float], layers: Mapping[str, Sequence[float]], alternative: str) -> str:
    """Areas on top of each other: for each x, one height of each layer, whose names are keys of COLOURS."""
    if len(xs) < 2:
        return _image("", alternative)
    bottom = [0.0] * len(xs)
    scale = _Scale(xs, 0.0, max(map(sum, zip(*layers.values(), strict=True))))
    body = ""
    for name, heights in layers.items():
        top = [low + height for low, height in zip(bottom, heights, strict=True)]
        outline = [*zip(xs, top, strict=True), *reversed(list(zip(xs, bottom, strict=True)))]
        body += f'<polygon points="{scale.path(outline)}" fill="{COLOURS[name]}"/>'
        bottom = top
    return _image(body, alternative)


def share_bar(values: Mapping[str, float], label: str = "") -> str:
    """One horizontal bar, divided as the values are, and its legend."""
    total = sum(values.values())
    shares = {name: value / total if total else 0.0 for name, value in values.items()}
    words = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    left, body = 0.0, ""
    for name, share in shares.items():
        body += f'<rect x="{left:.1f}" y="0" width="{share * WIDTH:.1f}" height="{HEIGHT}" fill="{COLOURS[name]}"/>'
        left += share * WIDTH
    return _image(body, f"{label} time: {words}".strip(), height_px=14) + legend(shares)


def legend(shares: Mapping[str, float]) -> str:
    """Names in the colours of their areas, with their share in percent; in words, since colour alone is not enough."""
    items = (
        f'<span style="white-space:nowrap"><span style="color:{COLOURS[name]}" aria-hidden="true">&#9632;</span> '
        f"{html.escape(name)} {share:.0%}</span>"
        for name, share in shares.items()
        if share or name != "retry"  # which is rare
    )
    return f'<div style="font-size:85%">{" &#160; ".join(items)}</div>'


class _Scale:
    """Maps values to the picture: x from left to right, y upwards."""

    def __init__(self, xs: Sequence[float], low: float, high: float) -> None:
        self._left, self._low = min(xs), low
        self._x = WIDTH / ((max(xs) - self._left) or 1.0)
        self._y = (HEIGHT - 4) / ((high - low) or 1.0)

    def path(self, points: Points) -> str:
        return " ".join(
            f"{(x - self._left) * self._x:.1f},{HEIGHT - 2 - (y - self._low) * self._y:.1f}" for x, y in points
        )


def _image(body: str, alternative: str, height_px: int = HEIGHT) -> str:
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'preserveAspectRatio="none">{body}<path d="M0 {HEIGHT}H{WIDTH}" stroke="#808080"/></svg>'
    )
    data = base64.b64encode(svg.encode()).decode()
    style = f"width:100%;height:{height_px}px;display:block;margin:0"
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(alternative)}" style="{style}"/>'
