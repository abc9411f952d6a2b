"""From u = dL/dh to r = dL/dx at the top of the stream, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from splitfg.types import Params

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Identity)


def has_pull_back(module: nn.Module) -> bool:
    """Whether there is a closed form for a module; a subclass may compute something else."""
    return type(module) in _NORMS


def pull_back(module: nn.Module, x: Tensor, u: Tensor) -> tuple[Tensor, Params]:
    """Of h = norm(x): r = dL/dx, and dL/dγ and dL/dβ by the module's own names; all exact, no tape.

    With x̂ = (x - μ) / σ over the n normalised entries and g = γ ⊙ u,

        r = (g - mean(g) - x̂ mean(g ⊙ x̂)) / σ,    dL/dγ = Σ u ⊙ x̂,    dL/dβ = Σ u,

    sums over everything that shares γ; RMSNorm has no μ and no mean(g).

    Args:
        module: ``nn.LayerNorm``, ``nn.RMSNorm``, ``nn.GroupNorm`` or ``nn.Identity``.
        x: What it read.
        u: dL/dh, with the shape of x.
    """
    if isinstance(module, nn.LayerNorm):
        return _layer_norm(module, x, u)
    if isinstance(module, nn.RMSNorm):
        return _rms_norm(module, x, u)
    if isinstance(module, nn.GroupNorm):
        return _group_norm(module, x, u)
    return u, {}


def _layer_norm(module: nn.LayerNorm, x: Tensor, u: Tensor) -> tuple[Tensor, Params]:
    dims = tuple(range(-len(module.normalized_shape), 0))
    normed, scale = _standardised(x, dims, module.eps)
    r = _through(normed, scale, u if module.weight is None else u * module.weight, dims)
    return r, _affine(module, u, normed, tuple(range(x.ndim - len(dims))))


def _rms_norm(module: nn.RMSNorm, x: Tensor, u: Tensor) -> tuple[Tensor, Params]:
    dims = tuple(range(-len(module.normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
    scale = (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    normed = x * scale
    g = u if module.weight is None else u * module.weight
    r = scale * (g - normed * (g * normed).mean(dims, keepdim=True))
    return r, _affine(module, u, normed, tuple(range(x.ndim - len(dims))))


def _group_norm(module: nn.GroupNorm, x: Tensor, u: Tensor) -> tuple[Tensor, Params]:
    grouped = x.unflatten(1, (module.num_groups, -1)).flatten(2)  # (B, groups, entries)
    normed, scale = _standardised(grouped, (-1,), module.eps)
    per_channel = (-1, *[1] * (x.ndim - 2))
    g = u if module.weight is None else u * module.weight.view(per_channel)
    r = _through(normed, scale, g.reshape(grouped.shape), (-1,)).view(x.shape)
    return r, _affine(module, u, normed.view(x.shape), (0, *range(2, x.ndim)))


def _standardised(x: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
    """x̂ and 1 / σ."""
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    scale = (variance + eps).rsqrt()
    return (x - mean) * scale, scale


def _through(normed: Tensor, scale: Tensor, g: Tensor, dims: tuple[int, ...]) -> Tensor:
    """R = (g - mean(g) - x̂ mean(g ⊙ x̂)) / σ."""
    return scale * (g - g.mean(dims, keepdim=True) - normed * (g * normed).mean(dims, keepdim=True))


def _affine(module: nn.Module, u: Tensor, normed: Tensor, over: tuple[int, ...]) -> Params:
    """The gradients of γ and β, of those there are."""
    sums = {"weight": lambda: (u * normed).sum(over), "bias": lambda: u.sum(over)}
    return {name: sums[name]() for name, _ in module.named_parameters()}
