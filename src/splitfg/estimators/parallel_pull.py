"""The parallel pull: every block pulls a predicted gradient back once, by itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from splitfg.compiled import Compile, CompiledPuller, CompiledRecorder, with_compiled_head
from splitfg.engines import ForwardMode
from splitfg.errors import SplitError, raise_if
from splitfg.estimators._head_pass import HeadPass
from splitfg.estimators._push import check_tangents
from splitfg.estimators._settings import kind_problems, pull_problems
from splitfg.estimators._state import with_state
from splitfg.estimators.partial import ALONE, Complete, Partial, Share
from splitfg.feedback import Feedback, LearnedMaps, NoiseControl, UnchangedFeedback
from splitfg.numerics import added, each_its_own, norm
from splitfg.sites import (
    BlockInput,
    BlockPath,
    Puller,
    Recorder,
    Recording,
    added_gradient,
    block_inputs,
    block_points,
    find_blocks,
    layer_gradients,
    pull_back,
    pull_block,
    record,
    top_shape,
    under,
    validate_blocks,
)
from splitfg.splitting import ForwardOnlyTrunk, Split
from splitfg.splitting.checks import check_batch
from splitfg.types import Estimate, Inputs, Params, Stats, Target


@dataclass(frozen=True)
class ParallelPull:
    """Exact head; every block of the trunk pulls a predicted gradient at its output back by itself.

    Feedback predicts D_i = dL/dx_i at every point of the stream from r = dL/dx_L. A pull is reverse mode inside one
    block, whose activations are computed again:

        c_i = (∂f_i / ∂x_i)ᵀ D_{i+1},    ĝ_i = (∂f_i / ∂θ_i)ᵀ D_{i+1}.

    The pulls refine the gradient at the points below: on a residual stream D_i ← r + Σ_{m ≥ i} c_m, in a chain
    D_i ← c_i. Blocks wait for r and for nothing else, so that all of them can be pulled at the same time. With several
    pulls, each starts from the refined gradients of the one before; the last gives the gradients of the blocks'
    parameters, and its sum those of the layers that write to the stream. With as many pulls as blocks this is
    backpropagation, exactly.

    Biased with fewer pulls, by the error of the prediction. Not forward-only: ``stats.block_backward`` counts the
    reverse passes inside blocks. No reverse pass crosses a block, and memory is that of the stream and one block.

    Args:
        path: The blocks; by default the trunk's ``block_path()``, or the layers of an ``nn.Sequential``.
        feedback: Predicts the gradient at the points of the stream; the default is r unchanged.
        pulls: How often every block is pulled.
        own_block: Keep every pull inside its block: writers learn from the prediction as well. Takes one pull.
        recorder: Runs the trunk and records the inputs of its blocks.
        puller: Pulls a gradient back through a block.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import splitfg
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> network = splitfg.split(model)
        >>> x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
        >>> estimate = splitfg.ParallelPull(feedback=splitfg.MeanJacobian())(
        ...     network, x, y, generator=torch.Generator().manual_seed(0)
        ... )
        >>> estimate.stats.trunk_backward, estimate.stats.block_backward
        (0, 2)
    """

    path: BlockPath | None = None
    feedback: Feedback = field(default_factory=UnchangedFeedback)
    pulls: int = 1
    own_block: bool = False
    recorder: Recorder = field(default=record, repr=False)
    puller: Puller = field(default=pull_block, repr=False)

    def __post_init__(self) -> None:
        found = pull_problems(self.pulls) + kind_problems("feedback", self.feedback, Feedback)
        if self.own_block and self.pulls != 1:
            found.append(f"own_block takes one pull, got pulls={self.pulls}: set pulls=1 or own_block=False")
        raise_if(found if self.path is None else found + kind_problems("path", self.path, BlockPath))

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator | None = None) -> Estimate:
        """Estimate the gradient; see :class:`~splitfg.estimators.protocol.Estimator`. Learned maps draw noise."""
        estimate = self.part(split, x, y, generator=generator, share=ALONE).completed(split)
        return with_state(split, [(x, y)], estimate)

    @property
    def score_count(self) -> int:
        """Return 0."""
        return 0

    @property
    def divides_tangents(self) -> bool:
        """Return ``False``: there are none."""
        return False

    @property
    def draws_for_rows(self) -> bool:
        """Whether the feedback draws noise."""
        return isinstance(self.feedback, LearnedMaps | NoiseControl)

    @property
    def reads_all_inputs(self) -> bool:
        """Return ``False``: what the maps learn from adds up over rows."""
        return False

    def part(
        self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator | None = None, share: Share
    ) -> Partial:
        """Compute the gradients of these rows; see :class:`~splitfg.estimators.PartialEstimator`."""
        check_batch(split, x, y, generator, tangents=False)
        path = self._path(split)
        validate_blocks(split, path, x)
        if isinstance(self.feedback, LearnedMaps) and generator is None:
            raise SplitError(["learned maps draw noise: pass generator=torch.Generator().manual_seed(0)"])
        with torch.no_grad():
            if isinstance(self.feedback, LearnedMaps):
                check_tangents(ForwardMode(), split, x)
            seen = self.recorder(split, x, block_points(path, self._moved(path)), generator)
            found, complete = self._learned(path, seen, share)
            seen = replace(seen, noise={}, response=None)  # frees them before the head's outputs exist
            head = HeadPass(split, y)
            u = head.u(0, seen.h, y)
            feedback = self.feedback.drawn(generator)
            pass_ = _PullPass(split, path, seen, u, self.pulls, self.own_block, feedback, self.puller)
            trunk = split.named_trunk_grads(pass_.grads())
            trunk = dict(zip(trunk, each_its_own(trunk.values()), strict=True))
            exact = head.result()
        norms = {"u": exact.u.norm(), "trunk": norm(trunk, like=exact.u), "head": norm(exact.grads, like=exact.u)}
        biased = self.pulls < len(path.blocks)
        stats = Stats(jvps=self.feedback.jvps, block_backward=pass_.reverse_passes, biased=biased, norms=norms)
        return Partial(exact.loss, added(exact.grads, trunk), stats, sums=found, complete=complete)

    def learned_state(self) -> dict[str, LearnedMaps]:
        """Return the maps if they are learned."""
        return {"maps": self.feedback} if isinstance(self.feedback, LearnedMaps) else {}

    def update_state(self, split: Split, estimate: Estimate) -> None:  # noqa: ARG002
        """Change the maps by the estimate's ``state_update``."""
        for maps in self.learned_state().values():
            maps.apply(estimate.state_update)

    def compiled(self, split: Split, compile_: Compile) -> tuple[Split, ParallelPull]:
        """Compile the recorded pass, every block's pull and the head."""
        fast = replace(self, recorder=CompiledRecorder(compile_), puller=CompiledPuller(compile_))
        return with_compiled_head(split, compile_), fast

    def _path(self, split: Split) -> BlockPath:
        if isinstance(split.trunk, ForwardOnlyTrunk):
            words = f"reverse mode cannot see into a {type(split.trunk).__name__}"
            raise SplitError([f"{words}: use SplitFG(engine=CentralDifference())"])
        path = find_blocks(split.trunk) if self.path is None else self.path
        if not isinstance(self.feedback, UnchangedFeedback):
            raise_if(path.shared_names())
        return path

    def _moved(self, path: BlockPath) -> tuple[str, ...]:
        """Return the modules whose outputs get noise: all that a prediction is needed at."""
        if not isinstance(self.feedback, LearnedMaps):
            return ()
        bottom = path.writers[:1] if self.own_block else ()
        return (*bottom, *(block.name for block in path.blocks[:-1]))

    def _learned(self, path: BlockPath, seen: Recording, share: Share) -> tuple[Params, Complete | None]:
        """Return the correlations that maps learn from, and how those of all rows change them."""
        if not isinstance(self.feedback, LearnedMaps) or seen.response is None:
            return {}, None
        response = _mean_rows(path, seen.response.reshape(top_shape(path, seen)))
        noise = {name: [_mean_rows(path, e) for e in calls] for name, calls in seen.noise.items()}
        found = self.feedback.correlate(noise, response)
        noises = sum(e.shape[-1] for calls in noise.values() for e in calls)
        change = partial(self.feedback.change, rows=share.total(response[..., 0].numel()), noises=noises)
        return found, lambda split, total: total.updated(change(total.sums)).completed(split)


