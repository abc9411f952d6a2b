"""Resolve arguments to experiments, presets, seeds and run folders."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from splitfg_lab.commands.errors import UsageError
from splitfg_lab.experiments import EXPERIMENTS, Cell, Experiment, Preset
from splitfg_lab.experiments.spec import Paired
from splitfg_lab.runs import ConfigError, RunError, RunFolder, differences, find_folders, override
from splitfg_lab.runs.folder import variant_name

LARGEST_SEED: Final = 2**32 - 1
"""The largest seed that all generators accept, numpy's included."""


@dataclass(frozen=True)
class Plan:
    """A run to make: a preset, its config with overrides, and a seed.

    Attributes:
        smoke: Whether this is a smoke test, whose folder is named after the preset alone.
    """

    experiment: Experiment
    preset: Preset
    config: Any
    seed: int
    smoke: bool = False

    @property
    def exact(self) -> bool:
        """Whether the config is that of the preset."""
        return not differences(self.preset.config, self.config)

    def folder(self, root: Path) -> RunFolder:
        """Return the run folder; overrides are part of its name."""
        changes = () if self.smoke else differences(self.preset.config, self.config)
        return RunFolder.of(root, self.experiment.name, variant_name(self.preset.name, changes), self.seed)

    def state(self, root: Path) -> str:
        """Describe what running this plan would do, without writing anything."""
        folder = self.folder(root)
        if not folder.config_path.exists():
            return "new"
        try:
            self.prepare(folder)
        except RunError as error:
            return f"cannot run: {error}"
        if folder.finished:
            return "finished before"
        return "resumes from its checkpoint" if folder.has_checkpoint else "starts over: no checkpoint yet"

    def prepare(self, folder: RunFolder) -> None:
        """Write the config into its folder, or compare it with the run that is there.

        Raises:
            RunError: The folder holds another run; the error shows the difference.
        """
        run = (self.experiment.name, self.preset.name, self.seed)
        if not folder.finished:
            folder.prepare(*run, self.config, completed=self.experiment.completed)
            return
        folder.require_run(*run)
        folder.require_result()
        changes = self.experiment.overrides(replace(self.preset, config=self.config), folder.report().config)
        if changes:
            raise folder.another_config("preset: the config of this command", changes)


def target_names() -> list[str]:
    """Return all targets: experiments, and ``experiment/`` with a preset, a table or a figure."""
    return list(dict.fromkeys(name for e in EXPERIMENTS for p in e.presets for name in _names_of(e, p)))


def find_presets(targets: Iterable[str]) -> list[tuple[Experiment, Preset]]:
    """Return the presets that targets name.

    A target is ``experiment/preset``, a bare ``experiment`` for all of its presets, ``experiment/table`` or
    ``experiment/figure`` (by key) for the presets it shows, or a pattern with ``*``.

    Raises:
        UsageError: A target names no preset; the error suggests the nearest names.
    """
    found: dict[str, tuple[Experiment, Preset]] = {}
    problems: list[str] = []
    for target in targets:
        named = {
            f"{e.name}/{p.name}": (e, p)
            for e in EXPERIMENTS
            for p in e.presets
            if target in _names_of(e, p) or fnmatchcase(f"{e.name}/{p.name}", target)
        }
        if not named:
            problems.append(_unknown(target))
        found |= named
    if problems:
        raise UsageError(
            "\n".join([*problems, "`splitfg ls` lists the experiments, `splitfg ls EXPERIMENT` its presets."])
        )
    return list(found.values())


def find_preset(experiment: str, preset: str) -> tuple[Experiment, Preset]:
    """Return the preset of that name.

    Raises:
        UsageError: There is no such preset.
    """
    for e in EXPERIMENTS:
        for p in e.presets:
            if (e.name, p.name) == (experiment, preset):
                return e, p
    raise UsageError(_unknown(f"{experiment}/{preset}"))


def make_plans(
    targets: Sequence[str], settings: Sequence[str], seeds: Sequence[int] | None, *, smoke: bool = False
) -> list[Plan]:
    """Return the runs of targets with overrides, for the given seeds or each preset's own.

    A smoke test applies the experiment's smoke settings first, and takes the first seed alone.

    Raises:
        UsageError: A target names no preset.
        ConfigError: An override names no field or has the wrong type.
    """
    plans = []
    for experiment, preset in find_presets(targets):
        config = _overridden(experiment, preset, [*(experiment.smoke if smoke else ()), *settings])
        chosen = seeds or (preset.seeds[:1] if smoke else preset.seeds)
        plans += [Plan(experiment, preset, config, seed, smoke) for seed in chosen]
    return plans


def _overridden(experiment: Experiment, preset: Preset, settings: Sequence[str]) -> Any:
    try:
        return override(preset.config, settings)
    except ConfigError as error:
        raise ConfigError(error.problems, what=f"the overrides of {experiment.name}/{preset.name}") from None


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse seeds: ``0,1,2`` or ``0-4``.

    Raises:
        UsageError: The text has another form, or a seed is too large.
    """
    try:
        ranges = [[int(end) for end in part.split("-", 1)] for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--seeds {text}: expected numbers and ranges, as in 0,1,2 or 0-4") from None
    too_large = [str(end) for ends in ranges for end in ends if end > LARGEST_SEED]
    if too_large:
        raise UsageError(f"--seeds {text}: {', '.join(too_large)} is too large; the largest seed is {LARGEST_SEED}")
    empty = [f"{first}-{last}" for first, last in ((ends[0], ends[-1]) for ends in ranges) if last < first]
    if empty:
        raise UsageError(f"--seeds {text}: {', '.join(empty)} runs backwards; the smaller number comes first")
    return tuple(dict.fromkeys(seed for ends in ranges for seed in range(ends[0], ends[-1] + 1)))


def find_runs(root: Path, names: Sequence[str]) -> list[RunFolder]:
    """Return the run folders at or below the given paths or names (``experiment/preset/seed0``); all without names.

    Raises:
        UsageError: A name is no run folder.
    """
    if not names:
        return find_folders(root)
    found: dict[Path, RunFolder] = {}
    problems: list[str] = []
    for name in names:
        places = dict.fromkeys((Path(name), root / name))  # the same place if the name is an absolute path
        folders = [f for place in places for f in _folders_below(place)]
        if not folders:
            problems.append(f"no run folder at {' or '.join(map(str, places))}")
        found |= {folder.path.resolve(): folder for folder in folders}
    if problems:
        raise UsageError("\n".join(problems))
    return list(found.values())


def _folders_below(start: Path) -> list[RunFolder]:
    return [RunFolder(path.parent) for path in sorted(start.rglob("config.json"))]


def _names_of(experiment: Experiment, preset: Preset) -> list[str]:
    """Return the targets that name a preset."""
    tables = [t.key for t in experiment.tables if any(_shows(cell, preset) for row in t.rows for cell in row.cells)]
    figures = [f.key for f in experiment.figures if preset.name in f.presets]
    return [experiment.name, *(f"{experiment.name}/{name}" for name in (preset.name, *tables, *figures))]


def _shows(cell: Cell | Paired | str | None, preset: Preset) -> bool:
    if isinstance(cell, Paired):
        return preset.name in (cell.preset, cell.against)
    return isinstance(cell, Cell) and cell.preset == preset.name


def _unknown(target: str) -> str:
    names = target_names()
    near = difflib.get_close_matches(target, names, n=3) or [n for n in names if target in n][:3]
    return f"no experiment or preset is called {target!r}" + (f"; did you mean {' or '.join(near)}?" if near else ".")
