"""The parallel pull: every block pulls a predicted gradient back once, by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from splitfg.calling import RandomState
from splitfg.compiled import Compile, CompiledPuller, CompiledRecorder, with_compiled_head
from splitfg.engines import ForwardMode
from splitfg.errors import SplitError, raise_if
from splitfg.estimators._head_pass import HeadPass
from splitfg.estimators._pull_pass import PullPass, PullPlan, mean_rows
from splitfg.estimators._settings import group_problems, kind_problems, pull_problems
from splitfg.estimators._state import with_state
from splitfg.estimators.partial import ALONE, Complete, Partial, PartNeeds, Share
from splitfg.estimators.push import check_tangents
from splitfg.feedback import Feedback, LearnedMaps, NoiseControl, UnchangedFeedback
from splitfg.numerics import add_into, each_its_own, norm
from splitfg.sites import (
    BlockPath,
    Puller,
    Recorder,
    Recording,
    TableRows,
    attention_above_blocks,
    block_inputs,
    block_points,
    block_states,
    entries,
    find_blocks,
    pull_block,
    record,
    skip_problems,
    top_shape,
    validate_blocks,
)
from splitfg.splitting import ForwardOnlyTrunk, Split, names_of, require_reverse_mode
from splitfg.splitting.checks import begin_step, check_gradients
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

    Networks whose blocks have other skips, such as y = ReLU(s(x) + f(x)) in a ResNet, are chains of whole blocks. With
    ``skips`` the gradient passes along the skips in closed form, K_i = (∂y/∂x with f constant), as it does on a
    residual stream, and only pulls through f wait for nothing:

        D_i ← c_i + K_iᵀ (D'_{i+1} - D_{i+1}),    D' the refinement of D.

    With r as the only prediction, D_i ← K_iᵀ D_{i+1} before the first pull, n pulls then sum the exact gradients of
    all paths through at most n - 1 of the f above a block.

    Blocks can be taken in groups, such as attention and feed-forward layer of a transformer block. Gradients pass from
    block to block inside a group, from the prediction at its output, so that a group is pulled as one block would be.

    Biased with fewer pulls than groups, by the error of the prediction. Not forward-only: ``stats.block_backward``
    counts the reverse passes inside blocks. No reverse pass crosses a group, and memory is that of the stream and
    one block.

    Args:
        path: The blocks; by default the trunk's ``block_path()``, or the layers of an ``nn.Sequential``.
        feedback: Predicts the gradient at the points of the stream; the default is r unchanged.
        pulls: Number of pulls of every block.
        own_block: Keep every pull inside its block: writers learn from the prediction as well. Takes one pull.
        group: Blocks in a group, counted from the first. With all blocks in one group this is backpropagation, too.
        skips: Carry gradients along the skips of blocks that have a ``skip_back``; see
            :class:`~splitfg.sites.SkipBlock`.
        recorder: Runs the trunk and records the inputs of its blocks.
        puller: Pulls a gradient back through a block.

    Raises:
        SplitError: If a setting is out of range, and in every call if network or batch do not fit.

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
    skips: bool = False
    group: int = 1
    recorder: Recorder = field(default=record, repr=False)
    puller: Puller = field(default=pull_block, repr=False)

    def __post_init__(self) -> None:
        found = pull_problems(self.pulls) + group_problems(self.group, skips=self.skips)
        found += kind_problems("feedback", self.feedback, Feedback)
        if self.own_block and self.pulls != 1:
            found.append(f"own_block takes one pull, got pulls={self.pulls}: set pulls=1 or own_block=False")
        raise_if(found if self.path is None else found + kind_problems("path", self.path, BlockPath))

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator | None = None) -> Estimate:
        """Estimate the gradient; see :class:`~splitfg.estimators.protocol.Estimator`. Learned maps draw noise."""
        split = begin_step(split, x, y, generator, tangents=False)
        estimate = self.part(split, x, y, generator=generator, share=ALONE).completed(split)
        return with_state(split, [(x, y)], estimate)

    @property
    def needs(self) -> PartNeeds:
        """Requirements of a part of the estimate; see :class:`~splitfg.estimators.PartialEstimator`."""
        return PartNeeds(row_noise=self._measures or isinstance(self.feedback, NoiseControl))

    def part(
        self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator | None = None, share: Share
    ) -> Partial:
        """Compute the gradients of these rows; see :class:`~splitfg.estimators.PartialEstimator`."""
        require_reverse_mode()
        split = begin_step(split, x, y, generator, tangents=False)
        path = self.blocks_of(split)
        validate_blocks(split, path, x)
        if isinstance(self.feedback, LearnedMaps) and generator is None:
            raise SplitError(["learned maps draw noise: pass generator=torch.Generator().manual_seed(0)"])
        with torch.no_grad():
            if self._measures:
                check_tangents(ForwardMode(), split, x)
            seen, states = self._recorded(split, path, x, generator)
            feedback = self._seeing(split, path, seen).drawn(generator)
            found, complete = self._learned(path, seen, share, feedback)
            seen = replace(seen, noise={}, response=None)  # frees them before the head's outputs exist
            head = HeadPass(split, y)
            u, exact = head.u(0, seen.h, y), head.result()
            names = names_of(split.trunk, split.model)
            tied = [inner for inner, outer in names.items() if outer in exact.grads]
            plan = PullPlan(self.pulls, self.group, self.own_block, self.skips)
            puller = self.puller if states is None else pull_block  # compiled code cannot draw a block's masks again
            pass_ = PullPass(split, path, seen, u, plan, feedback, puller, states, tied)
            del seen  # the pass drops the input of every block that it has pulled
            trunk = split.named_trunk_grads(pass_.grads())
            norms = {"u": exact.u.norm(), "head": norm(exact.grads, like=exact.u)}
            trained = split.trunk_params()  # without tables that the head alone trains
            lookups = [(names[inner], rows) for inner, rows in pass_.lookups if names[inner] in trained]
            norms["trunk"] = norm(trunk | {f"{i}": rows.values for i, (_, rows) in enumerate(lookups)}, like=exact.u)
            check_gradients(norms)
            grads = _total(exact.grads, trunk, lookups)
        norms |= self.feedback.norms(exact.u) if isinstance(self.feedback, LearnedMaps) else {}
        biased = self.own_block or self.pulls < path.groups(self.group) or head.biased
        jvps = self.feedback.jvps if self._moved(path) else 0
        stats = Stats(jvps=jvps, block_backward=pass_.reverse_passes, biased=biased, norms=norms)
        return Partial(exact.loss, grads, stats, sums=found, complete=complete)

    def _recorded(
        self, split: Split, path: BlockPath, x: Inputs, generator: torch.Generator | None
    ) -> tuple[Recording, list[RandomState] | None]:
        """Record one pass, and the states of the generators at every block if it draws random numbers."""
        points = block_points(path, self._moved(path))
        if not split.traits(x).random:
            return self.recorder(split, x, points, generator), None
        with entries(split.trunk, path) as states:
            seen = self.recorder(split, x, points, generator)
        return seen, block_states(path, states)

    def learned_state(self) -> dict[str, LearnedMaps]:
        """Return the maps if they are learned."""
        return {"maps": self.feedback} if isinstance(self.feedback, LearnedMaps) else {}

    def update_state(self, split: Split, estimate: Estimate) -> None:  # noqa: ARG002
        """Change the maps by the estimate's ``state_update``, and count the step."""
        for maps in self.learned_state().values():
            maps.apply(estimate.state_update)
            maps.taken += 1

    def compiled(self, split: Split, compile_: Compile) -> tuple[Split, ParallelPull]:
        """Compile the recorded pass, every block's pull and the head."""
        fast = replace(self, recorder=CompiledRecorder(compile_), puller=CompiledPuller(compile_))
        return with_compiled_head(split, compile_), fast

    @property
    def _measures(self) -> bool:
        """Whether the present step measures a response for the maps."""
        return isinstance(self.feedback, LearnedMaps) and self.feedback.due

    def blocks_of(self, split: Split) -> BlockPath:
        """Return the blocks that are pulled.

        Raises:
            SplitError: If the trunk declares none, or cannot be differentiated.
        """
        if isinstance(split.trunk, ForwardOnlyTrunk):
            words = f"reverse mode cannot see into a {type(split.trunk).__name__}"
            raise SplitError([f"{words}: use SplitFG(engine=CentralDifference())"])
        path = find_blocks(split.trunk) if self.path is None else self.path
        if not isinstance(self.feedback, UnchangedFeedback):
            raise_if(path.shared_names())
        if self.skips:
            alone = isinstance(self.feedback, UnchangedFeedback)
            raise_if(path.problems(split.trunk) or skip_problems(split.trunk, path, all_of_them=alone))
        return path

    def _moved(self, path: BlockPath) -> tuple[str, ...]:
        """Return the modules whose outputs get noise: all that a prediction is needed at, if this step measures."""
        if not self._measures:
            return ()
        bottom = path.writers[:1] if self.own_block else ()
        return (*bottom, *path.boundaries(self.group))

    def _seeing(self, split: Split, path: BlockPath, seen: Recording) -> Feedback:
        """Return the feedback with its values of a recorded pass."""
        feedback = self.feedback.seeing(self._stream(path, seen))
        if not feedback.reads_attention:
            return feedback
        return feedback.attending(attention_above_blocks(split.trunk, path, seen))

    def _stream(self, path: BlockPath, seen: Recording) -> Params:
        """Return the stream's values where gradients are predicted, if the feedback reads them."""
        if not self.feedback.reads_stream:
            return {}
        values = [mean_rows(path, given.x) for given in block_inputs(path, seen)[:: self.group]]
        points = (*path.writers[:1], *path.boundaries(self.group))
        return dict(zip(points, values if path.writers else values[1:], strict=True))

    def _learned(
        self, path: BlockPath, seen: Recording, share: Share, feedback: Feedback
    ) -> tuple[Params, Complete | None]:
        """Return the correlations that maps learn from, and how those of all rows change them."""
        if not isinstance(feedback, LearnedMaps) or seen.response is None:
            return {}, None
        response = mean_rows(path, seen.response.reshape(top_shape(path, seen)))
        noise = {
            name: [mean_rows(path, _every_row(path, seen, e) if name in path.writers else e) for e in calls]
            for name, calls in seen.noise.items()
        }
        found = feedback.correlate(noise, response)
        noises = sum(e.shape[-1] for calls in noise.values() for e in calls)
        change = partial(feedback.change, rows=share.total(response[..., 0].numel()), noises=noises)
        return found, lambda split, total: total.updated(change(total.sums)).completed(split)


def _total(head: Params, trunk: Params, lookups: Sequence[tuple[str, TableRows]]) -> Params:
    """Add the trunk's gradients to the head's in place, each with its own memory."""
    total = each_its_own(add_into(head, trunk))
    for name, rows in lookups:
        rows.add_to(total[name])
    return total


def _every_row(path: BlockPath, seen: Recording, e: Tensor) -> Tensor:
    """Return noise at a writer of x_0 for all rows, where the writer writes once for all of them."""
    x = seen.reads[path.blocks[0].modules[0]][0]
    return e.expand(len(x), *e.shape[1:]) if path.pooled else e.expand(x.shape)