class _PullPass:
    """One estimate: goes through the blocks from the last to the first.

    On the way, ``levels[s]`` is the gradient at the present block's output after s refinements. It depends on the pulls
    of refinement s - 1 alone, so that the order of the blocks does not matter; this one needs the least memory.
    """

    def __init__(
        self,
        split: Split,
        path: BlockPath,
        seen: Recording,
        u: Tensor,
        pulls: int,
        own_block: bool,
        feedback: Feedback,
        puller: Puller,
    ) -> None:
        self._trunk, self._path, self._seen = split.trunk, path, seen
        self._pulls, self._own_block, self._feedback, self._puller = pulls, own_block, feedback, puller
        self._found: Params = {}
        self._r = self._through_top(u)
        self._rows = _summed_rows(path, self._r)
        self.reverse_passes = 0

    def grads(self) -> Params:
        """Return the gradients, by the trunk's names."""
        path, inputs = self._path, block_inputs(self._path, self._seen)
        levels = [self._r] * (self._pulls + 1)
        for i in reversed(range(len(inputs))):
            shares = self._block(inputs[i], levels, last=len(inputs) - i, to_input=i > 0 or bool(path.writers))
            if i > 0 or path.writers:
                name = path.blocks[i - 1].name if i > 0 else path.writers[0]
                levels = self._next(levels, shares, name, inputs[i].x)
        self._bottom(levels[-1])
        return self._found

    def _block(self, given: BlockInput, levels: list[Tensor], *, last: int, to_input: bool) -> list[Tensor]:
        """Pull a block; returns its shares of the gradient at its input, one for every pull.

        The gradient at the output of the block that is ``last`` from the top is exact after as many refinements less
        one, so that further pulls would repeat themselves.
        """
        deltas = levels[: min(self._pulls, last)]
        pulled = self._puller(self._trunk, given, deltas if to_input else deltas[-1:], to_input=to_input)
        self.reverse_passes += len(deltas) if to_input else 1
        self._found = added(self._found, pulled.grads)
        writer = given.block.writer
        if writer is not None and pulled.read is not None:
            delta = levels[0 if self._own_block else -1]
            own = layer_gradients(self._trunk.get_submodule(writer), pulled.read, delta)
            self._found = added(self._found, under(writer, own))
        shares = list(pulled.shares)
        return shares + shares[-1:] * (self._pulls - len(shares))

    def _next(self, levels: list[Tensor], shares: list[Tensor], name: str, x: Tensor) -> list[Tensor]:
        """Return the levels at a block's input: the prediction, and the refinement of every pull."""
        first = self._predicted(name, x) if name not in self._path.writers or self._own_block else levels[0]
        if self._own_block:
            return [first] * len(levels)
        below = [s + c for s, c in zip(levels[1:], shares, strict=True)] if self._path.residual else shares
        return [first, *below]

    def _bottom(self, delta: Tensor) -> None:
        """Add the gradients of what writes to the bottom of the stream."""
        for name in self._path.writers:
            for a in self._seen.reads[name]:
                own = layer_gradients(self._trunk.get_submodule(name), a, delta)
                self._found = added(self._found, under(name, own))
        for parameter in self._path.added:
            own = {parameter: added_gradient(delta, self._trunk.get_parameter(parameter))}
            self._found = added(self._found, own)

    def _predicted(self, name: str, x: Tensor) -> Tensor:
        """Predict the gradient at the output of a module, which x is."""
        path, rows = self._path, self._rows
        features = x.shape[1] if path.pooled else path.features_last(x).shape[-1]
        found = self._feedback.at(name, rows, features) if features != rows.shape[-1] else self._feedback.at(name, rows)
        if not path.pooled:
            return path.features_back(found)
        return (found / x[0, 0].numel()).reshape(*found.shape, *[1] * (x.ndim - 2)).expand(x.shape)

    def _through_top(self, u: Tensor) -> Tensor:
        top = self._path.top
        if top is None:
            return u.reshape(top_shape(self._path, self._seen))
        r, own = pull_back(self._trunk.get_submodule(top), self._seen.reads[top][0], u)
        self._found = under(top, own)
        return r


def _summed_rows(path: BlockPath, r: Tensor) -> Tensor:
    """Return r as rows of features; of pooled paths, the sum over the pixels of an image."""
    return r.flatten(2).sum(-1) if path.pooled else path.features_last(r)


def _mean_rows(path: BlockPath, response: Tensor) -> Tensor:
    """Return a response or noise as rows of features; of pooled paths, the mean over the pixels of an image."""
    return response.flatten(2).mean(-1) if path.pooled else path.features_last(response)
