"""Tables and plots from the JSON of one or more runs.

One rule: nothing is computed here that is not in the JSON, and nothing in the tables comes from elsewhere.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
QUIET_CORES = 0.15  # other programs' share of a core above which a row is marked as a trial figure

Found = dict[str, Any]


def line(row: Found) -> str:
    """One row as one line for a terminal."""
    parts = [f"{row['name']:<9}{row['what']}"]
    if row["note"]:
        parts.append(row["note"])
    if row["wrapped"]:
        local = f"local {_spread(row['local'], row['unit'])}, " if row["local"] else ""
        parts.append(f"{local}wrapped {_spread(row['wrapped'], row['unit'])}")
    if row["ratio"]:
        parts.append(f"ratio {_ratio(row)}")
    if row["equal"]:
        parts.append(f"equal {row['equal']}")
    parts += _extras(row)
    return "\n          ".join(parts)


def markdown(documents: list[Found]) -> str:
    """All runs as markdown, between the marks that `replaced` looks for."""
    return "\n".join([BEGIN, "", *(part for document in documents for part in _section(document)), END])


def replaced(page: str, section: str) -> str:
    """A page with its marked section replaced.

    Raises:
        ValueError: the page has no marks.
    """
    if BEGIN not in page or END not in page:
        raise ValueError(f"the page has no section between {BEGIN} and {END}")
    return page.partition(BEGIN)[0] + section + page.partition(END)[2]


def plot(documents: list[Found], folder: Path) -> None:
    """Ratio against number of clients, one picture per run; needs matplotlib.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plots needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    for document in documents:
        series = _series(document)
        if series:
            _draw(series, document["about"], folder)


def _section(document: Found) -> list[str]:
    about, rows = document["about"], document["rows"]
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    lines = [
        f"### {about['base']}, {about['dtype']}, granularity `{about['granularity']}`",
        "",
        f"{about['date']}, commit {about['commit']}, {about['cores']} cores of {about['processor']}, "
        f"{about['memory_bytes'] / 2**30:.0f} GiB, {packages}. {about['rounds']} rounds.",
        "",
        "| row | local | wrapped | wrapped / local | target | results equal |",
        "|---|---|---|---|---|---|",
        *(_table_row(row) for row in rows),
        "",
        "Details:",
        "",
        *(f"- {row['what']}: {'; '.join(_extras(row))}" for row in rows if _extras(row)),
        "",
    ]
    return lines + _plans(rows)


def _table_row(row: Found) -> str:
    trial = " (trial)" if row["other_load_cores"] > QUIET_CORES else ""
    cells = [
        row["what"] + trial,
        _spread(row["local"], row["unit"]) if row["local"] else "",
        row["note"] or (_spread(row["wrapped"], row["unit"]) if row["wrapped"] else ""),
        _ratio(row) if row["ratio"] else "",
        row["target"],
        row["equal"],
    ]
    return "| " + " | ".join(cells) + " |"


def _plans(rows: list[Found]) -> list[str]:
    lines: list[str] = []
    for plan in dict.fromkeys(row["plan"] for row in rows if row["plan"]):
        names = ", ".join(dict.fromkeys(row["name"] for row in rows if row["plan"] == plan))
        lines += [f"Plan ({names}):", "", "```", plan, "```", ""]
    return lines


def _spread(spread: Found, unit: str) -> str:
    median = _figure(spread["median"], unit)
    if spread["n"] < 2:
        return median
    return f"{median} ({_figure(spread['min'], unit)} .. {_figure(spread['max'], unit)})"


def _figure(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "none"
    if unit == "s":
        return f"{value * 1e3:,.0f} ms" if value < 1 else f"{value:,.2f} s"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def _ratio(row: Found) -> str:
    ratio = row["ratio"]
    better = "higher" if row["higher_is_better"] else "lower"
    ends = f" ({ratio['min']:.2f} .. {ratio['max']:.2f})" if ratio["n"] > 1 else ""
    return f"**{ratio['median']:.2f}**{ends}, {better} is better"


def _extras(row: Found) -> list[str]:
    """The further figures of a row, in words."""
    extra, settings = row["extra"], row["settings"]
    found: list[str] = []
    if settings:
        found.append(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in settings.items()))
    if "split" in extra:
        split = (f"{part.removesuffix('_s')} {value * 1e3:.1f} ms" for part, value in extra["split"].items())
        found.append("per unit: " + ", ".join(split))
    if row["name"] == "traffic":
        found += [_traffic(side, extra[side]) for side in extra]
    if "gb_per_s" in extra:
        parts = ("serialise_us", "network_us", "queue_us", "compute_us")
        found.append(", ".join(f"{part.removesuffix('_us')} {extra[part]:,.0f} us" for part in parts))
        found.append(f"{extra['gb_per_s']:.2f} GB/s, {extra['transport']}")
    if "memory_ratio" in extra:
        found += _many(extra)
    if "active" in extra:
        found.append(f"{extra['active']} active; steps " + ", ".join(f"{k} {v}" for k, v in extra["steps"].items()))
    if "wrapped_kept_share" in extra:
        kept = (f"{side} {100 * extra[f'{side}_kept_share']:.0f}%" for side in ("local", "wrapped"))
        found.append("keeps " + ", ".join(kept) + " of its speed alone")
    return found


def _traffic(side: str, found: Found) -> str:
    return (
        f"{side}: {found['forward_calls']:.2f} forward and {found['backward_calls']:.2f} backward calls per layer, "
        f"{found['bytes_out']:,.0f} bytes out and {found['bytes_in']:,.0f} in per token and layer"
    )


def _many(extra: Found) -> list[str]:
    sides = ("local", "wrapped")
    memory = ", ".join(f"{side} {extra[f'{side}_memory_bytes'] / 2**20:,.0f} MiB" for side in sides)
    times = ", ".join(f"{side} {extra[f'{side}_p50_s']:.3f} / {extra[f'{side}_p95_s']:.3f} s" for side in sides)
    ratio = extra["memory_ratio"]
    return [
        f"memory above imports {memory}" + (f" ({ratio:.2f})" if ratio else ""),
        f"p50 / p95 {times}",
        f"executor busy {100 * extra['executor_share']:.0f}%, {extra['mean_batch']:.2f} requests per batch",
    ]


def _series(document: Found) -> dict[str, list[tuple[int, float]]]:
    """Workload -> (clients, ratio)."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in document["rows"]:
        if row["name"] == "clients" and row["ratio"]:
            workload, _, count = row["what"].partition(": ")
            series.setdefault(workload, []).append((int(count.split()[0]), row["ratio"]["median"]))
    return series


def _draw(series: dict[str, list[tuple[int, float]]], about: Found, folder: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for workload, points in series.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=workload)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="clients", ylabel="aggregate tokens/s, wrapped / local", title=f"{about['base']}, {about['dtype']}")
    axes.set_xscale("log", base=2)
    axes.legend()
    figure.savefig(folder / f"clients-{about['base']}-{about['dtype']}.svg")
    pyplot.close(figure)
