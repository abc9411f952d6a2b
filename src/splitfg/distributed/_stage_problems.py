"""Problems of settings, cuts and blocks that stages cannot take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from splitfg.distributed._ranks import Ranks
from splitfg.estimators import ParallelPull
from splitfg.feedback import MeanJacobian, RandomMaps, UnchangedFeedback
from splitfg.sites import BlockInput, BlockPath


def setting_problems(pull: object, ranks: Ranks, micro_batches: int) -> list[str]:
    """List the problems of a staged pull's arguments."""
    if not isinstance(pull, ParallelPull):
        return [f"pull must be a ParallelPull, got {type(pull).__name__}"]
    found = [] if micro_batches >= 1 else [f"micro_batches must be at least 1, got {micro_batches}"]
    if not isinstance(pull.feedback, UnchangedFeedback | RandomMaps | MeanJacobian):
        name = type(pull.feedback).__name__
        found.append(f"stages do not share what {name} draws or learns: use MeanJacobian(), or feedback that is fixed")
    if isinstance(pull.feedback, MeanJacobian) and pull.own_block:
        found.append("stages put no noise below the first block: use own_block=False with learned maps")
    if ranks.row_parts != ranks.size:
        found.append(f"{ranks} divides tangents, and a stage is a process: use a mesh with the dimension 'rows' alone")
    return found


def even_cuts(path: BlockPath, group: int, stages: int) -> tuple[int, ...]:
    """Return the first block of every stage but the first: stages of whole groups, of as many as possible each."""
    return tuple(group * (path.groups(group) * s // stages) for s in range(1, stages))


def cut_problems(cuts: Sequence[int], path: BlockPath, group: int, stages: int) -> list[str]:
    """List the problems of the numbers of the first blocks of all stages but the first."""
    count, groups = len(path.blocks), path.groups(group)
    if groups < stages:
        return [_too_few(groups, group, stages)]
    found, bounds = [], [0, *cuts, count]
    if len(cuts) != stages - 1 or bounds != sorted(set(bounds)):
        found.append(
            f"cuts are {tuple(cuts)} for {stages} stages of {count} blocks: give {stages - 1} rising numbers between"
            f" 1 and {count - 1}"
        )
    inside = [cut for cut in cuts if cut % group]
    if inside:
        found.append(
            f"cuts at {', '.join(map(str, inside))} divide groups of {group} blocks, and a group belongs to one stage:"
            f" give multiples of {group}, such as cuts={even_cuts(path, group, stages)}, or leave cuts out"
        )
    return found


def _too_few(groups: int, group: int, stages: int) -> str:
    words = f"cannot be divided between {stages} processes: start at most {groups}"
    if group == 1:
        return f"{groups} blocks {words}"
    return f"{groups} {'group' if groups == 1 else 'groups'} of {group} blocks {words}, or use a smaller group"


def argument_problems(given: Sequence[BlockInput], other: Sequence[BlockInput]) -> list[str]:
    """List blocks whose further arguments differ between two batches."""

    def differ(first: Any, second: Any) -> bool:
        return isinstance(first, Tensor) and (first.shape != second.shape or not torch.equal(first, second))

    return [
        f"{one.block.name} takes a tensor that depends on the rows of the batch, which stages do not send each other:"
        " compute it inside the block"
        for one, two in zip(given, other, strict=True)
        if any(map(differ, pytree.tree_leaves(one.further), pytree.tree_leaves(two.further)))
    ]
