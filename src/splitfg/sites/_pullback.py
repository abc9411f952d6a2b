"""From u = dL/dh to the gradient at the input of the last module before h, in closed form."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from splitfg.numerics import widened
from splitfg.sites._structure import rms_epsilon, rms_offset
from splitfg.types import Params

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


TOP_HOOK = """
    def pull_back(self, x, u):  # x: the input, u = dL/d(output)
        return r, {"weight": ...}  # r = dL/dx, and gradients by the names of its parameters"""
"""The method that lets u pass through a module of any class, for error messages."""


@runtime_checkable
class ClosedForm(Protocol):
    """A module that knows its own pullback."""

    def pull_back(self, x: Tensor, u: Tensor) -> tuple[Tensor, Params]:
        """Pull u back through this module, as :func:`pull_back` does."""


def is_norm(module: nn.Module) -> bool:
    """Whether a module is one of torch's norms, or computes what ``nn.RMSNorm`` does; a subclass may do otherwise."""
    return type(module) in (*_NORMS, *_BATCH_NORMS) or rms_offset(module) is not None


def has_pull_back(module: nn.Module) -> bool:
    """Whether :func:`pull_back` knows a module."""
    # `isinstance(module, ClosedForm)` takes 20 times as long
    known = is_norm(module) or type(module) in (nn.Identity, nn.ReLU) or _is_global_pool(module)
    return known or callable(getattr(module, "pull_back", None))


def _is_global_pool(module: nn.Module) -> bool:
    """Whether a module is the mean over all pixels."""
    return type(module) is nn.AdaptiveAvgPool2d and module.output_size in (1, (1, 1), [1, 1])


def pull_back(module: nn.Module, x: Tensor, u: Tensor) -> tuple[Tensor, Params]:
    """Return r = dL/dx of h = module(x), and the gradients of the module's parameters by name; exact, no tape.

    For a norm, with x̂ = (x - μ) / σ over the n normalised entries and g = γ ⊙ u,

        r = (g - mean(g) - x̂ mean(g ⊙ x̂)) / σ,    dL/dγ = Σ u ⊙ x̂,    dL/dβ = Σ u,

    sums over everything that shares γ; RMSNorm has no μ and no mean(g). BatchNorm in evaluation mode has constant
    μ and σ, so that r = g / σ. For ReLU, r = u where x > 0. For the mean over n pixels, r = u / n at each of them.

    Args:
        module: ``nn.LayerNorm``, ``nn.RMSNorm`` (or a class that computes the same, such as those of transformers),
            ``nn.GroupNorm``, ``nn.BatchNorm2d``, ``nn.ReLU``, ``nn.AdaptiveAvgPool2d(1)``, ``nn.Identity``, or a
            :class:`ClosedForm`.
        x: The module's input.
        u: dL/dh; h is the module's output, flattened or not.

    Returns:
        r, and gradients by parameter name.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from splitfg.sites import pull_back
        >>> r, _ = pull_back(nn.ReLU(), torch.tensor([-1.0, 2.0]), torch.tensor([3.0, 3.0]))
        >>> r
        tensor([0., 3.])
    """
    if isinstance(module, ClosedForm):
        return module.pull_back(x, u)
    if _is_global_pool(module):
        return (u.reshape(*x.shape[:-2], 1, 1) / (x.shape[-2] * x.shape[-1])).expand_as(x), {}
    u = u.reshape(x.shape)
    narrow, x, u = x.dtype, widened(x), widened(u)
    if isinstance(module, nn.ReLU):
        return (u * (x > 0)).to(narrow), {}
    if not is_norm(module):
        return u.to(narrow), {}
    normed, scale = _standardised(module, x)
    g = _grouped(module, u * _gain(module, u))
    if _has_constant_statistics(module):
        return (scale * g).to(narrow), affine_gradients(module, x, u)
    over = _over(module, x)
    r = g - normed * (g * normed).mean(over, keepdim=True)
    if not _is_rms(module):
        r = r - g.mean(over, keepdim=True)
    return (scale * r).view(x.shape).to(narrow), affine_gradients(module, x, u)


def affine_gradients(module: nn.Module, x: Tensor, u: Tensor) -> Params:
    """Return dL/dγ = Σ u ⊙ x̂ and dL/dβ = Σ u of a norm, if it has them."""
    found = {}
    x, u = widened(x), widened(u)
    shared = (0, *range(2, x.ndim)) if _is_by_channel(module) else tuple(range(x.ndim + _over(module, x)[0]))
    for name, p in module.named_parameters():
        summed = u * _standardised(module, x)[0].view(x.shape) if name == "weight" else u
        found[name] = summed.sum(shared).to(p.dtype)
    return found


def _is_rms(module: nn.Module) -> bool:
    return isinstance(module, nn.RMSNorm) or rms_offset(module) is not None


def _is_by_channel(module: nn.Module) -> bool:
    """Whether γ and β have one entry for every channel, dimension 1."""
    return isinstance(module, (nn.GroupNorm, *_BATCH_NORMS))


def _has_constant_statistics(module: nn.Module) -> bool:
    """Whether μ and σ are running statistics: those of BatchNorm in evaluation mode."""
    return isinstance(module, _BATCH_NORMS) and not module.training and module.running_mean is not None


def _over(module: nn.Module, x: Tensor) -> tuple[int, ...]:
    """The dimensions that are normalised over, once grouped."""
    if isinstance(module, _BATCH_NORMS):
        return (0, *range(2, x.ndim))
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return tuple(range(-len(module.normalized_shape), 0))
    return (-1,)


def _grouped(module: nn.Module, x: Tensor) -> Tensor:
    """GroupNorm's entries as ``(B, groups, entries)``; others as they are."""
    return x.unflatten(1, (module.num_groups, -1)).flatten(2) if isinstance(module, nn.GroupNorm) else x


def _gain(module: nn.Module, u: Tensor) -> Tensor | float:
    """γ, shaped to multiply u."""
    weight: Tensor | None = module.weight  # type: ignore[assignment]
    if weight is None:
        return 1.0
    return weight.view(-1, *[1] * (u.ndim - 2)) if _is_by_channel(module) else weight + (rms_offset(module) or 0.0)


def _standardised(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """x̂, grouped, and 1 / σ."""
    x, over = _grouped(module, x), _over(module, x)
    if _is_rms(module):
        given = module.eps if isinstance(module, nn.RMSNorm) else rms_epsilon(module)
        eps = torch.finfo(x.dtype).eps if given is None else given
        scale = (x.square().mean(over, keepdim=True) + eps).rsqrt()
        return x * scale, scale
    if _has_constant_statistics(module):
        shape = (-1, *[1] * (x.ndim - 2))
        mean, variance = (getattr(module, f"running_{name}").to(x).view(shape) for name in ("mean", "var"))
    else:
        variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
    scale = (variance + module.eps).rsqrt()
    return (x - mean) * scale, scale
