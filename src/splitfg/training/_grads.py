"""From an estimate to ``.grad``."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError, raise_if
from splitfg.numerics import norm
from splitfg.types import Estimate, Params


def clip(estimate: Estimate, max_norm: float, *, apart: Collection[str] = ()) -> Estimate:
    """Scale all gradients together so that their joint norm is at most ``max_norm``.

    ĝ ← ĝ · min(1, max_norm / ‖ĝ‖), over trunk and head jointly. This biases an estimate whose norm exceeds the
    bound. The norm before clipping is recorded as ``stats.norms["before_clip"]``.

    Args:
        estimate: What is clipped.
        max_norm: The bound.
        apart: Parameters that are clipped by themselves, the others by themselves too. With the trunk's names, the
            trunk's noise does not shrink the head's exact gradient.
    """
    copied = {name: g.clone() for name, g in estimate.grads.items()}
    return clip_(dataclasses.replace(estimate, grads=copied), max_norm, apart=apart)


def clip_(estimate: Estimate, max_norm: float, *, apart: Collection[str] = ()) -> Estimate:
    """:func:`clip` in the memory of the estimate's own gradients, for whoever needs them no more."""
    if not max_norm > 0:
        raise SplitError([f"max_norm must be positive, got {max_norm}: leave clipping out instead"])
    parts = [{n: g for n, g in estimate.grads.items() if (n in apart) is inside} for inside in (True, False)]
    norms = [_clip_together(part, max_norm) for part in parts if part]
    total = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    stats = dataclasses.replace(estimate.stats, norms={**estimate.stats.norms, "before_clip": total})
    return dataclasses.replace(estimate, stats=stats)


def _clip_together(grads: Params, max_norm: float) -> Tensor:
    """Clip in place; gives the norm before."""
    total = norm(grads)
    torch._foreach_mul_(list(grads.values()), (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


def write_grads(module: nn.Module, estimate: Estimate) -> None:
    """Put an estimate's gradients into ``.grad``, where any optimizer finds them.

    Parameters without an entry (a frozen trunk's) get ``None``, so that optimizers leave them alone. Nothing is copied
    that need not be: what changes ``.grad`` afterwards changes the estimate's gradients too.

    Args:
        module: The split's ``model``.
        estimate: Its gradients are keyed by the module's parameter names.
    """
    own = dict(module.named_parameters())
    unknown = sorted(set(estimate.grads) - set(own))
    found = [f"the module has no parameter named {', '.join(unknown)}: pass split.model"] if unknown else []
    for name, grad in estimate.grads.items():
        if name in own and grad.shape != own[name].shape:
            found.append(f"the gradient of {name} has shape {tuple(grad.shape)}, not {tuple(own[name].shape)}")
    raise_if(found)
    for name, p in own.items():
        g = estimate.grads.get(name)
        p.grad = None if g is None else _laid_out_like(p, g.detach().to(p.dtype))


def _laid_out_like(p: Tensor, g: Tensor) -> Tensor:
    """The gradient with the parameter's strides, which fused optimizers insist on."""
    return g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
