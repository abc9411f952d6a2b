"""Prepared data on disk: plain arrays and one ``meta.json``, memory-mapped and checked once.

``meta.json`` records type, shape, size and sha256 of every file, the source files, and the date. The first load hashes
every file and writes ``checked.json`` with the size and modification time of each; later loads compare only these.
``checked.json`` also lists raw files that were hashed and had not changed.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

from splitfg.errors import DataError
from splitfg_lab.data._writing import digest_of, write_atomic

if TYPE_CHECKING:
    import numpy as np

FORMAT = 1
META = "meta.json"
CHECKED = "checked.json"
ARRAYS = {"uint8": 1, "<u2": 2}
"""Types of plain arrays, and bytes per element."""


@dataclass(frozen=True)
class Stored:
    """One file of prepared data. ``dtype`` is one of :data:`ARRAYS`, or ``parquet`` or ``bytes``."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Built:
    """Result of a builder.

    Attributes:
        files: The files that it wrote.
        counts: Counts for listings.
        note: A note for results tables; may be empty.
        read: The files that it read.
    """

    files: Mapping[str, Stored]
    counts: Mapping[str, int]
    note: str
    read: Sequence[Path]


Stamp: TypeAlias = tuple[int, int]
"""Size and modification time (ns) of a file. If both are unchanged, the file counts as unchanged."""


@dataclass(frozen=True)
class Source:
    """A source file of prepared data.

    Attributes:
        file: Its name.
        sha256: Digest of its contents.
        path: Its path below the data folder; empty if the user gave the file.
        stamp: Its stamp when the data was prepared; ``None`` in old records, which have no stamps or paths.
    """

    file: str
    sha256: str
    path: str = ""
    stamp: Stamp | None = None


@dataclass(frozen=True)
class Meta:
    """The contents of ``meta.json``."""

    name: str
    split: str
    files: Mapping[str, Stored]
    counts: Mapping[str, int]
    note: str
    sources: Sequence[Source]
    date: str
    format: int = field(default=FORMAT)


