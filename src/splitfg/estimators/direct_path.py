"""The direct path: trunk gradients from u alone, along the residual stream."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from splitfg.compiled import Compile, CompiledRecorder, with_compiled_head
from splitfg.engines import ForwardMode
from splitfg.errors import SplitError, raise_if
from splitfg.estimators._head_pass import HeadPass
from splitfg.estimators._settings import kind_problems, micro_batch_problems, tied_share_problems
from splitfg.estimators._state import with_state
from splitfg.estimators.partial import ALONE, Partial, PartNeeds, Share
from splitfg.estimators.push import check_tangents
from splitfg.feedback import Feedback, LearnedMaps, NoiseControl, UnchangedFeedback
from splitfg.numerics import add_into, added, each_its_own, norm
from splitfg.sites import (
    Recorder,
    Recording,
    ResidualPath,
    ResidualTrunk,
    TapPoints,
    added_gradient,
    attention_above_writers,
    attention_layers,
    layer_gradients,
    pull_back,
    record,
    stream_after_writers,
    tapped,
    under,
    validate_path,
)
from splitfg.splitting import Role, Split, parts
from splitfg.splitting.checks import begin_step, check_gradients
from splitfg.types import Estimate, Inputs, Params, Stats, Target


@dataclass(frozen=True)
class DirectPath:
    """Exact head; r = dL/dx at the top of the residual stream trains every module that writes to the stream.

    u is pulled back to r through the final norm in closed form. For a writer w = W a + b on the stream,

        δ = feedback(r),    ĝ_W = Σ δ aᵀ,    ĝ_b = Σ δ:

    no reverse pass, no transposed weight, and with the identity no tangent either. The final norm and the last writer
    are exact (learned maps are not applied to a last writer that is called once on a strict path); the others miss the
    share of the gradient through later blocks. The trunk's other parameters get no entry.

    Under ``Tied.INCLUDE``, the gradient of a tied table is the head's exact one plus ``tied_share`` times the
    approximate one of the lookup. Over a long training with maps, the whole share (1) can make the table diverge.

    Args:
        path: The residual stream; by default the trunk's ``residual_path()``.
        feedback: Maps r to the gradient at the output of every writer.
        lean: Run the trunk a second time and form each writer's gradient on the way, instead of keeping the inputs of
            writers from the first pass. The estimate is the same. The noise that maps learn from is kept in any case.
        micro_batch: Rows of the batch that pass the trunk together; ``None`` for all. The gradients are the same, and
            learned maps get other noise.
        tied_share: Factor s of the trunk's share in the gradient of a tied table, ĝ = g_head + s ĝ_trunk.
        recorder: Runs the trunk and records the inputs of its writers.

    Raises:
        SplitError: If a setting is out of range, and in every call if network or batch do not fit.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from splitfg import DirectPath, LinearHead, ResidualPath, Split
        >>> class Residual(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.block, self.norm = nn.Linear(4, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        ...     def forward(self, x):
        ...         x = self.first(x)
        ...         return self.norm(x + self.block(x.relu()))
        >>> split = Split(Residual(), LinearHead(nn.Linear(8, 3)))
        >>> path = ResidualPath(writers=("first", "block"), top="norm")
        >>> estimate = DirectPath(path)(split, torch.randn(16, 4), torch.randint(0, 3, (16,)))
        >>> estimate.stats.jvps
        0
    """

    path: ResidualPath | None = None
    feedback: Feedback = field(default_factory=UnchangedFeedback)
    lean: bool = False
    micro_batch: int | None = None
    tied_share: float = 1.0
    recorder: Recorder = field(default=record, repr=False)

    def __post_init__(self) -> None:
        found = micro_batch_problems(self.micro_batch) + kind_problems("feedback", self.feedback, Feedback)
        found += tied_share_problems(self.tied_share)
        if self.lean and isinstance(self.feedback, Feedback) and self.feedback.reads_stream:
            words = "reads the stream's values, which a lean pass does not keep"
            found.append(f"{type(self.feedback).__name__} {words}: use lean=False, or MeanJacobian()")
        raise_if(found if self.path is None else found + kind_problems("path", self.path, ResidualPath))

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator | None = None) -> Estimate:
        """Estimate the gradient; see :class:`~splitfg.estimators.protocol.Estimator`. Learned maps draw noise."""
        split = begin_step(split, x, y, generator, tangents=False, micro_batch=self.micro_batch)
        estimate = self.part(split, x, y, generator=generator, share=ALONE).completed(split)
        return with_state(split, list(parts(x, y, self.micro_batch)), estimate)

    @property
    def needs(self) -> PartNeeds:
        """Requirements of a part of the estimate; see :class:`~splitfg.estimators.PartialEstimator`."""
        return PartNeeds(row_noise=self._measures or isinstance(self.feedback, NoiseControl))

    def part(
        self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator | None = None, share: Share
    ) -> Partial:
        """Compute the gradients of these rows; see :class:`~splitfg.estimators.PartialEstimator`."""
        split = begin_step(split, x, y, generator, tangents=False, micro_batch=self.micro_batch)
        path = self._path(split)
        if isinstance(self.feedback, LearnedMaps) and generator is None:
            raise SplitError(["learned maps draw noise: pass generator=torch.Generator().manual_seed(0)"])
        with torch.no_grad():
            head, trunk, learning = HeadPass(split, y), Params(), _MapLearning(self.feedback)
            for i, (part_x, part_y) in enumerate(parts(x, y, self.micro_batch)):
                validate_path(split, path, part_x)
                if self._measures:
                    check_tangents(ForwardMode(), split, part_x)
                part_split = split.part(i)
                seen = self.recorder(part_split, part_x, self._points(split, path), generator)
                feedback = self._seeing(part_split, path, seen)
                learning.add(seen, path, feedback)
                u = head.u(i, seen.h, part_y)
                trunk = added(trunk, self._part(part_split, path, seen, u, part_x, feedback.drawn(generator)))
                del seen  # before the next part is
            return self._assembled(self._shared(split, split.named_trunk_grads(trunk)), learning, head, share)

    def learned_state(self) -> dict[str, LearnedMaps]:
        """Return the maps if they are learned."""
        return {"maps": self.feedback} if isinstance(self.feedback, LearnedMaps) else {}

    def update_state(self, split: Split, estimate: Estimate) -> None:  # noqa: ARG002
        """Change the maps by the estimate's ``state_update``, and count the step."""
        for maps in self.learned_state().values():
            maps.apply(estimate.state_update)
            maps.taken += 1

    def compiled(self, split: Split, compile_: Compile) -> tuple[Split, DirectPath]:
        """Compile the recorded pass and the head."""
        return with_compiled_head(split, compile_), replace(self, recorder=CompiledRecorder(compile_))

    @property
    def _measures(self) -> bool:
        """Whether the present step measures a response for the maps."""
        return isinstance(self.feedback, LearnedMaps) and self.feedback.due

    def _path(self, split: Split) -> ResidualPath:
        if self.path is not None:
            return self.path
        if not isinstance(split.trunk, ResidualTrunk):
            words = "the trunk has no residual_path()"
            raise SplitError([f"{words}: give path=ResidualPath.find(split, batch), or ResidualPath(...)"])
        return split.trunk.residual_path()

    def _points(self, split: Split, path: ResidualPath) -> TapPoints:
        attention = attention_layers(split.trunk) if self.feedback.reads_attention else ()
        top = () if path.top is None else (path.top,)
        moved = path.writers if self._measures else ()
        read = top if self.lean else (*top, *path.writers)
        return TapPoints((*read, *attention), moved, path.top, attention)

    def _seeing(self, split: Split, path: ResidualPath, seen: Recording) -> Feedback:
        """Return the feedback with its values of a recorded pass: the stream's values, attention weights."""
        feedback = self.feedback
        if feedback.reads_stream:
            values = stream_after_writers(split.trunk, path, seen)
            feedback = feedback.seeing({name: path.features_last(x) for name, x in values.items()})
        if feedback.reads_attention:
            feedback = feedback.attending(attention_above_writers(split.trunk, path, seen))
        return feedback

    def _part(
        self,
        split: Split,
        path: ResidualPath,
        seen: Recording,
        u: Tensor,
        x: Inputs,
        feedback: Feedback,
    ) -> Params:
        """Return the trunk's gradients of one part of the batch, under the trunk's names."""
        trunk = split.trunk
        r, grads = (u, {}) if path.top is None else _through_top(trunk, path.top, seen.reads[path.top][0], u)

        exact = _exact_writer(path, seen)

        def fed_back(writer: str) -> Tensor:
            if writer == exact:
                return r
            return path.features_back(feedback.at(writer, path.features_last(r)))

        def write(name: str, a: Tensor, wrote: torch.Size) -> None:
            own = layer_gradients(trunk.get_submodule(name), a, fed_back(name).sum_to_size(wrote))
            grads.update(added(grads, under(name, own)))

        if self.lean:
            with tapped(trunk, path.writers, lambda name, a, z: write(name, a, z.shape)):
                split.h(x)
        else:
            for name in path.writers:
                for a, wrote in zip(seen.reads.get(name, ()), seen.wrote.get(name, ()), strict=True):
                    write(name, a, wrote)
        beside = {p: added_gradient(fed_back(w), trunk.get_parameter(p)) for p, w in path.added.items()}
        return {**grads, **beside}

    def _shared(self, split: Split, trunk: Params) -> Params:
        """Return the trunk's gradients with ``tied_share`` of those of tied tables."""
        if self.tied_share == 1:
            return trunk
        return {n: self.tied_share * g if split.roles[n] is Role.TIED else g for n, g in trunk.items()}

    def _assembled(self, trunk: Params, learning: _MapLearning, head: HeadPass, share: Share) -> Partial:
        exact = head.result()
        norms = {"u": exact.u.norm(), "trunk": norm(trunk, like=exact.u), "head": norm(exact.grads, like=exact.u)}
        check_gradients(norms)
        norms |= self.feedback.norms(exact.u) if isinstance(self.feedback, LearnedMaps) else {}
        stats = Stats(jvps=self.feedback.jvps, biased=True, norms=norms)
        grads = each_its_own(add_into(exact.grads, trunk))
        complete = partial(_with_change, learning, share)
        return Partial(exact.loss, grads, stats, sums=learning.found, complete=complete)


def _with_change(learning: _MapLearning, share: Share, split: Split, total: Partial) -> Estimate:
    """Complete an estimate with the change of the maps, from the correlations of all rows."""
    return total.updated(learning.change(total.sums, share)).completed(split)


class _MapLearning:
    """Sums the measurements of the maps over the parts of a batch, if maps are learned."""

    def __init__(self, feedback: Feedback) -> None:
        self._maps = feedback if isinstance(feedback, LearnedMaps) else None
        self.found, self._rows, self._noises = Params(), 0, 0

    def add(self, seen: Recording, path: ResidualPath, feedback: Feedback) -> None:
        if not isinstance(feedback, LearnedMaps) or seen.response is None:
            return
        response = path.features_last(seen.response)
        stream = seen.response.shape
        noise = {name: [path.features_last(e.expand(stream)) for e in calls] for name, calls in seen.noise.items()}
        exact = _exact_writer(path, seen)
        if exact is not None:
            response = response - noise.pop(exact)[0]
        self.found = added(self.found, feedback.correlate(noise, response))
        self._rows += response[..., 0].numel()
        self._noises = response.shape[-1] * sum(len(calls) for calls in noise.values())

    def change(self, found: Params, share: Share) -> Params:
        """Return the change of the maps, from the correlations of all rows; empty without a measurement."""
        if self._maps is None or not found:
            return {}
        return self._maps.change(found, rows=share.total(self._rows), noises=self._noises)


def _exact_writer(path: ResidualPath, seen: Recording) -> str | None:
    """Return the writer whose map is the identity by definition: the one called last, if it is called once.

    ``None`` without noise, so that fixed maps apply to all writers, and for streams that are scaled on their way.
    """
    if not path.strict or not seen.noise:
        return None
    name, noises = list(seen.noise.items())[-1]
    return name if len(noises) == 1 else None


def _through_top(trunk: nn.Module, name: str, x: Tensor, u: Tensor) -> tuple[Tensor, Params]:
    r, own = pull_back(trunk.get_submodule(name), x, u)
    return r, under(name, own)
