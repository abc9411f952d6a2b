"""The forward pass of one stage: its blocks, on micro-batches that pass through all stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from splitfg.distributed._kept_blocks import KeptBlock
from splitfg.distributed._stage_maps import moved
from splitfg.distributed._stage_messages import StageMessages
from splitfg.errors import SplitError
from splitfg.sites import BlockInput, BlockPath, Further, run_block, tapped
from splitfg.splitting import Split
from splitfg.types import Inputs

Written: TypeAlias = tuple[str, Tensor, tuple[int, ...]]
"""A layer's name, its input for every row, and the shape of its output without rows."""


@dataclass(frozen=True)
class Stage:
    """Results of a stage's forward pass.

    Attributes:
        trunk: Owner of the blocks.
        path: All blocks of the trunk.
        first: Number of the stage's first block.
        inputs: Inputs of the stage's blocks, for all rows.
        output: The stream after the last of them.
        bottom: Inputs of the path's writers for all rows, with the shapes of their outputs without rows; in the first
            stage.
        kept: Graphs of every block; empty if pulls compute them again.
        response: How the output moves by noise at this block's outputs and below, to first order; ``None`` without.
    """

    trunk: nn.Module
    path: BlockPath
    first: int
    inputs: Sequence[BlockInput]
    output: Tensor
    bottom: Sequence[Written] = ()
    kept: Sequence[KeptBlock] = ()
    response: Tensor | None = None

    def reaches_down(self, j: int) -> bool:
        """Return whether anything trained lies below the stage's block j."""
        return self.first + j > 0 or bool(self.path.writers)

    def written(self, j: int) -> Tensor:
        """Return the stream at the output of the stage's block j."""
        return self.inputs[j + 1].x if j + 1 < len(self.inputs) else self.output


def forward(
    split: Split,
    path: BlockPath,
    own: range,
    further: Mapping[int, Further],
    messages: StageMessages,
    parts: Sequence[Inputs],
    *,
    keep: bool,
    noise: Mapping[int, Tensor] | None = None,
) -> Stage:
    """Run a stage's blocks on all micro-batches, and send their outputs to the next stage.

    Args:
        split: The network.
        path: All its blocks.
        own: The numbers of this stage's blocks.
        further: Their constant arguments.
        messages: Messages between the stages.
        parts: The inputs of every micro-batch; the first stage reads them.
        keep: Keep the graph of every block for its pulls.
        noise: Noise at the outputs of the stage's groups, by the number of their last block, of all rows; ``None`` for
            a step without a measurement.
    """
    bottom: list[Written] = []
    streams: list[list[Tensor]] = []
    down = bool(path.writers)
    kept = [KeptBlock(split.trunk, path.blocks[i], to_input=i > 0 or down) for i in own] if keep else []
    responses: list[Tensor] = []
    row = 0
    device = next(split.model.parameters()).device
    for x in parts:
        if own[0] == 0:
            stream, writers = _start(split, path, x)
            bottom += writers
        else:
            stream = messages.receive_from_below(device)
        dx = messages.receive_from_below(device) if noise is not None and own[0] > 0 else None
        streams.append([stream])
        for j, i in enumerate(own):
            given = BlockInput(path.blocks[i], stream, further[i])
            out = kept[j].run(given) if keep else run_block(split.trunk, given.block, {}, stream, given.further)
            stream = stream + out if path.residual else out
            streams[-1].append(stream)
            if noise is not None:
                e = noise[i][row : row + len(stream)] if i in noise else None
                dx = moved(split.trunk, given, dx, e, residual=path.residual, like=stream)
        row += len(stream)
        responses += [] if dx is None else [dx]
        if own[-1] + 1 < len(path.blocks):
            for part in (stream, *([] if dx is None else [dx])):
                messages.send_up(part)
    messages.flush()
    *inputs, output = [torch.cat(pieces) for pieces in zip(*streams, strict=True)]
    blocks = [BlockInput(path.blocks[i], a, further[i]) for i, a in zip(own, inputs, strict=True)]
    response = torch.cat(responses) if responses else None
    return Stage(split.trunk, path, own[0], blocks, output, _joined(bottom), kept, response)


class _Reached(Exception):  # noqa: N818
    """Ends a forward pass at the first block."""

    def __init__(self, stream: Tensor) -> None:
        self.stream = stream


def _start(split: Split, path: BlockPath, x: Inputs) -> tuple[Tensor, list[Written]]:
    """Run a trunk up to its first block; returns that block's input, and the writers before it."""
    reads: list[tuple[str, Tensor, torch.Size]] = []
    first = path.blocks[0].modules[0]

    def stop(name: str, a: Tensor) -> None:
        if name == first:
            raise _Reached(a)

    def read(name: str, a: Tensor, z: Tensor) -> None:
        reads.append((name, a, z.shape))

    try:
        with tapped(split.trunk, dict.fromkeys((*path.writers, first)), read, before=stop):
            split.trunk_function(x)({})
    except _Reached as reached:
        return reached.stream, [(name, *_for_every_row(a, wrote, reached.stream)) for name, a, wrote in reads]
    raise SplitError([f"the trunk does not call {first}"])


def _for_every_row(a: Tensor, wrote: torch.Size, stream: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a layer's input for every row, repeated if it wrote once for all, and its output's shape without rows."""
    missing = (1,) * (stream.ndim - len(wrote))
    a = a.reshape(*missing, *a.shape)
    return a.expand(len(stream), *a.shape[1:]), (*missing, *wrote)[1:]


def _joined(written: Sequence[Written]) -> list[Written]:
    """Join the rows of every writer's input over micro-batches."""
    shapes = {name: shape for name, _, shape in written}
    return [(name, torch.cat([a for n, a, _ in written if n == name]), shape) for name, shape in shapes.items()]
