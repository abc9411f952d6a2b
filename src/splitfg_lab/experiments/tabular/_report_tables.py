"""The tables and figures of the report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from splitfg_lab.experiments._titles import ABBREVIATIONS, METHOD_TITLES
from splitfg_lab.experiments.spec import Cell, Curves, Headline, Paired, Row, Table
from splitfg_lab.experiments.tabular._presets import (
    ACTIVITY,
    FEEDBACK,
    PAPER,
    PLAIN,
    PLAIN_FEEDBACK,
    REFERENCES,
    SELDOM,
)
from splitfg_lab.experiments.tabular._sets import DATA, DataRow

_NOTE = (
    "Mean and standard deviation over the 5 held-out folds (a run's seed is its fold), as in the paper; training seed 0"
    " in all of them."
)
_BOTH = "Accuracy in %, or RMSE on the last four sets."


def tables() -> tuple[Table, ...]:
    """Return all tables, the paper's first."""
    return (
        _paper_table(
            "accuracy",
            "tabular-classification",
            "Tabular classification: held-out accuracy, %",
            "higher",
            1,
            "Higgs Small: the recorded runs used 54,423 of OpenML's 98,050 rows.",
        ),
        _paper_table(
            "rmse",
            "tabular-regression",
            "Tabular regression: held-out RMSE in standard deviations of the training target",
            "lower",
            3,
            "Forward-Forward compares labels and is defined for classification only.",
        ),
        _tests(),
        _feedback(),
        _seldom(),
        _plain_feedback(),
        _references(),
        _activity(),
        _plain(),
    )


def figures() -> tuple[Curves, ...]:
    """Return the training losses of every data set."""
    return tuple(_loss_curves(row) for row in DATA)


def _paper_table(
    metric: str, key: str, title: str, better: Literal["lower", "higher"], decimals: int, note: str
) -> Table:
    rows = tuple(_paper_row(row) for row in DATA if row.metric == metric)
    columns = tuple(METHOD_TITLES.values())
    return Table(
        key, title, columns, rows, better, best_in="row", decimals=decimals, note=f"{_NOTE} {note} {ABBREVIATIONS}"
    )


def _paper_row(row: DataRow) -> Row:
    return Row(row.label, tuple(_cell(row, name) if name in row.paper else None for name in METHOD_TITLES))


def _cell(row: DataRow, name: str) -> Cell:
    return Cell(f"{row.name}-{name}", row.metric, row.paper.get(name), row.decimals)


def _lead(row: DataRow, name: str, against: str) -> Paired:
    return Paired(f"{row.name}-{name}", f"{row.name}-{against}", row.metric, row.better, row.decimals)


def _cells(row: DataRow, names: Iterable[str]) -> tuple[Cell, ...]:
    return tuple(_cell(row, name) for name in names)


def _tests() -> Table:
    others = [name for name in METHOD_TITLES if name != "split_fg"]
    return Table(
        "tabular-tests",
        "Split-FG's lead over the others: paired t-tests over the folds",
        tuple(METHOD_TITLES[name] for name in others),
        tuple(
            Row(row.label, tuple(_lead(row, "split_fg", name) if name in row.paper else None for name in others))
            for row in DATA
        ),
        note="Lead in points of accuracy, or in RMSE on the last four sets; positive where Split-FG is better. The"
        " paper says that it tested its leads over pure FG and ES in this way, without printing p or a correction for"
        " many tests. The folds of a cross-validation share training rows, so that p comes out too small.",
    )


def _references() -> Table:
    ours = {"backprop": "Backprop", "activity_fg": ACTIVITY["activity_fg"].title, "split_fg": "Split-FG, K = 8"}
    return Table(
        "tabular-references",
        "scikit-learn's models on the same folds",
        (*(variant.title for variant in REFERENCES.values()), *ours.values()),
        tuple(Row(row.label, _cells(row, (*REFERENCES, *ours))) for row in DATA),
        note=f"Not in the paper. {_BOTH} The references read the same encoded rows: logistic regression (at most 300"
        " iterations) or ridge regression, an MLP n-128-128 (5,000 steps of 200 rows, rounded up to epochs) and"
        " histogram gradient boosting (at most 100 iterations, with early stopping), all other settings being"
        " scikit-learn's defaults. The last three columns"
        f" train a TabM-style network for 300 steps of 256 rows. {_NOTE}",
    )


