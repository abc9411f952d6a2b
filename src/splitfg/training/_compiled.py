"""A split and an estimator whose heavy parts are compiled; everything around them stays ordinary Python.

What is compiled is pure: the trunk under tangents (with forward mode *inside* the compiled function, since dual
tensors handed into one have lost their tangents in some versions of torch), the trunk under reverse mode, and the
loss with its closed form. Random numbers are drawn outside. The result is the same estimate, up to rounding.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from splitfg._call import Places, call, places_of
from splitfg._split import Split
from splitfg.engines import ForwardMode
from splitfg.estimators import ActivityFG, CheckpointedBackprop, DirectPath, Estimator, ForwardGradient, SplitFG
from splitfg.heads import LinearHead, OutputLoss
from splitfg.heads._losses import Facts, Spikes
from splitfg.training._compiled_look import Compile, CompiledLook
from splitfg.types import Engine, Params, TrunkFunction


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """:func:`torch.compile` of the whole function for the shapes it meets; a part that cannot be is an error."""
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False)
    return compiled


def compiled(split: Split, estimator: Estimator, compile_: Compile = whole) -> tuple[Split, Estimator]:
    """The same network and method with their heavy parts compiled; parameters are shared, not copied.

    Args:
        split: The network.
        estimator: Any estimator. Weight tangents pushed by forward mode are compiled with the engine; a direct path and
            activity tangents look into the trunk in compiled code, though activity tangents are pushed as they are;
            other methods get a compiled trunk.
        compile_: What compiles a function.
    """
    if isinstance(estimator, SplitFG | ForwardGradient) and isinstance(estimator.engine, ForwardMode):
        pushed = dataclasses.replace(estimator, engine=CompiledEngine(estimator.engine, compile_))
        # the pure forward gradient has the head inside what is pushed
        return (split if isinstance(estimator, ForwardGradient) else _twin(split, split.trunk, compile_)), pushed
    if isinstance(estimator, DirectPath | ActivityFG):
        return _twin(split, split.trunk, compile_), dataclasses.replace(estimator, look=CompiledLook(compile_))
    if isinstance(estimator, CheckpointedBackprop):
        return _twin(split, CompiledTrunk(estimator.trunk(split), compile_), compile_), estimator.plain()
    return _twin(split, CompiledTrunk(split.trunk, compile_), compile_), estimator


def _twin(split: Split, trunk: nn.Module, compile_: Compile) -> Split:
    head = _compiled_head(split.head, compile_) if isinstance(split.head, LinearHead) else split.head
    twin = Split(trunk, head, tied=split.tied, model=split.model)
    # the original is asked whether it agrees with its model: asking the twin would compile it for evaluation too
    twin.examined.add(twin.training_flags())
    return twin


def _compiled_head(head: LinearHead, compile_: Compile) -> LinearHead:
    return LinearHead(*head.layers, loss=_CompiledLoss(head.output_loss, compile_), block=head.block)


class CompiledEngine:
    """An engine that pushes tangents in compiled code.

    Args:
        engine: The engine to compile.
        compile_: What compiles a function.
    """

    def __init__(self, engine: Engine, compile_: Compile = whole) -> None:
        self._chunk, self._biased = engine.chunk, engine.biased
        self._push = compile_(engine.__call__)

    @property
    def chunk(self) -> int | None:
        """As the engine's."""
        return self._chunk

    @property
    def biased(self) -> bool:
        """As the engine's."""
        return self._biased

    def __call__(self, f: TrunkFunction, params: Params, tangents: Params) -> tuple[Tensor, Tensor]:
        """``h`` and ``dh``."""
        pushed: tuple[Tensor, Tensor] = self._push(f, params, tangents)
        return pushed


class CompiledTrunk(nn.Module):
    """A trunk whose forward pass, and backward pass where there is one, are compiled.

    Args:
        trunk: Kept and shared.
        compile_: What compiles a function.
    """

    def __init__(self, trunk: nn.Module, compile_: Compile = whole) -> None:
        super().__init__()
        self.inner, self._places = trunk, places_of(trunk)
        self._run = compile_(_run_trunk)

    def forward(self, *inputs: Any) -> Tensor:
        """h, as a function of the parameters in place at the moment: these may be another call's arguments."""
        h: Tensor = self._run(self.inner, dict(self.inner.named_parameters()), inputs, self._places)
        return h


def _run_trunk(trunk: nn.Module, params: Params, inputs: tuple[Any, ...], places: Places) -> Any:
    return call(trunk, params, inputs, places=places)


class _CompiledLoss(OutputLoss):
    """A loss whose passes over the outputs are compiled: several become one.

    Matrix products stay as they are: they write where their result is wanted, compiled code would copy it there.
    """

    def __init__(self, loss: OutputLoss, compile_: Compile) -> None:
        super().__init__()
        self.inner = loss
        self._summed, self._look, self._residual = (compile_(f) for f in (loss.summed, loss.look, loss.residual_))

    def fold(self, target: Tensor, width: int) -> Tensor:
        return self.inner.fold(target, width)

    def normaliser(self, target: Tensor, width: int) -> Tensor:
        return self.inner.normaliser(target, width)

    def summed(self, outputs: Tensor, target: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # torch looks for a .grad on whatever enters compiled code, and warns of having done so
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
            total: Tensor = self._summed(outputs, target)
        return total

    def rowwise(self, outputs: Tensor, target: Tensor) -> Tensor:
        return self.inner.rowwise(outputs, target)

    def rows(self, target: Tensor, normaliser: Tensor, width: int, dtype: torch.dtype) -> Facts:
        return self.inner.rows(target, normaliser, width, dtype)

    def look(self, outputs: Tensor, bias: Tensor | None, seen: Facts | None) -> Facts:
        found: Facts = self._look(outputs, bias, seen)
        return found

    def base(self, rows: Facts, seen: Facts) -> Tensor:
        return self.inner.base(rows, seen)

    def residual_(
        self, outputs: Tensor, bias: Tensor | None, first: Tensor | None, rows: Facts, seen: Facts
    ) -> tuple[Tensor, Spikes | None]:
        found: tuple[Tensor, Spikes | None] = self._residual(outputs, bias, first, rows, seen)
        return found

    def shape_problems(self, leading: tuple[int, ...], width: int, target: Tensor) -> list[str]:
        return self.inner.shape_problems(leading, width, target)

    def value_problems(self, width: int, target: Tensor) -> list[str]:
        return self.inner.value_problems(width, target)
