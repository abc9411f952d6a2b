"""Hashes, and files and folders that are either as they were or as they should be."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from splitfg.errors import DataError
from splitfg_lab.files import flock, replacing, temporary_beside

CHUNK = 1 << 20

OnProgress: TypeAlias = Callable[[str, int, int | None], None]
"""Told what is being worked on, how much is done and the total where it is known (bytes)."""


def silent(_what: str, _done: int, _total: int | None) -> None:
    """Progress that nobody watches."""


def digest_of(path: Path, algorithm: str = "sha256") -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def matches(path: Path, digest: str) -> bool:
    """Whether a file has the digest ``algorithm:hex``."""
    algorithm, _, expected = digest.partition(":")
    return digest_of(path, algorithm) == expected


class HashingWriter:
    """Writes a new file and knows its size and sha256.

    A full disk is a :class:`DataError` here, so that whoever reads while writing cannot mistake it for a bad source.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes) -> None:
        """Append bytes."""
        with writing(self._path):
            self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    @property
    def sha256(self) -> str:
        """Hex digest of what was written so far."""
        return self._hash.hexdigest()

    def __enter__(self) -> HashingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with writing(self._path), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into one error that names the place."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"cannot write {path}: {reason}. What was there before is intact.") from error


def write_atomic(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` as a whole."""
    with writing(path), replacing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process works in a folder under this name, and keep them out; it ends with the process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        flock(handle, wait=True)
        yield
    finally:
        os.close(handle)


@contextmanager
def building(final: Path, *, replace: bool) -> Iterator[Path]:
    """Yield an empty folder that becomes ``final`` if nothing is raised.

    Args:
        final: Where the finished folder goes.
        replace: Whether a folder that is already there gives way. If not, the one that was there first stays: two
            processes may prepare the same data at the same time, and both go on with the first result.

    Raises:
        DataError: The disk is full or the place cannot be written; what was there before is intact.
    """
    temporary = temporary_beside(final)
    try:
        with writing(final):
            temporary.mkdir(parents=True)
            yield temporary
            _move_into_place(temporary, final, replace)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_into_place(temporary: Path, final: Path, replace: bool) -> None:
    if not final.exists():
        try:
            temporary.rename(final)
        except OSError:
            if not final.exists():
                raise
    elif replace:
        retired = temporary.with_suffix(".old")
        final.rename(retired)
        try:
            temporary.rename(final)
        except OSError:
            retired.rename(final)
            raise
        shutil.rmtree(retired, ignore_errors=True)
