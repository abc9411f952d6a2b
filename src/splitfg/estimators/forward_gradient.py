"""The pure forward gradient: tangents over all parameters, head included."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from splitfg.compiled import Compile, CompiledEngine, with_compiled_trunk
from splitfg.engines import ForwardMode
from splitfg.errors import SplitError
from splitfg.estimators._head_tangents import check_head_tangents
from splitfg.estimators._settings import TangentSettings
from splitfg.estimators._state import with_state
from splitfg.estimators.partial import Partial, Share
from splitfg.estimators.push import push
from splitfg.numerics import norm
from splitfg.splitting import Batch, Split
from splitfg.splitting.checks import check_h, check_loss, skip_checks
from splitfg.tangents import Layout, TangentSource
from splitfg.types import Estimate, Inputs, Params, Stats, Target


@dataclass(frozen=True)
class ForwardGradient(TangentSettings):
    """Baydin et al.'s forward gradient: one scalar <∇L, v_k> per tangent for all P parameters.

        ĝ = (1/K) Σ_k <∇L, v_k> v_k,    Var[ĝ_i] = (‖∇L‖² + g_i²) / K.

    Unbiased. Under ``Tied.EXCLUDE`` the lookup role of a tied parameter is left out here too.

    Args:
        K: Tangents per estimate.
        law: Distribution of the tangents.
        engine: Computes the directional derivatives of the loss.
        combine: Combines K scores and tangents into a gradient.
        micro_batch: Rows of the batch that pass the trunk together; ``None`` for all. The estimate is the same.

    Raises:
        SplitError: If a setting is out of range, and in every call if network or batch do not fit.

    Example:
        >>> import torch
        >>> from splitfg import ForwardGradient
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> estimate = ForwardGradient(K=4)(split, x, y, generator=torch.Generator().manual_seed(0))
        >>> sorted(estimate.grads) == sorted(split.trained_params())
        True
    """

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator) -> Estimate:
        """Estimate the gradient; see :class:`~splitfg.estimators.protocol.Estimator`."""
        split, batch = self.begun(split, x, y, generator)
        check_head_tangents(self.engine, split, *batch[0])
        with torch.no_grad():
            source = self.source(self.layout(split), generator)
            total, scores = self.combine.start(source), []
            normaliser = _normaliser(split, batch[0][0], y)
            for tangents in source:
                loss, d = self._pushed(split, batch, normaliser, source.layout, tangents)
                scores.append(d)
                total.add(tangents, d)
            check_loss(loss, torch.cat(scores))
            estimate = self._assembled(loss, source.layout.unflatten(total.result()), torch.cat(scores))
            return with_state(split, batch, estimate)

    def part(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator, share: Share) -> Partial:
        """Compute scores; see :class:`~splitfg.estimators.PartialEstimator`."""
        split, batch = self.begun(split, x, y, generator)
        check_head_tangents(self.engine, split, *batch[0])
        with torch.no_grad():
            source = self.source(self.layout(split), generator, remember=True)
            normaliser = _normaliser(split, batch[0][0], y)
            loss, scores, start = torch.zeros((), device=source.layout.device), [], 0
            for tangents in source:
                own = share.within(start, start + len(tangents), self.K)
                start += len(tangents)
                d = tangents.new_zeros(len(tangents))
                if len(tangents[own]):
                    loss, d[own] = self._pushed(split, batch, normaliser, source.layout, tangents[own])
                scores.append(d)
            check_loss(loss, torch.cat(scores))
            stats = Stats(jvps=self.K, biased=self.biased, scores=torch.cat(scores))
            return Partial(loss, {}, stats, complete=partial(self._completed, source))

    def _pushed(
        self, split: Split, batch: Batch, normaliser: Tensor, layout: Layout, tangents: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and its derivatives along the tangents ``(c, P)``, shape ``(c,)``."""
        loss, d = tangents.new_zeros(()), tangents.new_zeros(tangents.shape[0])
        params, by_name = split.trained_params(), layout.unflatten(tangents)
        for i, (part_x, part_y) in enumerate(batch):
            part = split.part(i)
            f = part.loss_function(part_x, part_y, normaliser)
            part_loss, part_d = push(self.engine, f, params, by_name, split=part, x=part_x)
            loss, d = loss + part_loss, d + part_d
        return loss, d

    def _completed(self, source: TangentSource, split: Split, total: Partial) -> Estimate:  # noqa: ARG002
        return self._assembled(total.loss, self.from_source(source, total.stats.scores), total.stats.scores)

    def _assembled(self, loss: Tensor, grads: Params, scores: Tensor) -> Estimate:
        stats = Stats(jvps=self.K, biased=self.biased, scores=scores, norms={"all": norm(grads)})
        return Estimate(loss, grads, stats)

    def compiled(self, split: Split, compile_: Compile) -> tuple[Split, ForwardGradient]:
        """Compile the engine, which pushes through trunk and head; other engines get a compiled trunk and head."""
        tied = sorted(set(split.still_rows()) - set(self.still_rows(split)))
        if tied:
            words = "has a padding_idx and is tied, which compiled code does not support"
            raise SplitError([f"{name} {words}: use SplitFG(), or a GradientLearner" for name in tied])
        if not isinstance(self.engine, ForwardMode):
            return with_compiled_trunk(split, compile_), self
        engine = CompiledEngine(self.engine, split.trunk, split.head, compile_=compile_)
        return split, replace(self, engine=engine)


def _normaliser(split: Split, first: Inputs, y: Target) -> Tensor:
    """N of the whole batch, and the checks on h where they may be made."""
    if split.head.out_features is not None and skip_checks():
        return split.head.output_loss.normaliser(y, split.head.out_features)
    h = split.h(first)
    check_h(split, h, y)
    return split.head.normaliser(h, y)
