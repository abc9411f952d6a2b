"""The gradient of a writer's own parameters from the gradient of what it writes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from splitfg.types import Params

_WRITERS = (nn.Linear, nn.Embedding, nn.Conv2d)


def can_write(module: nn.Module) -> bool:
    """Whether :func:`write_gradients` knows a module; a subclass may compute something else."""
    return type(module) in _WRITERS


def write_gradients(module: nn.Module, a: Tensor, delta: Tensor) -> Params:
    """Of a write w = W a + b with δ = dL/dw: dL/dW = Σ δ aᵀ and dL/db = Σ δ over rows; no tape.

    Args:
        module: ``nn.Linear``, ``nn.Embedding`` (δ goes to the rows that were looked up) or ``nn.Conv2d``.
        a: What it read.
        delta: δ, with the shape of what it wrote.
    """
    if isinstance(module, nn.Linear):
        rows = delta.flatten(0, -2)
        grads = {"weight": rows.T @ a.flatten(0, -2)}
        return grads if module.bias is None else {**grads, "bias": rows.sum(0)}
    if isinstance(module, nn.Embedding):
        padding = -1 if module.padding_idx is None else module.padding_idx
        count = module.num_embeddings
        return {"weight": torch.ops.aten.embedding_dense_backward(delta, a, count, padding, False)}
    assert isinstance(module, nn.Conv2d)
    grads = {"weight": _conv_weight(module, a, delta)}
    return grads if module.bias is None else {**grads, "bias": delta.sum((0, 2, 3))}


def _conv_weight(module: nn.Conv2d, a: Tensor, delta: Tensor) -> Tensor:
    geometry = (module.stride, module.padding, module.dilation, module.groups)
    weight: Tensor = conv2d_weight(a, module.weight.shape, delta, *geometry)
    return weight
