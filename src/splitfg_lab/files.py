"""Files that are either as they were or as they should be."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".tmp"
"""How the names of unfinished files end."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside ``path`` that takes its place, synced to disk, if nothing is raised.

    A reader sees the old file or the new one, never half of one, even if the machine loses power.
    """
    temporary = temporary_beside(path)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def flock(handle: int, *, wait: bool) -> bool:
    """Take the lock of an open file or folder; whether it was got. It goes with the handle, however a process ends.

    On platforms without such locks nobody is kept out.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def temporary_beside(path: Path) -> Path:
    """A name in the same folder that nobody else uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
