"""List prepared and raw data, and verify prepared data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from splitfg.errors import DataError
from splitfg_lab.data._folder import DataFolder
from splitfg_lab.data._prepare import how_to_get, splits_of, unsupported_files
from splitfg_lab.data._prepared import Meta, damage, mark_checked, mistaken, read_meta
from splitfg_lab.data.catalogue import CATALOGUE, find_dataset
from splitfg_lab.data.specs import DataSet, ImageSet, TableSet, TextSet


@dataclass(frozen=True)
class Status:
    """State of a data set or of one of its splits.

    Attributes:
        name: Name of the data set.
        split: Split, or empty.
        state: ``prepared``; ``found``: raw files exist and will be prepared on first use; ``missing``;
            ``broken``: the prepared folder cannot be read, or contains other data.
        path: The prepared folder or the first raw file.
        detail: Counts and notes for people.
    """

    name: str
    split: str
    state: Literal["prepared", "found", "missing", "broken"]
    path: Path | None
    detail: str


def status(folder: Path | str | None = None) -> list[Status]:
    """Return the state of every data set in the catalogue. Reads file names and small files only."""
    place = DataFolder.at(folder)
    return [_status(data, split, place) for data in CATALOGUE for split in splits_of(data)]


def _status(data: DataSet, split: str, place: DataFolder) -> Status:
    prepared, raw = place.prepared(data, split), place.raw(data, split)
    if prepared.is_dir():
        try:
            meta = read_meta(prepared)
        except DataError as error:
            return Status(data.name, split, "broken", prepared, str(error))
        wrong = mistaken(prepared, meta, data.name, split)
        if wrong:
            return Status(data.name, split, "broken", prepared, "; ".join(wrong))
        counts = [f"{count:,} {what}" for what, count in meta.counts.items()]
        return Status(
            data.name, split, "prepared", prepared, "; ".join([", ".join(counts), *filter(None, [meta.note])])
        )
    if raw:
        return Status(data.name, split, "found", raw[0], "will be prepared on first use")
    unread = unsupported_files(data, place) or how_to_get(data).splitlines()
    return Status(data.name, split, "missing", None, unread[0])


def verify(data: str | DataSet, folder: Path | str | None = None) -> list[str]:
    """Hash and count prepared data again.

    Returns:
        Every problem; empty if there is none.
    """
    entry, place = find_dataset(data), DataFolder.at(folder)
    prepared = {split: path for split in splits_of(entry) if (path := place.prepared(entry, split)).is_dir()}
    if not prepared:
        return [f"{entry.name} is not prepared in {place.work}: nothing to verify"]
    return [problem for split, path in prepared.items() for problem in _verify_folder(entry, split, path)]


def _verify_folder(data: DataSet, split: str, folder: Path) -> list[str]:
    try:
        meta = read_meta(folder)
    except DataError as error:
        return list(error.problems)
    problems = damage(folder, meta) + mistaken(folder, meta, data.name, split)
    if not problems:
        problems = _recount(data, folder, meta)
    if not problems:
        mark_checked(folder, meta)
    return problems


def _recount(data: DataSet, folder: Path, meta: Meta) -> list[str]:
    match data:
        case TableSet():
            from splitfg_lab.data._table_files import recount_table

            return recount_table(data, folder, meta)
        case ImageSet():
            from splitfg_lab.data._images import recount_images

            return recount_images(data, folder, meta)
        case TextSet():
            from splitfg_lab.data._text import recount_text

            return recount_text(data, folder, meta)
    return []
