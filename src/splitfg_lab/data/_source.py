"""Files, folders and archives as a list of members that can be opened.

Archives are never unpacked: members are read as streams, so an archive cannot choose a path to write to.
"""

from __future__ import annotations

import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from splitfg.errors import DataError

MOST_MEMBERS = 10_000
MOST_BYTES = 8 << 30
_TAR = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")


@dataclass(frozen=True)
class Member:
    """One readable file.

    Attributes:
        name: Name without folders.
        path: The file itself, or its archive.
        size: Bytes, as the file system or the archive states them.
        open: Opens the file for reading.
    """

    name: str
    path: Path
    size: int
    open: Callable[[], IO[bytes]]

    def ends_with(self, *endings: str) -> bool:
        """Return whether the name has one of these endings, regardless of case."""
        return self.name.lower().endswith(endings)


@contextmanager
def members(paths: Sequence[Path], *, most_bytes: int = MOST_BYTES) -> Iterator[list[Member]]:
    """List all files in files, folders and archives, except those that macOS adds (``__MACOSX/``, ``._NAME``).

    Args:
        paths: Files, folders and archives.
        most_bytes: Limit for the unpacked contents of an archive.

    Raises:
        DataError: A path does not exist, or an archive is damaged, too large or contains unsafe names.
    """
    missing = [f"{path} does not exist" for path in paths if not path.exists()]
    if missing:
        raise DataError("cannot read the source", missing)
    with ExitStack() as stack:
        found: list[Member] = []
        for path in paths:
            with reading(path):
                found += _open(path, stack, most_bytes)
        yield found


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert the errors that damaged files cause into a :class:`DataError` that names ``path``."""
    try:
        yield
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        gzip.BadGzipFile,
        EOFError,
    ) as error:
        raise DataError(
            f"{path} is truncated or damaged ({error})", hint="get the file again, or check its checksum"
        ) from error
    except NotImplementedError as error:  # of zips
        raise DataError(
            f"{path} cannot be read ({error})",
            hint="unpack it with the program that made it, and give the folder instead",
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _open(path: Path, stack: ExitStack, most_bytes: int) -> list[Member]:
    if path.is_dir():
        return [_plain(file) for file in _files_in(path)]
    name = path.name.lower()
    if name.endswith(".zip"):
        return _zip(path, stack.enter_context(zipfile.ZipFile(path)), most_bytes)
    if name.endswith(_TAR):
        return _tar(path, stack.enter_context(tarfile.open(path)), most_bytes)
    return [_plain(path)]


def _files_in(folder: Path) -> list[Path]:
    """List the files of a folder and of its subfolders; a file that two links point to counts once."""
    listed = sorted(folder.glob("*")) + sorted(folder.glob("*/*"))
    found: dict[tuple[str, Path], Path] = {}
    for file in listed:
        if file.is_file() and not _of_macos(file.relative_to(folder).as_posix()):
            found.setdefault((file.name, file.resolve()), file)
    return list(found.values())


def _of_macos(name: str) -> bool:
    """Return whether macOS added a file for its own use."""
    path = PurePosixPath(name)
    return "__MACOSX" in path.parts or path.name.startswith("._") or path.name == ".DS_Store"


def _plain(path: Path) -> Member:
    return Member(path.name, path, path.stat().st_size, lambda: path.open("rb"))


def _zip(path: Path, archive: zipfile.ZipFile, most_bytes: int) -> list[Member]:
    entries = [info for info in archive.infolist() if not info.is_dir()]
    guard = _Guard(path, most_bytes)
    for info in entries:
        guard.add(info.filename, info.file_size)
    if any(info.flag_bits & 1 for info in entries):
        raise DataError(f"{path} is encrypted", hint="unpack it and give the folder instead")

    def opener(info: zipfile.ZipInfo) -> Callable[[], IO[bytes]]:
        return lambda: archive.open(info)

    kept = [info for info in entries if not _of_macos(info.filename)]
    return [Member(PurePosixPath(i.filename).name, path, i.file_size, opener(i)) for i in kept]


def _tar(path: Path, archive: tarfile.TarFile, most_bytes: int) -> list[Member]:
    guard = _Guard(path, most_bytes)
    entries = []
    for info in archive:
        # tarfile decompresses a member when it moves on to the next one: raise before that
        guard.add(info.name, info.size)
        entries += [info] if info.isfile() else []

    def opener(info: tarfile.TarInfo) -> Callable[[], IO[bytes]]:
        def open_member() -> IO[bytes]:
            stream = archive.extractfile(info)
            assert stream is not None  # only regular files are listed
            return stream

        return open_member

    kept = [info for info in entries if not _of_macos(info.name)]
    return [Member(PurePosixPath(i.name).name, path, i.size, opener(i)) for i in kept]


@dataclass
class _Guard:
    """Raises :class:`DataError` for an archive that is too large or contains unsafe names.

    Archives are not unpacked, so unsafe names are harmless here; no honest publisher uses them.
    """

    path: Path
    most_bytes: int
    count: int = 0
    bytes: int = 0

    def add(self, name: str, size: int) -> None:
        """Count one entry."""
        self.count += 1
        self.bytes += size
        problems = []
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            problems.append(f"it contains a name that points outside of it: {name}")
        if self.count > MOST_MEMBERS:
            problems.append(f"it contains more than {MOST_MEMBERS:,} files")
        if self.bytes > self.most_bytes:
            problems.append(f"it unpacks to {self.bytes:,} bytes or more; the limit is {self.most_bytes:,}")
        if problems:
            raise DataError(f"{self.path} is not safe to read", problems, "get the official file again")
