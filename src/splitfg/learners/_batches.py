"""Validation of batches of features and classes."""

from __future__ import annotations

import torch
from torch import Tensor

from splitfg.types import Inputs, Target

_INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def feature_problems(x: Inputs, features: int) -> list[str]:
    """List the problems of inputs that are not finite floating-point rows ``(B, features)`` with B at least 1."""
    if not isinstance(x, Tensor):
        return [f"inputs are a {type(x).__name__}: pass one tensor of shape (B, {features})"]
    if x.ndim != 2 or x.shape[1] != features or x.shape[0] == 0:
        return [f"inputs have shape {tuple(x.shape)}: pass shape (B, {features}) with B at least 1"]
    if not x.is_floating_point():
        return [f"inputs are {x.dtype}: pass x.float()"]
    if not bool(torch.isfinite(x).all()):
        return ["inputs contain NaN or infinite values: drop or impute those rows"]
    return []


def class_problems(x: Inputs, y: Target, classes: int) -> list[str]:
    """List the problems of targets that are not one class index in ``0..classes-1`` for every row of x."""
    rows = x.shape[0] if isinstance(x, Tensor) and x.ndim else 0
    found = []
    if tuple(y.shape) != (rows,):
        found.append(f"targets have shape {tuple(y.shape)}: pass shape ({rows},), one class per row")
    if y.dtype not in _INTEGER:
        found.append(f"targets are {y.dtype}: pass integer class indices, y.long()")
    elif y.numel() and (int(y.min()) < 0 or int(y.max()) >= classes):
        found.append(
            f"targets span {int(y.min())}..{int(y.max())}, but classes are 0..{classes - 1}: encode them, or pass"
            " a larger number of classes"
        )
    return found
