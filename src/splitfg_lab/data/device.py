"""Batches that a device gathers by itself, from data that lies on it whole."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from splitfg.errors import DataError
from splitfg_lab.data.windows import Windows


class DeviceWindows:
    """Windows over a token stream on a device: the batches of :meth:`Windows.step`, by a step that may be a tensor.

    Tokens take two bytes each, 227 MiB for 119 million. Only as many as ``steps`` need are moved.

    Args:
        windows: The windows.
        batch: Windows per step B; step i reads windows Bi to Bi + B - 1, beginning again after the last one.
        steps: Steps that will be taken.
        device: Where to.
    """

    def __init__(self, windows: Windows, *, batch: int, steps: int, device: torch.device) -> None:
        self._length = windows.length
        self._count = min(len(windows), batch * steps)
        needed = self._count * windows.length + 1
        tokens = np.asarray(windows.tokens[:needed])
        if tokens.dtype != np.uint16 and (tokens.min() < 0 or tokens.max() >= 2**16):
            raise DataError(f"token ids span {tokens.min()} to {tokens.max()}: on a device they are kept in 16 bits")
        # uint16 has next to no operators on a GPU: the same bits as int16, read back without their sign
        bits = tokens.astype(np.uint16).view(np.int16)
        self._tokens = torch.from_numpy(bits).to(device)
        self._lanes = torch.arange(batch, device=device)
        self._offsets = torch.arange(windows.length + 1, device=device)

    def __call__(self, step: int | Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T), int64, of a step."""
        numbers = (step * len(self._lanes) + self._lanes) % self._count
        ids = self._tokens[numbers[:, None] * self._length + self._offsets].long() & 0xFFFF
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
