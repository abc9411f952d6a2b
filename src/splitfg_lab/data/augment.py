"""Standardisation and augmentation of images on any device: random crops with reflection padding, and mirror images.

One integer encodes a view of an image: one of the (2 PAD + 1)² crops of the padded image, mirrored or not. All views of
a run are drawn before training, as one tensor of integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAD = 4
"""Pixels of padding on every side; images must be larger than this."""

_SHIFTS = 2 * PAD + 1

VIEWS = 2 * _SHIFTS**2
"""Views of an image: 81 crops, each plain or mirrored."""


@dataclass(frozen=True)
class ChannelScale:
    """Standardisation (pixel - mean) / deviation per channel, for pixels from 0 to 255.

    Attributes:
        mean: Mean of every channel, shape ``(C,)``, float64.
        deviation: Standard deviation of every channel; 1 if a channel is constant, which becomes zero.
    """

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    @classmethod
    def fit(cls, pixels: NDArray[np.uint8]) -> ChannelScale:
        """Compute the scale of images ``(N, C, H, W)``, with exact integer sums."""
        count = pixels.size // pixels.shape[1]
        sums = [(_sum(channel), _sum_of_squares(channel)) for channel in pixels.swapaxes(0, 1)]
        mean = np.array([total / count for total, _ in sums])
        variance = np.array([(count * squares - total**2) / count**2 for total, squares in sums])
        return cls(mean, np.where(variance > 0, np.sqrt(variance), 1.0))


def crop_and_mirror(views: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the pixels that each view shows.

    Args:
        views: Integers below :data:`VIEWS`, shape ``(B,)``.
        height: Rows of the image H.
        width: Columns of the image W.

    Returns:
        Rows ``(B, H)`` and columns ``(B, W)`` of the image, int64: pixel (i, j) of view b is pixel
        ``(rows[b, i], columns[b, j])`` of the image.
    """
    views = views.long()
    down, right = views // _SHIFTS % _SHIFTS, views % _SHIFTS
    rows = _reflected(down, height)
    columns = _reflected(right, width)
    mirrored = (views >= _SHIFTS**2).unsqueeze(1)
    return rows, torch.where(mirrored, columns.flip(1), columns)


def _reflected(shift: Tensor, size: int) -> Tensor:
    """Return the indices shift - PAD, ..., shift - PAD + size - 1, reflected at the edges."""
    places = shift.unsqueeze(1) - PAD + torch.arange(size, device=shift.device)
    last = size - 1
    return last - (last - places.abs()).abs()


def _sum(channel: NDArray[np.uint8]) -> int:
    return int(channel.sum(dtype=np.int64))


def _sum_of_squares(channel: NDArray[np.uint8]) -> int:
    return int(np.square(channel, dtype=np.uint16).sum(dtype=np.int64))
