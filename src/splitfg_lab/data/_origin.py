"""Whether the raw files in the data folder still are those that data was prepared from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from splitfg_lab.data._folder import DataFolder
from splitfg_lab.data._prepared import Meta, Source, Stamp, mark_checked, marked_sources, stamp_of
from splitfg_lab.data._writing import digest_of


def replaced(prepared: Path, meta: Meta, raw: Sequence[Path], place: DataFolder) -> list[Path]:
    """The raw files that are others than those the data was prepared from.

    Files that are gone, or were given by hand, are none of these. A file with the recorded size and time is taken to
    be the same; any other is hashed, once.

    Args:
        prepared: The prepared folder.
        meta: Its meta data.
        raw: The files recognised as this data now.
        place: The data folder.
    """
    if not raw:
        return []
    there = {source: path for source in meta.sources if (path := _where(source, raw, place)) is not None}
    if not there:
        return [path for path in raw if path.is_file()] if any(source.path for source in meta.sources) else []
    seen = marked_sources(prepared)
    unknown = {s: path for s, path in there.items() if stamp_of(path) not in (s.stamp, seen.get(str(path)))}
    others = [path for source, path in unknown.items() if _is_other(path, source)]
    if unknown and not others:
        same: dict[str, Stamp] = {str(path): stamp_of(path) for path in unknown.values()}
        mark_checked(prepared, meta, seen | same)
    return others


def _is_other(path: Path, source: Source) -> bool:
    try:
        return digest_of(path) != source.sha256
    except OSError:  # what cannot be read cannot be prepared from either
        return False


def _where(source: Source, raw: Sequence[Path], place: DataFolder) -> Path | None:
    """Where a file lies in the data folder, if it does; records without its path tell its name alone."""
    if source.path:
        candidates = [place.root / source.path, place.work / source.path]
    elif source.stamp is None:
        candidates = [path for path in raw if path.name == source.file]
    else:
        candidates = []
    return next((path for path in candidates if path.is_file()), None)
