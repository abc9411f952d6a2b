"""Build the images, the network and the learner of a config."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from splitfg import CosineWithWarmup, GradientLearner, Split
from splitfg.learners import CapturedLearner
from splitfg.learners.forward_forward import ForwardForward
from splitfg.learners.goodness import Contrast, HardNegatives
from splitfg.learners.hopfield import HopfieldReadout
from splitfg.recipes import Adam, AdamL2, AdamW, ForwardForwardMethod, HopfieldMethod, PredictiveCodingMethod
from splitfg_lab.data import Images, load_images
from splitfg_lab.data.augment import ChannelScale
from splitfg_lab.data.device_images import AugmentedBatches, DeviceImages
from splitfg_lab.experiments._training import compiler, gradient_learner, matmul_precision
from splitfg_lab.experiments.images._config import ImageTraining
from splitfg_lab.experiments.images._networks import PlainMLP
from splitfg_lab.runs import RunContext, RunError

_SYNTHETIC_SIDE, _SYNTHETIC_CLASSES = 8, 10


@dataclass(frozen=True)
class ImageData:
    """Training and test images on the device, both standardised by the training images' statistics."""

    train: DeviceImages
    test: DeviceImages
    classes: int


class TrainingBatches:
    """Augmented batches in the shape that the network takes: images, or rows of pixels.

    Args:
        config: Batch, steps and network.
        images: The training images.
        seed: Seed of the order and the augmentation.
    """

    def __init__(self, config: ImageTraining, images: DeviceImages, seed: int) -> None:
        self._augmented = AugmentedBatches(images, batch=config.batch, steps=config.steps, seed=seed)
        self._config = config

    def __call__(self, step: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of a step."""
        x, y = self._augmented(step)
        return as_read(self._config, x), y


def as_read(config: ImageTraining, x: Tensor) -> Tensor:
    """Return images in the shape that the config's network takes."""
    return x.flatten(1) if isinstance(config.network, PlainMLP) else x


def load_data(config: ImageTraining, device: torch.device) -> ImageData:
    """Load the images of a config onto the device.

    Raises:
        DataError: The files are missing or damaged.
    """
    data = _synthetic() if config.dataset == "synthetic" else load_images(config.dataset)
    scale = ChannelScale.fit(data.train_x)
    train = DeviceImages(data.train_x, data.train_y, scale=scale, device=device)
    test = DeviceImages(data.test_x, data.test_y, scale=scale, device=device)
    return ImageData(train, test, data.classes)


def random_data(dataset: Literal["cifar10", "cifar100"], images: int, device: torch.device) -> ImageData:
    """Make random images of CIFAR's size, to measure time and memory without data files."""
    rng = np.random.default_rng(0)
    classes = 10 if dataset == "cifar10" else 100
    pixels = rng.integers(0, 256, (images, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(0, classes, images)
    made = DeviceImages(pixels, labels, scale=ChannelScale.fit(pixels[:1000]), device=device)
    return ImageData(made, made, classes)


def make_split(config: ImageTraining, data: ImageData, seed: int) -> Split:
    """Build the network with the same initial values on every device."""
    generator = torch.Generator().manual_seed(seed)
    trunk = config.network.trunk(data.train.shape, generator)
    head = config.network.head(data.train.shape, data.classes, generator)
    return Split(trunk.to(data.train.device), head.to(data.train.device))


def make_learner(
    config: ImageTraining, split: Split, batches: TrainingBatches, run: RunContext | None = None
) -> GradientLearner | CapturedLearner:
    """Build the learner of a gradient method, compiled or captured if the config says so."""
    learner = gradient_learner(config, split, horizon=config.horizon, run=run)
    if config.step == "eager":
        return learner
    # predictive coding needs the layers of a plain MLP, which a compiled trunk does not expose
    local = isinstance(config.method, PredictiveCodingMethod)
    device = next(split.model.parameters()).device
    compile_ = None if local else compiler(config.step, device)
    return CapturedLearner(learner, horizon=config.steps, batches=batches, compile_=compile_)


def make_forward_forward(
    config: ImageTraining, method: ForwardForwardMethod, data: ImageData, seed: int
) -> ForwardForward:
    """Build the layer-local learner; its input is the pixels and the label.

    Raises:
        RunError: The network is not a plain MLP.
    """
    if not isinstance(config.network, PlainMLP):
        raise RunError(f"Forward-Forward trains a PlainMLP, not a {type(config.network).__name__}: set network to one")
    generator = torch.Generator().manual_seed(seed)
    features = math.prod(data.train.shape)
    mlp = config.network.over(features + data.classes, generator).to(data.train.device)
    return ForwardForward(
        mlp,
        _optimizer(config.optimizer, mlp),
        classes=data.classes,
        label_scale=method.label_scale,
        objective=Contrast(method.sharpness),
        negatives=HardNegatives(method.negative_sharpness),
        schedule=CosineWithWarmup(config.horizon, config.warmup),
        max_norm=config.max_norm,
    )


def make_readout(config: ImageTraining, method: HopfieldMethod, data: ImageData, seed: int) -> HopfieldReadout:
    """Build the readout over the frozen random trunk."""
    trunk = config.network.trunk(data.train.shape, torch.Generator().manual_seed(seed)).to(data.train.device)
    return HopfieldReadout(trunk, classes=data.classes, capacity=method.capacity)


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Set the precision of float32 matrix products and convolutions inside the context."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = name != "highest"
    try:
        with matmul_precision(name):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _optimizer(settings: Adam | AdamL2 | AdamW, mlp: nn.Module) -> torch.optim.Optimizer:
    make = torch.optim.AdamW if isinstance(settings, AdamW) else torch.optim.Adam
    decay = 0.0 if isinstance(settings, Adam) else settings.weight_decay
    return make(mlp.parameters(), settings.lr, settings.betas, settings.eps, decay)


def _synthetic() -> Images:
    rng = np.random.default_rng(0)
    train, test = _made_up(rng, 64), _made_up(rng, 128)
    return Images("synthetic", *train, *test, classes=_SYNTHETIC_CLASSES, note="made up")


def _made_up(rng: np.random.Generator, count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Make random images whose brightness depends on the class."""
    labels = rng.integers(0, _SYNTHETIC_CLASSES, count)
    noise = rng.integers(0, 56, (count, 3, _SYNTHETIC_SIDE, _SYNTHETIC_SIDE))
    return (noise + 20 * labels[:, None, None, None]).astype(np.uint8), labels
