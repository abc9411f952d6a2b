"""Derivatives measured by finite differences, to validate computed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Line = Callable[[float], Tensor]
"""t ↦ f(θ + t v), flattened."""

# First and second step t, relative to the size of parameters, and the error that rounding explains.
_STEPS = {torch.float64: (1e-4, 1e-2), torch.float32: (1e-2, 1e-1)}
_NARROW_STEPS = (1e-1, 5e-1)
_ERROR = {torch.float64: 1e-3, torch.float32: 2e-2}
_NARROW_ERROR = 0.3
# Above this relative difference between the two sides, the larger step is tried.
_COARSE = 0.05
# The error of a derivative in float32 that rounding explains, TF32 included, and of one measured in float64.
_OF_FLOAT32 = 1e-2
_CERTAIN = 1e-3
# Functions whose derivative is zero wherever it exists: differences would measure their jumps.
_FLAT = frozenset({"round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "heaviside"})


class DifferentPassError(Exception):
    """Passes at perturbed parameters call other functions, so that no difference can be taken."""


@dataclass(frozen=True, eq=False)
class Slope:
    """A directional derivative measured from both sides.

    Attributes:
        central: (f(t) - f(-t)) / 2t.
        spread: |f(t) - 2 f(0) + f(-t)| / t, the difference of the one-sided slopes: zero up to O(t) where f is smooth,
            large for entries with a kink or a jump within the step, and where rounding hides the slope.
        error: Relative error that rounding explains.
    """

    central: Tensor
    spread: Tensor
    error: float

    @property
    def coarseness(self) -> float:
        """‖spread‖ / ‖central‖."""
        return float(self.spread.norm() / self.central.norm().clamp_min(torch.finfo(torch.float64).tiny))

    def deviation(self, derivative: Tensor) -> float:
        """Return the relative error of a computed derivative beyond the uncertainty of the measurement; 0 if none.

        Every entry may leave the centre by the difference of its one-sided slopes, twice what a kink explains, and all
        entries together by another quarter of it.
        """
        derivative = derivative.detach().double()  # parameters that no module registers keep a graph
        size = float(torch.maximum(self.central.norm(), derivative.norm()))
        outside = float(((derivative - self.central).abs() - self.spread).clamp_min(0).norm())
        allowed = self.error * size + 0.25 * float(self.spread.norm())
        return 0.0 if not outside > allowed else outside / size

    def agrees(self, derivative: Tensor) -> bool:
        """Whether a computed derivative agrees with the measured one."""
        return self.deviation(derivative) == 0.0


def measured_in_double(line: Line) -> Slope | None:
    """Measure the slope of a function that computes in float64, to validate a derivative that was computed in float32.

    The differences D of two steps t and 2t bound their own error: D(2t) - D(t) is three times the truncation error of
    D(t) where the function is smooth (Richardson), and as large as its rounding error elsewhere.

    Returns:
        The slope; ``None`` if its own error is not far below the rounding of float32 derivatives, as where the function
        casts to float32 on the way.
    """
    step = _STEPS[torch.float64][0]
    constants = Constants()
    with constants:
        centre = line(0.0)
    centre = centre.detach()  # a trunk may read parameters that are not among the moved ones
    ends = {t: _again(line, t, constants) for t in (step, -step, 2 * step, -2 * step)}
    near, far = ((ends[t] - ends[-t]) / (2 * t) for t in (step, 2 * step))
    uncertain, size = float((far - near).norm()), float(near.norm())
    if not uncertain <= _CERTAIN * size:
        return None
    return Slope(
        near, (ends[step] + ends[-step] - 2 * centre).abs() / step, _OF_FLOAT32 + uncertain / max(size, 1e-300)
    )


def measured(line: Line, dtype: torch.dtype, *, no_grad: bool = True) -> Slope | None:
    """Measure the slope of a function at t = 0 as backprop defines it: detached values stay constant.

    Runs the function three times, and five times if the sides differ by much.

    Args:
        line: The function.
        dtype: Precision of its computation.
        no_grad: Whether values computed under ``torch.no_grad()`` count as constants too.

    Returns:
        The slope; ``None`` if the function is not finite.

    Raises:
        DifferentPassError: If the passes differ in the functions they call.
    """
    constants, error = Constants(no_grad=no_grad), _ERROR.get(dtype, _NARROW_ERROR)
    with constants:
        centre = line(0.0)
    centre = centre.detach()  # a trunk may read parameters that are not among the moved ones
    best: Slope | None = None
    for step in _STEPS.get(dtype, _NARROW_STEPS):
        after, before = (_again(line, t, constants) for t in (step, -step))
        if not bool((centre + after + before).isfinite().all()):
            return best
        slope = Slope((after - before) / (2 * step), (after + before - 2 * centre).abs() / step, error)
        best = slope if best is None or slope.coarseness < best.coarseness else best
        if best.coarseness < _COARSE:
            break
    return best


def _again(line: Line, t: float, constants: Constants) -> Tensor:
    constants.rewind()
    with constants:
        value = line(t)
    return value.detach()


class Constants(TorchFunctionMode):
    """Stores the values that backprop treats as constants in one pass, and returns them in later passes.

    Covers ``detach()``, ``.data``, functions with a derivative of zero, and results of ``torch.no_grad()`` blocks.

    Args:
        no_grad: Whether to include blocks under ``torch.no_grad()``.
    """

    def __init__(self, *, no_grad: bool = True) -> None:
        super().__init__()
        self._no_grad = no_grad
        self._values: list[Any] = []
        self._left: Iterator[Any] | None = None

    def rewind(self) -> None:
        """Return the stored values from now on, from the first."""
        self._left = iter(self._values)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            if not self._is_constant(func, args, result):
                return result
            if self._left is None:
                self._values.append(_copied(result))
                return result
            return _copied(self._stored(result))

    def _stored(self, result: Any) -> Any:
        stored = next(self._left or iter(()), None)
        if _shapes(stored) != _shapes(result):
            raise DifferentPassError
        return stored

    def _is_constant(self, func: Any, args: Any, result: Any) -> bool:
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if not any(t.is_floating_point() for t in outputs) or any(t is a for t in outputs for a in args):
            return False  # writes in place take effect
        name = str(getattr(func, "__name__", "")).strip("_")
        if func == Tensor.data.__get__ or name in ("detach", *_FLAT):  # type: ignore[attr-defined]
            return True
        return self._no_grad and in_no_grad_block()


def in_no_grad_block() -> bool:
    """Whether gradients are disabled by ``torch.no_grad()``, and not by ``torch.autograd.Function.forward``."""
    return not torch.is_grad_enabled() and torch._C._is_fwd_grad_enabled()


def _copied(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, value)


def _shapes(value: Any) -> list[Any]:
    return [leaf.shape if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(value)]
