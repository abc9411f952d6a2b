"""What a user hands over: files, folders, archives, seen as a list of members that can be opened.

Archives are never unpacked: members are read as streams, so nothing an archive says can name a place to write to.
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

from splitfg.errors import DataError, shorten

MOST_MEMBERS = 10_000
MOST_BYTES = 8 << 30
_TAR = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")


@dataclass(frozen=True)
class Member:
    """One readable file: its plain name, where it lies on disk (itself or its archive), its size, how to open it."""

    name: str
    path: Path
    size: int
    open: Callable[[], IO[bytes]]

    def ends_with(self, *endings: str) -> bool:
        """Whether the name has one of these endings, in small letters or capitals."""
        return self.name.lower().endswith(endings)


@contextmanager
def members(paths: Sequence[Path]) -> Iterator[list[Member]]:
    """All files in the given files, folders and archives, without those that macOS adds (``__MACOSX/``, ``._NAME``).

    Raises:
        DataError: A path does not exist, or an archive is damaged, too large or holds unsafe names.
    """
    missing = [f"{path} does not exist" for path in paths if not path.exists()]
    if missing:
        raise DataError("nothing to read", missing)
    with ExitStack() as stack:
        found: list[Member] = []
        for path in paths:
            with reading(path):
                found += _open(path, stack)
        yield found


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file raises into one error that names it."""
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


def _open(path: Path, stack: ExitStack) -> list[Member]:
    if path.is_dir():
        return [_plain(file) for file in _files_in(path)]
    name = path.name.lower()
    if name.endswith(".zip"):
        return _zip(path, stack.enter_context(zipfile.ZipFile(path)))
    if name.endswith(_TAR):
        return _tar(path, stack.enter_context(tarfile.open(path)))
    return [_plain(path)]


def _files_in(folder: Path) -> list[Path]:
    """The files of a folder and of the folders in it; one that links lead to twice counts once."""
    listed = sorted(folder.glob("*")) + sorted(folder.glob("*/*"))
    found: dict[tuple[str, Path], Path] = {}
    for file in listed:
        if file.is_file() and not _of_macos(file.relative_to(folder).as_posix()):
            found.setdefault((file.name, file.resolve()), file)
    return list(found.values())


def _of_macos(name: str) -> bool:
    """Whether a file holds what macOS keeps beside the files of others."""
    path = PurePosixPath(name)
    return "__MACOSX" in path.parts or path.name.startswith("._") or path.name == ".DS_Store"


def _plain(path: Path) -> Member:
    return Member(path.name, path, path.stat().st_size, lambda: path.open("rb"))


def _zip(path: Path, archive: zipfile.ZipFile) -> list[Member]:
    entries = [info for info in archive.infolist() if not info.is_dir()]
    _refuse_unsafe(path, [(info.filename, info.file_size) for info in entries])
    if any(info.flag_bits & 1 for info in entries):
        raise DataError(f"{path} is encrypted", hint="unpack it and give the folder instead")

    def opener(info: zipfile.ZipInfo) -> Callable[[], IO[bytes]]:
        return lambda: archive.open(info)

    kept = [info for info in entries if not _of_macos(info.filename)]
    return [Member(PurePosixPath(i.filename).name, path, i.file_size, opener(i)) for i in kept]


def _tar(path: Path, archive: tarfile.TarFile) -> list[Member]:
    entries = [info for info in archive if info.isfile()]
    _refuse_unsafe(path, [(info.name, info.size) for info in entries])

    def opener(info: tarfile.TarInfo) -> Callable[[], IO[bytes]]:
        def open_member() -> IO[bytes]:
            stream = archive.extractfile(info)
            assert stream is not None  # only regular files are listed
            return stream

        return open_member

    kept = [info for info in entries if not _of_macos(info.name)]
    return [Member(PurePosixPath(i.name).name, path, i.size, opener(i)) for i in kept]


def _refuse_unsafe(path: Path, entries: Sequence[tuple[str, int]]) -> None:
    """Refuse archives that no honest publisher makes. Nothing is unpacked, so this is a second line of defence."""
    problems = []
    unsafe = [name for name, _ in entries if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
    total = sum(size for _, size in entries)
    if unsafe:
        problems.append(f"it holds names that point outside: {shorten(unsafe, 3)}")
    if len(entries) > MOST_MEMBERS:
        problems.append(f"it holds {len(entries):,} files; at most {MOST_MEMBERS:,} are accepted")
    if total > MOST_BYTES:
        problems.append(f"it would unpack to {total:,} bytes; at most {MOST_BYTES:,} are accepted")
    if problems:
        raise DataError(f"{path} is refused", problems)
