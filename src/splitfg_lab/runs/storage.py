"""Atomic writes, locks, and strict JSON for the files of runs."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from splitfg_lab.files import locked as file_locked, replacing
from splitfg_lab.runs._errors import RunError


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the contents of ``path`` atomically.

    Raises:
        RunError: The file cannot be written (a full disk, no permission) and is as it was.
    """
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise unwritable(path, error) from error


def make_folder(path: Path) -> None:
    """Create a folder and its parents if they do not exist.

    Raises:
        RunError: It cannot be created (no permission, a file of that name).
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of a folder; the system releases it if the process dies.

    Yields whether this process holds the lock: always with ``wait``, which waits for other processes to release it.

    Raises:
        RunError: The lock file cannot be written.
    """
    path = folder / ".lock"
    with contextlib.ExitStack() as held:
        try:
            got = held.enter_context(file_locked(path, wait=wait))
        except OSError as error:
            raise unwritable(path, error) from error
        yield got


def unwritable(path: Path, error: OSError) -> RunError:
    """Return the error for a file that cannot be written."""
    return RunError(f"cannot write {path}: {error.strerror or error}. Earlier contents are intact.")


def write_json(path: Path, value: Any) -> None:
    """Replace the contents of ``path`` by indented JSON."""
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        RunError: The file cannot be read or is not JSON.
    """
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RunError(f"{path} is not valid JSON ({error}): it is damaged, or another program wrote it") from error


def parse_json(data: bytes | str) -> Any:
    """Parse strict JSON: no NaN, no Infinity, no number that overflows to it.

    Raises:
        ValueError: The text is not JSON, not UTF-8, or nested too deeply.
    """
    try:
        return json.loads(data, parse_constant=_reject_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} does not fit a float")
    return value
