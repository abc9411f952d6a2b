"""Detect raw files that changed since data was prepared from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from splitfg_lab.data._folder import DataFolder
from splitfg_lab.data._prepared import Meta, Source, Stamp, mark_checked, marked_sources, stamp_of
from splitfg_lab.data._writing import digest_of


def replaced(prepared: Path, meta: Meta, raw: Sequence[Path], place: DataFolder) -> list[Path]:
    """List the raw files that changed since the data was prepared.

    Ignores files that no longer exist, and files that the user gave. A file with the recorded size and time counts as
    unchanged; any other is hashed once.

    Args:
        prepared: The prepared folder.
        meta: Its metadata.
        raw: The raw files of this data in the data folder now.
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
    except OSError:  # an unreadable file cannot be prepared from either
        return False


def _where(source: Source, raw: Sequence[Path], place: DataFolder) -> Path | None:
    """Find a source file in the data folder; old records have its name alone."""
    if source.path:
        candidates = [place.root / source.path, place.work / source.path]
    elif source.stamp is None:
        candidates = [path for path in raw if path.name == source.file]
    else:
        candidates = []
    return next((path for path in candidates if path.is_file()), None)
