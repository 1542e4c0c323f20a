"""Masking, noise, certificates, DP-SGD and the attacks that measure them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from symbiosis.config import ActivationNoise, Masking
    from symbiosis.privacy.dp import make_private
    from symbiosis.privacy.refill import fill_masks

__all__ = ["ActivationNoise", "Masking", "fill_masks", "make_private"]

# Looked up on first use: what a server needs of this package must not load what DP-SGD needs.
_HOME: Final = {
    "ActivationNoise": "symbiosis.config",
    "Masking": "symbiosis.config",
    "fill_masks": "symbiosis.privacy.refill",
    "make_private": "symbiosis.privacy.dp",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
