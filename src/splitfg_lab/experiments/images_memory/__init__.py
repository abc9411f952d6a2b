"""Table 10: peak GPU memory of the image systems, and of the same networks under other methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from splitfg.errors import raise_if
from splitfg.recipes.checks import below
from splitfg_lab.experiments.spec import Cell, Experiment, Paper, Preset, Row, Table

VARIANTS = {
    "backprop": "Backprop, whole backbone",
    "backprop-checkpointed": "Backprop, whole backbone, activation checkpointing",
    "learned": "Learned feedback, whole backbone",
    "learned-layers": "Learned feedback, whole backbone, layers measured alone",
    "pure_fg-chunk1": "Pure FG, whole backbone, one tangent at a time",
    "pure_fg-chunk4": "Pure FG, whole backbone, all at once",
    "naive-chunk1": "Split-FG, whole backbone, one tangent at a time",
    "naive-chunk4": "Split-FG, whole backbone, all at once",
    "split_fg-chunk1": "Split-FG, flat head, one tangent at a time",
    "split_fg-chunk4": "Split-FG, flat head, all at once",
    "frozen": "Frozen trunk, flat head",
    "flat-backprop": "Backprop, flat head",
    "flat-checkpointed": "Backprop, flat head, activation checkpointing",
}
"""Names and labels of the variants, in the order of the table; ``chunk`` is the number of tangents at a time, of 4."""


@dataclass(frozen=True)
class ImageMemory:
    """Peak memory of several methods, each in its own process, on random images of CIFAR's size.

    Attributes:
        dataset: The data set whose networks and number of classes to use.
        variants: Names of the variants to measure.
        images: Training images on the GPU, a byte per pixel.
        batch: Images per step.
        step: ``eager``, as the paper measured, or ``compiled`` and captured in a CUDA graph, or ``captured`` alone.
        matmul: float32 products and convolutions: ``high`` allows TF32.
    """

    dataset: Literal["cifar10", "cifar100"]
    variants: tuple[str, ...] = tuple(VARIANTS)
    images: int = 50_000
    batch: int = 128
    step: Literal["compiled", "captured", "eager"] = "eager"
    matmul: Literal["high", "highest"] = "high"

    def __post_init__(self) -> None:
        raise_if(below(1, self, "images", "batch"))


LABELS = {"cifar10": "CIFAR-10, ResNet-20", "cifar100": "CIFAR-100, ResNet-18"}
PAPER = {  # MiB, by variant
    "cifar10": {"backprop": 1520.0, "pure_fg-chunk1": 2668.0, "split_fg-chunk1": 1282.0},
    "cifar100": {"backprop": 3402.0, "split_fg-chunk1": 3117.0},
}
REFERENCE_DIFFERENCE = {"cifar10": 15.6, "cifar100": 8.4}
"""The paper's saving of Split-FG against backprop, in %."""


def _row(dataset: str, variant: str) -> Row:
    mib = PAPER[dataset].get(variant)
    saved = REFERENCE_DIFFERENCE[dataset] if variant == "split_fg-chunk1" else None
    return Row(
        VARIANTS[variant],
        (
            Cell(dataset, f"mib/{variant}", None if mib is None else Paper(mib), decimals=0),
            Cell(dataset, f"saved/{variant}", None if saved is None else Paper(saved)),
            Cell(dataset, f"beyond/{variant}", decimals=0),
            Cell(f"{dataset}-compiled", f"mib/{variant}", decimals=0),
            Cell(f"{dataset}-compiled", f"saved/{variant}"),
            Cell(f"{dataset}-compiled", f"beyond/{variant}", decimals=0),
        ),
    )


def _table(dataset: str) -> Table:
    columns = ("peak, MiB", "saved against backprop, %", "beyond resident memory, MiB")
    return Table(
        f"images-memory-{dataset}",
        f"Peak GPU memory of a training step: {LABELS[dataset]}, batch 128, K = 4",
        tuple(f"{how}, {column}" for how in ("Eager", "Compiled") for column in columns),
        tuple(_row(dataset, variant) for variant in VARIANTS),
        note="Every peak (torch.cuda.max_memory_allocated) is taken in a process of its own, with the training images"
        " on the GPU. Resident between steps are the images, parameters, gradients, Adam's moments and work spaces. The"
        " paper compares Split-FG on the flat head with backprop on the whole backbone, so that its saving is that of"
        " another network; the rows with the same network show what the estimator saves. It takes tangents one at a"
        " time and says that pure FG on the whole ResNet-20 needs as much as a split of it.",
    )


def _preset(dataset: Literal["cifar10", "cifar100"], step: Literal["eager", "compiled"]) -> Preset:
    name = dataset if step == "eager" else f"{dataset}-{step}"
    return Preset(name, f"{LABELS[dataset]}: {step} steps", ImageMemory(dataset, step=step))


EXPERIMENT = Experiment(
    name="images_memory",
    title="Images: peak GPU memory",
    source="Section 4.3, Table 10",
    runner="splitfg_lab.experiments.images_memory.run:run",
    presets=(
        _preset("cifar10", "eager"),
        _preset("cifar100", "eager"),
        _preset("cifar10", "compiled"),
        _preset("cifar100", "compiled"),
    ),
    tables=(_table("cifar10"), _table("cifar100")),
    no_checkpoints=("*",),
    smoke=("images=64", "batch=2"),
)
