"""Files that only their owner may read: how they are written, replaced and locked.

One rule: a secret is never on disk in a file that others can read, not even for a moment, and a reader sees either
the old content or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from symbiosis.errors import ConfigError


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner may enter, unless it is there; returns it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder {path} cannot be made: {error.strerror}; choose another one") from None
    return path


def write_private(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file at once, with this mode from its first moment on.

    Raises:
        ConfigError: the file cannot be written.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # half a file would keep a full disk full
            part.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}; check its folder") from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock beside a file, so that two processes do not both change it."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{lock} cannot be written: {error.strerror}; check its folder") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_file(path: Path, what: str) -> bytes:
    """The content of a file that an option names.

    Raises:
        ConfigError: it cannot be read; `what` is the option.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}; check the path and its mode") from None


def check_owned(path: Path, what: str, *, secret: bool) -> None:
    """Refuse a file that others may change, or, if it is secret, read.

    Raises:
        ConfigError: its mode is too wide.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (0o077 if secret else 0o022):
        raise ConfigError(
            f"{what} {path} has mode {mode:03o}, so others can {'use' if secret else 'change'} it; "
            f"run: chmod {'600' if secret else '644'} {path}"
        )
