"""Validation that forward mode through a head computes the derivative that the head itself computes."""

from __future__ import annotations

import torch
from torch import Tensor

from splitfg.engines import ForwardMode
from splitfg.heads import LinearHead, ProbedHead
from splitfg.numerics import derivative_rounding, norm
from splitfg.splitting import HEAD_TANGENTS, Split, tangent_kernels
from splitfg.splitting.checks import check_h, skip_checks
from splitfg.types import Engine, Inputs, Params, Target

_DIRECTIONS = 3
_H = ""  # among parameters, whose names are not empty
_CURE = "use SplitFG(), which differentiates the head by reverse mode, or engine=CentralDifference()"


def check_head_tangents(engine: Engine, split: Split, x: Inputs, y: Target) -> None:
    """Raise :class:`~splitfg.SplitError` on the first batch if tangents through a head give another derivative.

    Closed-form heads are known, and heads that are probed have no other derivative to compare with.
    """
    known = isinstance(split.head, LinearHead | ProbedHead) or engine.biased
    if not known and not skip_checks():
        split.validate_once(HEAD_TANGENTS, lambda: head_problems(split, x, y))


def head_problems(split: Split, x: Inputs, y: Target) -> list[str]:
    """Compare the loss's derivative along random v at the head with <u, v_h> + Σ <g_p, v_p> of reverse mode.

    Args:
        split: The network.
        x: Inputs of a part of the batch.
        y: Target of the same part.
    """
    head, h = split.head, split.h(x)
    check_h(split, h, y)
    exact, normaliser = head(h, y), head.normaliser(h, y)
    every, gradient = head.params(), {_H: exact.u, **exact.grads}
    params = {_H: h, **{name: every[name] for name in exact.grads}}

    def loss(moved: Params) -> Tensor:
        own = {name: p for name, p in moved.items() if name != _H}
        with tangent_kernels(head):
            return head.loss({**every, **own}, moved[_H], y, normaliser)

    draws = torch.Generator().manual_seed(0)
    v = {n: torch.randn(_DIRECTIONS, *p.shape, generator=draws).to(p) for n, p in params.items()}
    try:
        found = torch.cat([ForwardMode()(loss, params, _nth(v, k))[1] for k in range(_DIRECTIONS)])
    except (NotImplementedError, RuntimeError) as error:
        return [f"forward mode does not work in the head ({str(error).splitlines()[0]}): {_CURE}"]
    expected = torch.stack([v[n].double().flatten(1) @ g.double().flatten() for n, g in gradient.items()]).sum(0)
    size = norm(gradient)
    if bool((found.double() - expected).abs().max() <= derivative_rounding(h.dtype, h.device) * size):
        return []
    return [
        "forward mode through the head does not give the derivative that reverse mode gives: an operator of the head"
        f" has no forward-mode rule or a wrong one, or tangents pass through torch.no_grad(): {_CURE}"
    ]


def _nth(v: Params, k: int) -> Params:
    return {name: direction[k : k + 1] for name, direction in v.items()}
