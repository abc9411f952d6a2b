"""Split forward gradients: the paper's estimator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from splitfg.compiled import Compile, with_compiled_tangents
from splitfg.errors import SplitError, raise_if
from splitfg.estimators._head_pass import HeadPass
from splitfg.estimators._settings import TangentSettings
from splitfg.estimators._state import with_state
from splitfg.estimators.partial import Partial, Share
from splitfg.estimators.push import push
from splitfg.numerics import add_into, added, inner_products, norm, widened
from splitfg.splitting import Batch, Split
from splitfg.splitting.checks import check_gradients, check_loss
from splitfg.tangents import Layout, TangentSource
from splitfg.types import Estimate, Inputs, Params, Stats, Target


@dataclass(frozen=True)
class SplitFG(TangentSettings):
    """Exact head, tangents in the trunk, no reverse pass through the trunk.

    With u = dL/dh from the head and J = dh/dθ_trunk, for K tangents v_k,

        d_k = <u, J v_k>,    ĝ_trunk = (1/K) Σ_k d_k v_k,    E[ĝ_trunk] = Jᵀ u = dL/dθ_trunk,

    since E[v vᵀ] = I. Its variance is (‖g_trunk‖² + g_i²) / K per trunk coordinate, and zero for the head.

    Given a ``prediction`` p of the trunk's gradient, the estimate is p + (1/K) Σ_k (d_k - <p, v_k>) v_k:
    unbiased whatever p is, with ‖g_trunk - p‖² in place of ‖g_trunk‖² in the variance.

    Args:
        K: Tangents per estimate.
        law: Distribution of the tangents.
        engine: Computes J v, for as many tangents in one pass as its ``chunk``.
        combine: Combines K scores and tangents into a gradient.
        micro_batch: Rows of the batch that pass the trunk together; ``None`` for all. The estimate is the same.
        lean: Compute u alone before the tangents, and the head's gradients after them. This computes the head's outputs
            twice, and needs no memory for its gradients while tangents pass. The estimate is the same.

    Raises:
        SplitError: If a setting is out of range, and in every call if network or batch do not fit.

    Example:
        >>> import torch
        >>> from splitfg import SplitFG
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> estimate = SplitFG(K=4)(split, x, y, generator=torch.Generator().manual_seed(0))
        >>> estimate.stats.jvps, estimate.stats.biased
        (4, False)
    """

    lean: bool = False

    def __call__(
        self,
        split: Split,
        x: Inputs,
        y: Target,
        *,
        generator: torch.Generator,
        prediction: Params | None = None,
    ) -> Estimate:
        """Estimate the gradient; see :class:`~splitfg.estimators.protocol.Estimator`.

        Args:
            split: The network.
            x: Inputs.
            y: Target.
            generator: Draws the tangents.
            prediction: A guess of the trunk's gradient, keyed by parameter name; missing names count as zero.
        """
        split, batch = self.begun(split, x, y, generator)
        with torch.no_grad():
            params = _trunk_params(split)
            layout = self.layout(split)
            source = self.source(layout, generator)
            guess = _flat_guess(layout, params, prediction, split)
            head = HeadPass(split, y, lean=self.lean)
            flat, scores = self._estimate(split, batch, params, source, guess, head)
            return with_state(split, batch, self._assembled(layout.unflatten(flat), scores, head))

    def part(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator, share: Share) -> Partial:
        """Compute scores and the head's gradient; see :class:`~splitfg.estimators.PartialEstimator`."""
        split, batch = self.begun(split, x, y, generator)
        with torch.no_grad():
            params = _trunk_params(split)
            source = self.source(self.layout(split), generator, remember=True)
            head = HeadPass(split, y, lean=self.lean)
            scores = self._own_scores(split, batch, params, source, head, share)
            exact = head.result()
            check_loss(exact.loss, scores)
            norms = {"u": exact.u.norm(), "head": norm(exact.grads, like=exact.u)}
            stats = Stats(jvps=self.K, biased=self.biased or head.biased, scores=scores, norms=norms)
            return Partial(exact.loss, share.once(exact.grads), stats, complete=partial(self._completed, source))

    def drawn_for(self, split: Split) -> Params:
        """Return the trunk's trained parameters."""
        return split.trunk_params()

    def still_rows(self, split: Split) -> dict[str, int]:
        """Return all padding rows: the head's gradient of a tied table is exact."""
        return split.still_rows()

    def compiled(self, split: Split, compile_: Compile) -> tuple[Split, SplitFG]:
        """Compile the engine and the head; engines other than forward mode get a compiled trunk instead."""
        fast, engine = with_compiled_tangents(split, self.engine, compile_)
        return fast, replace(self, engine=engine)

    def _own_scores(
        self,
        split: Split,
        batch: Batch,
        params: Params,
        source: TangentSource,
        head: HeadPass,
        share: Share,
    ) -> Tensor:
        """Return the K scores, zero for the tangents of other processes."""
        scores, start = [], 0
        for tangents in source:
            own = tangents[share.within(start, start + len(tangents), self.K)]
            start += len(tangents)
            d = widened(tangents.new_zeros(len(tangents)))
            if len(own):
                found = self._scores(split, batch, params, source.layout.unflatten(own), head)
                d = d.to(found.dtype)
                d[share.within(start - len(tangents), start, self.K)] = found
            scores.append(d)
        return torch.cat(scores)

    def _completed(self, source: TangentSource, split: Split, total: Partial) -> Estimate:  # noqa: ARG002
        trunk = self.from_source(source, total.stats.scores)
        norms = {**total.stats.norms, "trunk": norm(trunk), "head": norm(total.grads, like=total.loss)}
        check_gradients(norms)
        return Estimate(total.loss, added(total.grads, trunk), replace(total.stats, norms=norms))

    def _estimate(
        self,
        split: Split,
        batch: Batch,
        params: Params,
        source: TangentSource,
        guess: Tensor | None,
        head: HeadPass,
    ) -> tuple[Tensor, Tensor]:
        """Return the trunk's gradient, flat, and the scores."""
        total, scores = self.combine.start(source), []
        for tangents in source:
            d = self._scores(split, batch, params, source.layout.unflatten(tangents), head)
            scores.append(d)
            total.add(tangents, d if guess is None else d - (tangents @ guess).to(d.dtype))
            del tangents  # before the next ones are drawn
        flat = total.result()
        return flat if guess is None else flat + guess, torch.cat(scores)

    def _scores(
        self,
        split: Split,
        batch: Batch,
        params: Params,
        tangents: Params,
        head: HeadPass,
    ) -> Tensor:
        """d_k = <u, J v_k> over all parts of the batch, shape ``(c,)``."""
        total: Tensor | None = None
        for i, (x, y) in enumerate(batch):
            part = split.part(i)
            h, dh = push(self.engine, part.trunk_function(x), params, tangents, split=part, x=x)
            u = head.u(i, h, y)
            d = inner_products(dh, u)
            total = d if total is None else total + d
        assert total is not None
        return total

    def _assembled(self, trunk: Params, scores: Tensor, head: HeadPass) -> Estimate:
        exact = head.result()
        check_loss(exact.loss, scores)
        norms = {"u": exact.u.norm(), "trunk": norm(trunk), "head": norm(exact.grads, like=exact.u)}
        check_gradients(norms)
        stats = Stats(jvps=self.K, biased=self.biased or head.biased, scores=scores, norms=norms)
        return Estimate(exact.loss, add_into(exact.grads, trunk), stats)


def _trunk_params(split: Split) -> Params:
    params = split.trunk_params()
    if not params:
        raise SplitError(["the trunk has no trained parameter, so there is nothing to estimate: use FrozenTrunk()"])
    return params


def _flat_guess(layout: Layout, params: Params, prediction: Params | None, split: Split) -> Tensor | None:
    if prediction is None:
        return None
    raise_if(
        [f"the prediction names {name}, which is no parameter" for name in prediction if name not in split.roles]
        + [
            f"the prediction for {name} has shape {tuple(g.shape)}, the parameter {tuple(params[name].shape)}"
            for name, g in prediction.items()
            if name in params and g.shape != params[name].shape
        ]
    )
    return layout.flatten({n: prediction.get(n, torch.zeros_like(p)).to(p) for n, p in params.items()})
