"""From files somebody has to prepared data: by command, or on first use from what lies in the data folder."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from splitfg.errors import DataError, shorten
from splitfg_lab.data._catalogue_text import GPT2_BPE
from splitfg_lab.data._folder import DataFolder
from splitfg_lab.data._origin import replaced
from splitfg_lab.data._prepared import Built, Meta, open_checked, write_meta
from splitfg_lab.data._writing import OnProgress, alone_in, building, silent
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
    """Prepare a data set, replacing what was prepared before.

    Args:
        data: A name from the catalogue, or a data set of your own.
        source: A file, folder or archive you have; ``None`` takes what is recognised in the data folder.
        folder: The data folder; ``None`` for the default one.
        on_progress: Told what is being read.

    Returns:
        The prepared folders: one, or one per split found.

    Raises:
        DataError: Everything that is wrong with the source. What was prepared before is intact.
    """
    entry, place = find_dataset(data), DataFolder.at(folder)
    progress = on_progress or silent
    if source is not None:
        given = [Path(source).expanduser()]
        splits = _splits_in(entry, given)
        return [_build(entry, split, given, place, progress, replace=True, by_hand=True) for split in splits]
    found = {split: place.raw(entry, split) for split in splits_of(entry)}
    if not any(found.values()):
        raise _missing(entry, "", place)
    return [_build(entry, split, paths, place, progress, replace=True) for split, paths in found.items() if paths]


def ensure(data: DataSet, split: str, place: DataFolder) -> tuple[Path, Meta]:
    """A prepared folder, checked; prepared now, or again, if its raw files lie in the data folder and are new there.

    Raises:
        DataError: There is nothing to prepare it from, or something is damaged.

    Warns:
        PreparedAgainWarning: Raw files have been replaced by others since it was prepared.
    """
    prepared, raw = place.prepared(data, split), place.raw(data, split)
    if not prepared.is_dir():
        if not raw:
            raise _missing(data, split, place)
        _build(data, split, raw, place, silent, replace=False)
    meta = open_checked(prepared, data.name, split)
    if replaced(prepared, meta, raw, place):
        meta = _build_again(data, split, raw, place)
    return prepared, meta


def _build_again(data: DataSet, split: str, raw: Sequence[Path], place: DataFolder) -> Meta:
    """Prepare data from raw files that were replaced; of several processes that find this out, one does it."""
    prepared = place.prepared(data, split)
    with alone_in(prepared.parent):
        others = replaced(prepared, open_checked(prepared, data.name, split), raw, place)
        if others:
            warnings.warn(
                f"{shorten(others)} is not what {f'{data.name} {split}'.strip()} was prepared from: preparing it again",
                PreparedAgainWarning,
                stacklevel=4,
            )
            _build(data, split, raw, place, silent, replace=True)
        return open_checked(prepared, data.name, split)


def load_encoding(folder: Path | str | None = None) -> tiktoken.Encoding:
    """GPT-2's encoding from the files in the data folder, without network."""
    return _encoding(DataFolder.at(folder))


def _encoding(place: DataFolder) -> tiktoken.Encoding:
    from splitfg_lab.data._bpe import read_encoding

    prepared, _ = ensure(GPT2_BPE, "", place)
    return read_encoding(prepared)


def splits_of(data: DataSet) -> list[str]:
    """The splits that are prepared separately; one nameless split where there are none."""
    return [split.name for split in data.splits] if isinstance(data, TextSet) else [""]


def _splits_in(data: DataSet, paths: Sequence[Path]) -> list[str]:
    from splitfg_lab.data._text import splits_in

    return [split.name for split in splits_in(data, paths)] if isinstance(data, TextSet) else [""]


def _build(
    data: DataSet,
    split: str,
    paths: Sequence[Path],
    place: DataFolder,
    progress: OnProgress,
    *,
    replace: bool,
    by_hand: bool = False,
) -> Path:
    final = place.prepared(data, split)
    with building(final, replace=replace) as temporary:
        built = _dispatch(data, split, paths, temporary, place, progress)
        write_meta(temporary, data.name, split, built, () if by_hand else (place.root, place.work))
    return final


def _dispatch(
    data: DataSet, split: str, paths: Sequence[Path], into: Path, place: DataFolder, progress: OnProgress
) -> Built:
    match data:
        case TableSet():
            from splitfg_lab.data._table_files import build_table

            return build_table(data, paths, into, progress)
        case ImageSet():
            from splitfg_lab.data._images import build_images

            return build_images(data, paths, into, progress)
        case TextSet():
            from splitfg_lab.data._text import build_split

            part = data.split(split)
            assert part is not None  # callers take splits from the data set itself
            return build_split(data, part, paths, into, functools.partial(_encoding, place), progress)
        case FileSet():
            from splitfg_lab.data._plain_files import build_files

            return build_files(data, paths, into, progress)
    raise DataError(f"{type(data).__name__} cannot be prepared")


def how_to_get(data: DataSet) -> str:
    """What to do where a data set is not at hand."""
    fetch = f"fetch it: splitfg data fetch {data.name}" if data.downloads else f"get it by hand: {data.by_hand}"
    return f"{fetch}\nor give files you have: splitfg data prepare {data.name} --from PATH"


def _missing(data: DataSet, split: str, place: DataFolder) -> DataError:
    what = f"{data.name} {split}".strip()
    looked = [str(place.root / pattern.replace("{split}", split or "*")) for pattern in data.raw]
    return DataError(f"{what} is not in {place.root}", [f"looked for {path}" for path in looked], how_to_get(data))
