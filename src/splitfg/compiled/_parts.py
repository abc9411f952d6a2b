"""Compiled parts that estimators build their compiled form from; everything around them stays ordinary Python.

All compiled code is pure: the trunk under tangents (with forward mode *inside* the compiled function, since dual
tensors handed into one have lost their tangents in some versions of torch), the trunk under reverse mode, and the
loss with its closed form. Tangents are drawn outside, and callers seed torch's generators for dropout masks. The result
is the same estimate, up to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from splitfg.calling import Places, call, places_of
from splitfg.compiled._recorder import Compile
from splitfg.engines import ForwardMode
from splitfg.heads import Head, LinearHead, OutputLoss, RowData, RowEntries
from splitfg.splitting import Split, TangentNorms, has_reduced_precision
from splitfg.types import Engine, Params, TrunkFunction


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply :func:`torch.compile` with static shapes; raises if the function cannot be compiled as a whole.

    Compiled code draws the random numbers of eager code, such as the same dropout masks.

    Example:
        >>> from splitfg.compiled import whole
        >>> fast = whole(lambda x: 2 * x)  # compiles on its first call
    """
    if isinstance(function, fx.GraphModule):
        function = function.forward  # its __call__ hides errors: it handles them in code that cannot be compiled
    compiled: Callable[..., Any] = torch.compile(
        function, fullgraph=True, dynamic=False, options={"fallback_random": True}
    )
    return compiled


def with_compiled_head(split: Split, compile_: Compile = whole) -> Split:
    """Return the same network with a compiled head; parameters are shared."""
    return split.twin(split.trunk, _compiled_head(split.head, compile_))


def with_compiled_trunk(split: Split, compile_: Compile = whole, *, trunk: nn.Module | None = None) -> Split:
    """Return the same network with trunk and head compiled; parameters are shared.

    Args:
        split: The network.
        compile_: Compiles a function.
        trunk: Compiled in place of the split's own trunk; must compute the same function.
    """
    compiled = CompiledTrunk(split.trunk if trunk is None else trunk, compile_)
    return split.twin(compiled, _compiled_head(split.head, compile_))


def with_compiled_tangents(split: Split, engine: Engine, compile_: Compile = whole) -> tuple[Split, Engine]:
    """Return the same network with a compiled head, and an engine that pushes tangents in compiled code.

    Engines other than forward mode run the trunk as it is; they get a compiled trunk instead.
    """
    if not isinstance(engine, ForwardMode):
        return with_compiled_trunk(split, compile_), engine
    return with_compiled_head(split, compile_), CompiledEngine(engine, split.trunk, compile_=compile_)


def _compiled_head(head: Head, compile_: Compile) -> Head:
    if not isinstance(head, LinearHead):
        return head
    return LinearHead(*head.layers, loss=_CompiledLoss(head.output_loss, compile_), block=head.block)


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a Python function or method together with its code.

    torch keeps compiled code by code object, and few versions of each: networks that are compiled in one process would
    use up each other's.
    """
    if isinstance(function, MethodType):
        return MethodType(_own_code(function.__func__), function.__self__)
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace()
    copied = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


class CompiledEngine:
    """An engine that pushes tangents in compiled code.

    Scales and shifts apart in norms that torch's compiler cannot trace in forward mode: those whose weights carry no
    tangent, and those of reduced precision, as a GPU gives their narrow outputs tangents in float32. Networks that
    train all of their tensors in float32 or wider compute norms as they are.

    Args:
        engine: The engine to compile.
        *parts: Modules that it pushes tangents through.
        compile_: Compiles a function.
    """

    def __init__(self, engine: Engine, *parts: nn.Module, compile_: Compile = whole) -> None:
        self._chunk, self._biased, self._parts = engine.chunk, engine.biased, parts
        self._push = compile_(_own_code(engine.__call__))

    @property
    def chunk(self) -> int | None:
        """Return the value of the wrapped engine."""
        return self._chunk

    @property
    def biased(self) -> bool:
        """Return the value of the wrapped engine."""
        return self._biased

    def __call__(self, f: TrunkFunction, params: Params, tangents: Params) -> tuple[Tensor, Tensor]:
        """Return ``h`` and ``dh``."""
        # both outside, where the compiler reads them; fused kernels have no rule
        with sdpa_kernel(SDPBackend.MATH), TangentNorms(every=True) if self._has_constants() else nullcontext():
            pushed: tuple[Tensor, Tensor] = self._push(f, params, tangents)
        return pushed

    def _has_constants(self) -> bool:
        """Whether the parts have reduced precision, or hold numbers that no tangent moves."""
        held = (t for part in self._parts for t in (*part.parameters(), *part.buffers()) if t.is_floating_point())
        return has_reduced_precision(*self._parts) or any(not t.requires_grad for t in held)


class CompiledTrunk(nn.Module):
    """A trunk whose forward pass, and backward pass where there is one, are compiled.

    Args:
        trunk: Kept and shared.
        compile_: Compiles a function.
    """

    def __init__(self, trunk: nn.Module, compile_: Compile = whole) -> None:
        super().__init__()
        self.inner, self._places = trunk, places_of(trunk)
        self._run = compile_(_own_code(_run_trunk))

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Return h for the present parameters, which may be those of a functional call."""
        h: Tensor = self._run(self.inner, dict(self.inner.named_parameters()), inputs, named, self._places)
        return h


def _run_trunk(trunk: nn.Module, params: Params, inputs: tuple[Any, ...], named: dict[str, Any], places: Places) -> Any:
    return call(trunk, params, inputs, named, places=places)


class _CompiledLoss(OutputLoss):
    """A loss whose passes over the outputs are compiled: several become one.

    Matrix products stay as they are: they write where their result is wanted, compiled code would copy it there.
    """

    def __init__(self, loss: OutputLoss, compile_: Compile) -> None:
        super().__init__()
        self.inner = loss
        self._summed, self._accumulate, self._residual = (
            compile_(_own_code(f)) for f in (loss.summed, loss.accumulate, loss.residual_)
        )

    def fold(self, target: Tensor, width: int) -> Tensor:
        return self.inner.fold(target, width)

    def normaliser(self, target: Tensor, width: int) -> Tensor:
        return self.inner.normaliser(target, width)

    def summed(self, outputs: Tensor, target: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # torch reads .grad of the inputs of compiled code, and warns about it
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
            total: Tensor = self._summed(outputs, target)
        return total

    def rowwise(self, outputs: Tensor, target: Tensor) -> Tensor:
        return self.inner.rowwise(outputs, target)

    def rows(self, target: Tensor, normaliser: Tensor, width: int, dtype: torch.dtype) -> RowData:
        return self.inner.rows(target, normaliser, width, dtype)

    def accumulate(self, outputs: Tensor, bias: Tensor | None, statistics: RowData | None) -> RowData:
        found: RowData = self._accumulate(outputs, bias, statistics)
        return found

    def base(self, rows: RowData, statistics: RowData) -> Tensor:
        return self.inner.base(rows, statistics)

    def residual_(
        self, outputs: Tensor, bias: Tensor | None, first: Tensor | None, rows: RowData, statistics: RowData
    ) -> tuple[Tensor, RowEntries | None]:
        found: tuple[Tensor, RowEntries | None] = self._residual(outputs, bias, first, rows, statistics)
        return found

    def shape_problems(self, leading: tuple[int, ...], width: int, target: Tensor) -> list[str]:
        return self.inner.shape_problems(leading, width, target)

    def value_problems(self, width: int, target: Tensor) -> list[str]:
        return self.inner.value_problems(width, target)
