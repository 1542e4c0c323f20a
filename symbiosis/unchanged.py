"""Unchanged: whether small parameters still have the values that the server has.

One rule: it looks at the values. Versions miss what is written through `.data`, and addresses what is
written in place.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class Unchanged:
    """The values of parameters at one time.

    Args:
        named: names and parameters; those on meta have no values yet, and count as changed.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._values = {name: p.detach().clone() for name, p in named if not p.is_meta}

    def changed(self, named: Iterable[tuple[str, nn.Parameter]]) -> str:
        """The first parameter that has another value now, or had none; empty if there is none."""
        for name, parameter in named:
            value = self._values.get(name)
            if value is None:
                return name
            if value.dtype != parameter.dtype or value.device != parameter.device:
                value = self._values[name] = value.to(parameter.device, parameter.dtype)
            if not torch.equal(value, parameter):
                return name
        return ""
