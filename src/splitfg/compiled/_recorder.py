"""Recording a pass of a trunk in compiled code."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from splitfg.sites import Recording, TapPoints, record, record_run
from splitfg.splitting import Split
from splitfg.tangents import row_noise
from splitfg.types import Inputs, Params

Compile: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From a function to its compiled twin."""

T = TypeVar("T")


class CompiledRecorder:
    """A :class:`~splitfg.sites.Recorder` that runs the trunk in compiled code.

    A compiler does not follow temporary hooks, so the pass is first traced to its operators, once for every shape of
    inputs. Parameters, inputs and noise are arguments of the compiled function; other values that the trunk reads are
    constants of the trace. Runs a trunk that cannot be traced in eager code, with a warning.

    Args:
        compile_: Compiles a function.
    """

    def __init__(self, compile_: Compile) -> None:
        self._compile = compile_
        self._passes: dict[Hashable, tuple[_Pass | None, tuple[Tensor, ...]]] = {}

    def __call__(self, split: Split, x: Inputs, points: TapPoints, generator: torch.Generator | None) -> Recording:
        """Record one pass; the noise is the same as in eager code."""
        key, held = (points, *pass_facts(split, x)), tuple(split.trunk.buffers())
        if key not in self._passes:
            self._passes[key] = traced_or_none(partial(_trace, split, x, points, self._compile)), held
        traced, _ = self._passes[key]
        if traced is None:
            return record(split, x, points, generator)
        return traced(split.all_trunk_params(), tensors_of(x), generator)


def pass_facts(split: Split, x: Inputs) -> tuple[Hashable, ...]:
    """Return what a trace of the trunk depends on, beside the values of parameters and inputs.

    Keep the trunk's buffers with the trace: they are told apart by identity.
    """
    leaves, structure = pytree.tree_flatten(x)
    facts = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    dtypes = tuple(p.dtype for p in split.all_trunk_params().values())
    return split.training_flags(), structure, facts, dtypes, tuple(map(id, split.trunk.buffers()))


def tensors_of(x: Inputs) -> list[Tensor]:
    """Return the tensors of inputs, in order."""
    return [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]


def with_tensors(x: Inputs, tensors: Sequence[Tensor]) -> Inputs:
    """Return inputs with other tensors."""
    leaves, structure = pytree.tree_flatten(x)
    left = iter(tensors)
    filled: Inputs = pytree.tree_unflatten([next(left) if isinstance(v, Tensor) else v for v in leaves], structure)
    return filled


def traced_or_none(trace: Callable[[], T]) -> T | None:
    """Return the trace of a trunk, or warn and return ``None`` if the trunk cannot be traced."""
    try:
        return trace()
    except RuntimeError as error:
        words = "the trunk cannot be traced for compiling, and runs in eager code"
        warnings.warn(f"{words}: {str(error).splitlines()[0]}", stacklevel=3)
        return None


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
