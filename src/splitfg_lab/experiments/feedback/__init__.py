"""Learned feedback against depth, forward passes, and the read-out that its maps are measured with."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitfg.errors import raise_if
from splitfg.recipes import (
    ActivityMethod,
    Adam,
    BackpropMethod,
    CoarseProbe,
    DirectRoute,
    FrozenMethod,
    LearnedFeedbackMethod,
    MethodRecipe,
    ProximalRule,
    RelayRoute,
    SplitFGMethod,
)
from splitfg.recipes.checks import below, rho_problems
from splitfg_lab.experiments._feedback_methods import by_passes, every_nth
from splitfg_lab.experiments.spec import Cell, Experiment, Preset, Row, Table


@dataclass(frozen=True)
class Feedback:
    """A plain ReLU network with He's initialisation on one fold of Otto; seeds set initial weights, batches and noise.

    Attributes:
        method: How the network is trained.
        layers: Hidden layers.
        width: Units of a layer.
        steps: Training steps, over which the learning rate is annealed.
        batch: Rows per step.
        optimizer: Optimizer, with its settings.
        rho: Trunk step scale.
        dataset: Name of the table.
    """

    method: MethodRecipe
    layers: int = 3
    width: int = 128
    steps: int = 600
    batch: int = 128
    optimizer: Adam = field(default_factory=lambda: Adam(lr=3e-3))
    rho: float = 1.0
    dataset: str = "otto"

    def __post_init__(self) -> None:
        raise_if(below(1, self, "layers", "width", "steps", "batch") + rho_problems(self.rho))


DEPTHS = (3, 6, 10, 20)
_LEARNED = by_passes()
METHODS: dict[str, tuple[str, MethodRecipe, float]] = {
    "backprop": ("Backprop", BackpropMethod(), 1.0),
    "learned": ("Learned feedback", _LEARNED, 1.0),
    **{
        f"learned-every{n}": (
            f"Learned feedback, measured every {n} steps",
            every_nth(n),
            1.0,
        )
        for n in (2, 4, 8)
    },
    "direct": ("Learned feedback, direct route", by_passes(DirectRoute()), 1.0),
    "direct-rho0.3": ("Learned feedback, direct route, rho = 0.3", by_passes(DirectRoute()), 0.3),
    "activity": ("Activity tangents, K = 8", ActivityMethod(K=8), 1.0),
    "split_fg": ("Split-FG, K = 8, rho = 0.3", SplitFGMethod(K=8), 0.3),
    "frozen": ("Frozen trunk", FrozenMethod(), 1.0),
}
"""Title, method and trunk step scale of every row of the depth table."""

BUDGETS: dict[str, tuple[int, tuple[int, ...]]] = {
    "learned": (2, (100, 200, 300, 450)),
    "activity": (9, (150, 300, 2700)),
    "split_fg": (9, (1200, 2700, 5400)),
}
"""Forward passes of a step (a Jacobian-vector product counts as one), and steps, of the table against passes."""

BITS = (3, 4, 5, 6, 8)
NOISES = (0.02, 0.05, 0.1)
STEPS = (1.0, 0.3)
RATES = (1.0, 0.3)
_THREE = (0, 1, 2)


def coarse(rate: float, step: float, *, bits: int | None = None, noise: float = 0.0) -> str:
    """Return the name of a preset with a coarse read-out."""
    reading = f"{bits}bit" if bits is not None else f"noise{noise:g}"
    return f"{reading}-step{step:g}-rate{rate:g}"


def _presets() -> tuple[Preset, ...]:
    made = [
        Preset(f"{name}-depth{depth}", f"Otto, {depth} layers: {title}", Feedback(method, depth, rho=rho), _THREE)
        for depth in DEPTHS
        for name, (title, method, rho) in METHODS.items()
    ]
    for name, (_, budgets) in BUDGETS.items():
        title, method, rho = METHODS[name]
        for steps in budgets:
            config = Feedback(method, steps=steps, rho=rho)
            made.append(Preset(f"{name}-steps{steps}", f"Otto, 3 layers, {steps:,} steps: {title}", config, _THREE))
    for rate in RATES:
        route = RelayRoute(ProximalRule(rate))
        for step in STEPS:
            probes = {coarse(rate, step, bits=b): CoarseProbe(step, b) for b in BITS}
            probes |= {coarse(rate, step, noise=n): CoarseProbe(step, None, n) for n in NOISES}
            for name, probe in probes.items():
                config = Feedback(LearnedFeedbackMethod(route, probe))
                made.append(
                    Preset(name, f"Otto, 3 layers: learned feedback, {name.replace('-', ', ')}", config, _THREE)
                )
    return tuple(made)


def _depth_table() -> Table:
    rows = [
        Row(title, tuple(Cell(f"{name}-depth{depth}", "accuracy") for depth in DEPTHS))
        for name, (title, _, _) in METHODS.items()
    ]
    return Table(
        "feedback-depth",
        "Otto: held-out accuracy against depth, %",
        tuple(f"{depth} layers" for depth in DEPTHS),
        tuple(rows),
        "higher",
        note="Plain ReLU networks of width 128, 600 steps of 128 rows, Adam at 3e-3 annealed to zero, fold 0; mean and"
        " standard deviation over seeds.",
    )


def _passes_table() -> Table:
    ends = [("Frozen trunk, 600 steps", "frozen-depth3"), ("Backprop, 600 steps", "backprop-depth3")]
    rows = [Row(label, ("600", Cell(preset, "accuracy"))) for label, preset in ends]
    for name, (passes, budgets) in BUDGETS.items():
        presets = {steps: f"{name}-steps{steps}" for steps in budgets} | {600: f"{name}-depth3"}
        rows += [
            Row(f"{METHODS[name][0]}, {steps:,} steps", (f"{passes * steps:,}", Cell(presets[steps], "accuracy")))
            for steps in sorted(presets)
        ]
    return Table(
        "feedback-passes",
        "Otto, 3 layers: held-out accuracy against forward passes, %",
        ("forward passes", "accuracy"),
        tuple(rows),
        "higher",
        note="A pass runs a batch of 128 rows through the trunk; a Jacobian-vector product counts as one. Backprop's"
        " backward passes are not counted. Every row is a run of its own, with the rate annealed over its steps.",
    )


def _coarse_table() -> Table:
    readings: list[tuple[str, dict[str, object]]] = [(f"{b} bits", {"bits": b}) for b in BITS]
    readings += [(f"noise of {100 * n:g}%", {"noise": n}) for n in NOISES]
    columns = [(rate, step) for rate in RATES for step in STEPS]
    return Table(
        "feedback-readout",
        "Otto, 3 layers: held-out accuracy against the read-out that the maps are measured with, %",
        tuple(f"step {step:g}, rate {rate:g}" for rate, step in columns),
        tuple(
            Row(label, tuple(Cell(coarse(rate, step, **how), "accuracy") for rate, step in columns))  # type: ignore[arg-type]
            for label, how in readings
        ),
        "higher",
        best_in="row",
        note="Every tensor that a difference reads is quantised over its range, or has noise added relative to its"
        " size. The step is relative to what is perturbed. With exact readings: the row of learned feedback above.",
    )


EXPERIMENT = Experiment(
    name="feedback",
    title="Learned feedback: depth and read-out",
    source="New here",
    runner="splitfg_lab.experiments.feedback.run:run",
    presets=_presets(),
    tables=(_depth_table(), _passes_table(), _coarse_table()),
    figures=(),
)
