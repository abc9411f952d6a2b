"""Atomic file replacement, and locks between processes."""

from __future__ import annotations

import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".tmp"
"""Suffix of unfinished files."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to ``path``; sync it and move it to ``path`` unless the block raises.

    Readers get the old file or the new one, never a part of one, even after a power cut.
    """
    temporary = temporary_beside(path)
    try:
        yield temporary
        with temporary.open("r+b") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock file ``path`` during the block, and yield whether this process got it.

    The operating system releases the lock when the process ends, even if it is killed. The empty file stays: deleting
    it would let two processes lock two different files of the same name.

    Args:
        path: The lock file. Its folder must exist.
        wait: Wait until the lock is free, so that the value is always true.

    Raises:
        OSError: The lock file cannot be written.
    """
    from filelock import FileLock, Timeout

    path.touch()  # raises if the folder does not exist; filelock would create it
    lock = FileLock(path, timeout=-1 if wait else 0)
    with suppress(Timeout):
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()


def temporary_beside(path: Path) -> Path:
    """Return an unused name in the folder of ``path``; :func:`leftovers` finds it again."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")


def leftovers(path: Path, suffix: str = TEMPORARY) -> list[Path]:
    """List the temporary files and folders of ``path`` that a killed process did not remove."""
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.????????{suffix}"))


def sync_folder(path: Path) -> None:
    """Make renamed and new files in a folder survive a power cut."""
    if os.name == "nt":  # Windows opens no folders, and journals renames by itself
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
