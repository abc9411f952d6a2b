"""Compare the loss of a split with the one that the model itself computes from labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from splitfg.calling import drawing_from, random_state
from splitfg.errors import SplitError

_FULL_PRECISION = (torch.float32, torch.float64)


def own_loss_problems(model: nn.Module, batch: Mapping[str, Any], loss: Callable[[], Tensor]) -> list[str]:
    """Explain why a split would minimise another loss than the model's own.

    Some models do not shift labels, sum several losses, add one of a router, or use CTC.

    Args:
        model: A model of transformers, which returns its loss if the batch has labels.
        batch: Arguments of the model, with labels.
        loss: Computes the split's loss of the same batch.

    Returns:
        A problem with its cure; empty if both agree, or if the model computes no loss.
    """
    state = random_state()
    own = _own_loss(model, batch, state)
    if own is None:
        return []
    try:
        with drawing_from(state):
            ours = float(loss())
    except (SplitError, RuntimeError, IndexError, ValueError):
        return [f"{_prefix(model, own)} is not the cross-entropy of its logits, which do not fit the labels: {_CURE}"]
    tolerance = 1e-4 if own.dtype in _FULL_PRECISION and _precise(model) else 5e-2
    if abs(ours - float(own)) <= tolerance * max(1.0, abs(float(own))):
        return []
    return [f"{_prefix(model, own)} is not {ours:.6g}, the cross-entropy of its logits: {_CURE}"]


_CURE = (
    "if cross-entropy is what you want, pass inputs and target instead of a dict with labels; else pass loss=... to"
    " split(), or switch off further losses in the model's config"
)


def _own_loss(model: nn.Module, batch: Mapping[str, Any], state: Any) -> Tensor | None:
    """Return the loss that the model computes by itself; ``None`` if there is none, or if it raises."""
    try:
        with torch.no_grad(), drawing_from(state), _same_config(model):
            own: Any = getattr(model(**batch), "loss", None)
    except Exception:  # the validation of the first batch reports what is wrong with it
        return None
    return own if isinstance(own, Tensor) and own.numel() == 1 and bool(own.isfinite()) else None


@contextmanager
def _same_config(model: nn.Module) -> Iterator[None]:
    """Restore the config of a model: classifiers store their ``problem_type`` in it when they get labels."""
    config = vars(getattr(model, "config", nn.Module()))
    before = config.copy()
    try:
        yield
    finally:
        config.clear()
        config.update(before)


def _precise(model: nn.Module) -> bool:
    return all(p.dtype in _FULL_PRECISION for p in model.parameters())


def _prefix(model: nn.Module, own: Tensor) -> str:
    return f"{type(model).__name__}'s own loss of this batch, {float(own):.6g},"
