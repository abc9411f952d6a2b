"""The pulls of one stage's blocks, in rounds that all stages take at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfg.distributed._stage_forward import Stage
from splitfg.distributed._stage_messages import StageMessages
from splitfg.estimators import ParallelPull, predicted_gradient, stream_rows
from splitfg.numerics import added
from splitfg.sites import Pulled, added_gradient, layer_gradients, under
from splitfg.types import Params


@dataclass
class StagePulls:
    """Pull the blocks of a stage; ``grads`` are by the trunk's names, ``reverse_passes`` counts them.

    In round k every block i pulls its D_{i+1}, and the stages exchange what the next round needs: the share of the
    first block above in a chain, the sum of all shares above on a residual stream.
    """

    stage: Stage
    pull: ParallelPull
    messages: StageMessages
    r: Tensor
    grads: Params = field(default_factory=dict)
    reverse_passes: int = 0

    def run(self) -> None:
        """Take all rounds, and add the gradients."""
        stage, count = self.stage, len(self.stage.inputs)
        at = self._predicted()
        shares: list[Tensor | None] = [None] * count
        pulled: list[Pulled | None] = [None] * count
        bottom = at[0]
        for k in range(self.pull.pulls):
            for j in range(count):
                if k < stage.from_top(j):  # later rounds would repeat it: the gradient at its output is exact
                    pulled[j] = self._pull(j, at[j], last=k == min(self.pull.pulls, stage.from_top(j)) - 1) or pulled[j]
                    found = pulled[j]
                    shares[j] = found.shares[-1] if found is not None and found.shares else None
            if not self.pull.own_block:
                at, bottom = self._refined(shares)
        for j, one in enumerate(pulled):
            assert one is not None
            self._add(j, one, at[j])
        if stage.first == 0:
            self._add_bottom(self._at_bottom() if self.pull.own_block else bottom)

    def _predicted(self) -> list[Tensor]:
        """Return the prediction at the output of every block; r itself at the top."""
        stage, rows = self.stage, stream_rows(self.stage.path, self.r)
        return [
            self.r
            if stage.from_top(j) == 1
            else predicted_gradient(stage.path, self.pull.feedback, given.block.name, rows, stage.written(j))
            for j, given in enumerate(stage.inputs)
        ]

    def _at_bottom(self) -> Tensor:
        path, rows = self.stage.path, stream_rows(self.stage.path, self.r)
        if not path.writers:
            return self.r
        return predicted_gradient(path, self.pull.feedback, path.writers[0], rows, self.stage.inputs[0].x)

    def _pull(self, j: int, delta: Tensor, *, last: bool) -> Pulled | None:
        down = self.stage.reaches_down(j)
        if not (down or last):
            return None  # the bottom of the trunk: nothing below waits for its share
        self.reverse_passes += 1
        if self.stage.kept:
            return self.stage.kept[j].pull(delta, last=last)
        return self.pull.puller(self.stage.trunk, self.stage.inputs[j], [delta], to_input=down)

    def _refined(self, shares: Sequence[Tensor | None]) -> tuple[list[Tensor], Tensor]:
        """Return the gradient at the output of every block after one more pull, and that at the stage's input."""
        if self.stage.path.residual:
            own = [torch.zeros_like(self.r) if c is None else c for c in shares]
            total = self.r + self.messages.sum_above(torch.stack(own).sum(0))
            found = []
            for c in reversed(own):
                found.append(total)
                total = total + c
            return found[::-1], total
        first = self.r if shares[0] is None else shares[0]
        above = self.messages.from_above(first, self.stage.output)
        chain = [c for c in shares[1:] if c is not None]
        return [*chain, self.r if above is None else above], first

    def _add(self, j: int, pulled: Pulled, delta: Tensor) -> None:
        self.grads = added(self.grads, pulled.grads)
        writer = self.stage.inputs[j].block.writer
        if writer is not None and pulled.read is not None:
            own = layer_gradients(self.stage.trunk.get_submodule(writer), pulled.read, delta)
            self.grads = added(self.grads, under(writer, own))

    def _add_bottom(self, delta: Tensor) -> None:
        """Add the gradients of everything that writes to the bottom of the stream."""
        trunk = self.stage.trunk
        for name, a, shape in self.stage.bottom:
            own = layer_gradients(trunk.get_submodule(name), a, delta.sum_to_size(len(delta), *shape))
            self.grads = added(self.grads, under(name, own))
        for parameter in self.stage.path.added:
            self.grads = added(self.grads, {parameter: added_gradient(delta, trunk.get_parameter(parameter))})
