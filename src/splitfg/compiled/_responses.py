"""Responses of a trunk to noise at the outputs of its layers, in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from splitfg.compiled._recorder import Compile
from splitfg.compiled._traces import PassTraces, tensors_of, with_tensors
from splitfg.engines import forward_jvps
from splitfg.sites import shifted
from splitfg.splitting import Split
from splitfg.types import Inputs, Params

_Run = Callable[[Params, Sequence[Tensor], Params], Tensor]


class Responder(Protocol):
    """Pushes noise at the outputs of layers through a trunk."""

    def __call__(self, split: Split, x: Inputs, noise: Params, top: str | None) -> Tensor:
        """Return the responses of the top's input to a stack of K noises, shape ``(K, *shape)``.

        Args:
            split: The network.
            x: Inputs.
            noise: e of every layer, shape ``(K, *z.shape)``.
            top: The module whose input responds; ``None`` for h.
        """


class CompiledResponder:
    """A :class:`Responder` that runs forward mode in compiled code.

    As in :class:`CompiledRecorder`, the pass is first traced to its operators, once for every shape of inputs and
    noise; values that are neither parameters nor inputs are constants of the trace.

    Args:
        eager: Pushes noise through a trunk that draws random numbers or, with a warning, cannot be traced.
        compile_: Compiles a function.
    """

    def __init__(self, eager: Responder, compile_: Compile) -> None:
        self._eager, self._compile = eager, compile_
        self._passes = PassTraces[_Run]()

    def __call__(self, split: Split, x: Inputs, noise: Params, top: str | None) -> Tensor:
        """Return the responses; see :class:`Responder`."""
        shapes = tuple((name, e.shape, e.dtype) for name, e in noise.items())
        run = self._passes.get(split, x, (top, shapes), partial(_trace, split, x, noise, top, self._compile))
        if run is None:
            return self._eager(split, x, noise, top)
        return run(split.all_trunk_params(), tensors_of(x), noise)


def _trace(split: Split, x: Inputs, noise: Params, top: str | None, compile_: Compile) -> _Run:
    def run(params: Params, tensors: Sequence[Tensor], noise: Params) -> Tensor:
        f = split.trunk_function(with_tensors(x, tensors))
        return forward_jvps(shifted(split.trunk, lambda: f(params), noise, top), _still(noise), noise)[1]

    traced = make_fx(run)(split.all_trunk_params(), tensors_of(x), noise)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    compiled: _Run = compile_(traced)
    return compiled


def _still(noise: Params) -> Params:
    """Return the offsets at which derivatives are taken."""
    return {name: torch.zeros_like(e[0]) for name, e in noise.items()}
