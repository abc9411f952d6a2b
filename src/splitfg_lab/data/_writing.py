"""Digests, and folders that replace another as a whole."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from splitfg.errors import DataError
from splitfg_lab.files import leftovers, locked, replacing, temporary_beside

CHUNK = 1 << 20
_RETIRED = ".old"
"""Suffix of a finished folder while another one takes its place."""

OnProgress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the name of a file, the bytes done so far, and the total if it is known."""


def silent(_name: str, _done: int, _total: int | None) -> None:
    """Ignore progress."""


def digest_of(path: Path, algorithm: str = "sha256") -> str:
    """Compute the hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def matches(path: Path, digest: str) -> bool:
    """Return whether a file has the digest ``algorithm:hex``."""
    algorithm, _, expected = digest.partition(":")
    return digest_of(path, algorithm) == expected


class HashingWriter:
    """Writes a new file, and computes its size and sha256.

    Raises :class:`DataError` if the disk is full, so that callers that read and write in one block do not blame the
    file they read.
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
        """Hexadecimal digest of all bytes written so far."""
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
    """Convert a full disk or a missing permission into a :class:`DataError` that names ``path``."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"cannot write {path}: {reason}. Earlier data is unchanged.") from error


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the contents of ``path`` by ``data`` as a whole."""
    with writing(path), replacing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def reserved(final: Path) -> Iterator[None]:
    """Keep other processes from building the folder ``final`` during the block; wait for one that does.

    Removes the unfinished folders that killed processes left next to ``final``.

    Raises:
        DataError: The folder of ``final`` cannot be written.
    """
    with ExitStack() as stack:
        with writing(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(final.with_name(f".{final.name}.lock"), wait=True))
            _clean_up(final)
        yield


def _clean_up(final: Path) -> None:
    """Remove the leftovers of killed processes; the caller holds the lock, so no running process uses them."""
    for retired in leftovers(final, _RETIRED):
        if not final.exists():  # a process was killed between the two renames of a replacement
            retired.rename(final)
        shutil.rmtree(retired, ignore_errors=True)
    for temporary in leftovers(final):
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def building(final: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces ``final`` unless the block raises. Call it inside :func:`reserved`.

    Raises:
        DataError: The disk is full or the place cannot be written; the earlier folder is unchanged.
    """
    temporary = temporary_beside(final)
    try:
        with writing(final):
            temporary.mkdir(parents=True)
            yield temporary
            _move_into_place(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_into_place(temporary: Path, final: Path) -> None:
    if not final.exists():
        temporary.rename(final)
        return
    retired = temporary.with_suffix(_RETIRED)
    final.rename(retired)
    try:
        temporary.rename(final)
    except OSError:
        retired.rename(final)
        raise
    shutil.rmtree(retired, ignore_errors=True)
