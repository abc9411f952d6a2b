"""``python -m splitfg_lab.compatibility``: measure which models every estimator trains, and record it.

All models run on the CPU. Each row is written as soon as it is measured, so that ``--skip`` with the same file resumes
an interrupted run. Rows that need a library of another machine are measured there into a file of their own, and merged
here::

    PYTHONPATH=src python -m splitfg_lab.compatibility --library timm --workers 12 --record timm.json --skip timm.json
    python -m splitfg_lab.compatibility --merge timm.json --record benchmarks/compatibility.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from pathlib import Path

from splitfg_lab.compatibility import CASES, Case, Row, add_rows, read_rows
from splitfg_lab.compatibility._workers import rows_in_parallel


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the chosen models, print a line for each, and add them to a file."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.merge is not None:
        _merge(parser, given.merge, given.record)
        return
    if given.workers < 1:
        parser.error(f"--workers must be at least 1, got {given.workers}")
    chosen = _installed(_chosen(parser, given))
    print(f"{len(chosen)} models to measure", file=sys.stderr)
    failed = 0
    try:
        for row in rows_in_parallel(chosen, given.workers):
            print(_line(row), flush=True)
            failed += _report_failures(row)
            if given.record is not None:
                add_rows(given.record, [row], CASES)
    except BrokenProcessPool:
        sys.exit("a process died: run the same command again with --skip of the record, and with fewer --workers")
    if failed:
        sys.exit(f"{failed} cells failed")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m splitfg_lab.compatibility", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--record", type=Path, help="JSON file to add the rows to; nothing is written without it")
    parser.add_argument("--merge", type=Path, help="measure nothing, and add the rows of this file to --record")
    parser.add_argument("--library", action="append", help="measure models of this library alone; may be repeated")
    parser.add_argument("--name", help="measure models whose name contains this alone")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure the models of exactly these names alone")
    parser.add_argument(
        "--skip",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="leave out models with a row in this file, if it exists; may be repeated",
    )
    parser.add_argument("--workers", type=int, default=1, help="number of processes, of one thread each (default 1)")
    return parser


def _chosen(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[Case]:
    """Return the models that the options choose."""
    unknown = sorted(set(given.only or ()) - {case.name for case in CASES})
    if unknown:
        parser.error(f"--only: there is no model {', '.join(unknown)}")
    recorded = {(row["library"], row["name"]) for path in given.skip for row in read_rows(path)}
    chosen = [c for c in CASES if not given.library or c.library in given.library]
    chosen = [c for c in chosen if not given.name or given.name in c.name]
    chosen = [c for c in chosen if not given.only or c.name in given.only]
    return [c for c in chosen if (c.library, c.name) not in recorded]


def _installed(cases: Sequence[Case]) -> list[Case]:
    missing = {c.library for c in cases if find_spec(c.library) is None}
    for library in sorted(missing):
        print(f"{library} is not installed: its models are skipped", file=sys.stderr)
    return [c for c in cases if c.library not in missing]


def _report_failures(row: Row) -> int:
    """Print the reasons of cells without a result other than a ``SplitError``, and return how many there are."""
    failed = {name: cell["reason"] for name, cell in row["cells"].items() if cell["status"] == "failed"}
    for name, reason in failed.items():
        print(f"{row['name']}, {name}: {reason}", file=sys.stderr)
    return len(failed)


def _merge(parser: argparse.ArgumentParser, source: Path, record: Path | None) -> None:
    """Add the rows of one file to another, in place of earlier ones of the same models."""
    if record is None:
        parser.error("--merge needs --record, the file to add the rows to")
    if not source.exists():
        parser.error(f"{source} does not exist: measure it with --record {source}")
    rows = read_rows(source)
    add_rows(record, rows, CASES)
    print(f"{len(rows)} rows of {source} are now in {record}")


def _line(row: Row) -> str:
    cells = " ".join(f"{name}:{cell['status']}" for name, cell in row["cells"].items())
    return f"{row['library']:13} {row['name']:45} {cells}"


if __name__ == "__main__":
    main()