def stamp_of(path: Path) -> Stamp:
    """Return size and modification time of a file."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def write_meta(folder: Path, name: str, split: str, built: Built, raw: Sequence[Path] = ()) -> None:
    """Write ``meta.json`` into a folder that a builder filled.

    Args:
        folder: The folder.
        name: The data set.
        split: Its split, or empty.
        built: The result of the builder.
        raw: The folders in which the sources were found; none if the user gave them.
    """
    sources = [Source(path.name, digest_of(path), _below(path, raw), stamp_of(path)) for path in built.read]
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    meta = Meta(name, split, built.files, built.counts, built.note, sources, now)
    write_atomic(folder / META, (json.dumps(asdict(meta), indent=2) + "\n").encode())


def _below(path: Path, folders: Sequence[Path]) -> str:
    """Return the path of a file relative to the first folder that contains it, or an empty string."""
    return next((path.relative_to(f).as_posix() for f in folders if path.is_relative_to(f)), "")


def read_meta(folder: Path) -> Meta:
    """Read and validate ``meta.json``.

    Raises:
        DataError: The file is missing, not JSON, or of another format.
    """
    path = folder / META
    try:
        value = json.loads(path.read_bytes())
        return _meta(value)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}", hint=_again(folder)) from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path} does not have format {FORMAT} ({error}): it is damaged, or another program wrote it",
            hint=_again(folder),
        ) from error


def _meta(value: Any) -> Meta:
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']!r}")
    files = {_plain_name(name): _stored(stored) for name, stored in value["files"].items()}
    counts = {str(name): int(count) for name, count in value["counts"].items()}
    sources = [_source(source) for source in value["sources"]]
    texts = [value[key] for key in ("name", "split", "note", "date")]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("name, split, note and date must be strings")
    name, split, note, date = texts
    return Meta(name, split, files, counts, note, sources, date)


def _source(value: Any) -> Source:
    path, stamp = str(value.get("path", "")), value.get("stamp")
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"path {path!r}")
    return Source(str(value["file"]), str(value["sha256"]), path, None if stamp is None else _stamp(stamp))


def _stamp(value: Any) -> Stamp:
    size, time = value
    return int(size), int(time)


def _plain_name(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"file name {name!r}")
    return name


def _stored(value: Any) -> Stored:
    stored = Stored(
        str(value["dtype"]), tuple(int(n) for n in value["shape"]), int(value["bytes"]), str(value["sha256"])
    )
    if stored.dtype not in (*ARRAYS, "parquet", "bytes"):
        raise ValueError(f"dtype {stored.dtype!r}")
    if min(stored.shape, default=0) < 0:
        raise ValueError(f"shape {stored.shape}")
    if stored.dtype in ARRAYS and math.prod(stored.shape) * ARRAYS[stored.dtype] != stored.bytes:
        raise ValueError(f"{stored.bytes} bytes do not make shape {stored.shape}")
    return stored


def damage(folder: Path, meta: Meta) -> list[str]:
    """Hash every file, and return every difference from ``meta.json``."""
    problems = []
    for name, stored in meta.files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != stored.bytes:
            problems.append(f"{path} has {path.stat().st_size:,} bytes; expected {stored.bytes:,}")
        elif digest_of(path) != stored.sha256:
            problems.append(f"{path} has changed: its sha256 is not the recorded one")
    return problems


def mistaken(folder: Path, meta: Meta, name: str, split: str) -> list[str]:
    """Return a problem if the folder holds another data set or split than its path says."""
    held, wanted = f"{meta.name} {meta.split}".strip(), f"{name} {split}".strip()
    return [f"{folder} holds {held}, not {wanted}"] if (meta.name, meta.split) != (name, split) else []


def open_checked(folder: Path, name: str, split: str = "") -> Meta:
    """Read the metadata of a prepared folder, and validate its contents.

    Raises:
        DataError: The folder holds another data set or split, or a file is missing or has changed.
    """
    meta = read_meta(folder)
    wrong = mistaken(folder, meta, name, split)
    if wrong:
        hint = f"move the folder away, then run: splitfg data prepare {name}"
        raise DataError("a prepared folder holds other data", wrong, hint)
    if _marked(folder).get("files") != _stats(folder, meta):
        problems = damage(folder, meta)
        if problems:
            raise DataError(f"prepared data of {meta.name} is damaged", problems, _again(folder))
        mark_checked(folder, meta)
    return meta


def mark_checked(folder: Path, meta: Meta, sources: Mapping[str, Stamp] | None = None) -> None:
    """Write the stamps of all files, and of raw files that have not changed, to ``checked.json``.

    If the folder is read-only, the next load hashes the files again.
    """
    mark = {"files": _stats(folder, meta), "sources": sources or {}}
    try:
        write_atomic(folder / CHECKED, json.dumps(mark).encode())
    except (OSError, DataError):
        return


def marked_sources(folder: Path) -> dict[str, Stamp]:
    """Return the stamps of raw files in ``checked.json``, by path."""
    try:
        return {path: _stamp(stamp) for path, stamp in _marked(folder)["sources"].items()}
    except (KeyError, AttributeError, TypeError, ValueError, OverflowError):
        return {}


def _stats(folder: Path, meta: Meta) -> dict[str, list[int]]:
    paths = {name: folder / name for name in (META, *meta.files)}
    return {name: list(stamp_of(path)) for name, path in paths.items() if path.is_file()}


def _marked(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / CHECKED).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def open_array(folder: Path, meta: Meta, name: str) -> np.memmap[Any, np.dtype[Any]]:
    """Memory-map one array of a checked folder, read-only."""
    import numpy as np

    stored = meta.files.get(name)
    if stored is None or stored.dtype not in ARRAYS:
        raise DataError(f"{folder} holds no array {name}", hint=_again(folder))
    return np.memmap(folder / name, dtype=np.dtype(stored.dtype), mode="r", shape=stored.shape)


def _again(folder: Path) -> str:
    return f"delete {folder}, then run: splitfg data prepare"
