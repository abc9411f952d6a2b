"""The blocks of a trunk, in the order in which they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, runtime_checkable

from torch import nn

from splitfg.errors import SplitError, raise_if
from splitfg.sites._features import FeatureDimension
from splitfg.sites._layers import has_layer_gradients
from splitfg.sites._pullback import TOP_HOOK, has_pull_back
from splitfg.splitting import Split, original
from splitfg.types import Inputs


@dataclass(frozen=True)
class PathBlock:
    """One block of a trunk: modules that run one after the other, each on the output of the one before.

    Attributes:
        modules: Names of the trunk's modules. Further arguments of a module (a mask) are constants.
        writer: The layer inside that computes the block's output (``nn.Linear``, ``nn.Conv2d`` or a ``LocalLayer``);
            its gradient is formed in closed form. ``None`` to pull it back with the rest of the block.

    Example:
        >>> from splitfg import PathBlock
        >>> PathBlock(("norm", "attention"), writer="attention.proj").name
        'attention'
    """

    modules: tuple[str, ...]
    writer: str | None = None

    def __post_init__(self) -> None:
        given: object = self.modules
        raise_if([f"modules is {given!r}: give a tuple of names, ({given!r},)"] if isinstance(given, str) else [])
        object.__setattr__(self, "modules", tuple(self.modules))
        raise_if([] if self.modules else ["a block has no module"])

    @property
    def name(self) -> str:
        """Name of the module that gives the block's output; feedback maps use it."""
        return self.modules[-1]


