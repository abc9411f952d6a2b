"""The demo: four ways to train a trunk side by side, on data that ships with scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitfg.errors import raise_if
from splitfg.recipes import Adam, BackpropMethod, FrozenMethod, LearnedFeedbackMethod, MethodRecipe, SplitFGMethod
from splitfg.recipes.checks import below, rho_problems
from splitfg_lab.experiments.spec import Cell, Curves, Experiment, Preset, Row, Table


@dataclass(frozen=True)
class Demo:
    """A plain ReLU trunk, 64-128-128, on scikit-learn's handwritten digits.

    Attributes:
        method: How the trunk is trained.
        steps: Training steps.
        batch: Rows per step.
        optimizer: Optimizer, with its settings.
        rho: Trunk step scale.
    """

    method: MethodRecipe
    steps: int = 600
    batch: int = 128
    optimizer: Adam = field(default_factory=lambda: Adam(lr=3e-3))
    rho: float = 1.0

    def __post_init__(self) -> None:
        raise_if(below(1, self, "steps", "batch") + rho_problems(self.rho))


_METHODS: dict[str, tuple[str, MethodRecipe]] = {
    "frozen": ("Frozen trunk, exact head", FrozenMethod()),
    "split_fg": ("Split-FG, K = 8", SplitFGMethod(K=8)),
    "learned_feedback": ("Learned feedback", LearnedFeedbackMethod()),
    "backprop": ("Backprop", BackpropMethod()),
}

EXPERIMENT = Experiment(
    name="demo",
    title="Digits: frozen trunk, Split-FG, learned feedback and backprop",
    source="New here",
    runner="splitfg_lab.experiments.demo.run:run",
    presets=tuple(Preset(name, title, Demo(method)) for name, (title, method) in _METHODS.items()),
    tables=(
        Table(
            "demo",
            "Held-out accuracy on scikit-learn's digits, %",
            ("Accuracy", "Test loss"),
            tuple(Row(title, (Cell(m, "accuracy"), Cell(m, "test_loss"))) for m, (title, _) in _METHODS.items()),
            better=None,
            decimals=2,
            note="8x8 images, 1,437 rows to train on and 360 held out; not an experiment of the paper.",
        ),
    ),
    figures=(
        Curves("demo-loss", "Training loss", tuple(_METHODS), "loss", log_y=True),
        Curves("demo-accuracy", "Held-out accuracy, %", tuple(_METHODS), "accuracy"),
    ),
)
