"""Loaders for tables, images and tokens. Prepared data is memory-mapped and checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from splitfg.errors import DataError
from splitfg_lab.data._folder import DataFolder
from splitfg_lab.data._prepare import ensure, splits_of
from splitfg_lab.data._prepared import open_array
from splitfg_lab.data.catalogue import find_dataset
from splitfg_lab.data.specs import DataSet, ImageSet, TableSet, Task, TextSet

if TYPE_CHECKING:
    import pandas as pd

Kind = TypeVar("Kind", bound=DataSet)


@dataclass(frozen=True)
class Table:
    """A table ready for folds and encoders.

    Attributes:
        name: Name of the data set.
        task: Kind of prediction.
        features: Numeric columns as floats (missing: NaN), categories as strings (missing: ``None``).
        target: Indices (int64) into ``classes``, or values (float64).
        categorical: Names of the categorical columns.
        classes: Labels of the classes, in order; empty for regression.
        note: A note for results tables, for example that rows are missing.
        expected_rows: Rows of the complete set; ``None`` if any number is accepted.
    """

    name: str
    task: Task
    features: pd.DataFrame
    target: NDArray[Any]
    categorical: tuple[str, ...]
    classes: tuple[str, ...]
    note: str
    expected_rows: int | None = None

    @property
    def rows(self) -> int:
        """Number of rows. Do not compare results with those on another number of rows."""
        return len(self.target)

    @property
    def is_subset(self) -> bool:
        """Whether rows of the complete set are missing."""
        return self.expected_rows is not None and self.rows < self.expected_rows


@dataclass(frozen=True)
class Images:
    """Images and labels.

    Attributes:
        name: Name of the data set.
        train_x: Training images (N, 3, 32, 32), uint8, memory-mapped and read-only.
        train_y: Training labels (N,), int64.
        test_x: Test images, like ``train_x``.
        test_y: Test labels, like ``train_y``.
        classes: Number of classes.
        note: A note for results tables; may be empty.
    """

    name: str
    train_x: NDArray[np.uint8]
    train_y: NDArray[np.int64]
    test_x: NDArray[np.uint8]
    test_y: NDArray[np.int64]
    classes: int
    note: str


def load_table(data: str | TableSet, folder: Path | str | None = None) -> Table:
    """Load a table; prepare it on first use from a file in the data folder.

    Raises:
        DataError: The data is missing or damaged, or ``data`` is not a table.
    """
    import pandas as pd

    from splitfg_lab.data._table_files import TABLE

    entry = _of_kind(data, TableSet)
    prepared, meta = ensure(entry, "", DataFolder.at(folder))
    frame = pd.read_parquet(prepared / TABLE)
    target = frame.columns[-1]
    features = frame.drop(columns=target)
    categorical = tuple(c for c in features.columns if not pd.api.types.is_numeric_dtype(features[c].dtype))
    for column in categorical:
        values = features[column].astype("object")
        features[column] = values.where(values.notna(), None).astype("object")
    codes, classes = _encode(frame[target], entry.task)
    return Table(entry.name, entry.task, features, codes, categorical, classes, meta.note, entry.rows)


def _encode(column: pd.Series[Any], task: Task) -> tuple[NDArray[Any], tuple[str, ...]]:
    if task == "regression":
        return column.to_numpy(dtype=np.float64), ()
    classes = sorted(column.unique(), key=lambda label: (len(label), label) if label.isdigit() else (0, label))
    numbers = {label: number for number, label in enumerate(classes)}
    return column.map(numbers).to_numpy(dtype=np.int64), tuple(classes)


def load_images(data: str | ImageSet, folder: Path | str | None = None) -> Images:
    """Load an image set; prepare it on first use from files in the data folder.

    Raises:
        DataError: The data is missing or damaged, or ``data`` is not an image set.
    """
    entry = _of_kind(data, ImageSet)
    prepared, meta = ensure(entry, "", DataFolder.at(folder))
    x = {split: open_array(prepared, meta, f"{split}_x.u8") for split in ("train", "test")}
    y = {split: open_array(prepared, meta, f"{split}_y.u8").astype(np.int64) for split in ("train", "test")}
    return Images(entry.name, x["train"], y["train"], x["test"], y["test"], entry.classes, meta.note)


def load_tokens(data: str | TextSet, split: str, folder: Path | str | None = None) -> NDArray[np.uint16]:
    """Memory-map the tokens of one split (uint16, read-only); prepare them on first use.

    Raises:
        DataError: The data is missing or damaged, or ``data`` is not a corpus with this split.
    """
    from splitfg_lab.data._text import TOKENS

    entry = _of_kind(data, TextSet)
    if entry.split(split) is None:
        raise DataError(f"{entry.name} has no split {split!r}; it has {', '.join(splits_of(entry))}")
    prepared, meta = ensure(entry, split, DataFolder.at(folder))
    return open_array(prepared, meta, TOKENS)


def _of_kind(data: str | DataSet, kind: type[Kind]) -> Kind:
    entry = find_dataset(data)
    if not isinstance(entry, kind):
        raise DataError(f"{entry.name} ({entry.title}) is a {type(entry).__name__}; expected a {kind.__name__}")
    return entry
