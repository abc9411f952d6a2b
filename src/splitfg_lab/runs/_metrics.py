"""``metrics.jsonl``: one line per logged step."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path

from splitfg_lab.runs._errors import RunError
from splitfg_lab.runs.config import is_finite_number
from splitfg_lab.runs.storage import parse_json, unwritable


class MetricsWriter:
    """Append lines to a metrics file, after truncating it to ``keep`` bytes.

    A checkpoint stores the length of the file. Truncating to it makes the file of a resumed run equal to that of an
    uninterrupted one.
    """

    def __init__(self, path: Path, *, keep: int) -> None:
        self._path = path
        # unbuffered, so that a full disk shows at the line it cuts off and not when the file is closed
        self._file = path.open("ab", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        if size < keep:
            self._file.close()
            raise RunError(
                f"{path} has lost lines: {size} bytes, but {keep} when the checkpoint was written. Restore the file,"
                " or delete the run folder to start over."
            )
        self._file.truncate(keep)
        self._file.seek(keep)  # truncating does not move the position, which sync() reports

    def append(self, values: Mapping[str, float]) -> None:
        """Write one line.

        Raises:
            RunError: The disk is full.
        """
        try:
            line = json.dumps(dict(values), allow_nan=False).encode() + b"\n"
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise unwritable(self._path, error) from error

    def sync(self) -> int:
        """Flush all lines to disk and return the length of the file."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> tuple[dict[str, float], ...]:
    """Read the lines of a metrics file; none if there is no such file. Skips an incomplete last line.

    Raises:
        RunError: The file cannot be read, or a line is not an object of numbers with a ``step``.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    return tuple(_parse_line(line, f"{path}, line {i}") for i, line in enumerate(lines[:-1], start=1))


def _parse_line(line: bytes, where: str) -> dict[str, float]:
    try:
        values = parse_json(line)
    except ValueError as error:
        raise RunError(f"{where}: not JSON ({error})") from error
    if not isinstance(values, dict) or not all(map(is_finite_number, values.values())):
        raise RunError(f"{where}: not an object of numbers")
    if "step" not in values:
        raise RunError(f"{where}: no step")
    return values
