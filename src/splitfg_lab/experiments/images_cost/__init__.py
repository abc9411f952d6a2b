"""Time of a training step of the image methods, against backprop on the same network."""

from __future__ import annotations

from dataclasses import dataclass

from splitfg.errors import raise_if
from splitfg.recipes.checks import below, not_positive
from splitfg_lab.experiments.spec import Cell, Experiment, Preset, Row, Table

NETWORKS = {
    "flat-backprop": {
        "flat-backprop": "Flat head: backprop",
        "cifar10-frozen": "Flat head: frozen trunk",
        "cifar10-split_fg": "Flat head: Split-FG, K = 4",
        "flat-split_fg-single": "Flat head, one layer: Split-FG, K = 4",
        "flat-k64-rho0.1": "Flat head: Split-FG, K = 64",
        "flat-direct-rho0.1": "Flat head: direct path",
        "flat-learned": "Flat head: learned feedback",
        "flat-pure_fg": "Flat head: pure FG, K = 4",
        "flat-es": "Flat head: ES, K = 4",
    },
    "cifar10-backprop": {
        "cifar10-backprop": "ResNet-20: backprop",
        "resnet20-learned": "ResNet-20: learned feedback",
        "resnet20-learned-layers": "ResNet-20: learned feedback, layers measured alone",
        "resnet20-pull": "ResNet-20: maps, reverse mode inside own block",
        "resnet20-pull2": "ResNet-20: maps, two pulls",
        "naive-split_fg": "ResNet-20: Split-FG, K = 4",
        "cifar10-pure_fg": "ResNet-20: pure FG, K = 4",
        "cifar10-es": "ResNet-20: ES, K = 4",
    },
    "": {
        "cifar10-predictive_coding": "MLP: predictive coding",
        "cifar10-forward_forward": "MLP: Forward-Forward",
    },
}
"""Presets of ``images`` and their labels, by backprop on the same network; the MLP has no backprop preset."""

VARIANTS = tuple(name for group in NETWORKS.values() for name in group)


@dataclass(frozen=True)
class ImageCost:
    """Training steps of several presets of ``images``, on random images of CIFAR-10's size.

    Attributes:
        variants: Names of presets of ``images``.
        images: Training images on the GPU, a byte per pixel.
        batch: Images per step.
        warmup: Steps before timing, in which steps are compiled and captured.
        blocks: Timed blocks of each preset; the median counts.
        steps: Most steps in a block.
        seconds: A block ends after about this time.
    """

    variants: tuple[str, ...] = VARIANTS
    images: int = 50_000
    batch: int = 128
    warmup: int = 30
    blocks: int = 5
    steps: int = 400
    seconds: float = 0.5

    def __post_init__(self) -> None:
        raise_if(below(1, self, "images", "batch", "warmup", "blocks", "steps") + not_positive(self, "seconds"))


def _row(reference: str, variant: str, label: str) -> Row:
    ratio = Cell("compiled", f"ratio/{variant}", decimals=2) if reference else None
    return Row(label, (Cell("compiled", f"ms/{variant}", decimals=3), ratio))


EXPERIMENT = Experiment(
    name="images_cost",
    title="Images: step time",
    source="Section 4.3, step time (not in the paper)",
    runner="splitfg_lab.experiments.images_cost.run:run",
    no_checkpoints=("compiled",),
    presets=(Preset("compiled", "Time of all methods, in turns", ImageCost()),),
    tables=(
        Table(
            "images-cost",
            "A training step on CIFAR-10, batch 128, compiled and captured",
            ("Step, ms", "Time over backprop's on the same network"),
            tuple(_row(reference, v, label) for reference, group in NETWORKS.items() for v, label in group.items()),
            note="All times come from one process, in turns. Forward-Forward runs eagerly; predictive coding is"
            " captured without compilation.",
        ),
    ),
    smoke=(
        "variants=flat-backprop,cifar10-split_fg,cifar10-forward_forward",
        "images=64",
        "batch=2",
        "blocks=1",
        "steps=1",
        "warmup=1",
    ),
)
