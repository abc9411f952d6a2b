"""One step of learned feedback in two halves: h, then, with u from the head, gradients and the change of the maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from splitfg.compiled import Compile, CompiledHalves, PassTraces
from splitfg.feedback import Noise
from splitfg.sites import Tape, TapedTrunk, hollow
from splitfg.splitting import Split
from splitfg.types import Inputs, Params

if TYPE_CHECKING:
    from splitfg.estimators.learned_feedback import LearnedFeedback
    from splitfg.estimators.partial import Share


class FeedbackRun(Protocol):
    """A step that waits for u."""

    @property
    def h(self) -> Tensor:
        """The representation."""

    def finish(self, u: Tensor, generator: torch.Generator) -> tuple[Params, Params]:
        """Return the gradients, by the trunk's names, and the change of the maps."""


Runner: TypeAlias = "Callable[[LearnedFeedback, Split, Inputs, Share], FeedbackRun]"
"""Begins a step of learned feedback."""


class EagerRun:
    """A step that keeps the tape of its pass."""

    def __init__(self, feedback: LearnedFeedback, split: Split, x: Inputs, share: Share) -> None:
        self._feedback, self._split, self._x, self._share = feedback, split, x, share
        self._tape = feedback.record(split, x, lean=True)

    @property
    def h(self) -> Tensor:
        """The representation."""
        return self._tape.h

    def finish(self, u: Tensor, generator: torch.Generator) -> tuple[Params, Params]:
        """Sweep the tape, and measure; a sweep that frees the tape on the way comes last."""
        feedback, split = self._feedback, self._split
        consume = feedback.is_lean(split) or (feedback.route.lean and isinstance(split.trunk, TapedTrunk))
        grads = {} if consume else feedback.sweep(split, self._tape, u).grads
        change = feedback.learn_from_all(split, self._x, self._tape, generator, self._share)
        return feedback.sweep(split, self._tape, u, consume=True).grads if consume else grads, change


class CompiledFeedback:
    """Runs the steps of learned feedback in compiled code.

    Pass, sweep and measurement are traced to their operators together, once for every shape of inputs, and apart from
    them steps without a measurement; parameters, buffers, inputs, maps and noise are arguments of the compiled
    functions. Steps that several processes share, trunks that change state or draw random numbers, and trunks that
    cannot be traced run in eager code.

    Args:
        compile_: Compiles a function.
    """

    def __init__(self, compile_: Compile) -> None:
        self._compile = compile_
        self._traces = PassTraces[_Trace]()

    def __call__(self, feedback: LearnedFeedback, split: Split, x: Inputs, share: Share) -> FeedbackRun:
        """Begin a step."""
        traits = split.traits(x)
        if share.inputs is not None or isinstance(split.trunk, TapedTrunk) or traits.random or traits.stateful:
            return EagerRun(feedback, split, x, share)
        feedback.route.to(next(split.trunk.parameters()).device)
        trace = self._traces.get(split, x, feedback.route.due, partial(_trace, feedback, split, x, self._compile))
        return EagerRun(feedback, split, x, share) if trace is None else _CompiledRun(trace, feedback, split, x)


@dataclass(frozen=True)
class _Trace:
    halves: CompiledHalves
    measured: Tape  # hollow: what noise is drawn for


class _CompiledRun:
    def __init__(self, trace: _Trace, feedback: LearnedFeedback, split: Split, x: Inputs) -> None:
        self._trace, self._feedback, self._split, self._early = trace, feedback, split, _early(split, x)
        self._h, self._kept = trace.halves.first(self._early)

    @property
    def h(self) -> Tensor:
        return self._h

    def finish(self, u: Tensor, generator: torch.Generator) -> tuple[Params, Params]:
        route = self._feedback.route
        noise = self._feedback.draw(self._split, self._trace.measured, generator) if route.due else {}
        late = [*_sorted(route.maps), *noise.values(), u]
        found: tuple[Params, Params] = self._trace.halves.second(self._early, self._kept, late)
        return found


def _trace(feedback: LearnedFeedback, split: Split, x: Inputs, compile_: Compile) -> _Trace:
    route, tape = feedback.route, feedback.record(split, x)
    measured, noise = _measurement(feedback, split, x, tape) if route.due else (tape, {})
    whole = measured is tape
    maps, u = _sorted(route.maps), torch.zeros_like(tape.h)

    # the early arguments and the maps are the tensors that network, x and route hold, so that the trace follows them
    def function(_: Sequence[Tensor], late: Sequence[Tensor]) -> tuple[Tensor, tuple[Params, Params]]:
        tape = feedback.record(split, x)
        swept = feedback.sweep(split, tape, late[-1])
        drawn = dict(zip(noise, late[len(maps) : -1], strict=True))
        return tape.h, (swept.grads, feedback.change(split, x, tape, drawn, whole=whole))

    halves = CompiledHalves(function, _early(split, x), [*maps, *noise.values(), u], compile_=compile_)
    return _Trace(halves, hollow(measured))


def _measurement(feedback: LearnedFeedback, split: Split, x: Inputs, tape: Tape) -> tuple[Tape, Noise]:
    """Return the tape of the samples that are measured, and noise; makes maps that the route does not have yet."""
    route, generator = feedback.route, torch.Generator(tape.h.device).manual_seed(0)
    measured, change = feedback.measure(split, x, tape, generator)
    route.apply({name: torch.zeros_like(c) for name, c in change.items() if name not in route.maps})
    return measured, feedback.draw(split, measured, generator)


def _early(split: Split, x: Inputs) -> list[Tensor]:
    tensors = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    return [*split.trunk.parameters(), *split.trunk.buffers(), *tensors]


def _sorted(maps: Mapping[str, Tensor]) -> list[Tensor]:
    return [maps[name] for name in sorted(maps)]
