"""Plan: what runs where in a wrapped model, and why. It says; `wrapping` does.

One rule: a Plan holds names and no modules, so that it can be copied with a model and shown at any time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from symbiosis.flight.protocol import ModuleInfo
from symbiosis.sharing import SharedInputs
from symbiosis.tables import html_table

Granularity = Literal["auto", "segment", "module", "linear"]
Place = Literal["auto", "local", "remote"]


@dataclass(frozen=True)
class Entry:
    """One module of the client's model: its path there, its name without adapters, where it runs and why."""

    path: str
    name: str
    where: Literal["remote", "block", "local"]
    reason: str
    info: ModuleInfo | None = None

    @property
    def remote_name(self) -> str:
        """Its name on the server."""
        return self.info.name if self.info else self.name


@dataclass(repr=False)
class Plan:
    """What runs where. `shared.groups` (who shares calls) is learnt in the first forward pass."""

    entries: list[Entry]
    shared: SharedInputs
    granularity: Granularity
    keeps_weights: bool = False

    @property
    def remote(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.where != "local"]

    @property
    def local(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.where == "local"]

    @property
    def parameters_remote(self) -> int:
        return sum(entry.info.parameters for entry in self.entries if entry.where == "remote" and entry.info)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(where, module, how many, why), with layer numbers folded to `*`."""
        folded = Counter((e.where, _folded(e.name), e.reason) for e in self.entries)
        return [(where, name, str(count), reason) for (where, name, reason), count in folded.items()]

    def __str__(self) -> str:
        lines = [f"{where:<7}{count:>4} x {name:<44}{reason}" for where, name, count, reason in self.rows()]
        shares = sorted({" + ".join(_folded(n).rpartition(".")[2] for n in group) for group in self.shared.groups})
        if shares:
            lines.append("one call each: " + ", ".join(shares))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"<Plan: {len(self.remote)} modules remote, {self.parameters_remote:,} parameters; {len(self.local)} local>"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # what IPython shows of it

    def _repr_html_(self) -> str:
        return html_table(self.rows(), head=("where", "module", "count", "why"))


def _folded(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
