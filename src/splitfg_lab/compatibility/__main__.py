"""``python -m splitfg_lab.compatibility``: measure which models every estimator trains, and record it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from splitfg_lab.compatibility import CASES, Row, add_rows, measured_rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the chosen models, print a line for each, and add them to a file."""
    parser = argparse.ArgumentParser(prog="python -m splitfg_lab.compatibility", description=__doc__)
    parser.add_argument("--record", type=Path, help="JSON file to add the rows to; nothing is written without it")
    parser.add_argument("--library", action="append", help="measure models of this library alone; may be repeated")
    parser.add_argument("--name", help="measure models whose name contains this alone")
    given = parser.parse_args(arguments)
    chosen = [c for c in CASES if not given.library or c.library in given.library]
    chosen = [c for c in chosen if not given.name or given.name in c.name]
    missing = {c.library for c in chosen if find_spec(c.library) is None}
    for library in sorted(missing):
        print(f"{library} is not installed: its models are skipped", file=sys.stderr)
    done: list[Row] = []
    for row in measured_rows(c for c in chosen if c.library not in missing):
        done.append(row)
        print(_line(row), flush=True)
        if given.record is not None:
            add_rows(given.record, [row])


def _line(row: Row) -> str:
    cells = " ".join(f"{name}:{cell['status']}" for name, cell in row["cells"].items())
    return f"{row['library']:13} {row['name']:45} {cells}"


if __name__ == "__main__":
    main()
