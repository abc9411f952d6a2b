"""``python -m splitfg_lab.compatibility``: measure which models every estimator trains, and record it.

Rows that need a library of another machine are measured there into a file of their own, and merged here::

    PYTHONPATH=src python -m splitfg_lab.compatibility --library timm --record timm.json
    python -m splitfg_lab.compatibility --merge timm.json --record benchmarks/compatibility.json
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from splitfg_lab.compatibility import CASES, Row, add_rows, measured_rows, read_rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the chosen models, print a line for each, and add them to a file."""
    parser = argparse.ArgumentParser(
        prog="python -m splitfg_lab.compatibility", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--record", type=Path, help="JSON file to add the rows to; nothing is written without it")
    parser.add_argument("--merge", type=Path, help="measure nothing, and add the rows of this file to --record")
    parser.add_argument("--library", action="append", help="measure models of this library alone; may be repeated")
    parser.add_argument("--name", help="measure models whose name contains this alone")
    given = parser.parse_args(arguments)
    if given.merge is not None:
        _merge(parser, given.merge, given.record)
        return
    chosen = [c for c in CASES if not given.library or c.library in given.library]
    chosen = [c for c in chosen if not given.name or given.name in c.name]
    missing = {c.library for c in chosen if find_spec(c.library) is None}
    for library in sorted(missing):
        print(f"{library} is not installed: its models are skipped", file=sys.stderr)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the models are so small that threads cost more than they gain
    for row in measured_rows(c for c in chosen if c.library not in missing):
        print(_line(row), flush=True)
        if given.record is not None:
            add_rows(given.record, [row])


def _merge(parser: argparse.ArgumentParser, source: Path, record: Path | None) -> None:
    """Add the rows of one file to another, in place of earlier ones of the same models."""
    if record is None:
        parser.error("--merge needs --record, the file to add the rows to")
    if not source.exists():
        parser.error(f"{source} does not exist: measure it with --record {source}")
    rows = read_rows(source)
    add_rows(record, rows)
    print(f"{len(rows)} rows of {source} are now in {record}")


def _line(row: Row) -> str:
    cells = " ".join(f"{name}:{cell['status']}" for name, cell in row["cells"].items())
    return f"{row['library']:13} {row['name']:45} {cells}"


if __name__ == "__main__":
    main()
