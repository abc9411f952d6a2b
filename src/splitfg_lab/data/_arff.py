"""A small reader of dense ARFF, the format of OpenML's older files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pandas as pd

from splitfg.errors import DataError, shorten

_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_ATTRIBUTE = re.compile(rf"@attribute\s+({_QUOTED}|\S+)\s+(.+)", re.IGNORECASE)
_VALUE = re.compile(rf"(?:^|,)\s*({_QUOTED}|[^,]*)\s*(?=,|$)")
_NUMERIC = ("numeric", "real", "integer")
_RANGE = re.compile(r"\s*\[[^\]]*\]$")


@dataclass(frozen=True)
class _Attribute:
    name: str
    numeric: bool
    values: frozenset[str] | None


def read_arff(path: Path) -> pd.DataFrame:
    """A dense ARFF file as a frame: numbers as floats, nominal and string attributes as strings, ``?`` as missing.

    A byte-order mark is passed over, and so is the range of a numeric attribute (``numeric [0, 1]``).

    Raises:
        DataError: It is not ARFF, is sparse, or rows do not fit the header.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            attributes = _header(path, file)
            rows = list(_rows(path, file, len(attributes)))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    columns = [_column(path, a, [row[i] for row in rows]) for i, a in enumerate(attributes)]
    frame = pd.concat(columns, axis=1) if columns else pd.DataFrame()
    frame.columns = pd.Index([attribute.name for attribute in attributes])
    return frame


def _header(path: Path, file: IO[str]) -> list[_Attribute]:
    attributes: list[_Attribute] = []
    for number, line in enumerate(iter(file.readline, ""), start=1):
        text = line.strip()
        if text.lower().startswith("@data"):
            return attributes
        if text.lower().startswith("@attribute"):
            attributes.append(_attribute(path, number, text))
        elif text and not text.startswith("%") and not text.lower().startswith("@relation"):
            raise DataError(f"{path}, line {number}: not an ARFF header: {text[:60]!r}")
    raise DataError(f"{path} has no @data section: it is not ARFF, or it is truncated")


def _attribute(path: Path, number: int, text: str) -> _Attribute:
    match = _ATTRIBUTE.match(text)
    if match is None:
        raise DataError(f"{path}, line {number}: cannot read the attribute {text[:60]!r}")
    name, kind = _unquote(match[1]), match[2].strip()
    if kind.startswith("{"):
        values = _split(kind.strip("{} \t"))
        return _Attribute(name, False, frozenset(value for value in values if value is not None))
    if _RANGE.sub("", kind).lower() in _NUMERIC:
        return _Attribute(name, True, None)
    if kind.lower() != "string":
        raise DataError(f"{path}, line {number}: attributes of type {kind!r} are not supported")
    return _Attribute(name, False, None)


def _rows(path: Path, file: IO[str], width: int) -> Iterator[list[str | None]]:
    for number, line in enumerate(iter(file.readline, ""), start=1):
        text = line.strip()
        if not text or text.startswith("%"):
            continue
        if text.startswith("{"):
            raise DataError(f"{path} is sparse ARFF, which is not supported", hint="convert it to csv or parquet")
        row = _split(text)
        if len(row) != width:
            raise DataError(f"{path}, data line {number}: {len(row)} values for {width} attributes")
        yield row


def _split(text: str) -> list[str | None]:
    """Values of one line; an unquoted ``?`` is missing."""
    if "'" not in text and '"' not in text:
        return [None if (value := part.strip()) == "?" else value for part in text.split(",")]
    return [_value(match[1].strip()) for match in _VALUE.finditer(text)]


def _value(text: str) -> str | None:
    return None if text == "?" else _unquote(text)


def _unquote(text: str) -> str:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if quoted else text


def _column(path: Path, attribute: _Attribute, values: list[str | None]) -> pd.Series[Any]:
    if not attribute.numeric:
        allowed = attribute.values
        unknown = sorted({v for v in values if v is not None and allowed is not None and v not in allowed})
        if unknown:
            raise DataError(f"{path}: {attribute.name} holds undeclared values: {shorten(unknown)}")
        return pd.Series(values, dtype="object")
    try:
        return pd.Series([float("nan") if v is None else float(v) for v in values], dtype="float64")
    except ValueError as error:
        raise DataError(f"{path}: {attribute.name} is declared numeric: {error}") from error
