"""The state of each preset: which seeds are finished, in recorded results and in local run folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from splitfg_lab.experiments import Experiment, Preset
from splitfg_lab.experiments.spec import identity_in
from splitfg_lab.runs import RunReport
from splitfg_lab.runs.results import Problem, Records, read_local, read_recorded


@dataclass(frozen=True)
class Standing:
    """The runs of one preset.

    Attributes:
        recorded: Seeds of the preset with a finished run in the recorded results, diverged ones included.
        local: Seeds of the preset with a finished run in a run folder, diverged ones included.
        diverged: Seeds whose runs diverged.
        unfinished: Number of run folders that have begun and not finished, overridden ones included.
        overridden: Number of finished runs with overrides.
    """

    experiment: Experiment
    preset: Preset
    recorded: tuple[int, ...]
    local: tuple[int, ...]
    diverged: tuple[int, ...]
    unfinished: int
    overridden: int

    @property
    def done(self) -> tuple[int, ...]:
        """Seeds with a finished run, recorded or local."""
        return tuple(sorted({*self.recorded, *self.local}))

    @property
    def state(self) -> Literal["done", "partly", "not run"]:
        """Whether all, some or none of the preset's seeds are finished."""
        if set(self.preset.seeds) <= set(self.done):
            return "done"
        return "partly" if self.done or self.unfinished else "not run"

    def summary(self) -> str:
        """Return the state as text: ``recorded 3/5, here 1/5, 1 diverged``."""
        parts = [
            self._count("recorded", self.recorded),
            self._count("here", self.local),
            f"{len(self.diverged)} diverged" if self.diverged else "",
            f"{self.unfinished} unfinished here" if self.unfinished else "",
            f"{self.overridden} with overrides" if self.overridden else "",
        ]
        return ", ".join(filter(None, parts)) or "not run"

    def _count(self, where: str, seeds: tuple[int, ...]) -> str:
        return f"{where} {len(set(seeds) & set(self.preset.seeds))}/{len(self.preset.seeds)}" if seeds else ""

    def as_json(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "experiment": self.experiment.name,
            "preset": self.preset.name,
            "title": self.preset.title,
            "source": self.experiment.source,
            "seeds": list(self.preset.seeds),
            "done": list(self.done),
            "recorded": list(self.recorded),
            "local": list(self.local),
            "diverged": list(self.diverged),
            "unfinished": self.unfinished,
            "overridden": self.overridden,
        }


def standings(
    presets: Sequence[tuple[Experiment, Preset]], runs: Path, results: Path
) -> tuple[list[Standing], tuple[Problem, ...]]:
    """Return the state of presets, and the files that cannot be read."""
    identity = identity_in({e.name: e for e, _ in presets}.values())
    recorded, local = read_recorded(results, identity), read_local(runs, identity)
    found = [_standing(e, p, recorded, local) for e, p in presets]
    return found, (*recorded.problems, *local.problems)


def _standing(experiment: Experiment, preset: Preset, recorded: Records, local: Records) -> Standing:
    there, here = _runs_of(experiment, preset, recorded), _runs_of(experiment, preset, local)
    exact_there, exact_here = ([r for r in runs if not experiment.changes(preset, r.config)] for runs in (there, here))
    begun = f"{experiment.name}/{preset.name}"
    changed = {(r.seed, r.finished) for r in (*there, *here)} - {
        (r.seed, r.finished) for r in (*exact_there, *exact_here)
    }
    return Standing(
        experiment,
        preset,
        recorded=tuple(sorted(r.seed for r in exact_there)),
        local=tuple(sorted(r.seed for r in exact_here)),
        diverged=tuple(sorted({r.seed for r in (*exact_there, *exact_here) if r.status == "diverged"})),
        unfinished=sum(name.startswith((f"{begun}/", f"{begun}+")) for name in local.unfinished),
        overridden=len(changed),
    )


def _runs_of(experiment: Experiment, preset: Preset, records: Records) -> list[RunReport]:
    reports = [record.report for record in records.runs]
    return [r for r in reports if (r.experiment, r.preset) == (experiment.name, preset.name)]
