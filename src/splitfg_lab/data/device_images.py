"""Image sets on a device, and augmented batches gathered there without transfers from the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitfg.errors import DataError
from splitfg.training import Epochs
from splitfg_lab.data.augment import PAD, VIEWS, ChannelScale, crop_and_mirror


class DeviceImages:
    """Images and labels on a device, one byte per pixel (147 MiB for CIFAR's 50,000), standardised when read.

    Args:
        pixels: Shape ``(N, C, H, W)``, uint8.
        labels: Shape ``(N,)``, integers from 0.
        scale: Standardisation of the channels.
        device: The device.

    Raises:
        DataError: Lists everything wrong with shapes, types and labels.
    """

    def __init__(
        self, pixels: NDArray[np.uint8], labels: NDArray[np.int64], *, scale: ChannelScale, device: torch.device
    ) -> None:
        problems = _problems(pixels, labels, scale)
        if problems:
            raise DataError("cannot use these images", problems)
        self._pixels = torch.from_numpy(np.array(pixels)).to(device)
        self.labels = torch.from_numpy(np.array(labels)).to(device)
        self._mean, self._deviation = (
            torch.as_tensor(part, dtype=torch.float32, device=device).view(-1, 1, 1)
            for part in (scale.mean, scale.deviation)
        )
        self._channels = torch.arange(pixels.shape[1], device=device).view(1, -1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        """The device of images and labels."""
        return self.labels.device

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self._pixels.shape[1:]
        return channels, height, width

    def take(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return images ``(B, C, H, W)``, float32, without augmentation, and labels ``(B,)``."""
        return self._standardised(self._pixels[numbers]), self.labels[numbers]

    def augmented(self, numbers: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same with one view of each image; ``views`` holds integers below :data:`VIEWS`."""
        rows, columns = crop_and_mirror(views, *self.shape[1:])
        pixels = self._pixels[numbers.view(-1, 1, 1, 1), self._channels, rows[:, None, :, None], columns[:, None, None]]
        return self._standardised(pixels), self.labels[numbers]

    def _standardised(self, pixels: Tensor) -> Tensor:
        return (pixels.float() - self._mean) / self._deviation


def _problems(pixels: NDArray[Any], labels: NDArray[Any], scale: ChannelScale) -> list[str]:
    problems = []
    if pixels.ndim != 4 or pixels.dtype != np.uint8:
        problems.append(f"pixels must have shape (N, C, H, W) and type uint8, got {pixels.shape} and {pixels.dtype}")
    elif pixels.shape[1] != len(scale.mean):
        problems.append(f"the images have {pixels.shape[1]} channels, and the scale has {len(scale.mean)}")
    if labels.shape != pixels.shape[:1] or labels.dtype.kind not in "iu":
        problems.append(f"labels must be {pixels.shape[0]:,} integers, got shape {labels.shape} and {labels.dtype}")
    elif not labels.size:
        problems.append("the set is empty")
    elif labels.min() < 0:
        problems.append(f"labels must be 0 or more, got {labels.min()}")
    return problems


class AugmentedBatches:
    """Batches of random views, epoch after epoch in random order; the step may be a tensor, as CUDA graphs need.

    The seed alone determines orders and views, which are drawn beforehand: a batch does not depend on earlier ones and
    is the same on every device. They take five bytes per image, 14 MiB for 60 epochs of CIFAR.

    Args:
        images: The training images.
        batch: Images per step B, at most the number of images; batches run on across epochs.
        steps: Number of training steps.
        seed: Seed of orders and views.

    Raises:
        DataError: The batch is empty or larger than the set, or the images are too small for the crops.
    """

    def __init__(self, images: DeviceImages, *, batch: int, steps: int, seed: int) -> None:
        problems = []
        if not 1 <= batch <= len(images):
            problems.append(f"batch must be 1 to {len(images):,}, the number of images, got {batch:,}")
        if min(images.shape[1:]) <= PAD:
            problems.append(f"images must be larger than {PAD} x {PAD} pixels for random crops, got {images.shape[1:]}")
        if problems:
            raise DataError("cannot make batches", problems)
        epochs = Epochs(len(images), batch=batch, seed=seed)
        order = torch.cat([epochs.rows(step) for step in range(steps)])
        # Epochs uses seeds of zero and above
        generator = torch.Generator().manual_seed(-1 - seed)
        views = torch.randint(VIEWS, order.shape, generator=generator, dtype=torch.uint8)
        self._images = images
        self._order, self._views = order.int().to(images.device), views.to(images.device)
        self._lanes = torch.arange(epochs.batch, device=images.device)

    def __call__(self, step: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return images ``(B, C, H, W)`` and labels ``(B,)`` of a step."""
        places = step * len(self._lanes) + self._lanes
        return self._images.augmented(self._order[places].long(), self._views[places])
