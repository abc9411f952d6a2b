"""The gradient of a layer's own parameters from the gradient at its output."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv1d_weight, conv2d_weight

from splitfg.errors import SplitError
from splitfg.sites._pullback import affine_gradients, is_norm
from splitfg.sites._structure import is_conv1d
from splitfg.types import Params

_LAYERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)


LAYER_HOOK = """
    def layer_gradients(self, a, delta):  # a: the input, delta = dL/d(output)
        return {"weight": ..., "bias": ...}  # by the names of its parameters"""
"""The method that lets a module of any class train itself, for error messages."""


@runtime_checkable
class LocalLayer(Protocol):
    """A layer that knows its own gradient."""

    def layer_gradients(self, a: Tensor, delta: Tensor) -> Params:
        """Return the gradients of this layer, as :func:`layer_gradients` does."""


def has_layer_gradients(module: nn.Module) -> bool:
    """Whether :func:`layer_gradients` knows a module; a subclass of torch's may compute something else."""
    if type(module) in _LAYERS and module._parameters.get("weight") is None:  # computed from others, as by weight_norm
        return False
    if isinstance(module, nn.Conv1d | nn.Conv2d) and type(module) in _LAYERS:
        return module.padding_mode == "zeros" and _padding(module) is not None
    return type(module) in _LAYERS or is_conv1d(module) or is_norm(module) or isinstance(module, LocalLayer)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is one of torch's linear layers, z = W a + b; a subclass may compute something else."""
    return type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d) or is_conv1d(module)


def layer_gradients(module: nn.Module, a: Tensor, delta: Tensor) -> Params:
    """Return dL/dθ of a layer z = layer_θ(a) from δ = dL/dz, without a tape.

    For z = W a + b: dL/dW = Σ δ aᵀ and dL/db = Σ δ over rows.

    Args:
        module: ``nn.Linear``, ``nn.Embedding`` (δ goes to the rows that were looked up), ``nn.Conv1d`` or
            ``nn.Conv2d`` padded evenly by zeros, the ``Conv1D`` of transformers, a norm, or a :class:`LocalLayer`.
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
    if is_conv1d(module):
        rows = delta.flatten(0, -2)
        return {"weight": a.flatten(0, -2).T @ rows, "bias": rows.sum(0)}
    if isinstance(module, nn.Embedding):
        padding = -1 if module.padding_idx is None else module.padding_idx
        count = module.num_embeddings
        return {"weight": torch.ops.aten.embedding_dense_backward(delta, a, count, padding, module.scale_grad_by_freq)}
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        grads = {"weight": _conv_weight(module, a, delta)}
        return grads if module.bias is None else {**grads, "bias": delta.sum((0, *range(2, delta.ndim)))}
    return affine_gradients(module, a, delta)


def added_gradient(delta: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter that is added to a stream: a sum over broadcast dimensions.

    Args:
        delta: Gradient at the stream.
        parameter: The parameter; one with more rows than the stream is read from its first.

    Raises:
        SplitError: If the parameter cannot be added to the stream.
    """
    lines = (1,) * (delta.ndim - parameter.ndim) + tuple(parameter.shape)
    along = [i for i, (rows, line) in enumerate(zip(delta.shape, lines, strict=True)) if line == 1 and rows > 1]
    summed = delta.sum(along, keepdim=True) if along else delta
    missing = [line - rows for rows, line in zip(summed.shape, lines, strict=True)]
    if min(missing) < 0:
        words = f"a parameter of shape {tuple(parameter.shape)} cannot be added to the stream {tuple(delta.shape)}"
        raise SplitError([f"{words}: name only what is added to the stream as it is"])
    padding = [size for count in reversed(missing) for size in (0, count)]
    return (F.pad(summed, padding) if any(missing) else summed).reshape(parameter.shape)


def under(name: str, own: Params) -> Params:
    """Prefix a module's gradients with its name in its owner."""
    return {f"{name}.{parameter}" if name else parameter: g for parameter, g in own.items()}


def convolution_geometry(module: nn.Conv1d | nn.Conv2d) -> tuple[Any, Any, Any, int]:
    """Return stride, padding in numbers, dilation and groups of a convolution that has layer gradients."""
    padding = _padding(module)
    assert padding is not None
    return module.stride, padding, module.dilation, module.groups


def _padding(module: nn.Conv1d | nn.Conv2d) -> tuple[int, ...] | None:
    """Return the zeros on both sides of every dimension; ``None`` if the two sides differ, as "same" may want."""
    if not isinstance(module.padding, str):
        return tuple(module.padding)
    spans = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    if module.padding == "valid":
        return (0,) * len(spans)
    return None if any(span % 2 for span in spans) else tuple(span // 2 for span in spans)


def _conv_weight(module: nn.Conv1d | nn.Conv2d, a: Tensor, delta: Tensor) -> Tensor:
    formula = conv1d_weight if isinstance(module, nn.Conv1d) else conv2d_weight
    weight: Tensor = formula(a, module.weight.shape, delta, *convolution_geometry(module))
    return weight
