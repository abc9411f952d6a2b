"""Validation of the gradients that learned feedback computes from a tape in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from splitfg.engines import ForwardMode
from splitfg.errors import SplitError, shorten
from splitfg.feedback import Transposed, sweep
from splitfg.numerics import norm
from splitfg.sites import Tape, leaves
from splitfg.splitting import Split, lookup_problems, measured_slope
from splitfg.types import Inputs, Params

# Largest difference of <g, v> and <u, J v> relative to ‖g‖, by how J v is found.
_ERROR = {torch.float64: 1e-5, torch.float32: 1e-2}
_NARROW_ERROR, _MEASURED_ERROR = 0.3, 0.1
_LISTED = 64


def tape_gradient_problems(split: Split, x: Inputs, tape: Tape, trained: Mapping[int, str]) -> list[str]:
    """List the parameters whose gradient from a tape is not the derivative of h, with every layer pulled back exactly.

    For a random u at h and a random direction v, <g, v> must be <u, J v>. Finds layers whose forward was replaced,
    rules and modules with a wrong closed form, and functions that hide a derivative from the tape.

    Args:
        split: The network.
        x: Inputs.
        tape: The recorded pass, which is empty afterwards.
        trained: From ``id`` of a trained parameter to the trunk's name of it.
    """
    draws = torch.Generator().manual_seed(0)
    u = torch.randn(tape.h.shape, generator=draws).to(tape.h)
    dtype = _narrowest(tape)
    try:
        grads = split.named_trunk_grads(sweep(tape, u, Transposed(), trained, consume=True).grads)
    except SplitError:
        return []  # the estimate raises it too
    left_out = _by_frequency(split)
    grads = {name: g for name, g in grads.items() if name not in left_out}
    params = {name: p for name, p in split.trunk_params().items() if name in grads}
    v = {name: torch.randn(p.shape, generator=draws).to(p) for name, p in params.items()}
    if not params:
        return []
    if not bool(norm(grads).isfinite()):
        return _infinite(grads)
    lookup_problems(split, x)  # remembers the tables that functions look up with a padding row
    derivative, allowed = _derivative(split, x, u, params, dtype)
    size = float(norm(grads))

    def far(direction: Params) -> float:
        expected = sum(float((grads[n].double() * t.double()).sum()) for n, t in direction.items())
        return abs(expected - derivative(direction)) / max(size, 1e-300)

    error = far(v)
    if not error > allowed:
        return []
    still = {name: torch.zeros_like(t) for name, t in v.items()}
    alone = [name for name in list(params)[:_LISTED] if far({**still, name: v[name]}) > allowed]
    return [
        f"gradients of {shorten(alone or list(params))} in closed form are not the trunk's derivatives (relative error"
        f" {error:.2g}): a layer's forward() was replaced, a pull_back or a rule is wrong, or a function hides a"
        " derivative. Correct it, use SplitFG(), or, to train with it as it is, pass check=False to split() or Split()"
    ]


def _infinite(grads: Params) -> list[str]:
    """Word the problem of gradients that are not finite; those of narrow dtypes may overflow for this u alone."""
    wide = [name for name, g in grads.items() if g.dtype.itemsize >= 4 and not bool(g.isfinite().all())]
    words = "in closed form are not finite: a function of the trunk has no derivative there, as sqrt at 0, or a rule"
    return [f"gradients of {shorten(wide)} {words} is wrong"] if wide else []


def _by_frequency(split: Split) -> set[str]:
    """Return the tables whose gradient is divided by the frequency of a row, which is not a derivative."""
    kinds = nn.Embedding | nn.EmbeddingBag
    found = [m.weight for m in split.trunk.modules() if isinstance(m, kinds) and m.scale_grad_by_freq]
    return {name for name, p in split.model.named_parameters() if any(p is weight for weight in found)}


def _narrowest(tape: Tape) -> torch.dtype:
    """Return the narrowest dtype of a pass, such as that of a part under autocast."""
    values = [t for o in tape.operations for t in leaves(o.output) if isinstance(t, Tensor)]
    dtypes = {t.dtype for t in (tape.h, *values) if t.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _derivative(
    split: Split, x: Inputs, u: Tensor, params: Params, dtype: torch.dtype
) -> tuple[Callable[[Params], float], float]:
    """Return v ↦ <u, J v>, by forward mode or else by differences, and the relative error that it explains.

    Values that the trunk detaches are constants in both. Rounding is that of the dtype.
    """
    f = split.trunk_function(x)

    def pushed(v: Params) -> float:
        _, dh = ForwardMode()(f, params, {name: t.unsqueeze(0) for name, t in v.items()})
        return float((dh[0].double() * u.double()).sum())

    def measured(v: Params) -> float:
        scale = float(norm(params) / norm(v))
        slope = measured_slope(split, x, {name: scale * t for name, t in v.items()}, dtype)
        return math.nan if slope is None else float(slope.central @ u.double().flatten()) / scale

    try:
        pushed({name: torch.zeros_like(p) for name, p in params.items()})
    except (NotImplementedError, RuntimeError):
        return measured, _MEASURED_ERROR
    return pushed, _ERROR.get(dtype, _NARROW_ERROR)
