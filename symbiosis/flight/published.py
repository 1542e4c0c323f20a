"""Whether weights are those that were published: files of the hub's cache against the SHA-256 that the hub gave them.

The cache keeps each large file under the hash of its content and links to it, so a file says itself what it should
be. A damaged one would load without a word, since safetensors has no checksum, and everybody who trains on
it would train against numbers that nobody else has.

One rule: what cannot be checked is not guessed at. A folder has no published hashes; whoever serves one names the
fingerprint that it must have (`expect_fingerprint`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from symbiosis.errors import ConfigError


def checkpoint_folder(source: str, revision: str | None) -> Path | None:
    """Where a model's files lie: the folder itself, or the snapshot in the hub's cache; None where there is neither."""
    if Path(source).is_dir():
        return Path(source)
    found = try_to_load_from_cache(source, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def commit_of(folder: Path | None) -> str:
    """The commit whose snapshot a folder of the hub's cache is; empty for any other folder.

    Configurations of transformers no longer carry it (5.24).
    """
    is_snapshot = folder is not None and folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name)
    return folder.name if folder is not None and is_snapshot else ""


def weight_files(folder: Path | None) -> list[Path]:
    """The files that hold the weights."""
    return sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")) if folder else []


def check_files(files: Iterable[Path]) -> None:
    """Hash every file whose hash was published, and compare.

    Raises:
        ConfigError: a file is not what was published.
    """
    for file in files:
        blob = file.resolve()
        if not file.is_symlink() or not re.fullmatch("[0-9a-f]{64}", blob.name):
            continue
        with blob.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != blob.name:
            raise ConfigError(
                f"{file.name} is not the file that was published: its SHA-256 is {found}, that of the published one "
                f"{blob.name}. It was damaged or changed; delete {blob} and start again, to load it anew"
            )


def check_fingerprint(found: str, expected: str | None) -> None:
    """Compare a model's fingerprint with the one that the operator expects, or its first digits.

    Raises:
        ConfigError: the weights are others.
    """
    if expected is not None and not found.startswith(expected):
        raise ConfigError(
            f"the weights have the fingerprint {found}, and expect_fingerprint is {expected}. They were damaged or "
            "changed, or another dtype or revision is served: load the checkpoint anew, or expect what is right"
        )
