"""Backpropagation, the reference: plain, with the closed-form head, and with activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from splitfg.compiled import Compile, with_compiled_trunk
from splitfg.errors import SplitError
from splitfg.estimators._head_pass import HeadPass
from splitfg.estimators._settings import ReverseSettings
from splitfg.estimators._state import with_state
from splitfg.numerics import add_into, added, each_its_own, norm
from splitfg.splitting import (
    Batch,
    ForwardOnlyTrunk,
    Role,
    Split,
    explained_reverse,
    names_of,
    original,
    parts,
    replaced,
    require_reverse_mode,
    submodule,
)
from splitfg.splitting.checks import begin_step, check_h, check_loss, warn_unreached
from splitfg.types import Estimate, Inputs, Params, Stats, Target


@dataclass(frozen=True)
class Backprop(ReverseSettings):
    """The exact gradient by reverse mode through trunk and head.

    A tied parameter gets the gradient of both its roles, whatever the split's policy for estimates.

    Args:
        closed_head: Take the head's closed form, in row chunks, and reverse mode through the trunk alone:
            the same gradient without the logits of the whole batch on the tape.
        readout_only: Leave out the trunk's share of tied parameters, as ``Tied.EXCLUDE`` does.
        micro_batch: Rows of the batch that pass the trunk together; ``None`` for all. The gradient is the same.

    Raises:
        SplitError: If a setting is out of range, and in every call if network or batch do not fit.

    Example:
        >>> import torch
        >>> from splitfg import Backprop
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> estimate = Backprop()(split, x, y, generator=torch.Generator().manual_seed(0))
        >>> estimate.stats.trunk_backward
        1
    """

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator | None = None) -> Estimate:
        """Compute the gradient; see :class:`~splitfg.estimators.protocol.Estimator`. Draws for dropout alone."""
        split = begin_step(split, x, y, generator, tangents=False, micro_batch=self.micro_batch, reverse=True)
        _check_reverse(split)
        return _Reverse(split, split, self.closed_head, self.readout_only)(x, y, self.micro_batch)


@dataclass(frozen=True)
class CheckpointedBackprop(ReverseSettings):
    """The exact gradient with activation checkpointing: each block's inside is computed again on the way back.

    Args:
        blocks: Names of the trunk's modules to checkpoint; by default the entries with parameters of its outermost
            :class:`torch.nn.ModuleList` and :class:`torch.nn.Sequential` containers.
        closed_head: As in :class:`Backprop`.
        readout_only: As in :class:`Backprop`.
        micro_batch: As in :class:`Backprop`.

    Raises:
        SplitError: If a setting is out of range, and in every call if network or batch do not fit.

    Example:
        >>> import torch
        >>> from splitfg import CheckpointedBackprop
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> estimate = CheckpointedBackprop()(split, x, y, generator=torch.Generator().manual_seed(0))
        >>> estimate.stats.trunk_backward
        1
    """

    blocks: tuple[str, ...] = field(default=(), kw_only=True)

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator | None = None) -> Estimate:
        """Compute the gradient; see :class:`~splitfg.estimators.protocol.Estimator`. Draws for dropout alone."""
        split = begin_step(split, x, y, generator, tangents=False, micro_batch=self.micro_batch, reverse=True)
        _check_reverse(split)
        twin = split.twin(self.trunk(split), split.head)
        return _Reverse(split, twin, self.closed_head, self.readout_only)(x, y, self.micro_batch)

    def trunk(self, split: Split) -> nn.Module:
        """Return the split's trunk with its blocks checkpointed; parameters are shared."""
        if any(isinstance(module, fx.GraphModule) for module in split.trunk.modules()):
            raise SplitError(
                ["a trunk that was cut by tracing has no blocks to checkpoint: build Split(trunk, head) from its parts"]
            )
        names = self.blocks or _blocks(split.trunk)
        return replaced(split.trunk, {n: _Checkpointed(submodule(split.trunk, n)) for n in names})

    def compiled(self, split: Split, compile_: Compile) -> tuple[Split, Backprop]:
        """Compile the checkpointed trunk; over it, plain backprop is this method."""
        plain = Backprop(self.closed_head, self.readout_only, self.micro_batch)
        return with_compiled_trunk(split, compile_, trunk=self.trunk(split)), plain


