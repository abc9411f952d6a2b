"""The head's exact part of an estimate, gathered over micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor

from splitfg.numerics import add_into
from splitfg.splitting import Split
from splitfg.splitting.checks import check_h, check_loss
from splitfg.types import HeadGradient, Params, Target


class HeadPass:
    """Loss, head gradients and u of each part of a batch, each computed once.

    Args:
        split: The network.
        target: The target of the whole batch: every part is divided by the whole batch's normaliser.
        lean: Compute u alone until the result is asked for, and the outputs once more for the gradients.
    """

    def __init__(self, split: Split, target: Target, *, lean: bool = False) -> None:
        self._split, self._target, self._lean = split, target, lean
        self._normaliser: Tensor | None = None
        self._waiting: list[tuple[Tensor, Target]] = []
        self._us: list[Tensor] = []
        self._loss: Tensor | None = None
        self._grads: Params = {}

    @property
    def biased(self) -> bool:
        """Whether u and the head's gradient are approximate."""
        return self._split.head.biased

    def u(self, part: int, h: Tensor, target: Target) -> Tensor:
        """Return dL/dh of a part; new parts must come in order."""
        if part == len(self._us):
            self._take(h, target)
        return self._us[part]

    def result(self) -> HeadGradient:
        """Return the whole batch's loss, u (parts joined) and head gradients under the model's names."""
        assert self._loss is not None
        check_loss(self._loss)
        for h, target in self._waiting if self._split.head_params() else ():
            self._grads = add_into(self._grads, self._split.head(h, target, self._normaliser).grads)
        return HeadGradient(self._loss, torch.cat(self._us), self._split.named_head_grads(self._grads))

    def _take(self, h: Tensor, target: Target) -> None:
        check_h(self._split, h, self._target)
        if self._normaliser is None:
            self._normaliser = self._split.head.normaliser(h, self._target)
        if self._lean:
            loss, u = self._split.head.loss_and_u(h, target, self._normaliser)
            self._waiting.append((h, target))
        else:
            part = self._split.head(h, target, self._normaliser)
            loss, u = part.loss, part.u
            self._grads = add_into(self._grads, part.grads)
        self._us.append(u)
        self._loss = loss if self._loss is None else self._loss + loss
