"""Clipping, and writing estimates to ``.grad``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError, raise_if
from splitfg.numerics import norm
from splitfg.types import Estimate, Params


def clip(estimate: Estimate, max_norm: float, *, apart: Collection[str] = ()) -> Estimate:
    """Scale all gradients together so that their joint norm is at most ``max_norm``.

    ĝ ← ĝ · min(1, max_norm / ‖ĝ‖), over trunk and head jointly. This biases an estimate whose norm exceeds the
    bound. The result records the norm before clipping as ``stats.norms["before_clip"]``. Parts of the gradient that
    other processes hold, ``estimate.elsewhere``, count in the norm.

    Args:
        estimate: The estimate; its gradients stay unchanged.
        max_norm: The bound.
        apart: Names of parameters to clip separately from the others. With the trunk's names, the trunk's noise does
            not shrink the head's exact gradient.

    Returns:
        The clipped estimate.

    Raises:
        SplitError: If ``max_norm`` is not positive.

    Example:
        >>> import torch
        >>> import splitfg
        >>> estimate = splitfg.Estimate(torch.tensor(1.0), {"w": torch.tensor([3.0, 4.0])}, splitfg.Stats())
        >>> splitfg.clip(estimate, max_norm=1.0).grads["w"]
        tensor([0.6000, 0.8000])
    """
    copied = {name: g.clone() for name, g in estimate.grads.items()}
    return clip_(dataclasses.replace(estimate, grads=copied), max_norm, apart=apart)


def clip_(estimate: Estimate, max_norm: float, *, apart: Collection[str] = ()) -> Estimate:
    """Clip in place; otherwise like :func:`clip`."""
    if not max_norm > 0:
        raise SplitError([f"max_norm must be positive, got {max_norm}: pass None to a learner for no clipping"])
    norms = []
    for inside in (True, False):
        grads, elsewhere = (
            {n: t for n, t in part.items() if (n in apart) is inside} for part in (estimate.grads, estimate.elsewhere)
        )
        norms += [_clip_together(grads, elsewhere, max_norm)] if grads or elsewhere else []
    total = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    stats = dataclasses.replace(estimate.stats, norms={**estimate.stats.norms, "before_clip": total})
    return dataclasses.replace(estimate, stats=stats)


def _clip_together(grads: Params, elsewhere: Params, max_norm: float) -> Tensor:
    """Clip in place and return the norm before, over these gradients and those of other processes."""
    total = norm(grads, like=next(iter(elsewhere.values()), None))
    if elsewhere:
        total = (total.square() + torch.stack(list(elsewhere.values())).sum().to(total)).sqrt()
    if grads and max_norm < math.inf:  # inf / inf would be NaN where the norm overflows
        torch._foreach_mul_(list(grads.values()), (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


def write_grads(module: nn.Module, estimate: Estimate) -> None:
    """Write an estimate's gradients to ``.grad``, for any optimizer, and update the state of the forward pass.

    The state, such as the running statistics of batch norm, changes once, as by one forward pass of ordinary training.

    Parameters without an entry, such as those of a frozen trunk, get ``None``, which optimizers skip. ``.grad`` shares
    memory with the estimate where possible: changing it in place changes the estimate too.

    Args:
        module: The split's ``model``.
        estimate: The estimate, with gradients keyed by the module's parameter names.

    Raises:
        SplitError: If ``module`` is no module, or a name or a shape does not match its parameters.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import splitfg
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> network, x, y = splitfg.split(model), torch.randn(16, 4), torch.randint(0, 3, (16,))
        >>> estimate = splitfg.SplitFG(K=2)(network, x, y, generator=torch.Generator())
        >>> splitfg.write_grads(network.model, estimate)
        >>> torch.optim.SGD(model.parameters(), lr=0.1).step()
    """
    if not isinstance(module, nn.Module):
        raise SplitError([f"module must be an nn.Module, got {type(module).__name__}: pass split.model"])
    own = dict(module.named_parameters())
    unknown = sorted(set(estimate.grads) - set(own))
    found = [f"the module has no parameter named {', '.join(unknown)}: pass split.model"] if unknown else []
    for name, grad in estimate.grads.items():
        if name in own and grad.shape != own[name].shape:
            wanted, shape = tuple(own[name].shape), tuple(grad.shape)
            found.append(f"the gradient of {name} has shape {shape}: return the parameter's shape, {wanted}")
    raise_if(found)
    for name, p in own.items():
        g = estimate.grads.get(name)
        p.grad = None if g is None else _laid_out_like(p, g.detach().to(p.dtype))
    if estimate.forward_state is not None:
        estimate.forward_state.apply()


def _laid_out_like(p: Tensor, g: Tensor) -> Tensor:
    """Return the gradient with the parameter's strides, which fused optimizers require."""
    return g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
