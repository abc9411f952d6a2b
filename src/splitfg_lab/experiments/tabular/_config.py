"""The config of one run on a table."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitfg.errors import raise_if
from splitfg.recipes import Adam, TableMethod
from splitfg.recipes.checks import adaptive_problems, below, not_positive, rho_problems
from splitfg.recipes.tables import Network, NetworkRecipe

FOLDS = 5
"""Folds of the cross-validation."""


@dataclass(frozen=True)
class Tabular:
    """One method on one data set; the run's seed is the number of the held-out fold.

    References, the models of scikit-learn, use ``dataset``, ``method``, ``steps``, ``folds`` and ``training_seed``
    and ignore the other fields.

    Attributes:
        dataset: Name of the data set.
        method: How the network is trained.
        network: The network.
        steps: Training steps; of a reference, the most.
        batch: Rows per step.
        optimizer: Optimizer, with its settings.
        rho: Trunk step scale.
        clip: Joint clipping bound.
        adaptive: Let a line search find the trunk step scale; rho must be 1.
        folds: Folds of the cross-validation, always dealt with seed 0.
        training_seed: Seed of initialisation, batches and tangents, the same in every fold.
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
    adaptive: bool = False

    def __post_init__(self) -> None:
        found = below(1, self, "steps", "batch") + below(2, self, "folds") + below(0, self, "training_seed")
        raise_if(
            found + not_positive(self, "clip") + rho_problems(self.rho) + adaptive_problems(self.adaptive, self.rho)
        )
