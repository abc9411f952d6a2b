"""The config of an image run: data, network, method and budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from splitfg.errors import raise_if
from splitfg.recipes import (
    Adam,
    AdamL2,
    AdamW,
    HopfieldMethod,
    TableMethod,
)
from splitfg.recipes.checks import adaptive_problems, below, not_positive, rho_problems, warmup_problems
from splitfg_lab.experiments._search import Search, search_problems
from splitfg_lab.experiments.images._networks import Backbone, FlatNetwork, PlainMLP

FULL = 23_437
"""Steps of the full budget, 60 epochs of 50,000 images at 128 a step."""

ABLATION = 6_000
"""Steps of the flat-head ablation, 15.4 epochs; also the budget of the screening runs."""


@dataclass(frozen=True)
class ImageTraining:
    """One method on one image set, as in the paper's appendix unless a field says otherwise.

    Attributes:
        dataset: What is learned; ``synthetic`` is small, random and for tests.
        method: How the network learns.
        network: What learns.
        optimizer: Optimizer, with its settings.
        rho: Trunk step scale.
        steps: Optimizer steps; Hopfield stores every image once, within them.
        horizon: Steps over which the learning rate is annealed; a run with fewer steps is one stopped early.
        warmup: Steps of the linear warmup.
        batch: Images per step.
        max_norm: Clipping bound.
        clip_apart: Clip trunk and head each by itself; the paper clips them jointly.
        adaptive: Let a line search find the trunk's step scale; rho must be 1.
        search: How the line search begins.
        evaluations: Full passes over the test images.
        checkpoints: Number of checkpoints in a run.
        matmul: float32 products and convolutions on a GPU: ``high`` allows TF32.
        step: How a step runs on a GPU: ``compiled`` and captured in a CUDA graph, ``captured`` alone, or ``eager``.
            Predictive coding is captured alone; Forward-Forward and Hopfield are always eager.
    """

    dataset: Literal["cifar10", "cifar100", "synthetic"]
    method: TableMethod
    network: FlatNetwork | Backbone | PlainMLP = field(default_factory=FlatNetwork)
    optimizer: Adam | AdamL2 | AdamW = field(default_factory=Adam)
    rho: float = 1.0
    steps: int = FULL
    horizon: int = FULL
    warmup: int = 200
    batch: int = 128
    max_norm: float = 1.0
    clip_apart: bool = False
    adaptive: bool = False
    search: Search = field(default_factory=Search)
    evaluations: int = 20
    checkpoints: int = 2
    matmul: Literal["high", "highest"] = "high"
    step: Literal["compiled", "captured", "eager"] = "compiled"

    @property
    def adaptive_groups(self) -> tuple[str, ...]:
        """Return none: the line search has one scale."""
        return ()

    def __post_init__(self) -> None:
        found = below(1, self, "steps", "horizon", "batch") + not_positive(self, "max_norm") + rho_problems(self.rho)
        found += adaptive_problems(self.adaptive, self.rho) + search_problems(self.search, adaptive=self.adaptive)
        if not isinstance(self.method, HopfieldMethod):
            found += warmup_problems(self.warmup, self.horizon)
        raise_if(found)
