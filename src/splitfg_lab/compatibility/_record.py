"""Record measurements in a JSON file, one row for every model class."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

from splitfg_lab.compatibility._case import Case
from splitfg_lab.compatibility._measure import EXACT, SEED, TANGENTS, UPDATES, Cell, measure
from splitfg_lab.files import replacing

Row: TypeAlias = Mapping[str, Any]
"""A model class: library, name, cells by estimator, and what the measurement rests on."""

_PACKAGES = ("splitfg", "torch", "transformers", "peft", "timm")


def measured_rows(cases: Iterable[Case]) -> Iterator[Row]:
    """Measure every estimator on every model, and yield one row after another."""
    origin = _origin()
    for case in cases:
        cells = {name: _plain(cell) for name, cell in measure(case).items()}
        yield {"library": case.library, "name": case.name, "cells": cells, "origin": origin}


def read_rows(path: Path) -> list[Row]:
    """Return the recorded rows; empty without a file."""
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return rows


def add_rows(path: Path, new: Iterable[Row], order: Sequence[Case] = ()) -> None:
    """Write rows to a file, in place of earlier ones of the same model; others stay.

    Args:
        path: The file.
        new: The rows.
        order: Model classes whose rows come first, in this order.
    """
    rows = {(row["library"], row["name"]): row for row in (*read_rows(path), *new)}
    places = {(case.library, case.name): place for place, case in enumerate(order)}
    ordered = sorted(rows, key=lambda key: places.get(key, len(places)))
    settings = {"exact": EXACT, "seed": SEED, "tangents": TANGENTS, "updates": UPDATES}
    with replacing(path) as temporary:
        temporary.write_text(
            json.dumps({"settings": settings, "rows": [rows[key] for key in ordered]}, indent=1) + "\n", "utf-8"
        )


def _plain(cell: Cell) -> dict[str, Any]:
    """Return a cell without empty fields, rounded."""
    given = {key: value for key, value in asdict(cell).items() if value not in (None, "", 0.0)}
    given.pop("seconds", None)
    for key in ("error", "double"):
        if getattr(cell, key) is not None:
            given[key] = float(f"{getattr(cell, key):.2g}")
    return given


def _origin() -> dict[str, Any]:
    return {
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": "cpu",
        "dtype": "float32",
        "revision": _revision(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def _revision() -> str | None:
    with suppress(ImportError):  # the laboratory's extras may be missing
        from splitfg_lab.runs.environment import source_revision

        found = source_revision()
        return None if found is None else found.commit + ("+changes" if found.dirty else "")
    return None
