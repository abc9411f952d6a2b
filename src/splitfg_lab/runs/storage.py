"""Run files written as a whole, and JSON that is really JSON."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from splitfg_lab.files import flock, replacing
from splitfg_lab.runs._errors import RunError


def write_atomic(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` as a whole.

    Raises:
        RunError: It could not be written (a full disk, no permission); the file is as it was.
    """
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise unwritable(path, error) from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are not there yet.

    Raises:
        RunError: It cannot be made (no permission, a file of that name).
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Keep every other process that asks for it out of a folder; the lock goes with the process, however it ends.

    Yields whether the lock was got: always with ``wait``, which waits for it.

    Raises:
        RunError: The folder cannot be written to.
    """
    path = folder / ".lock"
    try:
        file = path.open("ab")
    except OSError as error:
        raise unwritable(path, error) from error
    with file:
        yield flock(file.fileno(), wait=wait)


def unwritable(path: Path, error: OSError) -> RunError:
    """The error for a file that could not be written."""
    return RunError(f"cannot write {path}: {error.strerror or error}. What was there before is intact.")


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by a JSON value, indented for people and for diffs."""
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """The JSON value in a file.

    Raises:
        RunError: The file cannot be read or is not JSON.
    """
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RunError(f"{path} is not valid JSON ({error}): it was damaged, or something else wrote it") from error


def parse_json(data: bytes | str) -> Any:
    """Parse strict JSON: no NaN, no Infinity, nothing that would overflow to it.

    Raises:
        ValueError: It is not JSON, not UTF-8, or nested beyond reason.
    """
    try:
        return json.loads(data, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} does not fit a float")
    return value
