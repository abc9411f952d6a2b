"""A digest of prepared data, for checkpoints and reports."""

from __future__ import annotations

import hashlib
from pathlib import Path

from splitfg.errors import DataError
from splitfg_lab.data._folder import DataFolder
from splitfg_lab.data._prepare import ensure, splits_of
from splitfg_lab.data._prepared import Meta
from splitfg_lab.data.catalogue import find_dataset
from splitfg_lab.data.specs import DataSet, TableSet


def data_digest(data: str | DataSet, split: str = "", folder: Path | str | None = None) -> str:
    """Compute a digest of the values that the loaders return.

    Two folders have the same digest exactly if their loaders return the same values in the same order. The digest does
    not depend on the format of the raw files, on compression, on the version of pyarrow or on the date. As the loaders
    do, this prepares the data on first use.

    Args:
        data: A name from the catalogue, or your own data set.
        split: The split of a corpus; other data sets have none.
        folder: The data folder; ``None`` for the default one.

    Returns:
        ``sha256:`` and 64 hexadecimal digits.

    Raises:
        DataError: The data is missing or damaged, or has no such split.

    Example:
        ``data_digest("cifar10")`` or ``data_digest("wikitext103", "valid")``.
    """
    entry = find_dataset(data)
    if split not in splits_of(entry):
        splits = ", ".join(filter(None, splits_of(entry)))
        cure = f"choose one of {splits}" if splits else "leave the split out"
        raise DataError(f"{entry.name} has no split {split!r}: {cure}")
    prepared, meta = ensure(entry, split, DataFolder.at(folder))
    if isinstance(entry, TableSet):
        from splitfg_lab.data._table_files import table_digest

        return f"sha256:{table_digest(prepared)}"
    return f"sha256:{_files_digest(meta)}"


def _files_digest(meta: Meta) -> str:
    """Combine the recorded digests of plain arrays and files, in the order of their names."""
    lines = [f"{name} {s.dtype} {list(s.shape)} {s.sha256}" for name, s in sorted(meta.files.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
