"""The frozen-trunk control: K = 0, only the exact head is trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from splitfg.errors import raise_if
from splitfg.estimators._head_pass import HeadPass
from splitfg.estimators._settings import micro_batch_problems
from splitfg.estimators._state import with_state
from splitfg.numerics import norm
from splitfg.splitting import Split, parts
from splitfg.splitting.checks import begin_step
from splitfg.types import Estimate, Inputs, Stats, Target


@dataclass(frozen=True)
class FrozenTrunk:
    """The head's exact gradient over a trunk that stays as it is; trunk parameters get no entry.

    Args:
        micro_batch: Rows of the batch that pass the trunk together; ``None`` for all. The gradient is the same.

    Raises:
        SplitError: If a setting is out of range, and in every call if network or batch do not fit.

    Example:
        >>> import torch
        >>> from splitfg import FrozenTrunk
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> estimate = FrozenTrunk()(split, x, y, generator=torch.Generator().manual_seed(0))
        >>> sorted(estimate.grads)
        ['head.0.bias', 'head.0.weight']
    """

    micro_batch: int | None = None

    def __post_init__(self) -> None:
        raise_if(micro_batch_problems(self.micro_batch))

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator | None = None) -> Estimate:
        """Compute the head's gradient; see :class:`~splitfg.estimators.protocol.Estimator`. Draws for dropout alone."""
        split = begin_step(split, x, y, generator, tangents=False, micro_batch=self.micro_batch)
        batch = list(parts(x, y, self.micro_batch))
        with torch.no_grad():
            head = HeadPass(split, y)
            for i, (part_x, part_y) in enumerate(batch):
                head.u(i, split.part(i).h(part_x), part_y)
            exact = head.result()
            norms = {"u": exact.u.norm(), "head": norm(exact.grads, like=exact.u)}
            return with_state(split, batch, Estimate(exact.loss, exact.grads, Stats(biased=head.biased, norms=norms)))
