"""Run folders: one per experiment, preset and seed, with everything needed to resume and to verify a run.

::

    runs/<experiment>/<preset>/seed<k>/
        config.json              experiment, preset, seed and config
        metrics.jsonl            one line per logged step
        checkpoint.json, ...     the state from which the run resumes
        log.txt                  output of the run, tracebacks included
        report.json              the result
        DONE                     marks the result as final: nothing in the folder changes any more
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
from splitfg_lab.runs.lease import WAIT, BusyError, is_held_elsewhere
from splitfg_lab.runs.record import RunReport, Status, read_report, write_report
from splitfg_lab.runs.storage import locked, make_folder, read_json, write_atomic, write_json

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class RunIdentity:
    """The contents of ``config.json``: experiment, preset, seed, and the config as JSON."""

    schema: Literal[1] = field(default=1, kw_only=True)
    experiment: str
    preset: str
    seed: int
    config: dict[str, Any]


def variant_name(preset: str, changes: tuple[Difference, ...]) -> str:
    """Return the folder name of a preset with overrides, ``c500+K=8,steps=10``; without any, the preset's name."""
    if not changes:
        return preset
    text = ",".join(f"{c.field}={c.new}" for c in changes)
    plain = re.sub(r"[^\w.,=+-]", "", text)
    if plain != text.replace('"', "") or len(plain) > 80:
        plain = f"{plain[:60]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return f"{preset}+{plain}"


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, which need not exist yet."""

    path: Path

    @classmethod
    def of(cls, root: Path, experiment: str, variant: str, seed: int) -> RunFolder:
        """Return the folder of a run under ``root``."""
        return cls(root / experiment / variant / f"seed{seed}")

    @property
    def name(self) -> str:
        """``experiment/preset/seed0``."""
        return "/".join(self.path.absolute().parts[-3:])

    @property
    def config_path(self) -> Path:
        """The file with the config."""
        return self.path / "config.json"

    @property
    def metrics_path(self) -> Path:
        """The file with the logged steps."""
        return self.path / "metrics.jsonl"

    @property
    def log_path(self) -> Path:
        """The file with the output of the run."""
        return self.path / "log.txt"

    @property
    def finished(self) -> bool:
        """Whether the run is finished and its result final."""
        return (self.path / "DONE").exists()

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run can resume from a checkpoint."""
        return any(self.path.glob("checkpoint*.json"))

    def status(self) -> Literal["absent", "unfinished"] | Status:
        """Return whether the run is absent, unfinished, done or diverged.

        Raises:
            RunError: The run is finished, but its report cannot be read.
        """
        if self.finished:
            return self.report().status
        return "unfinished" if self.config_path.exists() else "absent"

    def identity(self) -> RunIdentity:
        """Read ``config.json``.

        Raises:
            RunError: It is missing, damaged or of another format.
        """
        data = read_json(self.config_path)
        try:
            return from_json(RunIdentity, data)
        except ConfigError as error:
            raise ConfigError(error.problems, what=str(self.config_path)) from None

    def report(self) -> RunReport:
        """Read ``report.json``.

        Raises:
            RunError: It is missing, damaged, edited, of another format, or that of another run.
        """
        path = self.path / "report.json"
        report = read_report(path)
        if self.config_path.exists():
            there = self.identity()
            named, own = (f"{r.experiment}/{r.preset}/seed{r.seed}" for r in (report, there))
            if named != own:
                raise RunError(f"{path} is the result of {named}, but {self.config_path} names {own}")
        return report

    def require_result(self) -> None:
        """Raise a :class:`RunError` with the cure if the run is finished and its result cannot be read."""
        try:
            self.report()
        except RunError as error:
            raise RunError(
                f"{error}\n{self.path} is marked as finished, but its result is lost. Delete {self.path / 'DONE'} and"
                f" run `splitfg resume {self.path}` to compute the result again from the last checkpoint, or delete"
                " the folder to start over."
            ) from error

    def prepare(
        self, experiment: str, preset: str, seed: int, config: Any, *, completed: Callable[[Json], Json] = dict
    ) -> None:
        """Write ``config.json``, or compare the existing one with the arguments.

        Args:
            experiment: Name of the experiment.
            preset: Name of the preset.
            seed: Seed.
            config: The config.
            completed: Adds the fields that an earlier version did not have to the config it wrote, with the values
                they implicitly had then; fields it leaves out take their defaults.

        Raises:
            RunError: The folder holds a run with another config; the error shows the difference.
        """
        if not self.config_path.exists():
            make_folder(self.path)
            identity = RunIdentity(experiment, preset, seed, to_json(config))
            write_json(self.config_path, to_json(identity))
            return
        there = self.require_run(experiment, preset, seed)
        changes = differences(from_json(type(config), completed(there.config)), config)
        if changes:
            raise self.another_config("there -> now", map(str, changes))

    def require_run(self, experiment: str, preset: str, seed: int) -> RunIdentity:
        """Read ``config.json``; raise a :class:`RunError` if it names another preset or seed."""
        there = self.identity()
        if (there.experiment, there.preset, there.seed) != (experiment, preset, seed):
            raise RunError(
                f"{self.path} holds {there.experiment}/{there.preset}/seed{there.seed}, not"
                f" {experiment}/{preset}/seed{seed}: move it to its own folder, or use --runs OTHER_FOLDER"
            )
        return there

    def another_config(self, how: str, changes: Iterable[str]) -> RunError:
        """Return the error for a folder whose run has another config; ``how`` explains the two sides of ``changes``."""
        lines = "\n".join(f"  {change}" for change in changes)
        return RunError(
            f"{self.path} holds a run with another config ({how}):\n{lines}\n"
            "Delete or move that folder, or keep both with --runs OTHER_FOLDER."
        )

    def finish(self, report: RunReport) -> None:
        """Write the result and mark the run as finished.

        Raises:
            RunError: The run is finished already, or the disk is full.
        """
        self.require_unfinished()
        write_report(self.path / "report.json", report)
        write_atomic(self.path / "DONE", f"{report.finished}\n".encode())

    def require_unfinished(self) -> None:
        """Raise a :class:`RunError` if the run is finished."""
        if self.finished:
            raise RunError(f"{self.path} is finished and its files are final; delete the folder to run it again")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock; the system releases it if the process dies.

        Raises:
            RunError: Another process holds it.
        """
        with locked(self.path, wait=False) as got:
            if not got:
                raise BusyError(f"another process is running in {self.path}; {WAIT}")
            self._remove_leftovers()
            yield

    def require_free(self) -> None:
        """Raise a :class:`BusyError` if another process runs here, or on a host that shares the folder."""
        if is_held_elsewhere(self.path):
            raise BusyError(f"another host is running in {self.path}; {WAIT}")
        with self.locked():
            return

    def discard(self) -> None:
        """Delete the folder of a run that has not begun, and its parents if they are empty then.

        Raises:
            RunError: Another process holds the lock, or the run has begun.
        """
        with self.locked():
            self.require_unfinished()
            if self.has_checkpoint:
                raise RunError(f"{self.path} holds a checkpoint: delete it yourself if you do not need it")
            shutil.rmtree(self.path)
        with contextlib.suppress(OSError):  # they hold other runs
            for parent in (self.path.parent, self.path.parent.parent):
                parent.rmdir()

    def _remove_leftovers(self) -> None:
        for path in self.path.glob(f".*{TEMPORARY}"):
            path.unlink(missing_ok=True)


def find_folders(root: Path) -> list[RunFolder]:
    """Return all run folders under ``root``, sorted by path."""
    return [RunFolder(path.parent) for path in sorted(root.glob("*/*/seed*/config.json"))]
