"""The paper's future work on tables: conditioned tangents, a nonlinear head, a probed head."""

from __future__ import annotations

from splitfg.recipes import BackpropMethod, ConditionedLaw, SplitFGMethod, TableMethod
from splitfg.recipes.tables import Network, NonlinearHeadRecipe, ProbedHeadRecipe, table_methods
from splitfg_lab.experiments.spec import Cell, Experiment, Preset, Row, Table
from splitfg_lab.experiments.tabular import FOLDS, Tabular

_DATA = {"adult": ("Adult", "accuracy"), "otto": ("Otto", "accuracy"), "california": ("California", "rmse")}

_GAUSSIAN = table_methods()["split_fg"]
_VARIANTS: dict[str, tuple[str, TableMethod, Network]] = {
    "gaussian": ("Gaussian tangents, linear head (the paper)", _GAUSSIAN, Network()),
    "conditioned": (
        "Conditioned tangents, power 1",
        SplitFGMethod(K=8, chunk=2, law=ConditionedLaw(power=1.0)),
        Network(),
    ),
    "conditioned_inverse": (
        "Conditioned tangents, power -1/2",
        SplitFGMethod(K=8, chunk=2, law=ConditionedLaw(power=-0.5)),
        Network(),
    ),
    "probed_head": ("Linear head, probed", _GAUSSIAN, Network(head=ProbedHeadRecipe())),
    "nonlinear_head": ("Nonlinear head, reverse mode inside it", _GAUSSIAN, Network(head=NonlinearHeadRecipe())),
    "nonlinear_backprop": ("Nonlinear head, backprop", BackpropMethod(), Network(head=NonlinearHeadRecipe())),
    "backprop": ("Linear head, backprop", BackpropMethod(), Network()),
}


def _cell(preset: str, metric: str) -> Cell:
    return Cell(preset, metric, decimals=1 if metric == "accuracy" else 3)


EXPERIMENT = Experiment(
    name="tabular_future",
    title="Tables: conditioned tangents, nonlinear and probed heads",
    source="New here: Section 5's future work",
    runner="splitfg_lab.experiments.tabular.run:run",
    earlier=(("adaptive", False),),
    presets=tuple(
        Preset(f"{name}-{variant}", f"{label}: {title}", Tabular(name, method, network), seeds=tuple(range(FOLDS)))
        for name, (label, _) in _DATA.items()
        for variant, (title, method, network) in _VARIANTS.items()
    ),
    tables=(
        Table(
            "tabular-future",
            "Split-FG, K = 8, with other tangents and heads",
            tuple(f"{label}, {'%' if metric == 'accuracy' else 'RMSE'}" for label, metric in _DATA.values()),
            tuple(
                Row(title, tuple(_cell(f"{name}-{variant}", metric) for name, (_, metric) in _DATA.items()))
                for variant, (title, _, _) in _VARIANTS.items()
            ),
            decimals=3,
            note="Mean and standard deviation over 5 folds, protocol of the main table. Accuracy: higher is better;"
            " RMSE: lower. One training seed: differences within a standard deviation are no evidence either way.",
        ),
    ),
)