def _feedback() -> Table:
    rivals = ("backprop", "predictive_coding", "forward_forward", "activity_fg", "split_fg")
    titles = {**METHOD_TITLES, "activity_fg": ACTIVITY["activity_fg"].title}
    return Table(
        "tabular-feedback",
        "Learned feedback: maps carry u to every layer, and learn from one noisy forward pass a step",
        (*(variant.title for variant in FEEDBACK.values()), *(titles[name] for name in rivals), "Lead over backprop"),
        tuple(_feedback_row(row, rivals) for row in DATA),
        note=f"Not in the paper, but for backprop, PC, FF and Split-FG. {_BOTH} No derivative of the trunk is taken."
        f" PC and FF train a plain MLP. {_NOTE}",
    )


def _feedback_row(row: DataRow, rivals: Iterable[str]) -> Row:
    cells = [_cell(row, name) if name in row.paper or name == "activity_fg" else None for name in rivals]
    return Row(row.label, (*_cells(row, FEEDBACK), *cells, _lead(row, "learned_feedback", "backprop")))


def _seldom() -> Table:
    every = FEEDBACK["learned_feedback"].title
    return Table(
        "tabular-feedback-seldom",
        "Learned feedback, measured at every n-th step",
        ("Backprop", every, *(variant.title for variant in SELDOM.values()), "Lead of every 4 over every step"),
        tuple(
            Row(
                row.label,
                (
                    *_cells(row, ("backprop", "learned_feedback", *SELDOM)),
                    _lead(row, "learned_every4", "learned_feedback"),
                ),
            )
            for row in DATA
        ),
        note=f"Not in the paper. {_BOTH} A step without a measurement takes one forward pass. {_NOTE}",
        collapse=True,
    )


def _plain_feedback() -> Table:
    return Table(
        "tabular-feedback-plain",
        "Feedback on a plain MLP: learned maps, and the baselines of others",
        (PLAIN["mlp_backprop"].title, *(variant.title for variant in PLAIN_FEEDBACK.values()), "Lead over backprop"),
        tuple(
            Row(
                row.label,
                (*_cells(row, ("mlp_backprop", *PLAIN_FEEDBACK)), _lead(row, "mlp_learned_feedback", "mlp_backprop")),
            )
            for row in DATA
        ),
        note=f"Not in the paper. {_BOTH} All but the last column but one take one more forward pass a step. {_NOTE}",
    )


def _activity() -> Table:
    return Table(
        "tabular-activity",
        "Activity tangents: perturb the outputs of layers instead of their weights",
        ("Backprop", "Split-FG, K = 8", *(variant.title for variant in ACTIVITY.values()), "Lead over Split-FG"),
        tuple(
            Row(
                row.label,
                (*_cells(row, ("backprop", "split_fg", *ACTIVITY)), _lead(row, "activity_fg", "split_fg")),
            )
            for row in DATA
        ),
        note=f"Not in the paper. {_BOTH} {_NOTE}",
    )


def _plain() -> Table:
    trunk = ("backprop", "split_fg")
    return Table(
        "tabular-plain",
        "A plain MLP instead of the TabM-style trunk",
        (*(variant.title for variant in PLAIN.values()), *(f"TabM-style, {PAPER[name].title}" for name in trunk)),
        tuple(Row(row.label, _cells(row, (*PLAIN, *trunk))) for row in DATA),
        note=f"Not in the paper. {_BOTH} The protocol of the main table, with n-128-128 as the trunk. {_NOTE}",
    )


def _loss_curves(row: DataRow) -> Curves:
    # Hopfield retrieval stores rows and Forward-Forward compares labels: neither has a loss on this scale
    paper = [name for name in METHOD_TITLES if name in row.paper and name not in ("hopfield", "forward_forward")]
    shown = (*paper, "activity_fg", "learned_layers")
    return Curves(
        f"tabular-{row.name}", f"{row.label}: training loss", tuple(f"{row.name}-{name}" for name in shown), "loss"
    )


def headlines() -> tuple[Headline, ...]:
    """Return the rows of the report's summary."""
    return tuple(_headline(row) for row in DATA if row.name in ("adult", "otto", "california"))


def _headline(row: DataRow) -> Headline:
    shown = {"Backprop": "backprop", "Pure FG": "pure_fg", "Split-FG": "split_fg"}
    cells = {column: Cell(f"{row.name}-{m}", row.metric, row.paper[m]) for column, m in shown.items()}
    beyond = Cell(f"{row.name}-learned_layers", row.metric)
    metric = "accuracy, %" if row.metric == "accuracy" else "RMSE"
    label = f"{row.label}, five folds: held-out {metric}"
    return Headline(label, {**cells, "Beyond the paper": beyond}, row.better, "learned feedback", row.decimals)