@dataclass(frozen=True)
class BlockPath(FeatureDimension):
    """The blocks f_0, ..., f_{L-1} of a trunk and the stream x_0, ..., x_L between them.

    A chain has x_{i+1} = f_i(x_i), a residual stream x_{i+1} = x_i + f_i(x_i); h = top(x_L). Names are those of the
    trunk's modules and parameters.

    Attributes:
        blocks: The blocks, in the order in which they run.
        residual: Whether the blocks' outputs are added to the stream.
        top: The module that reads x_L and gives h, flattened or not (a norm, a ReLU, or a module with ``pull_back``);
            ``None`` where x_L is h.
        writers: Layers whose outputs sum to x_0, if it depends on trained parameters.
        added: Parameters that are added to x_0, each with the writer it is added beside.
        features: The dimension of the stream that holds features; ``None`` for the channels of images (dimension 1 of
            4) and the last of anything else.
        pooled: Predict one gradient for all pixels of an image, from the sum over the pixels of the gradient at x_L.
            For trunks that end in global average pooling; streams may then change their resolution.

    Example:
        >>> from torch import nn
        >>> from splitfg import BlockPath, PathBlock
        >>> trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        >>> BlockPath((PathBlock(("0", "1")), PathBlock(("2", "3")))).problems(trunk)
        []
    """

    blocks: tuple[PathBlock, ...]
    residual: bool = False
    top: str | None = None
    writers: tuple[str, ...] = ()
    added: Mapping[str, str] = field(default_factory=dict)
    features: int | None = None
    pooled: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        object.__setattr__(self, "writers", tuple(self.writers))
        found = [] if self.blocks else ["the path has no block"]
        found += [f"{b!r} is no PathBlock: use PathBlock(modules)" for b in self.blocks if not isinstance(b, PathBlock)]
        raise_if(found)

    @classmethod
    def find(cls, network: Split | nn.Module, batch: Inputs) -> BlockPath:
        """Find a chain of blocks from one forward pass: the modules that lead to h, one after the other.

        Walks back from h over the outermost modules, to data or to layers whose outputs sum to x_0 (token and position
        tables). Every module with trained parameters is a block, with the norms and activations after it; the parts of
        an ``nn.Sequential`` are blocks of their own. A residual block is found as a whole, skip included. Print the
        result to see it; the first batch of :class:`~splitfg.ParallelPull` validates it.

        Args:
            network: A split, or a model with its head that :func:`~splitfg.split` cuts.
            batch: Inputs; labels in a dict are ignored.

        Raises:
            SplitError: If functions that are no modules lie between the blocks.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from splitfg import BlockPath
            >>> class Deep(nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            ...         self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)
            ...     def forward(self, x):
            ...         for layer in self.layers:
            ...             x = layer(x)
            ...         return self.head(self.norm(x))
            >>> path = BlockPath.find(Deep(), torch.randn(8, 4))
            >>> [block.name for block in path.blocks], path.top
            (['layers.0', 'layers.1', 'layers.2'], 'norm')
        """
        from splitfg.sites._find_blocks import find_block_path

        return find_block_path(network, batch)

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module of every block and the bottom writers, in the order of their calls; shared ones repeat."""
        return (*self.writers, *(name for block in self.blocks for name in block.modules))

    def groups(self, size: int) -> int:
        """Return the number of groups of this many blocks, counted from the first; the last may be smaller."""
        return -(-len(self.blocks) // size)

    def boundaries(self, size: int) -> tuple[str, ...]:
        """Return the names of the blocks whose outputs lie between groups of this many blocks."""
        return tuple(self.blocks[i - 1].name for i in range(size, len(self.blocks), size))

    def shared_names(self) -> list[str]:
        """List the problems of blocks that end in the same module, which feedback maps cannot tell apart."""
        counts = Counter(block.name for block in self.blocks)
        return [
            f"{count} blocks end in {name}, so they would share one feedback map: give each block a last module of its"
            " own, or use UnchangedFeedback()"
            for name, count in counts.items()
            if count > 1
        ]

    def problems(self, trunk: nn.Module) -> list[str]:
        """List everything that does not fit a trunk."""
        modules, params = dict(trunk.named_modules()), dict(trunk.named_parameters())
        inner = [block.writer for block in self.blocks if block.writer is not None]
        wanted = dict.fromkeys([*self.modules, *inner, *([] if self.top is None else [self.top])])
        found = [f"the path names {name!r}, which is no module of the trunk" for name in wanted if name not in modules]
        found += [f"the path names {p!r}, which is no parameter of the trunk" for p in self.added if p not in params]
        found += [
            f"{parameter} is added beside {writer!r}, which is no writer at the bottom of the path"
            for parameter, writer in self.added.items()
            if writer not in self.writers
        ]
        found += [
            f"{name} ({type(modules[name]).__name__}) cannot be trained by what it writes: name an nn.Linear,"
            " nn.Embedding or nn.Conv2d (and no subclass)"
            for name in (*self.writers, *inner)
            if name in modules and not has_layer_gradients(modules[name])
        ]
        found += [
            f"{block.writer} is not inside {block.name}: name the layer that gives the output of {block.name}"
            for block in self.blocks
            if block.writer is not None and not f"{block.writer}.".startswith(f"{block.name}.")
        ]
        if self.top in modules and not has_pull_back(modules[self.top]):
            found.append(
                f"there is no closed form for {self.top} ({type(modules[self.top]).__name__}): make it the last module"
                f" of the last block, or give it a method{TOP_HOOK}"
            )
        return found


@runtime_checkable
class BlockTrunk(Protocol):
    """A trunk that declares its own blocks."""

    def block_path(self) -> BlockPath:
        """Return the blocks."""


def find_blocks(trunk: nn.Module) -> BlockPath:
    """Return the blocks of a trunk: its own ``block_path()``, or a chain found in an ``nn.Sequential``.

    In a sequential trunk every child with parameters begins a block; children without parameters belong to the block
    before them.

    Raises:
        SplitError: If the trunk is neither.

    Example:
        >>> from torch import nn
        >>> from splitfg.sites import find_blocks
        >>> trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        >>> [block.modules for block in find_blocks(trunk).blocks]
        [('0', '1'), ('2', '3')]
    """
    model = original(trunk)
    if isinstance(model, BlockTrunk):
        return model.block_path()
    names = [name for name, _ in trunk.named_children()]
    starts = [i for i, child in enumerate(trunk.children()) if any(True for _ in child.parameters())]
    if type(model) is not nn.Sequential or not starts:
        raise SplitError([_NO_BLOCKS])
    bounds = [0, *starts[1:], len(names)]
    return BlockPath(tuple(PathBlock(tuple(names[a:b])) for a, b in pairwise(bounds)))


_NO_BLOCKS = """the trunk has no block_path(): find its blocks, or name them in the order of their calls,
    path = BlockPath.find(split, batch)
    path = BlockPath(tuple(PathBlock((f"layers.{i}",)) for i in range(n)))  # and top=, writers=, residual=
    ParallelPull(path)"""
