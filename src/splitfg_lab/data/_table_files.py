"""Tables (parquet, csv) to one typed parquet file: numbers as floats, categories as strings, target last."""

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
from splitfg_lab.data._prepared import Built, Meta, Stored
from splitfg_lab.data._source import reading
from splitfg_lab.data._writing import OnProgress, digest_of
from splitfg_lab.data.specs import TableSet

TABLE = "table.parquet"
_MISSING = ("?", "")
_NO_NUMBERS = ("NA", "N/A", "None", "null", "NULL")
"""Words for a missing number; in a categorical column they are values."""


def build_table(data: TableSet, paths: Sequence[Path], folder: Path, progress: OnProgress) -> Built:
    """Write the normalised table into an empty folder.

    Raises:
        DataError: The file cannot be read, or is not this table. Lists everything wrong.
    """
    if len(paths) != 1 or not paths[0].is_file():
        raise DataError(f"{shorten(paths) or 'nothing'} is not one table file (parquet or csv)")
    if paths[0].suffix.lower() == ".arff":
        raise _arff_error(data, paths[0])
    frame = normalise(data, read_table_file(paths[0]), paths[0].name)
    path = folder / TABLE
    frame.to_parquet(path, index=False)
    size = path.stat().st_size
    progress(path.name, size, size)
    stored = Stored("parquet", (len(frame), frame.shape[1]), size, digest_of(path))
    counts = {"rows": len(frame), "features": frame.shape[1] - 1}
    return Built({TABLE: stored}, counts, _note(data, len(frame)), paths)


def _arff_error(data: TableSet, path: Path) -> DataError:
    reason = data.unsupported.reason if data.unsupported else "an ARFF file, which splitfg does not read"
    fetch = f"fetch it (splitfg data fetch {data.name}), or " if data.downloads else ""
    return DataError(f"{path} is {reason}", hint=f"{fetch}convert the file to parquet or csv")


def read_table_file(path: Path) -> pd.DataFrame:
    """Read a parquet or csv file.

    Raises:
        DataError: The file is damaged or has another format.
    """
    suffix = path.suffix.lower()
    if suffix not in (".parquet", ".pq", ".csv"):
        raise DataError(f"{path} must be a parquet or csv file", hint="convert it, and name it .parquet or .csv")
    with reading(path):
        try:
            return _read_csv(path) if suffix == ".csv" else pd.read_parquet(path)
        except DataError:
            raise
        except (ValueError, NotImplementedError) as error:  # pyarrow and pandas raise these for malformed files
            raise DataError(f"{path} is not a {suffix[1:]} file, or it is damaged: {error}") from error


def _read_csv(path: Path) -> pd.DataFrame:
    """Read a csv file with a header. A comma at the end of every row adds no column."""
    missing = ["", "?", "nan", "NaN"]  # "NA" or "None" may be a category
    with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
        try:
            # with another index_col, pandas takes a surplus first column for row names
            return pd.read_csv(
                path, index_col=False, skipinitialspace=True, keep_default_na=False, na_values=missing, low_memory=False
            )
        except pd.errors.ParserWarning as warning:
            raise DataError(
                f"{path}: its rows have more values than its header has names",
                hint="name every column in the header, or remove the surplus values",
            ) from warning


def normalise(data: TableSet, frame: pd.DataFrame, source: str) -> pd.DataFrame:
    """Return the features in their order, then the target; categories as strings, other columns as floats.

    Raises:
        DataError: Lists every difference between the frame and this table.
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
        problems.append(f"{len(features)} features; expected {data.features}")
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
        problems.append(f"{column.name} must be numeric; it contains {shorten(list(words.unique()), 3)}")
    if infinite:
        problems.append(f"{column.name} has {infinite:,} infinite values")
    return _narrowed(numbers)


def _narrowed(numbers: pd.Series[Any]) -> pd.Series[Any]:
    """Convert to float32 if that is exact, so that a column's type does not depend on the file format."""
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
        problems.append(f"{len(found)} classes ({shorten(found)}); expected {data.classes}")
    return values


def _label(value: object) -> str:
    """Convert a category to text; 3 and 3.0 both become ``3``."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()


def _note(data: TableSet, rows: int) -> str:
    return f"subset: {rows:,} of {data.rows:,} rows" if data.rows is not None and rows < data.rows else ""


def recount_table(data: TableSet, folder: Path, meta: Meta) -> list[str]:
    """Count the rows and columns of a prepared table again, and return every difference."""
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
