"""From u = dL/dh to the gradient at the input of the last module before h, in closed form."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from splitfg.numerics import widened
from splitfg.types import Params

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


@runtime_checkable
class ClosedForm(Protocol):
    """A module that knows its own pullback."""

    def pull_back(self, x: Tensor, u: Tensor) -> tuple[Tensor, Params]:
        """Pull u back through this module, as :func:`pull_back` does."""


def is_norm(module: nn.Module) -> bool:
    """Whether a module is one of torch's norms; a subclass may compute something else."""
    return type(module) in _NORMS


def has_pull_back(module: nn.Module) -> bool:
    """Whether :func:`pull_back` knows a module."""
    return is_norm(module) or type(module) in (nn.Identity, nn.ReLU) or isinstance(module, ClosedForm)


def pull_back(module: nn.Module, x: Tensor, u: Tensor) -> tuple[Tensor, Params]:
    """Return r = dL/dx of h = module(x), and the gradients of the module's parameters by name; exact, no tape.

    For a norm, with x̂ = (x - μ) / σ over the n normalised entries and g = γ ⊙ u,

        r = (g - mean(g) - x̂ mean(g ⊙ x̂)) / σ,    dL/dγ = Σ u ⊙ x̂,    dL/dβ = Σ u,

    sums over everything that shares γ; RMSNorm has no μ and no mean(g). For ReLU, r = u where x > 0.

    Args:
        module: ``nn.LayerNorm``, ``nn.RMSNorm``, ``nn.GroupNorm``, ``nn.ReLU``, ``nn.Identity``, or a
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
    u = u.reshape(x.shape)
    narrow, x, u = x.dtype, widened(x), widened(u)
    if isinstance(module, nn.ReLU):
        return (u * (x > 0)).to(narrow), {}
    if not is_norm(module):
        return u.to(narrow), {}
    normed, scale = _standardised(module, x)
    g = _grouped(module, u * _gain(module, u))
    r = g - normed * (g * normed).mean(_over(module), keepdim=True)
    if not isinstance(module, nn.RMSNorm):
        r = r - g.mean(_over(module), keepdim=True)
    return (scale * r).view(x.shape).to(narrow), affine_gradients(module, x, u)


def affine_gradients(module: nn.Module, x: Tensor, u: Tensor) -> Params:
    """Return dL/dγ = Σ u ⊙ x̂ and dL/dβ = Σ u of a norm, if it has them."""
    found = {}
    x, u = widened(x), widened(u)
    over = (0, *range(2, x.ndim)) if isinstance(module, nn.GroupNorm) else tuple(range(x.ndim + _over(module)[0]))
    for name, p in module.named_parameters():
        summed = u * _standardised(module, x)[0].view(x.shape) if name == "weight" else u
        found[name] = summed.sum(over).to(p.dtype)
    return found


def _over(module: nn.Module) -> tuple[int, ...]:
    """The dimensions that are normalised over, once grouped."""
    count = 1 if isinstance(module, nn.GroupNorm) else len(module.normalized_shape)  # type: ignore[arg-type]
    return tuple(range(-count, 0))


def _grouped(module: nn.Module, x: Tensor) -> Tensor:
    """GroupNorm's entries as ``(B, groups, entries)``; others as they are."""
    return x.unflatten(1, (module.num_groups, -1)).flatten(2) if isinstance(module, nn.GroupNorm) else x


def _gain(module: nn.Module, u: Tensor) -> Tensor | float:
    """γ, shaped to multiply u."""
    weight: Tensor | None = module.weight  # type: ignore[assignment]
    if weight is None:
        return 1.0
    return weight.view(-1, *[1] * (u.ndim - 2)) if isinstance(module, nn.GroupNorm) else weight


def _standardised(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """x̂, grouped, and 1 / σ."""
    x, over = _grouped(module, x), _over(module)
    if isinstance(module, nn.RMSNorm):
        eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
        scale = (x.square().mean(over, keepdim=True) + eps).rsqrt()
        return x * scale, scale
    variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
    scale = (variance + module.eps).rsqrt()  # type: ignore[operator]
    return (x - mean) * scale, scale
