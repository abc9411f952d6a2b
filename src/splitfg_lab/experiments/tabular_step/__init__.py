"""Tables: a line search for the trunk's step against a grid of trunk step scales."""

from __future__ import annotations

from splitfg.recipes import ActivityMethod, TableMethod
from splitfg.recipes.tables import table_methods
from splitfg_lab.experiments._feedback_methods import by_passes
from splitfg_lab.experiments.spec import Cell, Experiment, Preset, Row, Table
from splitfg_lab.experiments.tabular import FOLDS, Tabular

RHOS = (0.01, 0.03, 0.1, 0.3, 1.0)
_DATA = {
    "otto": ("Otto", "accuracy", "higher", 1),
    "california": ("California", "rmse", "lower", 3),
    "house_16h": ("House 16H", "rmse", "lower", 3),
    "diamond": ("Diamond", "rmse", "lower", 3),
}
_METHODS: dict[str, tuple[str, TableMethod]] = {
    "split_fg": ("Split-FG, K = 8", table_methods()["split_fg"]),
    "activity_fg": ("Activity tangents, K = 8", table_methods()["activity_fg"]),
    "learned_feedback": ("Learned feedback", by_passes()),
    "activity_fg_k1": ("Activity tangents, K = 1, one fold", ActivityMethod(K=1)),
}
_ONE_FOLD = {"activity_fg_k1"}


def _name(dataset: str, method: str, rho: float | None) -> str:
    return f"{dataset}-{method}-" + ("adaptive" if rho is None else f"rho{rho:g}")


def _presets() -> tuple[Preset, ...]:
    made = []
    for dataset, (label, *_) in _DATA.items():
        for method, (title, recipe) in _METHODS.items():
            folds = (0,) if method in _ONE_FOLD else tuple(range(FOLDS))
            for rho in (*RHOS, None):
                how = "line search" if rho is None else f"rho = {rho:g}"
                config = Tabular(dataset, recipe, rho=1.0 if rho is None else rho, adaptive=rho is None)
                made.append(Preset(_name(dataset, method, rho), f"{label}: {title}, {how}", config, folds))
    return tuple(made)


def _table(dataset: str) -> Table:
    label, metric, better, decimals = _DATA[dataset]
    rows = tuple(
        Row(title, tuple(Cell(_name(dataset, method, rho), metric) for rho in (*RHOS, None)))
        for method, (title, _) in _METHODS.items()
    )
    return Table(
        f"tabular-step-{dataset}",
        f"{label}: trunk step scale by a grid and by a line search, "
        + ("held-out accuracy, %" if decimals == 1 else "RMSE"),
        (*(f"rho = {rho:g}" for rho in RHOS), "Line search"),
        rows,
        "higher" if better == "higher" else "lower",
        best_in="row",
        decimals=decimals,
        note="Means over five held-out folds, protocol of the main table, Adam at 3e-3. The line search has its"
        " defaults in all rows: rho begins at 1 and is at most 3.",
    )


EXPERIMENT = Experiment(
    name="tabular_step",
    title="Tables: a trunk step learned during training",
    source="New here: Section 5's future work",
    runner="splitfg_lab.experiments.tabular.run:run",
    presets=_presets(),
    tables=tuple(_table(dataset) for dataset in _DATA),
)
