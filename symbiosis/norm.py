"""RemoteNorm: a norm that is computed where its input is, here or in a segment on the server.

One rule: it is normed there only with the values that the server has. Whether it has is asked of the values
themselves, each time; they are a few thousand numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from symbiosis.flight.protocol import Step
from symbiosis.lazy import Deferred, defer, deferring, fits, value_of
from symbiosis.pending import Deferrals
from symbiosis.unchanged import Unchanged


class RemoteNorm:
    """Replaces the `forward` of a norm on its instance: a deferred input is normed where it is.

    A norm that was trained, replaced or hooked is computed here, as is every input that is here already.
    """

    def __init__(self, name: str, module: nn.Module, width: int, deferrals: Deferrals) -> None:
        self.name = name
        self._width = width
        self._deferrals = deferrals
        self._module = module
        self._own_forward = type(module).forward
        self.remember()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = isinstance(x, Deferred) and x.is_pending and not (args or kwargs)
        plain = plain and x.shape[-1] == self._width  # without parameters a norm takes any width, the server one
        if plain and fits(x) and not self._is_trained() and not self._values.changed(self._module.named_parameters()):
            return defer(self._deferrals, Step("call", (self.name,), ()), x, x.shape[-1], self._here)
        value = value_of(x)
        if deferring():
            self._deferrals.saw(value)
        return self._here(value, *args, **kwargs)

    def _is_trained(self) -> bool:
        return torch.is_grad_enabled() and any(p.requires_grad for p in self._module.parameters())

    def remember(self) -> None:
        """Take the parameters as they are for the server's."""
        self._values = Unchanged(self._module.named_parameters())

    def restore(self) -> None:
        """Undo the replacement."""
        del self._module.forward

    def _here(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._own_forward(self._module, x, *args, **kwargs)
