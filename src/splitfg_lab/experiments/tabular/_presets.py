"""The presets: the paper's seven methods, and rows that the paper does not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from splitfg.recipes import (
    ActivityMethod,
    AlignedRule,
    DirectRoute,
    FixedRule,
    ForwardDFARule,
    PredictedActivityMethod,
    TableMethod,
)
from splitfg.recipes.tables import Network, NetworkRecipe, PlainNetwork, table_methods
from splitfg_lab.experiments._feedback_methods import LAYERS_ALONE, by_passes, every_nth
from splitfg_lab.experiments._titles import METHOD_TITLES
from splitfg_lab.experiments.spec import Preset
from splitfg_lab.experiments.tabular._config import FOLDS, Tabular
from splitfg_lab.experiments.tabular._references import BoostingReference, LinearReference, MLPReference
from splitfg_lab.experiments.tabular._sets import DATA, DataRow


@dataclass(frozen=True)
class Variant:
    """A column beside the paper's: its title, and how it departs from the protocol."""

    title: str
    method: TableMethod
    network: NetworkRecipe = field(default_factory=Network)
    steps: int = 300

    def config(self, dataset: str) -> Tabular:
        """Return the config on a data set."""
        return Tabular(dataset, self.method, self.network, self.steps)


_METHODS = table_methods()
_PREDICTED = PredictedActivityMethod(chunk=2, feedback=by_passes())

PAPER = {name: Variant(title, _METHODS[name]) for name, title in METHOD_TITLES.items()}
"""The paper's methods, in the order of its columns."""

ACTIVITY = {
    "activity_fg": Variant("Activity tangents, K = 8", _METHODS["activity_fg"]),
    "activity_fg_k1": Variant("Activity tangents, K = 1", ActivityMethod(K=1)),
}
"""Tangents at activities."""

PLAIN = {
    "mlp_backprop": Variant("Plain MLP, backprop", _METHODS["backprop"], PlainNetwork()),
    "mlp_split_fg": Variant("Plain MLP, Split-FG, K = 8", _METHODS["split_fg"], PlainNetwork()),
}
"""The same protocol on a plain MLP, n-128-128, instead of the TabM-style trunk."""

FEEDBACK = {
    "learned_feedback": Variant("Learned feedback", by_passes()),
    "learned_layers": Variant("Learned feedback, layers alone", LAYERS_ALONE),
    "predicted_activity_fg": Variant("Activity tangents on it, K = 8", _PREDICTED),
}
"""Feedback through learned maps, on the TabM-style trunk: as it is, and as a control variate."""

SELDOM = {f"learned_every{n}": Variant(f"Measured every {n} steps", every_nth(n)) for n in (2, 4, 8)}
"""Learned feedback, measured at every n-th step."""

PLAIN_FEEDBACK = {
    "mlp_learned_feedback": Variant("Learned feedback", by_passes(), PlainNetwork()),
    "mlp_learned_layers": Variant("Learned feedback, layers alone", LAYERS_ALONE, PlainNetwork()),
    "mlp_direct_feedback": Variant("Direct route", by_passes(DirectRoute()), PlainNetwork()),
    "mlp_fdfa": Variant("FDFA", by_passes(DirectRoute(ForwardDFARule())), PlainNetwork()),
    "mlp_aligned": Variant("GrAPE, no anchors", by_passes(DirectRoute(AlignedRule())), PlainNetwork()),
    "mlp_dfa": Variant("DFA", by_passes(DirectRoute(FixedRule())), PlainNetwork()),
    "mlp_node_perturbation": Variant("Node perturbation, K = 1", ActivityMethod(K=1), PlainNetwork()),
}
"""Feedback through learned and random maps on the plain MLP, and the baselines of others."""

REFERENCES = {
    "linear": Variant("Logistic or ridge regression", LinearReference(), PlainNetwork(), 300),
    "sklearn_mlp": Variant("scikit-learn's MLP", MLPReference(), PlainNetwork(), 5_000),
    "boosting": Variant("Gradient boosting", BoostingReference(), PlainNetwork(), 100),
}
"""Models of scikit-learn on the same folds and encoded rows."""


def presets() -> tuple[Preset, ...]:
    """Return all presets, the paper's first."""
    groups = (ACTIVITY, FEEDBACK, SELDOM, PLAIN, PLAIN_FEEDBACK, REFERENCES)
    beyond = [pair for group in groups for pair in group.items()]
    pairs = [(row, name, variant) for row in DATA for name, variant in PAPER.items() if name in row.paper]
    pairs += [(row, name, variant) for row in DATA for name, variant in beyond]
    return tuple(_all_folds(pairs))


def _all_folds(pairs: list[tuple[DataRow, str, Variant]]) -> Iterator[Preset]:
    for row, name, variant in pairs:
        title, config = f"{row.label}: {variant.title}", variant.config(row.name)
        yield Preset(f"{row.name}-{name}", title, config, seeds=tuple(range(FOLDS)))
