"""Token windows on a device, gathered there without transfers from the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from splitfg.errors import DataError
from splitfg_lab.data.windows import Windows


class DeviceWindows:
    """The batches of :meth:`Windows.step` on a device; the step may be a tensor, as CUDA graphs need.

    Tokens take two bytes each, 227 MiB for 119 million. Only the tokens that ``steps`` steps read are copied.

    Args:
        windows: The windows.
        batch: Windows per step B; step i reads windows Bi to Bi + B - 1, modulo the number of windows.
        steps: Number of training steps.
        device: The device.
    """

    def __init__(self, windows: Windows, *, batch: int, steps: int, device: torch.device) -> None:
        self._length = windows.length
        self._count = min(len(windows), batch * steps)
        needed = self._count * windows.length + 1
        tokens = np.asarray(windows.tokens[:needed])
        if tokens.dtype != np.uint16 and (tokens.min() < 0 or tokens.max() >= 2**16):
            raise DataError(f"token ids must fit 16 bits, got {tokens.min()} to {tokens.max()}")
        # torch has few operators for uint16 on a GPU: store the bits as int16, and mask the sign when reading
        bits = tokens.astype(np.uint16).view(np.int16)
        self._tokens = torch.from_numpy(bits).to(device)
        self._lanes = torch.arange(batch, device=device)
        self._offsets = torch.arange(windows.length + 1, device=device)

    def __call__(self, step: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (B, T), int64, of a step."""
        numbers = (step * len(self._lanes) + self._lanes) % self._count
        ids = self._tokens[numbers[:, None] * self._length + self._offsets].long() & 0xFFFF
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
