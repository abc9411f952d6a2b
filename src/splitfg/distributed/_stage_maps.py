"""Maps that stages learn: every process those of its own blocks, from one response at the top of the trunk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import jvp

from splitfg.distributed._ranks import Ranks
from splitfg.distributed._stage_messages import StageMessages
from splitfg.estimators import mean_rows
from splitfg.feedback import MeanJacobian
from splitfg.sites import BlockInput, BlockPath, block_points, run_block
from splitfg.tangents import row_noise
from splitfg.types import Params


def draw_noise(
    path: BlockPath, shapes: Mapping[int, torch.Size], rows: int, own: range, like: Tensor, generator: torch.Generator
) -> dict[int, Tensor]:
    """Draw unit noise for the outputs of all groups but the last, and return that of a stage's groups.

    Every process draws all of it, as one process does.

    Args:
        path: The blocks.
        shapes: Shapes of these outputs, without rows, by the number of a group's last block.
        rows: Of the batch.
        own: The numbers of the stage's blocks.
        like: Decides dtype and device.
        generator: In the same state in all processes.
    """
    points, found = block_points(path), {}
    for i, shape in shapes.items():
        e = row_noise(points.moved_part(like.new_empty(()).expand(rows, *shape)), generator)
        if i in own:
            found[i] = e
    return found


def moved(
    trunk: nn.Module, given: BlockInput, dx: Tensor | None, e: Tensor | None, *, residual: bool, like: Tensor
) -> Tensor | None:
    """Return how the stream moves after a block, to first order: dx_{i+1} = J_i dx_i + e_i, and + dx_i if residual.

    Returns ``None`` below all noise.

    Args:
        trunk: Owner of the block.
        given: The block and its input.
        dx: How its input moves; ``None`` below all noise.
        e: Noise at its output; ``None`` inside a group and at the top.
        residual: Whether the block's output is added to the stream.
        like: The stream after the block.
    """
    if dx is None:
        return None if e is None else e.expand_as(like)
    _, through = jvp(partial(_run, trunk, given), (given.x,), (dx,))  # type: ignore[misc]
    total: Tensor = through + dx if residual else through
    return total if e is None else total + e


def _run(trunk: nn.Module, given: BlockInput, x: Tensor) -> Tensor:
    return run_block(trunk, given.block, {}, x, given.further)


def map_change(
    ranks: Ranks, path: BlockPath, maps: MeanJacobian, noise: Mapping[int, Tensor], response: Tensor, features: int
) -> Params:
    """Return the change of a stage's maps, from noise at its blocks and the response at the top.

    The delta rule takes off what all maps explain, Σ_j e_j J_j, which the stages sum in one message of the size of the
    response.

    Args:
        ranks: The processes.
        path: The blocks.
        maps: The maps, of which this process uses those of its own blocks.
        noise: Noise at the outputs of the stage's groups, by the number of their last block.
        response: dx at the top, of all rows.
        features: Noises a row, of all stages.
    """
    dx = mean_rows(path, response)
    own = {path.blocks[i].name: [mean_rows(path, e)] for i, e in noise.items()}
    rest = maps.rest(dx, ranks.sum_(maps.explained(own, dx)), features)
    return maps.change(maps.products(own, rest), rows=dx[..., 0].numel(), noises=features)


def collect_maps(ranks: Ranks, messages: StageMessages, maps: MeanJacobian, owners: Mapping[str, int]) -> None:
    """Copy every stage's maps to all processes; counts of steps are those of the first.

    Args:
        ranks: The processes.
        messages: Messages between them.
        maps: Changed in place.
        owners: The stage of every map, by its name.
    """
    own = maps.state_dict()
    facts = {name: [list(m.shape), str(m.dtype).removeprefix("torch.")] for name, m in own.items()}
    found = Params()
    for stage, text in enumerate(ranks.texts(json.dumps(facts))):
        for name, (shape, dtype) in json.loads(text).items():
            if owners.get(name, 0) == stage:
                place = torch.zeros(shape, dtype=getattr(torch, dtype))
                found[name] = messages.broadcast(own[name] if stage == ranks.rank else place, stage)
    maps.load_state_dict(found)
