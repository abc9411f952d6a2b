"""Table 7: peak GPU memory of backprop and Split-FG on five tabular data sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from splitfg.errors import raise_if
from splitfg.recipes import Adam
from splitfg.recipes.checks import below, not_positive, rho_problems
from splitfg.recipes.tables import Network
from splitfg_lab.experiments.spec import Cell, Experiment, Paper, Preset, Row, Table


@dataclass(frozen=True)
class TabularMemory:
    """Split-FG, backprop and checkpointed backprop in turn, with one whole data set on the GPU.

    Attributes:
        dataset: Name of the data set.
        network: The network.
        steps: Training steps of each method.
        batch: Rows per step.
        K: Tangents per step, measured one at a time (the paper's loop, whose memory does not grow with K) and all at
            once.
        train_fraction: Share of the rows to train on; four of the paper's five epochs are those of 70%.
        warm_up: The method that takes one step before the measurement, which allocates the work spaces of its threads
            for all methods alike. Backprop needs one more than Split-FG.
        optimizer: Optimizer, with its settings.
        rho: Trunk step scale.
        clip: Joint clipping bound.
    """

    dataset: str
    network: Network = field(default_factory=Network)
    steps: int = 300
    batch: int = 256
    K: int = 8
    train_fraction: float = 0.7
    optimizer: Adam = field(default_factory=lambda: Adam(lr=3e-3))
    rho: float = 1.0
    clip: float = 1.0
    warm_up: Literal["split_fg", "backprop"] = "split_fg"

    def __post_init__(self) -> None:
        found = below(1, self, "steps", "batch", "K") + not_positive(self, "clip") + rho_problems(self.rho)
        if not 0 < self.train_fraction < 1:
            found.append(f"train_fraction must be in (0, 1), got {self.train_fraction}")
        raise_if(found)


# label, epochs, backprop and Split-FG in MiB, MemSave in %
_PAPER = {
    "adult": ("Adult", 2.3, 144.4, 126.0, 12.7),
    "covertype": ("Covertype", 0.2, 309.8, 291.1, 6.0),
    "california": ("California Housing", 5.3, 76.0, 57.7, 24.1),
    "diamond": ("Diamond", 2.0, 156.9, 138.6, 11.7),
    "black_friday": ("Black Friday", 0.7, 425.2, 406.9, 4.3),
}


def _row(name: str) -> Row:
    label, epochs, backprop, split_fg, saved = _PAPER[name]
    return Row(
        label,
        (
            Cell(name, "epochs", Paper(epochs)),
            Cell(name, "resident_mib"),
            Cell(name, "backprop_mib", Paper(backprop)),
            Cell(name, "checkpointed_mib"),
            Cell(name, "split_fg_mib", Paper(split_fg)),
            Cell(name, "split_fg_at_once_mib"),
            Cell(name, "memsave_percent", Paper(saved)),
        ),
    )


def _row_beyond(name: str) -> Row:
    metrics = ("backprop_left_mib", "backprop_beyond_mib", "checkpointed_beyond_mib", "split_fg_beyond_mib")
    cells = tuple(Cell(name, metric) for metric in (*metrics, "split_fg_at_once_beyond_mib"))
    return Row(_PAPER[name][0], cells)


EXPERIMENT = Experiment(
    name="tabular_memory",
    title="Tables: peak GPU memory",
    source="Section 4.2, Table 7",
    runner="splitfg_lab.experiments.tabular_memory.run:run",
    presets=tuple(Preset(name, label, TabularMemory(name)) for name, (label, *_) in _PAPER.items()),
    tables=(
        Table(
            "tabular-memory",
            "Peak GPU memory of training, MiB",
            (
                "Epochs",
                "Resident at the start",
                "Backprop",
                "Backprop, checkpointed",
                "Split-FG, one tangent at a time",
                "Split-FG, all at once",
                "MemSave, %",
            ),
            tuple(_row(name) for name in _PAPER),
            decimals=1,
            note="The most memory torch had allocated on the GPU, counted from the start of training, with the whole"
            " data set on the GPU. Resident at the start are the data and cuBLAS's work space for the calling thread."
            " MemSave = 1 - Split-FG (one tangent at a time) / backprop. The paper measured on an RTX 4070.",
        ),
        Table(
            "tabular-memory-beyond",
            "Peak GPU memory of a step beyond the memory that stays allocated between steps, MiB",
            (
                "Work space of autograd's thread",
                "Backprop",
                "Backprop, checkpointed",
                "Split-FG, one tangent at a time",
                "Split-FG, all at once",
            ),
            tuple(_row_beyond(name) for name in _PAPER),
            decimals=1,
            note="The data, parameters, gradients, Adam's state and cuBLAS's work spaces stay allocated between steps;"
            " the table above counts them and this one does not. The first column is memory that backprop keeps and"
            " Split-FG does not need: autograd runs in its own thread, for which cuBLAS keeps a second work space.",
        ),
    ),
    earlier=(("warm_up", "backprop"),),
    no_checkpoints=("*",),
)