@dataclass(frozen=True, eq=False)
class _Reverse:
    """Reverse mode through a split's trunk, or that of its checkpointed twin, and its head."""

    split: Split
    twin: Split
    closed_head: bool
    readout_only: bool

    def __call__(self, x: Inputs, y: Target, micro_batch: int | None) -> Estimate:
        batch = list(parts(x, y, micro_batch))
        with explained_reverse():
            loss, grads = self._through_closed_head(batch, y) if self.closed_head else self._through_all(batch, y)
        check_loss(loss)
        estimate = Estimate(loss, grads, Stats(trunk_backward=len(batch), norms={"all": norm(grads)}))
        return with_state(self.split, batch, estimate)

    def _through_closed_head(self, batch: Batch, y: Target) -> tuple[Tensor, Params]:
        """Compute the head in closed form, then reverse mode from u through the trunk."""
        head, grads = HeadPass(self.split, y), Params()
        names = set(self._own_names().values())
        leaves = _leaves({n: p for n, p in self.split.trained_params().items() if n in names})
        for i, (part_x, part_y) in enumerate(batch):
            h = self._h(i, leaves, part_x)
            u = head.u(i, h.detach(), part_y)
            grads = added(grads, self._grads(h, leaves, u))
        exact = head.result()
        return exact.loss, add_into(exact.grads, grads)

    def _through_all(self, batch: Batch, y: Target) -> tuple[Tensor, Params]:
        """Reverse mode from the loss through head and trunk."""
        leaves = _leaves(self.split.trained_params())
        loss, grads = torch.zeros_like(next(iter(leaves.values())).sum()).detach(), Params()
        for i, (part_x, part_y) in enumerate(batch):
            part = self._loss(i, leaves, part_x, part_y, y)
            grads = added(grads, self._grads(part, leaves, None))
            loss = loss + part.detach()
        return loss, grads

    def _loss(self, part: int, leaves: Params, x: Inputs, part_y: Target, y: Target) -> Tensor:
        """Compute a part's loss in one function: compiled code warns about inputs with a graph, as h would be."""
        h = self._h(part, leaves, x)
        check_h(self.split, h.detach(), y)
        with torch.enable_grad():
            normaliser = self.split.head.normaliser(h.detach(), y)
            return self.split.head.loss(self.split.head_view(leaves), h, part_y, normaliser)

    def _h(self, part: int, leaves: Params, x: Inputs) -> Tensor:
        own = set(self._own_names().values())
        with torch.enable_grad():
            return self.twin.part(part).trunk_function(x, for_reverse_mode=True)(
                {n: p for n, p in leaves.items() if n in own}
            )

    def _grads(self, output: Tensor, leaves: Params, u: Tensor | None) -> Params:
        if not leaves:
            return {}
        if not torch.compiler.is_compiling() and not output.requires_grad:
            warn_unreached()
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        wanted = list(leaves.values())
        # checkpointed blocks run once more, with effects on their state
        with self.twin.restored(), nullcontext() if self.twin is self.split else _runs_again():
            grads = torch.autograd.grad(output, wanted, u, allow_unused=True, materialize_grads=True)
        return each_its_own(dict(zip(leaves, grads, strict=True)))

    def _own_names(self) -> dict[str, str]:
        """From the trunk's names to the model's, for what reverse mode reaches through it."""
        names = names_of(self.twin.trunk, self.split.model)
        left_out = Role.TIED if self.readout_only else None
        roles = self.split.roles
        return {inner: n for inner, n in names.items() if roles[n] not in (left_out, Role.FROZEN)}


@contextmanager
def _runs_again() -> Iterator[None]:
    """Explain the error of a checkpointed block that fails when it runs once more."""
    try:
        yield
    except (torch.OutOfMemoryError, NotImplementedError):
        raise
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            raise
        raise SplitError([f"a checkpointed block fails when it runs again ({error}): {_RUNS_TWICE}"]) from error


_RUNS_TWICE = (
    "it may change its arguments, such as a cache of keys and values. Name other blocks with blocks=..., or use"
    " Backprop()"
)


def _check_reverse(split: Split) -> None:
    """Raise :class:`SplitError` for a black box and in inference mode: the gradient would be a silent zero."""
    require_reverse_mode()
    if isinstance(split.trunk, ForwardOnlyTrunk):
        kind = type(split.trunk).__name__
        cure = "use SplitFG(engine=CentralDifference()), or FrozenTrunk() for the head alone"
        raise SplitError([f"reverse mode cannot see into a {kind}: {cure}"])


def _leaves(params: Params) -> Params:
    return {n: p.detach().requires_grad_() for n, p in params.items()}


class _Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # a model may read settings of its blocks
            return getattr(super().__getattr__("block"), name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        # copies of lists among the arguments, to which the trunk may append before the block runs again
        inputs, named = pytree.tree_map(lambda value: value, (inputs, named))
        return checkpoint(self.block, *inputs, use_reentrant=False, **named)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _blocks(trunk: nn.Module) -> tuple[str, ...]:
    names: list[str] = []
    for name, module in trunk.named_modules():
        if any(name == chosen or name.startswith(f"{chosen}.") for chosen in names):
            continue
        if isinstance(original(module), (*_CONTAINERS, nn.Sequential)):
            # containers without a forward pass are searched in turn
            inner = ((child, part) for child, part in module.named_children() if not isinstance(part, _CONTAINERS))
            held = [child for child, part in inner if any(True for _ in part.parameters())]
            names += [f"{name}.{child}".lstrip(".") for child in held]
    if not names:
        raise SplitError(["the trunk has no nn.ModuleList or nn.Sequential: name the blocks to checkpoint"])
    return tuple(names)
