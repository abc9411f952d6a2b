"""Validation that an engine's J·v is the derivative that backprop computes, by one finite difference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from splitfg.splitting._backward_rules import rule_problems, whole_problems
from splitfg.splitting._differences import DifferentPassError, Slope, measured, measured_in_double
from splitfg.splitting._lost_tangents import lost_tangents, without_graph
from splitfg.splitting._split import Split
from splitfg.types import Engine, Inputs, Params

# Parameters of trunks that the validation copies to float64, half a gibibyte.
_LARGEST_COPY = 2**26


def tangent_problems(split: Split, x: Inputs, engine: Engine) -> list[str]:
    """List places of a trunk where an exact engine and backprop compute different derivatives.

    Compares J·v for one random v with a finite difference of a few forward passes, where values that the trunk detaches
    or computes under ``torch.no_grad()`` are constants, as they are to backprop. The difference of a float32 trunk is
    taken in float64 if the trunk can compute in it. Only if the two disagree, every module is compared by itself, with
    its own backward pass, to find those that lose the tangent, and then the whole trunk: operators with a backward rule
    alone, such as a ``torch.library.custom_op``, ``torch.no_grad()`` blocks, quantised layers, or a wrong ``jvp`` of a
    ``torch.autograd.Function``. Straight-through functions, whose forward and backward rules agree with each other,
    pass, and functions whose two rules disagree do not.

    Stores no activations, so that memory does not grow with depth; constants are stored for the perturbed passes.

    Args:
        split: The network.
        x: Inputs.
        engine: Computes J·v.
    """
    params = split.trunk_params()
    if not params:
        return []
    f, v = without_graph(split, x), direction(params)

    def line(t: float) -> Tensor:
        return f({name: p + t * v[name] for name, p in params.items()}).flatten().double()

    try:
        with torch.enable_grad():
            h, dh = engine(f, params, {name: tangent.unsqueeze(0) for name, tangent in v.items()})
            dtype = max((h.dtype, *(p.dtype for p in params.values())), key=lambda d: torch.finfo(d).eps)
            dh = dh.flatten()
            del h
            slope = _in_double(split, x, v) if dtype == torch.float32 else None
            slope = measured(line, dtype) if slope is None else slope
            if slope is None or slope.agrees(dh):
                return rule_problems(split, x, v, dh)
            return lost_tangents(split, x, v, dtype) or whole_problems(split, x, v, dh, slope.central)
    except (NotImplementedError, RuntimeError, DifferentPassError):
        return []  # the estimator's own pass explains operators without a forward-mode rule


def _in_double(split: Split, x: Inputs, v: Params) -> Slope | None:
    """Measure the slope in float64; ``None`` if the trunk cannot compute in it, or is too large for a copy."""
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
