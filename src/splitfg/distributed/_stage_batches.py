"""The parts of a batch in stages, and everything that does not depend on its rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from splitfg.distributed._stage_problems import argument_problems
from splitfg.errors import raise_if
from splitfg.sites import BlockPath, Further, Recording, block_inputs, block_points, record, validate_blocks
from splitfg.splitting import Split
from splitfg.splitting.checks import has_rows
from splitfg.types import Inputs


@dataclass(frozen=True)
class Constant:
    """Everything that does not depend on the rows of a batch.

    Attributes:
        further: Arguments of a stage's blocks after the first, such as a mask.
        h_shape: Of h, without rows.
        between: Shapes of the stream between the groups, without rows, by the number of the block before.
    """

    further: Mapping[int, Further]
    h_shape: torch.Size
    between: Mapping[int, torch.Size]


class Constants:
    """Finds the constants of a shape of inputs once, by a pass through the whole trunk.

    Args:
        group: Blocks in a group; noise enters between groups.
    """

    def __init__(self, group: int) -> None:
        self._group = group
        self._known: dict[Hashable, Constant] = {}

    @property
    def known(self) -> bool:
        """Whether any are known."""
        return bool(self._known)

    def __call__(self, split: Split, path: BlockPath, own: range, x: Inputs, *, noise: bool) -> Constant:
        """Return the constants of a stage whose blocks have these numbers.

        Args:
            split: The network.
            path: Its blocks.
            own: The numbers of the stage's blocks.
            x: Inputs.
            noise: Whether noise will pass through the blocks, by forward mode: the pass validates that it can.

        Raises:
            SplitError: If the path does not fit the trunk, a block takes a tensor that depends on the rows, or forward
                mode has no rule for an operator.
        """
        key = tuple(t.shape[1:] for t in pytree.tree_leaves(x) if isinstance(t, Tensor))
        if key not in self._known:
            validate_blocks(split, path, x)
            with torch.no_grad():
                names = path.boundaries(self._group) if noise else ()
                seen, other = (_recorded(split, path, part, names) for part in (x, _turned(x)))
            given = block_inputs(path, seen)
            raise_if(argument_problems(given, block_inputs(path, other)))
            between = {i - 1: given[i].x.shape[1:] for i in range(self._group, len(given), self._group)}
            self._known[key] = Constant({i: given[i].further for i in own}, seen.h.shape[1:], between)
        return self._known[key]


def _recorded(split: Split, path: BlockPath, x: Inputs, moved: tuple[str, ...]) -> Recording:
    device = next(split.model.parameters()).device
    return record(split, x, block_points(path, moved), torch.Generator(device).manual_seed(0))


def batch_parts(x: Inputs, rows: int, count: int) -> list[Inputs]:
    """Divide a batch into micro-batches, as even as possible."""
    raise_if([] if rows >= count else [f"a batch of {rows} rows has no {count} parts: lower micro_batches"])
    bounds = [rows * m // count for m in range(count + 1)]
    return [_taken(x, slice(a, b)) for a, b in pairwise(bounds)]


def _taken(x: Inputs, rows: slice | Tensor) -> Inputs:
    found: Inputs = pytree.tree_map(lambda t: t[rows] if has_rows(t) else t, x)
    return found


def _turned(x: Inputs) -> Inputs:
    """Return a batch with its rows in the opposite order, and one less where there are several."""
    rows = next(t.shape[0] for t in pytree.tree_leaves(x) if has_rows(t))
    return _taken(x, torch.arange(rows - 1, 0 if rows > 1 else -1, -1))
