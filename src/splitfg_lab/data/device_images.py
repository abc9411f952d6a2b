"""Image sets that lie on a device whole, and augmented batches that the device gathers by itself."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitfg.training import Epochs
from splitfg_lab.data.augment import VIEWS, ChannelScale, crop_and_mirror


class DeviceImages:
    """Images and labels on a device, a byte per pixel (147 MiB for CIFAR's 50,000), standardised when they are read.

    Args:
        pixels: Shape ``(N, C, H, W)``.
        labels: Shape ``(N,)``.
        scale: How pixels are standardised.
        device: Where to.
    """

    def __init__(
        self, pixels: NDArray[np.uint8], labels: NDArray[np.int64], *, scale: ChannelScale, device: torch.device
    ) -> None:
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
        """Where they are."""
        return self.labels.device

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self._pixels.shape[1:]
        return channels, height, width

    def take(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Images ``(B, C, H, W)``, float32, as they are, and labels ``(B,)``."""
        return self._standardised(self._pixels[numbers]), self.labels[numbers]

    def seen(self, numbers: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
        """The same, each image in one of its views."""
        rows, columns = crop_and_mirror(views, *self.shape[1:])
        pixels = self._pixels[numbers.view(-1, 1, 1, 1), self._channels, rows[:, None, :, None], columns[:, None, None]]
        return self._standardised(pixels), self.labels[numbers]

    def _standardised(self, pixels: Tensor) -> Tensor:
        return (pixels.float() - self._mean) / self._deviation


class AugmentedBatches:
    """Batches by a step that may be a tensor: epoch after epoch in a random order, each image in a random view.

    Orders and views are drawn beforehand, from the seed alone: a batch depends on no other, is the same on every
    device, and takes five bytes per image, 14 MiB for 60 epochs of CIFAR.

    Args:
        images: What is trained on.
        batch: Images per step B, at most as many as there are; batches run on across epochs.
        steps: Steps that will be taken.
        seed: Of orders and views.
    """

    def __init__(self, images: DeviceImages, *, batch: int, steps: int, seed: int) -> None:
        epochs = Epochs(len(images), batch=batch, seed=seed)
        order = torch.cat([epochs.rows(step) for step in range(steps)])
        # orders are drawn from seeds of zero and above
        generator = torch.Generator().manual_seed(-1 - seed)
        views = torch.randint(VIEWS, order.shape, generator=generator, dtype=torch.uint8)
        self._images = images
        self._order, self._views = order.int().to(images.device), views.to(images.device)
        self._lanes = torch.arange(epochs.batch, device=images.device)

    def __call__(self, step: int | Tensor) -> tuple[Tensor, Tensor]:
        """Images ``(B, C, H, W)`` and labels ``(B,)`` of a step."""
        places = step * len(self._lanes) + self._lanes
        return self._images.seen(self._order[places].long(), self._views[places])
