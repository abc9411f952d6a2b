"""Validation that an engine's J·v is the derivative that backprop computes, by one finite difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from splitfg.splitting._audit import dropped
from splitfg.splitting._backward_rules import rule_problems, warn_unreached, whole_problems
from splitfg.splitting._differences import DifferentPassError, Line, Slope, measured, measured_in_double
from splitfg.splitting._duals import without_graph
from splitfg.splitting._lost_tangents import lost_tangents
from splitfg.splitting._split import Split
from splitfg.types import Engine, Inputs, Params

# Parameters of trunks that the validation copies to float64, half a gibibyte.
_LARGEST_COPY = 2**26
# Relative difference of h in float32 and in float64 that rounding explains, TF32 included.
_SAME = 1e-2


def tangent_problems(split: Split, x: Inputs, engine: Engine) -> list[str]:
    """List places of a trunk where an exact engine and backprop compute different derivatives.

    Compares J·v for one random v with a finite difference of a few forward passes, where values that the trunk detaches
    or computes under ``torch.no_grad()`` are constants, as they are to backprop. The difference of a float32 trunk is
    taken in float64 if the trunk can compute in it. Only if the two disagree, every module is compared by itself, with
    its own backward pass, to find those that lose the tangent, and then the whole trunk: operators with a backward rule
    alone, such as a ``torch.library.custom_op``, ``torch.no_grad()`` blocks, quantised layers, or a wrong ``jvp`` of a
    ``torch.autograd.Function``. Straight-through functions, whose forward and backward rules agree with each other,
    pass, and functions whose two rules disagree do not.

    Then watches every operator in one more pass, and compares every ``torch.autograd.Function`` with its own backward:
    these find errors that change h by less than a finite difference resolves.

    Stores no activations, so that memory does not grow with depth; constants are stored for the perturbed passes.

    Args:
        split: The network.
        x: Inputs.
        engine: Computes J·v.
    """
    params = split.trunk_params()
    if not params:
        return []
    v = direction(params)
    tangents = {name: tangent.unsqueeze(0) for name, tangent in v.items()}
    with torch.enable_grad():
        try:
            h, dh = engine(without_graph(split, x), params, tangents)
        except (NotImplementedError, RuntimeError):
            return []  # the estimator's own pass explains operators without a forward-mode rule
        dtype = max((h.dtype, *(p.dtype for p in params.values())), key=lambda d: torch.finfo(d).eps)
        pushed = _Pushed(split, x, v, h, dh.flatten(), dtype)
        del h, dh
        return _first_found([pushed.difference_problems, pushed.audit_problems, pushed.rule_problems])


def _first_found(searches: Sequence[Callable[[], list[str]]]) -> list[str]:
    """Return the problems of the first search that finds any; a search that cannot run finds none."""
    for search in searches:
        with suppress(NotImplementedError, RuntimeError, DifferentPassError):
            found = search()
            if found:
                return found
    return []


@dataclass(frozen=True, eq=False)
class _Pushed:
    """J·v of a trunk for one v, to be validated.

    Attributes:
        split: The network.
        x: Inputs.
        v: Direction, by parameter name.
        h: Representation.
        dh: J v, flat.
        dtype: The narrowest precision of the computation.
    """

    split: Split
    x: Inputs
    v: Params
    h: Tensor
    dh: Tensor
    dtype: torch.dtype

    def difference_problems(self) -> list[str]:
        """Compare J v with a finite difference."""
        slope = _in_double(self.split, self.x, self.v, self.h) if self.dtype == torch.float32 else None
        slope = measured(_line(self.split, self.x, self.v), self.dtype) if slope is None else slope
        if slope is None or slope.agrees(self.dh):
            if slope is not None and not bool(self.dh.any()) and not bool(slope.central.any()):
                warn_unreached()
            return []
        found = lost_tangents(self.split, self.x, self.v, self.dtype)
        return found or whole_problems(self.split, self.x, self.v, self.dh, slope.central)

    def audit_problems(self) -> list[str]:
        """Watch every operator in one more pass."""
        return dropped(self.split, self.x, self.v, self.dh)

    def rule_problems(self) -> list[str]:
        """Compare every ``torch.autograd.Function`` with its own backward."""
        return rule_problems(self.split, self.x, self.v, self.dtype)


def measured_slope(split: Split, x: Inputs, v: Params, dtype: torch.dtype) -> Slope | None:
    """Measure the derivative of h by finite differences; values that the trunk detaches are constants.

    Args:
        split: The network.
        x: Inputs.
        v: Direction by the names of trained parameters, about as large as these.
        dtype: Precision of the computation.

    Returns:
        The slope; ``None`` if h is not finite, or passes at moved parameters call other functions.
    """
    with torch.enable_grad(), suppress(DifferentPassError):
        return measured(_line(split, x, v), dtype)
    return None


def _line(split: Split, x: Inputs, v: Params) -> Line:
    f, params = without_graph(split, x), split.trunk_params()

    def line(t: float) -> Tensor:
        return f({name: params[name] + t * moved for name, moved in v.items()}).flatten().double()

    return line


def _in_double(split: Split, x: Inputs, v: Params, h: Tensor) -> Slope | None:
    """Measure the slope in float64; ``None`` if the trunk cannot compute the same in it, or is too large for a copy.

    A trunk that draws noise gets other numbers in float64.
    """
    params = split.all_trunk_params()
    if sum(p.numel() for p in params.values()) > _LARGEST_COPY:
        return None
    f = split.trunk_function(pytree.tree_map_only(Tensor, _doubled, x))

    def line(t: float) -> Tensor:
        h = f({name: _moved(p, v.get(name), t) for name, p in params.items()})
        if h.dtype != torch.float64:
            raise TypeError("the trunk casts h")
        return h.flatten()

    try:
        size = h.double().norm()
        if not bool((line(0.0) - h.flatten()).norm() <= _SAME * size):
            return None
        return measured_in_double(line)
    except (NotImplementedError, RuntimeError, TypeError, DifferentPassError):
        return None


def _moved(p: Tensor, tangent: Tensor | None, t: float) -> Tensor:
    return _doubled(p) if tangent is None else _doubled(p).add_(tangent, alpha=t)


def _doubled(value: Tensor) -> Tensor:
    return value.detach().double() if value.is_floating_point() else value


def direction(params: Params) -> Params:
    """Draw one random direction as large as the parameters, each by its own root mean square.

    A parameter of zeros moves by the root mean square of all parameters.
    """
    draws = torch.Generator().manual_seed(0)
    sizes = {name: float(p.double().square().mean().sqrt()) if p.numel() else 0.0 for name, p in params.items()}
    count = sum(p.numel() for p in params.values())
    common = (sum(sizes[n] ** 2 * p.numel() for n, p in params.items()) / max(count, 1)) ** 0.5
    return {
        name: torch.randn(p.shape, generator=draws).to(p).mul_(sizes[name] or common or 1.0)
        for name, p in params.items()
    }
