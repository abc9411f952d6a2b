"""Recording a pass of a trunk in compiled code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from splitfg.compiled._traces import PassTraces, tensors_of, with_tensors
from splitfg.sites import Recording, TapPoints, record, record_run
from splitfg.splitting import Split
from splitfg.tangents import row_noise
from splitfg.types import Inputs, Params

Compile: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From a function to its compiled twin."""


class CompiledRecorder:
    """A :class:`~splitfg.sites.Recorder` that runs the trunk in compiled code.

    A compiler does not follow temporary hooks, so the pass is first traced to its operators, once for every shape of
    inputs. Parameters, inputs and noise are arguments of the compiled function; other values that the trunk reads are
    constants of the trace, which is made anew if an attribute changes, and not if Python reads another number from a
    buffer. Runs a trunk that draws random numbers, or cannot be traced, in eager code; the latter with a warning.

    Args:
        compile_: Compiles a function.
    """

    def __init__(self, compile_: Compile) -> None:
        self._compile = compile_
        self._passes = PassTraces[_Pass]()

    def __call__(self, split: Split, x: Inputs, points: TapPoints, generator: torch.Generator | None) -> Recording:
        """Record one pass; the noise is the same as in eager code."""
        traced = self._passes.get(split, x, points, partial(_trace, split, x, points, self._compile))
        if traced is None:
            return record(split, x, points, generator)
        return traced(split.all_trunk_params(), tensors_of(x), generator)


@dataclass(frozen=True)
class _Pass:
    """One traced pass, and the noise it takes in the order of writes: the writer's name and a tensor like it."""

    run: Callable[[Params, Sequence[Tensor], Sequence[Tensor]], tuple[Any, ...]]
    moved: Sequence[tuple[str, Tensor]]
    wrote: Mapping[str, Sequence[torch.Size]]

    def __call__(self, params: Params, tensors: Sequence[Tensor], generator: torch.Generator | None) -> Recording:
        noise: dict[str, list[Tensor]] = defaultdict(list)
        drawn = []
        for name, like in self.moved:
            drawn.append(row_noise(like, generator))
            noise[name].append(drawn[-1])
        h, reads, response, further = self.run(params, tensors, drawn)
        return Recording(h, reads, self.wrote, noise, response, further)


def _trace(split: Split, x: Inputs, points: TapPoints, compile_: Compile) -> _Pass:
    moved: list[tuple[str, Tensor]] = []

    def observed(params: Params, tensors: Sequence[Tensor], draw: Callable[[str, Tensor], Tensor]) -> Recording:
        f = split.trunk_function(with_tensors(x, tensors))
        return record_run(split.trunk, lambda: f(params), points, draw)

    def remember(name: str, z: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=z.dtype, device=z.device)
        moved.append((name, zero.expand(z.shape)))  # takes no memory
        return zero

    def run(params: Params, tensors: Sequence[Tensor], drawn: Sequence[Tensor]) -> tuple[Any, ...]:
        left = iter(drawn)
        recording = observed(params, tensors, lambda *_: next(left))
        return recording.h, dict(recording.reads), recording.response, dict(recording.further)

    params, tensors = split.all_trunk_params(), tensors_of(x)
    wrote = observed(params, tensors, remember).wrote
    traced = make_fx(run)(params, tensors, [like.contiguous() for _, like in moved])
    traced.graph.eliminate_dead_code()  # forward mode's own questions about shapes
    traced.recompile()
    return _Pass(compile_(traced), moved, wrote)
