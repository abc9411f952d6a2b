"""Settings that estimators share, and their validation."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import TypeGuard

import torch
from torch import Tensor

from splitfg.engines import ForwardMode
from splitfg.errors import SplitError, raise_if
from splitfg.estimators._combine import Combination, Mean
from splitfg.estimators.partial import PartNeeds
from splitfg.estimators.push import check_engine, check_tangents
from splitfg.splitting import Batch, Role, Split, parts
from splitfg.splitting.checks import begin_step
from splitfg.tangents import Conditioned, Gaussian, Layout, RunningMagnitude, TangentLaw, TangentSource
from splitfg.types import Engine, Estimate, Inputs, Params, Target


class DrawsByLaw:
    """Base of estimators that draw tangents; a conditioned law learns from every estimate."""

    law: TangentLaw

    def drawn_for(self, split: Split) -> Params:
        """Return the parameters that tangents are drawn for."""
        return split.trained_params()

    def still_rows(self, split: Split) -> dict[str, int]:
        """Return rows that have no gradient: padding rows, unless a tied head trains them."""
        roles = split.roles
        return {name: row for name, row in split.still_rows().items() if roles[name] is Role.TRUNK}

    def layout(self, split: Split) -> Layout:
        """Return the space that tangents are drawn in."""
        return Layout.of(self.drawn_for(split), self.still_rows(split))

    def learned_state(self) -> dict[str, RunningMagnitude]:
        """Return the running magnitude of conditioned tangents; empty for other laws."""
        return {"magnitude": self.law.magnitude} if isinstance(self.law, Conditioned) else {}

    def update_state(self, split: Split, estimate: Estimate) -> None:
        """Update the running magnitude."""
        for magnitude in self.learned_state().values():
            magnitude.update({name: estimate.grads[name] for name in self.drawn_for(split)})


@dataclass(frozen=True)
class TangentSettings(DrawsByLaw):
    """Settings of tangents: law, engine and combination of scores.

    Args:
        K: Tangents per estimate.
        law: Distribution of the tangents.
        engine: Computes directional derivatives, for as many tangents in one pass as its ``chunk``.
        combine: Combines K scores and tangents into a gradient.
        micro_batch: Rows per part where a batch is taken in parts; the estimate is the same.
    """

    K: int = 8
    law: TangentLaw = field(default_factory=Gaussian)
    engine: Engine = field(default_factory=ForwardMode)
    combine: Combination = field(default_factory=Mean)
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        found = tangent_problems(self.K) + micro_batch_problems(self.micro_batch)
        for name, value, kind in (
            ("law", self.law, TangentLaw),
            ("engine", self.engine, Engine),
            ("combine", self.combine, Combination),
        ):
            found += kind_problems(name, value, kind)
        raise_if(found)

    @property
    def biased(self) -> bool:
        """Whether the estimate is biased by construction."""
        return self.combine.biased or self.engine.biased

    @property
    def needs(self) -> PartNeeds:
        """Requirements of a part of the estimate; see :class:`~splitfg.estimators.PartialEstimator`."""
        return PartNeeds(scores=self.K)

    def begun(self, split: Split, x: Inputs, y: Target, generator: torch.Generator) -> tuple[Split, Batch]:
        """Validate the batch, and return the split of this step and the batch in parts."""
        split = begin_step(split, x, y, generator, micro_batch=self.micro_batch)
        batch = list(parts(x, y, self.micro_batch))
        check_engine(self.engine, split)
        check_tangents(self.engine, split, batch[0][0])
        return split, batch

    def from_scores(self, split: Split, scores: Tensor, *, generator: torch.Generator) -> Params:
        """Combine scores and the tangents that the generator draws to the estimated part of the gradient.

        Processes that share a seed need to send each other no more than these K numbers.

        Args:
            split: The network.
            scores: The K scores of an estimate, ``estimate.stats.scores``.
            generator: In the state from which that estimate was drawn; advanced by K tangents.

        Returns:
            Gradients by the names of the parameters that tangents are drawn for. Bit for bit those of the estimate,
            if it was made without a prediction.

        Raises:
            SplitError: If there are not K scores.
        """
        raise_if([] if tuple(scores.shape) == (self.K,) else [f"scores has shape {tuple(scores.shape)}: pass {self.K}"])
        layout = self.layout(split)
        source = self.source(layout, generator)
        with torch.no_grad():
            total = self.combine.start(source)
            for tangents, d in zip(source, scores.to(layout.device).split(source.chunk_sizes), strict=True):
                total.add(tangents, d)
            return layout.unflatten(total.result())

    def from_source(self, source: TangentSource, scores: Tensor) -> Params:
        """Combine scores with tangents of a source that remembers them."""
        total = self.combine.start(source)
        for index, d in enumerate(scores.split(source.chunk_sizes)):
            total.add(source.again(index), d)
        return source.layout.unflatten(total.result())

    def source(self, layout: Layout, generator: torch.Generator, *, remember: bool = False) -> TangentSource:
        """Return the K tangents of one estimate."""
        if not isinstance(generator, torch.Generator):
            raise SplitError(["tangents are drawn from a generator: pass generator=torch.Generator().manual_seed(0)"])
        chunk, again = self.engine.chunk, remember or self.combine.looks_back
        return TangentSource(self.law, layout, self.K, chunk, generator, remember=again)


@dataclass(frozen=True)
class ReverseSettings:
    """Settings of the exact gradient by reverse mode.

    Args:
        closed_head: Take the head's closed form, in parts, and reverse mode through the trunk alone: the same
            gradient without the outputs of the whole batch on the tape.
        readout_only: Leave out the trunk's share of tied parameters, as ``Tied.EXCLUDE`` does.
        micro_batch: Rows per part where a batch is taken in parts; the gradient is the same.
    """

    closed_head: bool = False
    readout_only: bool = False
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        raise_if(micro_batch_problems(self.micro_batch))


def tangent_problems(K: object) -> list[str]:
    """List the problems of a tangent count."""
    if not _is_count(K):
        return [f"K must be a whole number of tangents, got {K!r}"]
    return [] if int(K) >= 1 else [f"K must be at least 1 tangent, got {K}: for an untrained trunk use FrozenTrunk()"]


def pull_problems(pulls: object) -> list[str]:
    """List the problems of a number of pulls."""
    if _is_count(pulls) and int(pulls) >= 1:
        return []
    return [f"pulls must be a whole number of at least 1, got {pulls!r}: without pulls use DirectPath()"]


def group_problems(group: object, *, skips: bool) -> list[str]:
    """List the problems of a number of blocks in a group."""
    if not _is_count(group) or int(group) < 1:
        return [f"group must be a whole number of at least 1 block, got {group!r}"]
    return (
        [f"skips carry gradients from block to block, got group={group}: use group=1"] if skips and group != 1 else []
    )


def micro_batch_problems(rows: object) -> list[str]:
    """List the problems of a micro-batch size."""
    if rows is None or (_is_count(rows) and int(rows) >= 1):
        return []
    return [f"micro_batch must be at least 1 row (or None for the whole batch), got {rows!r}"]


def _is_count(value: object) -> TypeGuard[Integral]:
    """Whether a value is a whole number, numpy's included; booleans and tensors would pass for one and are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def tied_share_problems(tied_share: object) -> list[str]:
    """List the problems of a factor of the trunk's share in the gradient of a tied table."""
    if isinstance(tied_share, int | float) and type(tied_share) is not bool and 0 <= tied_share <= 1:
        return []
    return [f"tied_share must be a number from 0 to 1, got {tied_share!r}: 1 adds the trunk's whole share"]


def kind_problems(name: str, value: object, kind: type) -> list[str]:
    """List the problems of a setting that must be an instance of ``kind``."""
    if isinstance(value, type):
        return [f"{name} is the class {value.__name__}: give an object, {name}={value.__name__}()"]
    if isinstance(value, kind):
        return []
    given = repr(value)  # of tensors and modules: pages
    return [f"{name} must be of type {kind.__name__}, got {given if len(given) < 100 else type(value).__name__}"]
