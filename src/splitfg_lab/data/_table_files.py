"""Tables (parquet, csv, arff) to one typed parquet file: numbers as floats, categories as strings, target last."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from splitfg.errors import DataError, shorten
from splitfg_lab.data._arff import read_arff
from splitfg_lab.data._prepared import Built, Meta, Stored
from splitfg_lab.data._source import reading
from splitfg_lab.data._writing import OnProgress, digest_of
from splitfg_lab.data.specs import TableSet

TABLE = "table.parquet"
_MISSING = ("?", "")
_NO_NUMBERS = ("NA", "N/A", "None", "null", "NULL")
"""Words for a missing number; a category may well be called so."""


def build_table(data: TableSet, paths: Sequence[Path], folder: Path, progress: OnProgress) -> Built:
    """Write the normalised table into an empty folder.

    Raises:
        DataError: The file cannot be read or is not this table; everything wrong is listed.
    """
    if len(paths) != 1 or not paths[0].is_file():
        raise DataError(f"{shorten(paths) or 'nothing'} is not one table file (parquet, csv or arff)")
    frame = normalise(data, read_table_file(paths[0]), paths[0].name)
    path = folder / TABLE
    frame.to_parquet(path, index=False)
    size = path.stat().st_size
    progress(path.name, size, size)
    stored = Stored("parquet", (len(frame), frame.shape[1]), size, digest_of(path))
    counts = {"rows": len(frame), "features": frame.shape[1] - 1}
    return Built({TABLE: stored}, counts, _note(data, len(frame)), paths)


def read_table_file(path: Path) -> pd.DataFrame:
    """Any supported table file as a frame."""
    suffix = path.suffix.lower()
    if suffix not in (".parquet", ".pq", ".csv", ".arff"):
        raise DataError(f"{path.name}: tables are read from parquet, csv or arff, not {suffix or 'this'}")
    with reading(path):
        try:
            if suffix == ".arff":
                return read_arff(path)
            if suffix == ".csv":
                return _read_csv(path)
            return pd.read_parquet(path)
        except DataError:
            raise
        except (ValueError, NotImplementedError) as error:  # what pyarrow and pandas raise for malformed files
            raise DataError(f"{path} is no {suffix[1:]} file, or it is damaged: {error}") from error


def _read_csv(path: Path) -> pd.DataFrame:
    """A csv file with a name for every column; rows that all end with a comma hold no column more."""
    missing = ["", "?", "nan", "NaN"]  # "NA" or "None" may well be a category
    with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
        try:
            # with another index_col, pandas takes a first column too many for the names of the rows
            return pd.read_csv(
                path, index_col=False, skipinitialspace=True, keep_default_na=False, na_values=missing, low_memory=False
            )
        except pd.errors.ParserWarning as warning:
            raise DataError(
                f"{path}: its rows hold more values than its header names columns",
                hint="name every column in the header, or remove the values without a name",
            ) from warning


def normalise(data: TableSet, frame: pd.DataFrame, source: str) -> pd.DataFrame:
    """The features in their order, then the target; categories as strings, everything else as floats.

    Raises:
        DataError: Lists everything in which the frame is not this table.
    """
    frame = frame.rename(columns=str)
    by_key = {_key(column): column for column in frame.columns}
    target = next((by_key[_key(name)] for name in data.targets if _key(name) in by_key), None)
    dropped = {by_key.get(_key(name)) for name in data.drop} | {target}
    features = [column for column in frame.columns if column not in dropped]
    problems = _shape_problems(data, frame, target, features)
    if target is None or problems:
        raise DataError(f"{source} is not the table {data.name}", problems)
    categorical = {_key(name) for name in data.categorical}
    columns = {c: _column(frame[c], _key(c) in categorical, problems) for c in features}
    columns[target] = _target(data, frame[target], problems)
    if problems:
        raise DataError(f"{source} is not the table {data.name}", problems)
    return pd.DataFrame(columns)


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _shape_problems(data: TableSet, frame: pd.DataFrame, target: str | None, features: list[str]) -> list[str]:
    problems = []
    keys = {_key(column) for column in frame.columns}
    lacking = [name for name in data.categorical if _key(name) not in keys]
    if frame.columns.has_duplicates:
        problems.append("two columns have the same name")
    if target is None:
        problems.append(f"no target column ({' or '.join(data.targets)}) among {shorten(list(frame.columns))}")
    elif data.features is not None and len(features) != data.features:
        problems.append(f"{len(features)} features; {data.features} belong there")
    if lacking:
        problems.append(f"no column {shorten(lacking)}")
    if len(frame) == 0:
        problems.append("no rows")
    if data.rows is not None and len(frame) > data.rows:
        problems.append(f"{len(frame):,} rows; the complete set has {data.rows:,}")
    return problems


def _column(column: pd.Series[Any], categorical: bool, problems: list[str]) -> pd.Series[Any]:
    values, present = column, column.notna()
    if not is_numeric_dtype(column.dtype):
        values = column.astype("object")
        present &= ~values.isin(_MISSING if categorical else (*_MISSING, *_NO_NUMBERS))
    if categorical:
        text = [_label(v) if there else None for v, there in zip(values, present, strict=True)]
        return pd.Series(text, dtype="object", index=column.index)
    numbers = pd.to_numeric(values.where(present), errors="coerce").astype("float64")
    words = values[numbers.isna() & present]
    infinite = int(np.isinf(numbers).sum())
    if len(words):
        problems.append(f"{column.name} must be numeric; it holds {shorten(list(words.unique()), 3)}")
    if infinite:
        problems.append(f"{column.name} holds {infinite:,} infinite values")
    return _narrowed(numbers)


def _narrowed(numbers: pd.Series[Any]) -> pd.Series[Any]:
    """As float32 where that loses nothing, so that a column's type does not depend on the file's format."""
    with np.errstate(over="ignore"):
        narrow = numbers.astype("float32")
    return narrow if narrow.astype("float64").equals(numbers) else numbers


def _target(data: TableSet, column: pd.Series[Any], problems: list[str]) -> pd.Series[Any]:
    regression = data.task == "regression"
    values = _column(column, not regression, problems)
    missing = int(values.isna().sum())
    if missing:
        problems.append(f"the target {column.name} is missing in {missing:,} rows")
    if regression:
        return values.astype("float64")
    found = sorted(values.dropna().unique())
    if data.classes is not None and len(found) != data.classes:
        problems.append(f"{len(found)} classes ({shorten(found)}); {data.classes} belong there")
    return values


def _label(value: object) -> str:
    """A category as text; whole numbers as ``3``, whether the file says 3 or 3.0."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()


