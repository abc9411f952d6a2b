"""Table 1: seven methods on eight tabular data sets, five folds each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from splitfg.errors import raise_if
from splitfg.recipes import ActivityMethod, Adam, TableMethod
from splitfg.recipes.checks import below, not_positive, rho_problems
from splitfg.recipes.tables import Network, NetworkRecipe, table_methods
from splitfg_lab.experiments.spec import Cell, Curves, Experiment, Paired, Preset, Row, Table
from splitfg_lab.experiments.tabular._sets import DATA, METHOD_TITLES, DataRow

FOLDS = 5


@dataclass(frozen=True)
class Tabular:
    """One method on one data set; the run's seed says which fold is held out.

    Attributes:
        dataset: Name of the data set.
        method: How the network is trained.
        network: What is trained.
        steps: Training steps.
        batch: Rows per step.
        optimizer: How gradients become steps.
        rho: Trunk step scale.
        clip: Joint clipping bound.
        folds: Folds of the cross-validation, always dealt with seed 0.
        training_seed: Of initialisation, batches and tangents, the same in every fold.
    """

    dataset: str
    method: TableMethod
    network: NetworkRecipe = field(default_factory=Network)
    steps: int = 300
    batch: int = 256
    optimizer: Adam = field(default_factory=lambda: Adam(lr=3e-3))
    rho: float = 1.0
    clip: float = 1.0
    folds: int = FOLDS
    training_seed: int = 0

    def __post_init__(self) -> None:
        found = below(1, self, "steps", "batch") + below(2, self, "folds") + below(0, self, "training_seed")
        raise_if(found + not_positive(self, "clip") + rho_problems(self.rho))


_NOTE = (
    "Mean and standard deviation over the 5 held-out folds (a run's seed is its fold), as in the paper; training seed 0"
    " in all of them."
)


_METHODS = table_methods()
_ACTIVITY: dict[str, tuple[str, TableMethod]] = {
    "activity_fg": ("Activity tangents, K = 8", _METHODS["activity_fg"]),
    "activity_fg_k1": ("Activity tangents, K = 1", ActivityMethod(K=1)),
}


def _presets() -> tuple[Preset, ...]:
    paper = [(row, m, METHOD_TITLES[m], _METHODS[m]) for row in DATA for m in METHOD_TITLES if m in row.paper]
    beyond = [(row, m, title, method) for row in DATA for m, (title, method) in _ACTIVITY.items()]
    return tuple(
        Preset(f"{row.name}-{m}", f"{row.label}: {title}", Tabular(row.name, method), seeds=tuple(range(FOLDS)))
        for row, m, title, method in (*paper, *beyond)
    )


def _row(row: DataRow) -> Row:
    cells = (Cell(f"{row.name}-{m}", row.metric, row.paper[m]) if m in row.paper else None for m in METHOD_TITLES)
    return Row(row.label, tuple(cells))


def _table(metric: str, key: str, title: str, better: Literal["lower", "higher"], decimals: int, note: str) -> Table:
    rows = tuple(_row(row) for row in DATA if row.metric == metric)
    columns = tuple(METHOD_TITLES.values())
    return Table(key, title, columns, rows, better, best_in="row", decimals=decimals, note=f"{_NOTE} {note}")


def _test_row(row: DataRow) -> Row:
    ours, methods = f"{row.name}-split_fg", (m for m in METHOD_TITLES if m != "split_fg")
    cells = (
        Paired(ours, f"{row.name}-{m}", row.metric, row.better, row.decimals) if m in row.paper else None
        for m in methods
    )
    return Row(row.label, tuple(cells))


def _activity_row(row: DataRow) -> Row:
    cells = (
        Cell(f"{row.name}-{m}", row.metric, row.paper.get(m), row.decimals)
        for m in ("backprop", "split_fg", *_ACTIVITY)
    )
    lead = Paired(f"{row.name}-activity_fg", f"{row.name}-split_fg", row.metric, row.better, row.decimals)
    return Row(row.label, (*cells, lead))


def _activity() -> Table:
    return Table(
        "tabular-activity",
        "Activity tangents: what layers write is perturbed instead of their weights",
        ("Backprop", "Split-FG, K = 8", *(title for title, _ in _ACTIVITY.values()), "Lead over Split-FG"),
        tuple(_activity_row(row) for row in DATA),
        note=f"Not in the paper. Accuracy in %, or RMSE on the last four sets. {_NOTE}",
    )


def _tests() -> Table:
    return Table(
        "tabular-tests",
        "Split-FG's lead over the others: paired t-tests over the folds",
        tuple(title for method, title in METHOD_TITLES.items() if method != "split_fg"),
        tuple(_test_row(row) for row in DATA),
        note="Lead in points of accuracy, or in RMSE on the last four sets; positive where Split-FG is better. The"
        " paper says that it tested its leads over pure FG and ES in this way, without printing p or a correction for"
        " many tests. The folds of a cross-validation share training rows, so that p comes out too small.",
    )


def _loss_curves(row: DataRow) -> Curves:
    # the readout stores and Forward-Forward compares labels: neither has a loss on this scale
    gradient = [m for m in METHOD_TITLES if m in row.paper and m not in ("hopfield", "forward_forward")]
    return Curves(
        f"tabular-{row.name}", f"{row.label}: training loss", tuple(f"{row.name}-{m}" for m in gradient), "loss"
    )


EXPERIMENT = Experiment(
    name="tabular",
    title="Tables: seven methods on eight data sets",
    source="Section 4.2, Table 1",
    runner="splitfg_lab.experiments.tabular.run:run",
    presets=_presets(),
    tables=(
        _table(
            "accuracy",
            "tabular-classification",
            "Tabular classification: held-out accuracy, %",
            "higher",
            1,
            "Higgs Small: the recorded runs used 54,423 of OpenML's 98,050 rows; the metric `rows` of a run says how"
            " many it had.",
        ),
        _table(
            "rmse",
            "tabular-regression",
            "Tabular regression: held-out RMSE in standard deviations of the training target",
            "lower",
            3,
            "Forward-Forward compares labels and is defined for classification only.",
        ),
        _tests(),
        _activity(),
    ),
    figures=tuple(_loss_curves(row) for row in DATA),
)
