"""OnlyLinears: what all that hides rows from a server has in common.

One rule: it stands between the stand-ins of a model and a Caller, as a Remote to them that copies of a model share, and
what it cannot hide it refuses before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import torch

from symbiosis.errors import UnsupportedMethodError

if TYPE_CHECKING:
    from symbiosis.flight.protocol import ModuleInfo
    from symbiosis.sharing import Remote

LINEARS = ("linear", "conv1d")


class OnlyLinears:
    """Base of a Remote that goes with linears only.

    Args:
        inner: what computes.
        modules: what the server serves, by name.
    """

    why: ClassVar[str]  # only linears, and what to do

    def __init__(self, inner: Remote, modules: Mapping[str, ModuleInfo]) -> None:
        self._inner = inner
        self._modules = modules

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a live connection cannot be pickled; connect again in the other process")

    def segment(self, *_: object) -> NoReturn:
        raise UnsupportedMethodError(f"segments are not linear: {self.why}")

    def segment_grad(self, *_: object) -> NoReturn:
        raise UnsupportedMethodError(f"segments are not linear: {self.why}")

    def weight_norms(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inner.weight_norms(module)

    def _refuse_others(self, modules: Sequence[str]) -> None:
        for name in modules:
            info = self._modules.get(name)
            if info is not None and info.kind not in LINEARS:
                raise UnsupportedMethodError(f"{name} is a {info.kind}: {self.why}")


def finite_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of x [N, d] in float64 on the CPU, with zeros for rows that are not finite, and which those are [N].

    They would be lost locally, too, and what they look like on the wire would tell.
    """
    rows = x.detach().to("cpu", torch.float64, copy=True).contiguous()
    lost = ~rows.isfinite().all(dim=1)
    rows[lost] = 0
    return rows, lost
