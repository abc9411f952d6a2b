"""Plants one-line bugs in a copy of the package, one at a time, and demands that the tests notice each of them.

A suite that stays green with a sign turned round, a 1/K lost, a stale u or a tangent reused proves nothing. Every bug
names the quick tests that should catch it; they must pass on the untouched copy and fail on the spoilt one.

    python -m tools.plant_bugs            # all bugs
    python -m tools.plant_bugs sign tied  # those whose name contains one of the words
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.plant_bugs import BUGS
from tools.plant_bugs.bug import PACKAGE, ROOT, Bug

TESTS_FAILED = 1  # pytest's exit code; others mean that nothing was really run


def main(arguments: list[str]) -> int:
    """Plant, test, report; 0 if every bug was caught."""
    parser = argparse.ArgumentParser(prog="python -m tools.plant_bugs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="*", help="plant only bugs whose name contains one of these; default: all")
    parts = parser.parse_args(arguments).part
    unknown = [part for part in parts if not any(part in bug.name for bug in BUGS)]
    if unknown:
        parser.error(f"no bug's name contains {', '.join(unknown)}; there are: {', '.join(bug.name for bug in BUGS)}")
    chosen = [bug for bug in BUGS if not parts or any(part in bug.name for part in parts)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "splitfg"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        _require_sound(copy, sorted({t for b in chosen for t in b.tests}))
        survivors = [bug for bug in chosen if not _caught(bug, copy)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} planted bugs were caught")
    return 1 if survivors else 0


def _require_sound(copy: Path, tests: list[str]) -> None:
    """The tests must be about the copy, and pass on it before anything is spoilt."""
    where = subprocess.run(
        [sys.executable, "-c", "import splitfg; print(splitfg.__file__)"],
        env=_environment(copy),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if Path(where.strip()).parent.resolve() != copy.resolve():
        raise SystemExit(f"tests would import {where.strip()}, not the copy")
    if _pytest(copy, tests) != 0:
        raise SystemExit("the tests fail without any bug planted: mend that first")


def _caught(bug: Bug, copy: Path) -> bool:
    target, start = copy / bug.file, time.monotonic()
    sound = target.read_text(encoding="utf-8")
    target.write_text(bug.spoilt(), encoding="utf-8")
    caught = _pytest(copy, bug.tests) == TESTS_FAILED
    target.write_text(sound, encoding="utf-8")
    verdict = "caught" if caught else "SURVIVED"
    print(f"{verdict:<9} {time.monotonic() - start:5.1f} s  {bug.name:<52} {bug.file}", flush=True)
    return caught


def _pytest(copy: Path, tests: list[str] | tuple[str, ...]) -> int:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, env=_environment(copy), cwd=ROOT, capture_output=True).returncode


def _environment(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
