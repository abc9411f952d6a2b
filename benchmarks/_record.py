"""Options and records that the benchmarks of several processes share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import made
from benchmarks._machine import load
from splitfg_lab.runs.storage import make_folder, write_json


def options(
    name: str, text: str | None, recorded: Path, parts: Mapping[str, str], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse the options of a benchmark: ``--record``, ``--busy``, and one that chooses each part.

    Args:
        name: Of the module.
        text: Its docstring.
        recorded: The file that ``--record`` writes by default.
        parts: Help of every part by its name.
        arguments: The command line; ``None`` for that of the process.

    Returns:
        The options; ``parts`` lists the chosen parts, all if none was chosen.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=text)
    parser.add_argument("--record", type=Path, nargs="?", const=recorded, help=f"write a file, {recorded.name}")
    parser.add_argument("--busy", action="store_true", help="measure although other jobs run, and record that")
    for part, words in parts.items():
        parser.add_argument(f"--{part}", action="store_true", help=f"measure {words}; alone, or with other parts")
    args = parser.parse_args(arguments)
    args.parts = [part for part in parts if getattr(args, part)] or list(parts)
    return args


def machine(*, busy: bool) -> dict[str, Any]:
    """Return what a measurement rests on: date, machine, its load, revision and versions.

    Args:
        busy: Whether a busy machine will do; the process ends on it otherwise.
    """
    here = load()
    if here["busy"] and not busy:
        sys.exit(
            f"other jobs run here (a process waits {here['wall_to_cpu']:.2f} times as long as it computes): wait, or"
            " pass --busy"
        )
    return {**made(torch.device("cpu")), **here, "threads": 1}


class Record:
    """The numbers of one run of a benchmark, written to its file after every case.

    Args:
        path: The file, replaced as a whole; ``None`` writes nothing.
        facts: What the numbers rest on. ``finished`` is added, ``False`` until :meth:`finish`.
    """

    def __init__(self, path: Path | None, facts: Mapping[str, Any]) -> None:
        self._path, self.found = path, {"made": {**facts, "finished": False}}
        if path is not None:
            make_folder(path.parent)

    def update(self, **values: Any) -> None:
        """Replace some entries."""
        self.found |= values
        if self._path is not None:
            write_json(self._path, self.found)

    def add(self, part: str, case: Mapping[str, Any]) -> None:
        """Add a case to the list of a part."""
        self.update(**{part: [*self.found.get(part, []), dict(case)]})

    def finish(self, **facts: Any) -> None:
        """State that the run came to its end, with further facts, and print everything."""
        self.update(made={**self.found["made"], **facts, "finished": True})
        print(json.dumps(self.found, indent=1))
