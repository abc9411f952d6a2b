"""The whole report as plain data, which every output (page, Markdown, terminal) prints in its own way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from splitfg_lab.experiments.spec import Cell, Experiment, Row, Table, identity_in
from splitfg_lab.report._costs import CostTable, view_costs
from splitfg_lab.report._groups import PresetRuns, group_runs
from splitfg_lab.report._summary import SummaryRow, view_summary
from splitfg_lab.report._table_view import TableView, view_table
from splitfg_lab.runs.folder import find_folders
from splitfg_lab.runs.results import Problem, RunRecord, read_records


@dataclass(frozen=True)
class ExperimentView:
    """One experiment, filled from its runs.

    Attributes:
        tables: Its tables, filled.
        costs: The cost of its runs.
        groups: Its runs by preset, for the figures.
        everywhere: The runs of all experiments of the report, as ``EXPERIMENT/PRESET``, for the figures.
        done: How many of the planned runs (every seed of every preset) have ended, diverged ones included.
        planned: The number of planned runs.
        diverged: Names of runs that diverged, and why.
        not_run: Titles of the presets without runs.
        unfinished: Names of runs that have started and not ended.
    """

    experiment: Experiment
    tables: tuple[TableView, ...]
    costs: CostTable | None
    groups: dict[str, PresetRuns]
    everywhere: Mapping[str, PresetRuns]
    done: int
    planned: int
    diverged: tuple[tuple[str, str], ...]
    not_run: tuple[str, ...]
    unfinished: tuple[str, ...]


@dataclass(frozen=True)
class ReportView:
    """Every experiment, the files that could not be read, and runs of unknown presets."""

    experiments: tuple[ExperimentView, ...]
    problems: tuple[str, ...]
    strangers: tuple[RunRecord, ...]

    @property
    def summary(self) -> tuple[SummaryRow, ...]:
        """The headline results."""
        return view_summary((view.experiment, view.groups) for view in self.experiments)

    def only(self, name: str) -> ReportView:
        """Return the same report with one experiment.

        Raises:
            ValueError: There is no experiment of that name.
        """
        chosen = tuple(view for view in self.experiments if view.experiment.name == name)
        if not chosen:
            known = ", ".join(view.experiment.name for view in self.experiments)
            raise ValueError(f"There is no experiment named {name!r}. There are: {known}.")
        return replace(self, experiments=chosen)


def view_report(runs: Path, results: Path, experiments: Sequence[Experiment] | None) -> ReportView:
    """Read everything under ``runs`` and ``results``; ``None`` means all shipped experiments."""
    if experiments is None:
        from splitfg_lab.experiments import EXPERIMENTS

        experiments = tuple(EXPERIMENTS)
    records = read_records(runs, results, identity_in(experiments))
    known = {(e.name, p.name) for e in experiments for p in e.presets}
    strangers = tuple(run for run in records.runs if (run.report.experiment, run.report.preset) not in known)
    problems = tuple(_sentence(problem) for problem in (*records.problems, *_strays(runs)))
    groups = {e.name: group_runs(e, records.runs) for e in experiments}
    everywhere = {f"{name}/{preset}": group for name, own in groups.items() for preset, group in own.items()}
    views = (_view_experiment(e, groups[e.name], everywhere, records.unfinished) for e in experiments)
    return ReportView(tuple(views), problems, strangers)


def _sentence(problem: Problem) -> str:
    return problem.reason if problem.path in problem.reason else f"{problem.path}: {problem.reason}"


def _strays(runs: Path) -> list[Problem]:
    """Return reports outside of run folders."""
    expected = {folder.path for folder in find_folders(runs)}
    reports = (path for path in sorted(runs.rglob("report.json")) if path.parent not in expected)
    return [Problem(str(path), "not in a run folder (EXPERIMENT/PRESET/seedN with a config.json)") for path in reports]


def _view_experiment(
    experiment: Experiment,
    groups: dict[str, PresetRuns],
    everywhere: Mapping[str, PresetRuns],
    unfinished: Iterable[str],
) -> ExperimentView:
    made = [run for group in groups.values() for run in group.runs]
    return ExperimentView(
        experiment,
        tables=tuple(view_table(_within(table, everywhere), {**everywhere, **groups}) for table in experiment.tables),
        costs=view_costs(groups),
        groups=groups,
        everywhere=everywhere,
        done=sum(_done(group) for group in groups.values()),
        planned=sum(len(preset.seeds) for preset in experiment.presets),
        diverged=tuple((run.name, run.report.message) for run in made if run.report.status == "diverged"),
        not_run=tuple(g.preset.title for g in groups.values() if not g.runs and not g.variants),
        unfinished=tuple(_of(experiment, unfinished)),
    )


def _within(table: Table, everywhere: Mapping[str, PresetRuns]) -> Table:
    """Return the table without the numbers of experiments that are not part of the report."""

    def elsewhere(cell: object) -> bool:
        return isinstance(cell, Cell) and "/" in cell.preset and cell.preset not in everywhere

    def kept(row: Row) -> Row:
        return replace(row, cells=tuple(None if elsewhere(c) else c for c in row.cells))

    return replace(table, rows=tuple(map(kept, table.rows)))


def _done(group: PresetRuns) -> int:
    return len({run.report.seed for run in group.runs} & set(group.preset.seeds))


def _of(experiment: Experiment, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(f"{experiment.name}/")]
