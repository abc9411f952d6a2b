"""An experiment of another package, found by its entry point: what the tests of runs and command line run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from splitfg_lab.experiments.spec import Cell, Experiment, Paper, Preset, Row, Table


@dataclass(frozen=True)
class Sgd:
    lr: float = 0.05
    momentum: float = 0.9


@dataclass(frozen=True)
class Adam:
    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass(frozen=True)
class TinyConfig:
    """Every kind of field, and a few that make a run go wrong on purpose.

    Attributes:
        noise: Standard deviation of the noise that is added to gradients, in
            every coordinate.
        diverge_at: Step at which the loss becomes infinite.
    """

    steps: int = 40
    optimizer: Adam | Sgd = Adam()
    noise: float = 0.1
    loss: Literal["squared", "absolute"] = "squared"
    log_every: int = 7
    evaluate_every: int = 10
    checkpoint_every: int = 3
    pause_s: float = 0.0
    diverge_at: int | None = None
    fail: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be positive, got {self.steps}")


_CELL = Cell("adam", "error", Paper(0.5, 0.1))

EXPERIMENT = Experiment(
    name="tiny",
    title="A tiny regression",
    source="Table 0",
    runner="tiny.run:run",
    presets=(
        Preset("adam", "with Adam", TinyConfig(), seeds=(0, 1)),
        Preset("sgd", "with momentum", TinyConfig(optimizer=Sgd())),
        Preset("diverges", "on purpose", TinyConfig(diverge_at=15)),
        Preset("fails", "on purpose", TinyConfig(fail=True)),
    ),
    tables=(Table("errors", "Errors", ("error",), (Row("adam", (_CELL,)),), better="lower"),),
)
