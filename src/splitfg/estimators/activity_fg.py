"""Activity tangents: perturb the outputs of layers instead of their weights, and score every row by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from splitfg.compiled import Compile, CompiledRecorder, CompiledResponder, Responder, with_compiled_head
from splitfg.engines import ForwardMode
from splitfg.errors import SplitError, raise_if, shorten
from splitfg.estimators._head_pass import HeadPass
from splitfg.estimators._settings import kind_problems, tangent_problems
from splitfg.estimators._state import with_state
from splitfg.estimators.learned_feedback import LearnedFeedback
from splitfg.estimators.partial import ALONE, Partial, PartNeeds, Share
from splitfg.estimators.push import check_engine, check_tangents, push
from splitfg.feedback import Route
from splitfg.numerics import add_into, added, each_its_own, norm
from splitfg.sites import (
    Activities,
    ActivityTrunk,
    Recorder,
    Recording,
    TapPoints,
    activity_problems,
    each_row,
    layer_gradients,
    pull_back,
    record,
    shifted,
    under,
    validate_activities,
)
from splitfg.splitting import Role, Split, Tied, parts
from splitfg.splitting.checks import begin_step, check_finite, check_gradients, check_loss, skip_checks
from splitfg.tangents import row_noise
from splitfg.types import Engine, Estimate, Inputs, Params, Stats, Target, TrunkFunction


@dataclass(frozen=True)
class ActivityFG:
    """Exact head; tangents e at the outputs z_l = layer(a_l) of the trunk's layers, one score for every row b.

    With r the gradient at the top, which u gives, and J_b the Jacobian of row b of the top,

        d_kb = <r_b, J_b e_kb>,    δ̂_lb = (1/K) Σ_k d_kb e_klb,    E[δ̂_lb] = dL/dz_lb,    ĝ_W = Σ_b δ̂_lb a_lbᵀ:

    unbiased, with no reverse pass. A row's tangent has as many entries as its layers have outputs, not as many as they
    have weights, and rows do not disturb each other's scores. The estimate has far less noise than one from weight
    tangents where layers have many weights, and more where they use few weights in many places, as convolutions do.

    Args:
        K: Tangents per estimate.
        activities: Layers and rows; by default the trunk's ``activities()``, or else every layer with a gradient of its
            own, and a score for every sample.
        engine: Computes J e, for as many tangents in one pass as its ``chunk``.
        recorder: Runs the trunk for h and records the inputs of its layers.
        responder: Pushes noise at the layers through the trunk; by default, ``engine`` does.
        prediction: Predicts δ at every layer; the tangents then estimate only the rest, and the estimate stays
            unbiased: δ̂_lb = p_lb + (1/K) Σ_k (d_kb - Σ_m <p_mb, e_kmb>) e_klb. Its maps learn from every step.

    Raises:
        SplitError: If a setting is out of range, and in every call if network or batch do not fit.

    Example:
        >>> import torch
        >>> from splitfg import ActivityFG
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> estimate = ActivityFG(K=4)(split, x, y, generator=torch.Generator().manual_seed(0))
        >>> estimate.stats.jvps, estimate.stats.biased
        (4, False)
    """

    K: int = 8
    activities: Activities | None = None
    engine: Engine = field(default_factory=ForwardMode)
    recorder: Recorder = field(default=record, repr=False)
    prediction: LearnedFeedback | None = None
    responder: Responder | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        raise_if(tangent_problems(self.K) + kind_problems("engine", self.engine, Engine))

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator) -> Estimate:
        """Estimate the gradient; see :class:`~splitfg.estimators.protocol.Estimator`."""
        split = begin_step(split, x, y, generator, tangents=False)
        estimate = self.part(split, x, y, generator=generator, share=ALONE).completed(split)
        return with_state(split, [(x, y)], estimate)

    @property
    def needs(self) -> PartNeeds:
        """Requirements of a part of the estimate; see :class:`~splitfg.estimators.PartialEstimator`."""
        measures = self.prediction is not None and self.prediction.route.due
        return PartNeeds(scores=self.K, row_noise=True, all_inputs=measures)

    def measured_rows(self, split: Split, x: Inputs) -> int | None:
        """Return how many of the first rows the prediction measures on; ``None`` for all."""
        return None if self.prediction is None else self.prediction.measured_rows(split, x)

    def part(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator, share: Share) -> Partial:
        """Compute the gradients of these rows; see :class:`~splitfg.estimators.PartialEstimator`."""
        split = begin_step(split, x, y, generator, tangents=False)
        check_engine(self.engine, split)
        check_tangents(self.engine, split, x)
        chosen = self._activities(split)
        validate_activities(split, chosen, x)
        with torch.no_grad():
            names, head = chosen.names(split.trunk), HeadPass(split, y)
            top = () if chosen.top is None else (chosen.top,)
            seen = self.recorder(split, x, TapPoints((*names, *top)), None)
            check_finite(seen.h)
            inputs, shapes = _once(seen, names)
            raise_if([] if inputs else [_NO_CALLS])
            scored = seen.h if chosen.top is None else seen.reads[chosen.top][0]
            wrote = shapes
            inputs, shapes = _for_every_row(inputs, shapes, scored.shape[: chosen.rows])
            _check_rows(chosen, scored, shapes)
            try:
                self._validate_estimate(split, chosen, x, y)
            except RuntimeError:  # the trunk does more with what such layers write than to add it to every sample
                _check_rows(chosen, scored, wrote)
                raise
            r, grads = head.u(0, seen.h, y), Params()
            if chosen.top is not None:
                r, own = pull_back(split.trunk.get_submodule(chosen.top), seen.reads[chosen.top][0], r)
                grads = share.once(under(chosen.top, own))
            guess, change = self._guess(split, x, head.u(0, seen.h, y), shapes, generator, share)
            deltas, scores = self._deltas(split, x, chosen, shapes, r, guess, generator, share)
            for name, a in inputs.items():
                read = a.to(deltas[name].dtype) if a.is_floating_point() else a
                own = layer_gradients(split.trunk.get_submodule(name), read, deltas[name])
                grads.update(under(name, own))
            return self._assembled(split.named_trunk_grads(grads), scores, head, change, share)

    def compiled(self, split: Split, compile_: Compile) -> tuple[Split, ActivityFG]:
        """Compile the recorded pass, forward mode and the head; other engines push tangents in eager code."""
        responder = CompiledResponder(self._respond, compile_) if isinstance(self.engine, ForwardMode) else None
        fast = replace(self, recorder=CompiledRecorder(compile_), responder=responder)
        return with_compiled_head(split, compile_), fast

    def learned_state(self) -> dict[str, Route]:
        """Return the maps of the prediction, if there is one."""
        return {} if self.prediction is None else self.prediction.learned_state()

    def update_state(self, split: Split, estimate: Estimate) -> None:
        """Change the maps of the prediction."""
        if self.prediction is not None:
            self.prediction.update_state(split, estimate)

    def _guess(
        self,
        split: Split,
        x: Inputs,
        u: Tensor,
        shapes: Mapping[str, torch.Size],
        generator: torch.Generator,
        share: Share,
    ) -> tuple[Params, Params]:
        """Return predicted δ by layer, and the change of the maps; nothing without a prediction."""
        if self.prediction is None:
            return {}, {}
        tape = self.prediction.record(split, x)
        swept = self.prediction.sweep(split, tape, u)
        named = {tape.operations[place].name: delta for place, delta in swept.deltas.items()}
        change = self.prediction.learn_from_all(split, x, tape, generator, share)
        return {name: delta for name, delta in named.items() if delta.shape == shapes.get(name)}, change

    def _activities(self, split: Split) -> Activities:
        chosen = self.activities
        if chosen is None:
            chosen = split.trunk.activities() if isinstance(split.trunk, ActivityTrunk) else Activities()
        if not skip_checks():
            raise_if(chosen.problems(split.trunk) or _tied_problems(split, chosen))
        return _without_head_layers(split, chosen)

    def _validate_estimate(self, split: Split, chosen: Activities, x: Inputs, y: Target) -> None:
        """Validate on the first batch, and on the first with several rows, that the estimate is unbiased.

        Takes a few rows of the batch, so that its memory is small beside the estimate's own, or all of them for trunks
        that run on batches of one size.
        """
        if skip_checks():
            return

        def derivative(x: Inputs, f: TrunkFunction, params: Params, tangent: Params) -> Tensor:
            tangents = {name: v.unsqueeze(0) for name, v in tangent.items()}
            return push(self.engine, f, params, tangents, split=split, x=x)[1].squeeze(0)

        several = max((t.shape[0] for t in pytree.tree_leaves(x) if isinstance(t, Tensor) and t.ndim), default=1) > 1
        key = ("activities", chosen, chosen.names(split.trunk), several)
        exact = not self.engine.biased

        def problems() -> list[str]:
            few, _ = next(parts(x, y, _ROWS))
            try:
                return activity_problems(split, chosen, few, partial(derivative, few), exact=exact)
            except SplitError:
                raise
            except (RuntimeError, ValueError, IndexError):
                return activity_problems(split, chosen, x, partial(derivative, x), exact=exact)

        split.validate_once(key, problems)

    def _deltas(
        self,
        split: Split,
        x: Inputs,
        chosen: Activities,
        shapes: Mapping[str, torch.Size],
        r: Tensor,
        guess: Params,
        generator: torch.Generator,
        share: Share,
    ) -> tuple[Params, Tensor]:
        """Return the estimated gradient at every layer's output, and the K scores summed over rows.

        Sums run over this process's share of the tangents; its scores are zero for the others.
        """
        still = {
            # adapters may be wider than the layers around them
            name: torch.zeros(shape, dtype=next(split.trunk.get_submodule(name).parameters()).dtype, device=r.device)
            for name, shape in shapes.items()
        }
        deltas, scores = {name: torch.zeros_like(z) for name, z in still.items()}, r.new_zeros(self.K)
        rows, respond = chosen.rows, self.responder or self._respond
        for start, drawn in self._noise(still, generator):
            own = share.within(start, start + len(next(iter(drawn.values()))), self.K)
            noise = {name: e[own] for name, e in drawn.items()}
            del drawn
            if own.start == own.stop:
                continue
            response = respond(split, x, noise, chosen.top)
            d = (response * r).flatten(1 + rows).sum(-1) if r.ndim > rows else response * r  # (c, *rows)
            scores[start + own.start : start + own.stop] = d.flatten(1).sum(1)
            for name, p in guess.items():
                d = d - (noise[name] * p).flatten(1 + rows).sum(-1)
            for name, e in noise.items():
                deltas[name] += (d.view(*d.shape, *[1] * (e.ndim - d.ndim)) * e).sum(0) / self.K
            del noise, e  # before the next ones are drawn
        return added(deltas, share.once(guess)), scores

    def _respond(self, split: Split, x: Inputs, noise: Params, top: str | None) -> Tensor:
        """Return the responses to noise; see :class:`~splitfg.compiled.Responder`."""
        f = shifted(split.trunk, partial(split.trunk_function(x), {}), noise, top)
        still = {name: torch.zeros_like(e[0]) for name, e in noise.items()}
        return push(self.engine, f, still, noise, split=split, x=x)[1]

    def _noise(self, like: Params, generator: torch.Generator) -> Iterator[tuple[int, Params]]:
        """Yield unit noise for every layer, ``chunk`` tangents at a time, each chunk with the number of its first.

        The numbers do not depend on the chunk size.
        """
        if not isinstance(generator, torch.Generator):
            raise SplitError(["tangents are drawn from a generator: pass generator=torch.Generator().manual_seed(0)"])
        chunk = self.engine.chunk or self.K
        for start in range(0, self.K, chunk):
            drawn = [
                {name: row_noise(z, generator) for name, z in like.items()}
                for _ in range(start, min(start + chunk, self.K))
            ]
            yield start, {name: torch.stack([tangent[name] for tangent in drawn]) for name in like}

    def _assembled(self, trunk: Params, scores: Tensor, head: HeadPass, change: Params, share: Share) -> Partial:
        exact = head.result()
        check_loss(exact.loss, scores)
        norms = {"u": exact.u.norm(), "trunk": norm(trunk), "head": norm(exact.grads, like=exact.u)}
        check_gradients(norms)
        stats = Stats(jvps=self.K, biased=self.engine.biased or head.biased, scores=scores, norms=norms)
        grads = each_its_own(add_into(share.once(exact.grads), trunk))
        return Partial(exact.loss, grads, stats, state_update=change)


_ROWS = 8
"""Samples of the first batch that the validation takes."""

_NO_CALLS = "the trunk calls none of its layers, and reads their weights by itself: call the layers, or use SplitFG()"


def _without_head_layers(split: Split, chosen: Activities) -> Activities:
    """Return the activities without layers all of whose parameters the head alone trains, such as a tied table.

    Raises:
        SplitError: If no layer is left.
    """
    if split.tied is Tied.INCLUDE:
        return chosen
    roles = split.roles
    tied = {i for i, name in split.names_by_id().items() if roles[name] is Role.TIED}
    names = chosen.names(split.trunk)
    own = tuple(n for n in names if any(id(p) not in tied for p in split.trunk.get_submodule(n).parameters()))
    words = "the head alone trains every layer of the activities"
    raise_if([] if own else [f"{words} ({shorten(names)}): name others, or pass tied=Tied.INCLUDE"])
    return chosen if own == names else replace(chosen, layers=own)


def _tied_problems(split: Split, chosen: Activities) -> list[str]:
    """List tied parameters that the trunk should train, too, and that no layer holds."""
    if split.tied is not Tied.INCLUDE:
        return []
    layers, roles = map(split.trunk.get_submodule, chosen.names(split.trunk)), split.roles
    held = {id(p) for layer in layers for p in layer.parameters()}
    return [
        f"{name} is trained as part of the trunk too (tied=INCLUDE), and no layer of the activities holds it: use"
        " Tied.EXCLUDE, or name its module in Activities(layers=...)"
        for i, name in split.names_by_id().items()
        if roles[name] is Role.TIED and i not in held
    ]


def _once(seen: Recording, names: Sequence[str]) -> tuple[Params, dict[str, torch.Size]]:
    """Return the input and the output shape of every called layer.

    Raises:
        SplitError: A layer is called more than once.
    """
    often = [name for name, calls in seen.reads.items() if name in names and len(calls) > 1]
    words = "called twice in a pass, so that they have no single activity: leave them out of Activities(layers=...)"
    raise_if([f"layers ({shorten(often)}) are {words}"] if often else [])
    called = [name for name in names if name in seen.reads]
    return {name: seen.reads[name][0] for name in called}, {name: seen.wrote[name][0] for name in called}


def _for_every_row(
    inputs: Params, shapes: Mapping[str, torch.Size], rows: torch.Size
) -> tuple[Params, dict[str, torch.Size]]:
    """Treat layers that write once for all samples, such as positions, as if they wrote for every sample."""
    once = [n for n, shape in shapes.items() if shape[0] == inputs[n].shape[0] == 1 and len(rows) == 1 and rows[0] > 1]
    expanded = {n: each_row(inputs[n], rows[0]) for n in once}
    return {**inputs, **expanded}, {**shapes, **{n: torch.Size((*rows, *shapes[n][1:])) for n in once}}


def _check_rows(chosen: Activities, top: Tensor, shapes: Mapping[str, torch.Size]) -> None:
    rows = top.shape[: chosen.rows]
    others = [f"{name} writes {tuple(shape)}" for name, shape in shapes.items() if shape[: chosen.rows] != rows]
    words = f"which does not begin with the {tuple(rows)} rows that are scored: choose other layers or rows"
    raise_if([f"{shorten(others)}, {words}"] if others else [])