def _note(data: TableSet, rows: int) -> str:
    return f"subset: {rows:,} of {data.rows:,} rows" if data.rows is not None and rows < data.rows else ""


def recount_table(data: TableSet, folder: Path, meta: Meta) -> list[str]:
    """What a fresh count of a prepared table finds wrong."""
    try:
        frame = normalise(data, pd.read_parquet(folder / TABLE), TABLE)
    except DataError as error:
        return list(error.problems)
    except (ValueError, OSError) as error:
        return [f"{folder / TABLE} cannot be read: {error}"]
    found = {"rows": len(frame), "features": frame.shape[1] - 1}
    return [f"{found[k]:,} {k}; {n:,} were prepared" for k, n in meta.counts.items() if found.get(k) != n]


def table_digest(folder: Path) -> str:
    """Hash the names and values of a prepared table, column by column.

    Parquet files of equal tables differ between versions of pyarrow, so the digest covers the values instead.
    """
    frame = pd.read_parquet(folder / TABLE)
    digest = hashlib.sha256()
    for name in frame.columns:
        digest.update(json.dumps(str(name)).encode())
        digest.update(_column_bytes(frame[name]))
    return digest.hexdigest()


def _column_bytes(column: pd.Series[Any]) -> bytes:
    """Encode numbers as little-endian float64 with one NaN, and categories as a JSON list with ``null``."""
    if is_numeric_dtype(column.dtype):
        numbers = column.to_numpy(dtype="<f8", copy=True)
        numbers[np.isnan(numbers)] = np.nan
        return numbers.tobytes()
    values = column.astype("object")
    return json.dumps(values.where(values.notna(), None).tolist()).encode()
