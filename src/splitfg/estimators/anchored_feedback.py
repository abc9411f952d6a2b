"""Aligned feedback with occasional steps of backpropagation, after GrAPE: a baseline."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from splitfg.compiled import Compile
from splitfg.errors import raise_if
from splitfg.estimators._head_pass import HeadPass
from splitfg.estimators._settings import kind_problems
from splitfg.estimators._state import with_state
from splitfg.estimators.learned_feedback import LearnedFeedback
from splitfg.estimators.partial import ALONE, Partial, PartNeeds, Share
from splitfg.estimators.protocol import Stateful
from splitfg.feedback import AlignedMaps, Direct, Pace, Transposed
from splitfg.numerics import add_into, norm
from splitfg.sites import TapedTrunk
from splitfg.splitting import Split
from splitfg.splitting.checks import begin_step
from splitfg.types import Estimate, Inputs, Stats, Target


def _aligned() -> LearnedFeedback:
    return LearnedFeedback(Direct(AlignedMaps()))


@dataclass(frozen=True)
class AnchoredFeedback:
    """Direct feedback through maps that turn towards measured Jacobians, with backprop at every n-th step.

    Between anchors, the estimate is that of ``feedback``. At an anchor, reverse mode runs through the whole trunk: the
    estimate is backpropagation's gradient, and every map takes a step along the gradient of cos(M_i, G_i) with
    G_i = Σ over rows of δᵀ g_i, from the true gradients δ at the last layer's output and g_i at the place that the map
    leads to. After GrAPE (Caillon, Fagnou, Delattre and Allauzen, ICLR 2026), which takes backprop steps on single
    batches to curb drift; how it treats the maps at these steps is ours.

    Biased between anchors. Not forward-only: ``stats.trunk_backward`` is 1 at anchors.

    Args:
        feedback: Learned feedback with the route ``Direct(AlignedMaps())``.
        anchors: When an anchor is due; its first step is one.

    Example:
        >>> import torch
        >>> from splitfg.estimators import AnchoredFeedback
        >>> from splitfg.feedback import Pace
        >>> from splitfg.testing import example_split
        >>> estimator, (split, x, y) = AnchoredFeedback(anchors=Pace(2)), example_split()
        >>> for _ in range(2):
        ...     estimate = estimator(split, x, y, generator=torch.Generator().manual_seed(0))
        ...     estimator.update_state(split, estimate)
        ...     print(estimate.stats.trunk_backward)
        1
        0
    """

    feedback: LearnedFeedback = field(default_factory=_aligned)
    anchors: Pace = field(default_factory=lambda: Pace(100))

    def __post_init__(self) -> None:
        found = kind_problems("feedback", self.feedback, LearnedFeedback) + kind_problems("anchors", self.anchors, Pace)
        raise_if(found)
        route = self.feedback.route
        if not isinstance(route, Direct) or not isinstance(route.rule, AlignedMaps):
            found.append(f"the route must be Direct(AlignedMaps()), got {route!r}: anchors align its maps")
        if self.feedback.rest is not None or self.feedback.only is not None:
            found.append("anchors train all parameters: leave rest and only out")
        raise_if(found)

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator) -> Estimate:
        """Estimate the gradient; see :class:`~splitfg.estimators.protocol.Estimator`."""
        split = begin_step(split, x, y, generator, tangents=False)
        estimate = self.part(split, x, y, generator=generator, share=ALONE).completed(split)
        return with_state(split, [(x, y)], estimate)

    @property
    def needs(self) -> PartNeeds:
        """Requirements of a part of the estimate; see :class:`~splitfg.estimators.PartialEstimator`."""
        return PartNeeds() if self.anchors.due else self.feedback.needs

    def measured_rows(self, split: Split, x: Inputs) -> int | None:
        """Return how many of the first rows a measurement takes; see :class:`~splitfg.estimators.SamplingEstimator`."""
        return self.feedback.measured_rows(split, x)

    def part(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator, share: Share) -> Partial:
        """Compute the gradients of these rows; see :class:`~splitfg.estimators.PartialEstimator`."""
        if not self.anchors.due:
            return self.feedback.part(split, x, y, generator=generator, share=share)
        split = begin_step(split, x, y, generator, tangents=False)
        raise_if(["a trunk on a device has no backward pass"] if isinstance(split.trunk, TapedTrunk) else [])
        exact = replace(self.feedback, route=Transposed())
        with torch.no_grad():
            tape, head = exact.record(split, x), HeadPass(split, y)
            u = head.u(0, tape.h, y)
            route = self._route
            swept = exact.sweep(split, tape, u, keep=route.read_places(tape))
            evidence = route.evidence(tape, swept.kept, swept.deltas, u)
            trunk, own = split.named_trunk_grads(swept.grads), head.result()
        norms = {"u": own.u.norm(), "trunk": norm(trunk, like=own.u), "head": norm(own.grads, like=own.u)}
        stats = Stats(trunk_backward=1, biased=True, norms=norms)
        return Partial(own.loss, add_into(own.grads, trunk), stats, products=evidence, complete=self._aligned)

    def _aligned(self, split: Split, total: Partial) -> Estimate:
        """Turn the maps by the evidence of all rows."""
        with torch.no_grad():
            change = self._route.aligned(total.products)
        return total.updated(change).completed(split)

    def learned_state(self) -> dict[str, Stateful]:
        """Return the maps, and the count of steps."""
        return {**self.feedback.learned_state(), "anchors": self.anchors}

    def update_state(self, split: Split, estimate: Estimate) -> None:
        """Change the maps by the estimate's ``state_update``, and count the step."""
        self.feedback.update_state(split, estimate)
        self.anchors.taken += 1

    def compiled(self, split: Split, compile_: Compile) -> tuple[Split, AnchoredFeedback]:
        """Compile the steps between anchors."""
        fast_split, fast = self.feedback.compiled(split, compile_)
        return fast_split, replace(self, feedback=fast)

    @property
    def _route(self) -> Direct:
        assert isinstance(self.feedback.route, Direct)
        return self.feedback.route
