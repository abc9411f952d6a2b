"""Normalisation layers whose forward-mode pass torch's compiler can trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from splitfg.numerics import widened
from splitfg.splitting import Split, has_reduced_precision, replaced


def with_traced_norms(split: Split) -> Split:
    """Return the same network with norms that compiled code can push tangents through; parameters are shared.

    Replaces norms that torch's compiler cannot trace in forward mode: those with frozen weights, and in networks of
    reduced precision all of them, as a GPU gives their narrow outputs tangents in float32. Only passes with tangents in
    compiled code differ. Leaves trunks that were cut by tracing as they are, instance norms, and norms that are not
    modules of torch.
    """
    trunk = split.trunk
    if any(isinstance(module, fx.GraphModule) for module in trunk.modules()):
        return split
    narrow = has_reduced_precision(trunk)
    norms = {
        name: TracedNorm(module)
        for name, module in trunk.named_modules()
        if name and _is_norm(module) and (narrow or not all(p.requires_grad for p in module.parameters()))
    }
    return split.twin(replaced(trunk, norms), split.head) if norms else split


class TracedNorm(nn.Module):
    """A norm that normalises in float32 and then scales and shifts, in compiled passes with tangents.

    Args:
        norm: The norm, kept and shared; other passes run it as it is.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input."""
        if not torch.compiler.is_compiling() or forward_ad._current_level < 0:
            found: Tensor = self.norm(x)
            return found
        return _written_out(self.norm, widened(x)).to(x.dtype)


def _is_norm(module: nn.Module) -> bool:
    """Whether a module computes one of the norms of :func:`_written_out`, and nothing else."""
    kinds: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _BatchNorm)
    plain = any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return plain and not isinstance(module, nn.SyncBatchNorm) and not any(hooks)


def _written_out(norm: Any, x: Tensor) -> Tensor:
    """Compute a norm of a float32 input; running statistics are read and not updated, as passes run on copies."""
    if isinstance(norm, nn.LayerNorm):
        return _affine(F.layer_norm(x, norm.normalized_shape, eps=norm.eps), norm.weight, norm.bias)
    if isinstance(norm, nn.RMSNorm):
        return _affine(F.rms_norm(x, norm.normalized_shape, eps=norm.eps), norm.weight, None)
    shape = [1, -1] + [1] * (x.ndim - 2)
    weight = None if norm.weight is None else norm.weight.view(shape)
    bias = None if norm.bias is None else norm.bias.view(shape)
    if isinstance(norm, nn.GroupNorm):
        return _affine(F.group_norm(x, norm.num_groups, eps=norm.eps), weight, bias)
    if norm.training or norm.running_mean is None or norm.running_var is None:
        return _affine(F.batch_norm(x, None, None, training=True, eps=norm.eps), weight, bias)
    mean, variance = widened(norm.running_mean), widened(norm.running_var)
    return _affine(F.batch_norm(x, mean, variance, eps=norm.eps), weight, bias)


def _affine(z: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    z = z if weight is None else z * weight
    return z if bias is None else z + bias
