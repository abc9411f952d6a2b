"""The pulls of one stage's blocks, in rounds that all stages take at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from splitfg.distributed._stage_forward import Stage
from splitfg.distributed._stage_messages import StageMessages
from splitfg.distributed._stage_skips import carried
from splitfg.estimators import ParallelPull, predicted_gradient, stream_rows
from splitfg.feedback import UnchangedFeedback
from splitfg.numerics import added
from splitfg.sites import Pulled, added_gradient, layer_gradients, skip_back, under
from splitfg.types import Params


@dataclass
class StagePulls:
    """Pull the blocks of a stage; ``grads`` are by the trunk's names, ``reverse_passes`` counts them.

    In round k every group pulls the gradient at its output, from its last block to its first, and the stages exchange
    what the next round needs: the share of the first block above in a chain, the sum of all shares above on a residual
    stream. Along the skips of a ResNet, each stage waits for the refined gradient of the stage above.
    """

    stage: Stage
    pull: ParallelPull
    messages: StageMessages
    r: Tensor
    grads: Params = field(default_factory=dict)
    reverse_passes: int = 0
    _pulled: dict[int, Pulled] = field(default_factory=dict)

    def run(self) -> None:
        """Take all rounds, and add the gradients."""
        at, bottom = self._first()
        for k in range(self.pull.pulls):
            at = self._round(k, at)
            if not self.pull.own_block:
                at, bottom = self._refined(at)
        for j in range(len(self.stage.inputs)):
            self._add(j, self._pulled[j], at[j])
        if self.stage.first == 0:
            self._add_bottom(bottom)
        self.messages.flush()

    def _groups(self) -> list[range]:
        """Return the blocks of every group, as numbers in the stage."""
        count, size = len(self.stage.inputs), self.pull.group
        return [range(a, min(a + size, count)) for a in range(0, count, size)]

    def _from_top(self, blocks: range) -> int:
        """Return the number of groups from this one to the top, itself included."""
        size = self.pull.group
        return self.stage.path.groups(size) - (self.stage.first + blocks[0]) // size

    def _first(self) -> tuple[dict[int, Tensor], Tensor]:
        """Return the predictions at the output of every group, by its last block, and at the stage's input."""
        if self.pull.skips and isinstance(self.pull.feedback, UnchangedFeedback):
            return carried(self.stage, self.messages, self.r, self._along_skip)
        at = {blocks[-1]: self._predicted(blocks) for blocks in self._groups()}
        return at, self._at_bottom() if self.pull.own_block and self.stage.first == 0 else self.r

    def _predicted(self, blocks: range) -> Tensor:
        """Return the prediction at the output of a group; r itself at the top."""
        if self._from_top(blocks) == 1:
            return self.r
        path, j = self.stage.path, blocks[-1]
        name, rows = self.stage.inputs[j].block.name, stream_rows(path, self.r)
        return predicted_gradient(path, self.pull.feedback, name, rows, self.stage.written(j))

    def _round(self, k: int, at: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Pull every group from the gradient at its output; returns the gradient at the output of every block."""
        found = dict(at)
        for blocks in self._groups():
            last = min(self.pull.pulls, self._from_top(blocks)) - 1
            if k <= last:  # later rounds would repeat it: the gradient at its output is exact
                found |= self._pull_group(blocks, at[blocks[-1]], last=k == last)
        return found

    def _pull_group(self, blocks: range, delta: Tensor, *, last: bool) -> dict[int, Tensor]:
        """Pass a gradient through a group, from block to block; returns the gradient at the output of each."""
        at: dict[int, Tensor] = {}
        for j in reversed(blocks):
            at[j] = delta if j == blocks[-1] else self._inside(j, at[j + 1])
            pulled = self._pull(j, at[j], last=last)
            self._pulled |= {} if pulled is None else {j: pulled}
        return at

    def _inside(self, j: int, above: Tensor) -> Tensor:
        """Return the gradient at the output of block j of a group, from that at the output of the block above."""
        share = self._share(j + 1)
        assert share is not None
        return above + share if self.stage.path.residual else share

    def _share(self, j: int) -> Tensor | None:
        """Return the latest share of block j in the gradient at its input; ``None`` at the bottom of the trunk."""
        shares = self._pulled[j].shares if j in self._pulled else ()
        return shares[-1] if shares else None

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

    def _refined(self, at: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], Tensor]:
        """Return the gradient at the output of every block after one more pull, and that at the stage's input."""
        if self.pull.skips:
            return carried(self.stage, self.messages, self.r, partial(self._moved_along_skip, at))
        shares = [self._share(j) for j in range(len(self.stage.inputs))]
        return self._summed(shares) if self.stage.path.residual else self._chained(shares)

    def _along_skip(self, j: int, delta: Tensor) -> Tensor:
        """Return the share of the gradient at block j's input that passes along its skip."""
        return skip_back(self.stage.trunk, self.stage.inputs[j], self.stage.written(j), delta)

    def _moved_along_skip(self, at: Mapping[int, Tensor], j: int, refined: Tensor) -> Tensor:
        """Return c_j + K_jᵀ (D' - D), from D at the output of block j and its refinement D'."""
        share = self._share(j)
        assert share is not None
        return share + self._along_skip(j, refined - at[j])

    def _summed(self, shares: Sequence[Tensor | None]) -> tuple[dict[int, Tensor], Tensor]:
        """Return the sums of r and all shares above, on a residual stream."""
        own = [torch.zeros_like(self.r) if c is None else c for c in shares]
        total = self.r + self.messages.sum_above(torch.stack(own).sum(0))
        found = {}
        for j in reversed(range(len(own))):
            found[j] = total
            total = total + own[j]
        return found, total

    def _chained(self, shares: Sequence[Tensor | None]) -> tuple[dict[int, Tensor], Tensor]:
        """Return the share of the next block above, in a chain."""
        first = self.r if shares[0] is None else shares[0]
        above = self.messages.from_above(first, self.stage.output)
        chain = [c for c in shares[1:] if c is not None]
        return dict(enumerate([*chain, self.r if above is None else above])), first

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
