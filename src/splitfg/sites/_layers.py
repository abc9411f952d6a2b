"""The gradient of a layer's own parameters from the gradient at its output."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from splitfg.sites._pullback import affine_gradients, is_norm
from splitfg.types import Params

_LAYERS = (nn.Linear, nn.Embedding, nn.Conv2d)


@runtime_checkable
class LocalLayer(Protocol):
    """A layer that knows its own gradient."""

    def layer_gradients(self, a: Tensor, delta: Tensor) -> Params:
        """Return the gradients of this layer, as :func:`layer_gradients` does."""


def has_layer_gradients(module: nn.Module) -> bool:
    """Whether :func:`layer_gradients` knows a module; a subclass of torch's may compute something else."""
    if type(module) in _LAYERS and module._parameters.get("weight") is None:  # computed from others, as by weight_norm
        return False
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return type(module) in _LAYERS or is_norm(module) or isinstance(module, LocalLayer)


def layer_gradients(module: nn.Module, a: Tensor, delta: Tensor) -> Params:
    """Return dL/dθ of a layer z = layer_θ(a) from δ = dL/dz, without a tape.

    For z = W a + b: dL/dW = Σ δ aᵀ and dL/db = Σ δ over rows.

    Args:
        module: ``nn.Linear``, ``nn.Embedding`` (δ goes to the rows that were looked up), ``nn.Conv2d`` padded by
            numbers of zeros, a norm, or a :class:`LocalLayer`.
        a: The layer's input.
        delta: δ, with the shape of the output.

    Returns:
        Gradients by the layer's own parameter names.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from splitfg.sites import layer_gradients
        >>> grads = layer_gradients(nn.Linear(4, 3), torch.randn(8, 4), torch.randn(8, 3))
        >>> {name: tuple(g.shape) for name, g in grads.items()}
        {'weight': (3, 4), 'bias': (3,)}
    """
    if isinstance(module, LocalLayer):
        return module.layer_gradients(a, delta)
    if isinstance(module, nn.Linear):
        rows = delta.flatten(0, -2)
        grads = {"weight": rows.T @ a.flatten(0, -2)}
        return grads if module.bias is None else {**grads, "bias": rows.sum(0)}
    if isinstance(module, nn.Embedding):
        padding = -1 if module.padding_idx is None else module.padding_idx
        count = module.num_embeddings
        return {"weight": torch.ops.aten.embedding_dense_backward(delta, a, count, padding, module.scale_grad_by_freq)}
    if isinstance(module, nn.Conv2d):
        grads = {"weight": _conv_weight(module, a, delta)}
        return grads if module.bias is None else {**grads, "bias": delta.sum((0, 2, 3))}
    return affine_gradients(module, a, delta)


def under(name: str, own: Params) -> Params:
    """Prefix a module's gradients with its name in its owner."""
    return {f"{name}.{parameter}" if name else parameter: g for parameter, g in own.items()}


def _conv_weight(module: nn.Conv2d, a: Tensor, delta: Tensor) -> Tensor:
    geometry = (module.stride, module.padding, module.dilation, module.groups)
    weight: Tensor = conv2d_weight(a, module.weight.shape, delta, *geometry)
    return weight
