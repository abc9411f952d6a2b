"""How far each preset is: which of its seeds are done, diverged or unfinished, here or on record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from splitfg_lab.experiments import Experiment, Preset
from splitfg_lab.experiments.spec import identity_in
from splitfg_lab.runs import read_records
from splitfg_lab.runs.results import Problem, Records


@dataclass(frozen=True)
class Standing:
    """The runs of one preset.

    Attributes:
        done: Seeds of the preset that are finished as it says, diverged ones included.
        diverged: Those of them that diverged.
        unfinished: Runs begun and not ended, overridden ones included.
        overridden: Finished runs made with something changed.
    """

    experiment: Experiment
    preset: Preset
    done: tuple[int, ...]
    diverged: tuple[int, ...]
    unfinished: int
    overridden: int

    @property
    def state(self) -> Literal["done", "partly", "not run"]:
        """Whether all, some or none of the preset's seeds are finished."""
        missing = set(self.preset.seeds) - set(self.done)
        if not missing:
            return "done"
        return "partly" if self.done or self.unfinished else "not run"

    def summary(self) -> str:
        """``done 3/5, 1 diverged, 1 unfinished``."""
        made = len(set(self.done) & set(self.preset.seeds))
        parts = [
            f"done {made}/{len(self.preset.seeds)}" if self.done else "",
            f"{len(self.diverged)} diverged" if self.diverged else "",
            f"{self.unfinished} unfinished" if self.unfinished else "",
            f"{self.overridden} with overrides" if self.overridden else "",
        ]
        return ", ".join(filter(None, parts)) or "not run"

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "experiment": self.experiment.name,
            "preset": self.preset.name,
            "title": self.preset.title,
            "source": self.experiment.source,
            "seeds": list(self.preset.seeds),
            "done": list(self.done),
            "diverged": list(self.diverged),
            "unfinished": self.unfinished,
            "overridden": self.overridden,
        }


def standings(
    presets: Sequence[tuple[Experiment, Preset]], runs: Path, results: Path
) -> tuple[list[Standing], tuple[Problem, ...]]:
    """How far presets are, and which files could not be read to tell."""
    records = read_records(runs, results, identity_in({e.name: e for e, _ in presets}.values()))
    return [_standing(e, p, records) for e, p in presets], records.problems


def _standing(experiment: Experiment, preset: Preset, records: Records) -> Standing:
    reports = [r.report for r in records.runs]
    mine = [r for r in reports if (r.experiment, r.preset) == (experiment.name, preset.name)]
    exact = [r for r in mine if not experiment.changes(preset, r.config)]
    begun = f"{experiment.name}/{preset.name}"
    return Standing(
        experiment,
        preset,
        done=tuple(sorted(r.seed for r in exact)),
        diverged=tuple(sorted(r.seed for r in exact if r.status == "diverged")),
        unfinished=sum(name.startswith((f"{begun}/", f"{begun}+")) for name in records.unfinished),
        overridden=len(mine) - len(exact),
    )
