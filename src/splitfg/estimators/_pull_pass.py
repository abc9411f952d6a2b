"""One parallel pull: from recorded block inputs and u to gradients of the trunk."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor

from splitfg.calling import RandomState, drawing_from
from splitfg.errors import SplitError
from splitfg.feedback import Feedback, UnchangedFeedback
from splitfg.numerics import added
from splitfg.sites import (
    BlockInput,
    BlockPath,
    Puller,
    Recording,
    TableRows,
    added_gradient,
    block_inputs,
    layer_gradients,
    looks_up_few,
    lookup_gradient,
    pull_back,
    skip_back,
    top_shape,
    under,
)
from splitfg.splitting import Split
from splitfg.splitting.checks import skip_checks
from splitfg.types import Params


@dataclass(frozen=True)
class PullPlan:
    """How often and how blocks are pulled; see :class:`~splitfg.ParallelPull`."""

    pulls: int
    group: int
    own_block: bool
    skips: bool


@dataclass(frozen=True)
class _Gradients:
    """Gradients at one point of the stream.

    Attributes:
        pulled: Gradients that the pulls start from, one for each. At a group's output, D after 0, 1, ... refinements;
            inside a group, what the group's blocks above have pulled of these.
        refined: The gradients after 1, 2, ... refinements, which would be at this point if the group ended here.
    """

    pulled: list[Tensor]
    refined: list[Tensor]


class PullPass:
    """One estimate: goes through the blocks from the last to the first, and drops the input of every block it pulled.

    A refinement depends on the pulls of the refinement before it alone, so that the order of the groups does not
    matter; this one needs the least memory.

    With the share K_i of a block's Jacobian along its skip, a refinement at the block's input is

        D_i ← c_i(D_{i+1}) + K_iᵀ (D'_{i+1} - D_{i+1}),

    where D'_{i+1} is the refinement at its output: K_i = 0 in a chain, and on a residual stream, whose pulls are of
    f_i alone, D_i ← c_i(D_{i+1}) + D'_{i+1}. Inside a group the same holds with what the group has pulled in place of
    D.

    Args:
        split: The network.
        path: Its blocks.
        seen: A recorded pass.
        u: dL/dh.
        plan: How often and how blocks are pulled.
        feedback: Predicts gradients on the stream.
        puller: Pulls a gradient back through a block.
        states: The generators' states at every block, if the pass draws random numbers.
        tied: Names of the trunk's parameters that have a gradient already, which lookups can be added to.

    Attributes:
        lookups: Gradients of tied tables at the rows looked up, with the trunk's names, once :meth:`grads` has run;
            the gradients that it returns are without them.
        reverse_passes: Number of reverse passes inside blocks so far.
    """

    def __init__(
        self,
        split: Split,
        path: BlockPath,
        seen: Recording,
        u: Tensor,
        plan: PullPlan,
        feedback: Feedback,
        puller: Puller,
        states: Sequence[RandomState] | None = None,
        tied: Collection[str] = (),
    ) -> None:
        self._trunk, self._path = split.trunk, path
        self._split, self._states = split, states
        self._plan, self._feedback, self._puller = plan, feedback, puller
        # no reference to the recording, which would keep the inputs of all blocks
        self._inputs, self._x_top = block_inputs(path, seen), _top_value(path, seen)
        self._wrote = [(n, a, size) for n in path.writers for a, size in zip(seen.reads[n], seen.wrote[n], strict=True)]
        self._found: Params = {}
        self._tied = tied
        self.lookups: list[tuple[str, TableRows]] = []
        self._r = self._through_top(u)
        self._rows = stream_rows(path, self._r)
        self.reverse_passes = 0

    def grads(self) -> Params:
        """Return the gradients, by the trunk's names; call it once."""
        path, y = self._path, self._x_top
        at = _Gradients([self._r] * self._plan.pulls, [self._r] * self._plan.pulls)
        groups = path.groups(self._plan.group)
        for i in reversed(range(len(self._inputs))):
            given, last = self._inputs.pop(), groups - i // self._plan.group
            with self._as_recorded(i):
                shares = self._block(given, at, last=last, to_input=i > 0 or bool(path.writers))
            if i > 0 or path.writers:
                at = self._next(at, shares, i, given, y)
            y = given.x
        self._bottom(at.refined[-1])
        return self._found

    @contextmanager
    def _as_recorded(self, block: int) -> Iterator[None]:
        """Draw the dropout masks of the recorded pass again, and undo the effects on the state of the network."""
        with ExitStack() as stack:
            if not skip_checks():
                stack.enter_context(self._split.restored())
            if self._states is not None:
                stack.enter_context(drawing_from(self._states[block]))
            yield

    def _block(self, given: BlockInput, at: _Gradients, *, last: int, to_input: bool) -> list[Tensor]:
        """Pull a block; returns its shares of the gradient at its input, one for every pull that differs.

        The gradient at the output of a group that is ``last`` from the top is exact after as many refinements less
        one, so that further pulls would repeat themselves.
        """
        deltas = at.pulled[:last]
        pulled = self._puller(self._trunk, given, deltas if to_input else deltas[-1:], to_input=to_input)
        self.reverse_passes += len(deltas) if to_input else 1
        self._found = added(self._found, pulled.grads)
        writer = given.block.writer
        if writer is not None and pulled.read is not None:
            delta = at.pulled[0] if self._plan.own_block else at.refined[-1]
            own = layer_gradients(self._trunk.get_submodule(writer), pulled.read, delta)
            self._found = added(self._found, under(writer, own))
        return list(pulled.shares)

    def _next(self, at: _Gradients, shares: list[Tensor], i: int, given: BlockInput, y: Tensor) -> _Gradients:
        """Return the gradients at the input of block i, from those at its output and from its shares."""
        refined = [] if self._plan.own_block else self._every_pull(self._refined(at, shares, given, y))
        if i % self._plan.group:
            residual = self._path.residual
            pulled = [above + c for above, c in zip(at.pulled, shares, strict=False)] if residual else shares
            pulled = self._every_pull(pulled)
        else:
            pulled = [self._first(at.pulled[0], i, given, y), *refined[:-1]]
        return _Gradients(pulled, refined or pulled)

    def _every_pull(self, found: list[Tensor]) -> list[Tensor]:
        """Return one gradient for every pull; those after the last that differs repeat it."""
        return [*found, *found[-1:] * (self._plan.pulls - len(found))]

    def _refined(self, at: _Gradients, shares: list[Tensor], given: BlockInput, y: Tensor) -> list[Tensor]:
        """Return the refinements at a block's input, one for every share."""
        if self._path.residual:
            return [above + c for above, c in zip(at.refined, shares, strict=False)]
        if not self._plan.skips:
            return list(shares)
        moved = [after - before for before, after, _ in zip(at.pulled, at.refined, shares, strict=False)]
        return [c + skip_back(self._trunk, given, y, delta) for c, delta in zip(shares, moved, strict=True)]

    def _first(self, above: Tensor, i: int, given: BlockInput, y: Tensor) -> Tensor:
        """Return the prediction at the input of block i, from the feedback or from the prediction above."""
        if self._plan.skips and isinstance(self._feedback, UnchangedFeedback):
            return skip_back(self._trunk, given, y, above)
        if i == 0 and not self._plan.own_block:
            return above
        name = self._path.blocks[i - 1].name if i > 0 else self._path.writers[0]
        return predicted_gradient(self._path, self._feedback, name, self._rows, given.x)

    def _bottom(self, delta: Tensor) -> None:
        """Add the gradients of what writes to the bottom of the stream."""
        for name, a, size in self._wrote:
            module, written = self._trunk.get_submodule(name), delta.sum_to_size(size)
            if f"{name}.weight" in self._tied and looks_up_few(module, a, written):
                self.lookups.append((f"{name}.weight", lookup_gradient(module, a, written)))
            else:
                self._found = added(self._found, under(name, layer_gradients(module, a, written)))
        for parameter in self._path.added:
            own = {parameter: added_gradient(delta, self._trunk.get_parameter(parameter))}
            self._found = added(self._found, own)

    def _through_top(self, u: Tensor) -> Tensor:
        top = self._path.top
        if top is None:
            return u.reshape(self._x_top.shape)
        r, own = pull_back(self._trunk.get_submodule(top), self._x_top, u)
        self._found = under(top, own)
        return r


def _top_value(path: BlockPath, seen: Recording) -> Tensor:
    """Return x_L."""
    return seen.h.reshape(top_shape(path, seen)) if path.top is None else seen.reads[path.top][0]


def predicted_gradient(path: BlockPath, feedback: Feedback, name: str, rows: Tensor, x: Tensor) -> Tensor:
    """Predict dL/dx at a point of a stream.

    Args:
        path: The path of the stream.
        feedback: Predicts from r.
        name: The module whose output x is.
        rows: r, from :func:`stream_rows`.
        x: The stream at that point.

    Raises:
        SplitError: If the prediction has another shape than x.

    Example:
        >>> import torch
        >>> from splitfg import BlockPath, PathBlock
        >>> from splitfg.estimators import predicted_gradient, stream_rows
        >>> from splitfg.feedback import RandomMaps
        >>> path, r = BlockPath((PathBlock(("0",)), PathBlock(("1",)))), torch.ones(2, 3)
        >>> predicted_gradient(path, RandomMaps(), "0", stream_rows(path, r), torch.ones(2, 5)).shape
        torch.Size([2, 5])
    """
    features = x.shape[1] if path.pooled else path.features_last(x).shape[-1]
    found = feedback.at(name, rows, features) if features != rows.shape[-1] else feedback.at(name, rows)
    if not path.pooled:
        predicted = path.features_back(found)
        if predicted.shape != x.shape:
            words = f"{name} gives {tuple(x.shape)} and the top of the trunk {tuple(predicted.shape)}"
            raise SplitError([f"{words}, so that no gradient can be predicted there: name blocks with path=..."])
        return predicted
    return (found / x[0, 0].numel()).reshape(*found.shape, *[1] * (x.ndim - 2)).expand(x.shape)


def stream_rows(path: BlockPath, r: Tensor) -> Tensor:
    """Return r as rows of features, from which feedback predicts; of pooled paths, the sum over the pixels of an image.

    Example:
        >>> import torch
        >>> from splitfg import BlockPath, PathBlock
        >>> from splitfg.estimators import stream_rows
        >>> stream_rows(BlockPath((PathBlock(("0",)),), pooled=True), torch.ones(2, 3, 4, 4)).shape
        torch.Size([2, 3])
    """
    return r.flatten(2).sum(-1) if path.pooled else path.features_last(r)


def mean_rows(path: BlockPath, response: Tensor) -> Tensor:
    """Return a response or noise as rows of features; of pooled paths, the mean over the pixels of an image.

    Example:
        >>> import torch
        >>> from splitfg import BlockPath, PathBlock
        >>> from splitfg.estimators import mean_rows
        >>> mean_rows(BlockPath((PathBlock(("0",)),), pooled=True), torch.ones(2, 3, 4, 4)).shape
        torch.Size([2, 3])
    """
    return response.flatten(2).mean(-1) if path.pooled else path.features_last(response)
