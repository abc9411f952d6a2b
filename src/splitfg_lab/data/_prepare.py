"""Prepare data: on command, or on first use from raw files in the data folder."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from splitfg.errors import DataError, shorten
from splitfg_lab.data._catalogue_text import GPT2_BPE
from splitfg_lab.data._folder import DataFolder
from splitfg_lab.data._origin import replaced
from splitfg_lab.data._prepared import Built, Meta, open_checked, write_meta
from splitfg_lab.data._writing import OnProgress, building, reserved, silent
from splitfg_lab.data.catalogue import find_dataset
from splitfg_lab.data.errors import PreparedAgainWarning
from splitfg_lab.data.specs import DataSet, FileSet, ImageSet, TableSet, TextSet

if TYPE_CHECKING:
    import tiktoken


def prepare(
    data: str | DataSet,
    source: Path | str | None = None,
    folder: Path | str | None = None,
    on_progress: OnProgress | None = None,
) -> list[Path]:
    """Prepare a data set, and replace data that was prepared before.

    Args:
        data: A name from the catalogue, or your own data set.
        source: A file, folder or archive; ``None`` uses the raw files found in the data folder.
        folder: The data folder; ``None`` for the default one.
        on_progress: Called with file name, bytes read and total bytes.

    Returns:
        The prepared folders: one, or one per split found.

    Raises:
        DataError: Lists everything wrong with the source. Data that was prepared before is unchanged.
    """
    entry, place = find_dataset(data), DataFolder.at(folder)
    progress = on_progress or silent
    if source is not None:
        given = [Path(source).expanduser()]
        jobs = [_Job(entry, split, given, place, progress, in_folder=False) for split in _splits_in(entry, given)]
    else:
        found = {split: place.raw(entry, split) for split in splits_of(entry)}
        jobs = [_Job(entry, split, paths, place, progress) for split, paths in found.items() if paths]
    if not jobs:
        raise _missing(entry, "", place)
    for job in jobs:
        with reserved(job.final):
            job.build()
    return [job.final for job in jobs]


def ensure(data: DataSet, split: str, place: DataFolder) -> tuple[Path, Meta]:
    """Return a checked prepared folder; prepare it first if it is missing or its raw files changed.

    Raises:
        DataError: The data folder holds no raw files for it, or some data is damaged.

    Warns:
        PreparedAgainWarning: The raw files changed since the data was prepared.
    """
    job = _Job(data, split, place.raw(data, split), place, silent)
    if not job.final.is_dir():
        if not job.paths:
            raise _missing(data, split, place)
        with reserved(job.final):
            if not job.final.is_dir():  # another process may have built it in the meantime
                job.build()
    meta = open_checked(job.final, data.name, split)
    if replaced(job.final, meta, job.paths, place):
        meta = _prepare_again(job)
    return job.final, meta


@dataclass(frozen=True)
class _Job:
    """One folder to prepare. ``in_folder``: its raw files were found in the data folder."""

    data: DataSet
    split: str
    paths: Sequence[Path]
    place: DataFolder
    progress: OnProgress
    in_folder: bool = True

    @property
    def final(self) -> Path:
        """The prepared folder."""
        return self.place.prepared(self.data, self.split)

    @property
    def title(self) -> str:
        """Name and split for messages."""
        return f"{self.data.name} {self.split}".strip()

    def build(self) -> None:
        """Build the folder; call it inside :func:`reserved`."""
        with building(self.final) as temporary:
            built = _dispatch(self, temporary)
            roots = (self.place.root, self.place.work) if self.in_folder else ()
            write_meta(temporary, self.data.name, self.split, built, roots)


def _prepare_again(job: _Job) -> Meta:
    """Prepare data from raw files that changed; if several processes notice the change, one of them does it."""
    with reserved(job.final):
        others = replaced(job.final, open_checked(job.final, job.data.name, job.split), job.paths, job.place)
        if others:
            warnings.warn(
                f"{shorten(others)} changed since {job.title} was prepared from it: preparing {job.title} again",
                PreparedAgainWarning,
                stacklevel=4,
            )
            job.build()
        return open_checked(job.final, job.data.name, job.split)


def load_encoding(folder: Path | str | None = None) -> tiktoken.Encoding:
    """Load GPT-2's encoding from files in the data folder, without network access."""
    return _encoding(DataFolder.at(folder))


def _encoding(place: DataFolder) -> tiktoken.Encoding:
    from splitfg_lab.data._bpe import read_encoding

    prepared, _ = ensure(GPT2_BPE, "", place)
    return read_encoding(prepared)


def splits_of(data: DataSet) -> list[str]:
    """Return the names of the splits that have a prepared folder each; one empty name if there are no splits."""
    return [split.name for split in data.splits] if isinstance(data, TextSet) else [""]


def _splits_in(data: DataSet, paths: Sequence[Path]) -> list[str]:
    from splitfg_lab.data._text import splits_in

    return [split.name for split in splits_in(data, paths)] if isinstance(data, TextSet) else [""]


def _dispatch(job: _Job, into: Path) -> Built:
    data, paths, progress = job.data, job.paths, job.progress
    match data:
        case TableSet():
            from splitfg_lab.data._table_files import build_table

            return build_table(data, paths, into, progress)
        case ImageSet():
            from splitfg_lab.data._images import build_images

            return build_images(data, paths, into, progress)
        case TextSet():
            from splitfg_lab.data._text import build_split

            part = data.split(job.split)
            assert part is not None  # callers take splits from the data set itself
            return build_split(data, part, paths, into, functools.partial(_encoding, job.place), progress)
        case FileSet():
            from splitfg_lab.data._plain_files import build_files

            return build_files(data, paths, into, progress)
    raise DataError(f"cannot prepare a {type(data).__name__}: it must be a TableSet, ImageSet, TextSet or FileSet")


def how_to_get(data: DataSet) -> str:
    """Return instructions for getting a data set."""
    fetch = f"fetch it: splitfg data fetch {data.name}" if data.downloads else f"get it by hand: {data.by_hand}"
    return f"{fetch}\nor give files you have: splitfg data prepare {data.name} --from PATH"


def unsupported_files(data: DataSet, place: DataFolder) -> list[str]:
    """Return a sentence on every file in the data folder whose format splitfg does not read."""
    reason = data.unsupported.reason if data.unsupported else ""
    return [f"{path} is {reason}" for path in place.unsupported(data)]


def _missing(data: DataSet, split: str, place: DataFolder) -> DataError:
    what = f"{data.name} {split}".strip()
    looked = [f"no {place.root / pattern.replace('{split}', split or '*')}" for pattern in data.raw]
    unread = unsupported_files(data, place)
    return DataError(f"{what} is not in {place.root}", unread + looked, how_to_get(data))
