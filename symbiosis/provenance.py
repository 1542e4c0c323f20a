"""Provenance: which base an adapter was made for, as its folder says it and as a server serves it.

    adapter_config.json         peft's own; names the base and its revision
    README.md                   peft's own; its tags carry the base's fingerprint, however the adapter was saved
    symbiosis.json              what `export.save` adds: name, revision, architecture and fingerprints

One rule: a folder is an ordinary peft folder, which plain transformers and peft open without this package. What we
know more is in places that they leave alone. The tags get into README.md through `model_tags`, where transformers
lets a library leave its name, and from which peft writes its model card.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from symbiosis.adapters import base_of
from symbiosis.errors import ConfigError
from symbiosis.flight.fingerprint import model_fingerprint
from symbiosis.flight.protocol import DTYPES, Manifest

CONFIG, RECORD = "adapter_config.json", "symbiosis.json"
WITHOUT_RECORD = "restore it; without it the adapter loads too, but its base is known by name only"
TAG = "symbiosis-base:"
# Fingerprints are compared in the first of these that both sides have: the least precise dtype is one that a
# checkpoint served as float32 and the same one served as bfloat16 have in common.
COMPARED = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Base:
    """What is known of the base that an adapter was made for; fingerprints by dtype tag."""

    name: str = ""
    revision: str = ""
    architecture: str = ""
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def served(cls, manifest: Manifest) -> Base:
        """The base that a server serves."""
        hashes = {tag: {info.name: info.hashes.get(tag, "") for info in manifest.modules} for tag in DTYPES}
        known = {tag: model_fingerprint(values) for tag, values in hashes.items() if all(values.values())}
        return cls(manifest.model, manifest.revision, manifest.architecture, known)

    @classmethod
    def recorded(cls, folder: Path) -> Base:
        """The base that a saved adapter names: as we recorded it, or as peft did.

        Raises:
            ConfigError: a record is damaged.
        """
        config = read_json(folder / CONFIG)
        named = cls(config.get("base_model_name_or_path") or "", config.get("revision") or "")
        if (folder / RECORD).is_file():
            try:
                return msgspec.convert(read_json(folder / RECORD).get("base", {}), cls)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{folder / RECORD} does not describe a base: {error}; {WITHOUT_RECORD}") from error
        with contextlib.suppress(OSError):
            if tag := re.search(rf"{TAG}([0-9a-f]{{64}})", (folder / "README.md").read_text()):
                return cls(named.name, named.revision, "", {COMPARED[0]: tag[1]})
        return named

    @property
    def fingerprint(self) -> tuple[str, str]:
        """(dtype tag, fingerprint), in the first of the dtypes that are compared; empty if there is none."""
        return next(((tag, self.fingerprints[tag]) for tag in COMPARED if tag in self.fingerprints), ("", ""))

    def is_other(self, other: Base) -> bool:
        """Whether two bases differ, by the best that is known of both."""
        for tag in COMPARED:
            if tag in self.fingerprints and tag in other.fingerprints:
                return self.fingerprints[tag] != other.fingerprints[tag]
        return bool(self.name and other.name and self.name != other.name)

    def __str__(self) -> str:
        parts = [self.revision and f"revision {self.revision}", self.fingerprint[1] and self.fingerprint[1][:12]]
        known = ", ".join(filter(None, parts))
        return f"{self.name or 'a base without a name'}{f' ({known})' if known else ''}"


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file.

    Raises:
        ConfigError: it has none in it.
    """
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}; restore it from where the adapter came from") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, not an object; restore it")
    return found


def tag(model: nn.Module, manifest: Manifest) -> None:
    """Let adapters of this model that are saved by anybody say which base they were made for."""
    served = Base.served(manifest)
    add: Any = getattr(base_of(model), "add_model_tags", None)
    if callable(add) and COMPARED[0] in served.fingerprints:
        add(["symbiosis", f"{TAG}{served.fingerprints[COMPARED[0]]}"])
