"""Figures of the image experiments: curves, sweeps over tangents, confusion matrices, filters."""

from __future__ import annotations

from splitfg_lab.experiments.images._presets import (
    CIFAR10,
    CIFAR100,
    SETTINGS,
    TANGENTS,
    ImageSetting,
    direct,
    screened,
)
from splitfg_lab.experiments.spec import Cell, Confusion, Curves, Figure, Filters, Sweep

CIFAR10_CLASSES = ("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# the Hopfield readout is not trained
_TRAINED = ("backprop", "learned", "pure_fg", "es", "forward_forward", "predictive_coding", "split_fg", "frozen")


def figures() -> tuple[Figure, ...]:
    """Return all figures: accuracy over training and by tangents, confusion matrices, and filters."""
    curves = (_accuracy_curves(CIFAR10), _time_curves(), _accuracy_curves(CIFAR100))
    sweeps = tuple(
        Sweep(
            f"images-tangents-{s.dataset}",
            f"{s.label}: tangents at rho = 1, 6,000 steps",
            _tangents(s),
            "method.K",
            ("accuracy",),
            "top-1 accuracy, %",
            log_y=False,
            labels=("Split-FG",),
        )
        for s in SETTINGS
    )
    return (*curves, _ablation_curves(), _whole_curves(), *sweeps, *_pictures())


def _accuracy_curves(setting: ImageSetting) -> Curves:
    return Curves(
        f"images-{setting.dataset}", f"{setting.label}: accuracy over training", _trained(setting), "accuracy"
    )


def _time_curves() -> Curves:
    """Return accuracy over time on CIFAR-10; the steps of CIFAR-100 were not timed."""
    names = _trained(CIFAR10)
    # the same network and method with another budget
    timed = {"cifar10-learned": "resnet20-learned-layers"}
    return Curves(
        "images-cifar10-time",
        "CIFAR-10, each method on its own network: accuracy over time",
        names,
        "accuracy",
        log_x=True,
        step_ms=tuple((name, Cell("images_cost/compiled", f"ms/{timed.get(name, name)}")) for name in names),
    )


def _ablation_curves() -> Curves:
    names = ("flat-backprop", direct("flat", 1.0), "flat-split_fg", "flat-frozen", "flat-pure_fg", "flat-es")
    return Curves("images-flat", "CIFAR-10, flat head: accuracy over training", names, "accuracy")


def _whole_curves() -> Curves:
    names = ("backprop", "learned", "skips4", "skips3", "skips2", "pull2", "pure_fg")
    title = "CIFAR-10, whole ResNet-20, 60 epochs: accuracy over training"
    return Curves("images-whole", title, tuple(f"cifar10-{name}" for name in names), "accuracy")


def _pictures() -> tuple[Figure, ...]:
    return (
        Confusion(
            "images-confusion",
            "CIFAR-10: confusion matrices",
            ("cifar10-backprop", "cifar10-split_fg", "cifar10-frozen", direct("cifar10", 1.0)),
            CIFAR10_CLASSES,
        ),
        Filters(
            "images-filters",
            "CIFAR-10, flat head: filters of the first convolution",
            (
                "flat-frozen",
                "flat-split_fg",
                screened(SETTINGS[0], 64, 1.0),
                direct("flat", 1.0),
                "flat-learned",
                "flat-backprop",
            ),
        ),
    )


def _trained(setting: ImageSetting) -> tuple[str, ...]:
    return tuple(f"{setting.dataset}-{name}" for name in _TRAINED)


def _tangents(setting: ImageSetting) -> tuple[str, ...]:
    return tuple(screened(setting, K, 1.0) for K in TANGENTS[setting.dataset])
