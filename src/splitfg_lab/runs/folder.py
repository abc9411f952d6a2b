"""Run folders: one per experiment, preset and seed, with all a run needs to go on and to be believed.

::

    runs/<experiment>/<preset>/seed<k>/
        config.json              what is run
        metrics.jsonl            one line per logged step
        checkpoint.json, ...     where to go on from
        log.txt                  what the run printed, tracebacks included
        report.json              the result
        DONE                     the result is final: nothing here changes any more
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from splitfg_lab.files import TEMPORARY
from splitfg_lab.runs._errors import ConfigError, RunError
from splitfg_lab.runs.config import Difference, differences, from_json, to_json
from splitfg_lab.runs.record import RunReport, Status, read_report, write_report
from splitfg_lab.runs.storage import locked, make_folder, read_json, write_atomic, write_json

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class RunIdentity:
    """``config.json``: which experiment, preset and seed, and the config as JSON."""

    schema: Literal[1] = field(default=1, kw_only=True)
    experiment: str
    preset: str
    seed: int
    config: dict[str, Any]


def variant_name(preset: str, changes: tuple[Difference, ...]) -> str:
    """The folder of a preset with overrides: ``c500+K=8,steps=10``; the preset's own name without any."""
    if not changes:
        return preset
    text = ",".join(f"{c.field}={c.new}" for c in changes)
    plain = re.sub(r"[^\w.,=+-]", "", text)
    if plain != text.replace('"', "") or len(plain) > 80:
        plain = f"{plain[:60]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return f"{preset}+{plain}"


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, which need not exist yet."""

    path: Path

    @classmethod
    def of(cls, root: Path, experiment: str, variant: str, seed: int) -> RunFolder:
        """The folder of a run under ``root``."""
        return cls(root / experiment / variant / f"seed{seed}")

    @property
    def name(self) -> str:
        """``experiment/preset/seed0``."""
        return "/".join(self.path.absolute().parts[-3:])

    @property
    def metrics_path(self) -> Path:
        """Where logged steps go."""
        return self.path / "metrics.jsonl"

    @property
    def log_path(self) -> Path:
        """Where a run's own output goes."""
        return self.path / "log.txt"

    @property
    def finished(self) -> bool:
        """Whether the result is final."""
        return (self.path / "DONE").exists()

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to go on from."""
        return any(self.path.glob("checkpoint*.json"))

    def status(self) -> Literal["absent", "unfinished"] | Status:
        """How far the run is.

        Raises:
            RunError: It is finished, but its report cannot be read.
        """
        if self.finished:
            return self.report().status
        return "unfinished" if (self.path / "config.json").exists() else "absent"

    def identity(self) -> RunIdentity:
        """What is run here.

        Raises:
            RunError: ``config.json`` is missing, damaged or foreign.
        """
        path = self.path / "config.json"
        data = read_json(path)
        try:
            return from_json(RunIdentity, data)
        except ConfigError as error:
            raise ConfigError(error.problems, what=str(path)) from None

    def report(self) -> RunReport:
        """The result.

        Raises:
            RunError: ``report.json`` is missing, damaged or foreign.
        """
        return read_report(self.path / "report.json")

    def require_result(self) -> None:
        """Raise a :class:`RunError` that says what to do if the run is finished and its result cannot be read."""
        try:
            self.report()
        except RunError as error:
            raise RunError(
                f"{error}\n{self.path} is marked as finished, but its result is lost. Delete {self.path / 'DONE'} and"
                f" run `splitfg resume {self.path}` to make the result again from the last checkpoint, or delete the"
                " folder to run it anew."
            ) from error

    def prepare(
        self, experiment: str, preset: str, seed: int, config: Any, *, completed: Callable[[Json], Json] = dict
    ) -> None:
        """Write ``config.json``, or make sure that the one which is there says the same.

        ``completed`` adds to a config that was written earlier what its missing fields amounted to then; those it does
        not know of have their defaults.

        Raises:
            RunError: A run with another config lives here; the error shows the difference.
        """
        if not (self.path / "config.json").exists():
            make_folder(self.path)
            identity = RunIdentity(experiment, preset, seed, to_json(config))
            write_json(self.path / "config.json", to_json(identity))
            return
        there = self.require_run(experiment, preset, seed)
        changes = differences(from_json(type(config), completed(there.config)), config)
        if changes:
            raise self.another_config("there -> now", map(str, changes))

    def require_run(self, experiment: str, preset: str, seed: int) -> RunIdentity:
        """What is run here, or a :class:`RunError` if that is another preset or seed."""
        there = self.identity()
        if (there.experiment, there.preset, there.seed) != (experiment, preset, seed):
            raise RunError(f"{self.path} holds {there.experiment}/{there.preset}/seed{there.seed}")
        return there

    def another_config(self, how: str, changes: Iterable[str]) -> RunError:
        """The error for a folder whose run is not the one asked for, with the differences and how to read them."""
        lines = "\n".join(f"  {change}" for change in changes)
        return RunError(
            f"{self.path} holds a run with another config ({how}):\n{lines}\n"
            "Delete or move that folder, or keep both with --runs OTHER_FOLDER."
        )

    def finish(self, report: RunReport) -> None:
        """Write the result and close the folder for good.

        Raises:
            RunError: It is closed already, or the disk is full.
        """
        self.refuse_finished()
        write_report(self.path / "report.json", report)
        write_atomic(self.path / "DONE", f"{report.finished}\n".encode())

    def refuse_finished(self) -> None:
        """Raise a :class:`RunError` if the run is finished."""
        if self.finished:
            raise RunError(f"{self.path} is finished and never edited again; delete it to run it anew")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other process out of the folder; the lock goes with the process, however it ends.

        Raises:
            RunError: Another process is in there.
        """
        with locked(self.path, wait=False) as got:
            if not got:
                raise RunError(f"another process is running in {self.path}; wait for it or stop it")
            self._remove_leftovers()
            yield

    def discard(self) -> None:
        """Remove the folder of a run that never began, and the folders above it that are empty then.

        Raises:
            RunError: Another process is in there, or the run did begin.
        """
        with self.locked():
            self.refuse_finished()
            if self.has_checkpoint:
                raise RunError(f"{self.path} holds a checkpoint: delete it yourself if you do not want it")
            shutil.rmtree(self.path)
        with contextlib.suppress(OSError):  # other runs are in there
            for parent in (self.path.parent, self.path.parent.parent):
                parent.rmdir()

    def _remove_leftovers(self) -> None:
        for path in self.path.glob(f".*{TEMPORARY}"):
            path.unlink(missing_ok=True)


def find_folders(root: Path) -> list[RunFolder]:
    """All run folders under ``root``, in a stable order."""
    return [RunFolder(path.parent) for path in sorted(root.glob("*/*/seed*/config.json"))]
