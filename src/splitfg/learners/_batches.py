"""What is wrong with a batch, for learners that read features and classes."""

from __future__ import annotations

import torch
from torch import Tensor

from splitfg.types import Inputs, Target

_INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def feature_problems(x: Inputs, features: int) -> list[str]:
    """Anything but finite floating-point rows ``(B, features)`` with B at least 1."""
    if not isinstance(x, Tensor):
        return [f"inputs are a {type(x).__name__}: give one tensor of shape (B, {features})"]
    if x.ndim != 2 or x.shape[1] != features or x.shape[0] == 0:
        return [f"inputs have shape {tuple(x.shape)}, but (B, {features}) with B at least 1 is read: flatten them"]
    if not x.is_floating_point():
        return [f"inputs are {x.dtype}: pass x.float()"]
    if not bool(torch.isfinite(x).all()):
        return ["inputs hold NaN or infinite values: drop or impute those rows"]
    return []


def class_problems(x: Inputs, y: Target, classes: int) -> list[str]:
    """Anything but one class index in ``0..classes-1`` for every row of x."""
    rows = x.shape[0] if isinstance(x, Tensor) and x.ndim else 0
    found = []
    if tuple(y.shape) != (rows,):
        found.append(f"targets have shape {tuple(y.shape)}, but ({rows},) is wanted: one class for each row")
    if y.dtype not in _INTEGER:
        found.append(f"targets are {y.dtype}, but class indices are wanted: pass y.long()")
    elif y.numel() and (int(y.min()) < 0 or int(y.max()) >= classes):
        found.append(f"targets span {int(y.min())}..{int(y.max())}, but classes are 0..{classes - 1}")
    return found
