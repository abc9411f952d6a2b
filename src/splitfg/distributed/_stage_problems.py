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
from splitfg.sites import BlockInput


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
    if pull.group > 1:
        found.append("the blocks of a stage form no group: use group=1")
    if pull.skips:
        found.append("stages exchange the gradients of chains and residual streams alone: use skips=False")
    if ranks.row_parts != ranks.size:
        found.append(f"{ranks} divides tangents, and a stage is a process: use a mesh with the dimension 'rows' alone")
    return found


def cut_problems(bounds: Sequence[int], stages: int) -> list[str]:
    """List the problems of the numbers at which stages begin and end."""
    if len(bounds) == stages + 1 and list(bounds) == sorted(set(bounds)):
        return []
    if len(bounds) - 1 == stages and bounds[-1] < stages:
        return [f"{bounds[-1]} blocks cannot be divided between {stages} processes: start at most {bounds[-1]}"]
    return [
        f"cuts are {bounds[1:-1]} for {stages} stages of {bounds[-1]} blocks: give {stages - 1} rising numbers between"
        f" 1 and {bounds[-1] - 1}"
    ]


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
