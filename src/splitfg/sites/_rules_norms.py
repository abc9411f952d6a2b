"""Pullbacks of norms, and of the statistics that norms written by hand use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from splitfg.sites._rule_table import Pulled, argument, rule, summed_to
from splitfg.sites._tape import Operation


@rule("normalize")
def _normalize(operation: Operation, delta: Tensor) -> Pulled:
    x, y, dim = operation.input, operation.output, argument(operation, 2, "dim", 1)
    if argument(operation, 1, "p", 2.0) != 2:
        raise NotImplementedError("a norm other than the Euclidean: set p=2")
    eps, norm = argument(operation, 3, "eps", 1e-12), x.norm(dim=dim, keepdim=True)
    along = torch.where(norm > eps, (delta * y).sum(dim, keepdim=True), 0)
    yield x, (delta - along * y) / norm.clamp_min(eps)


@rule("batch_norm", output=False)
def _batch_norm(operation: Operation, delta: Tensor) -> Pulled:
    x, names = operation.input, ("running_mean", "running_var", "weight", "bias", "training")
    mean, variance, weight, bias, training = (argument(operation, i, n, None) for i, n in enumerate(names, start=1))
    over, shape = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
    if training:
        variance, mean = torch.var_mean(x, over, correction=0)
    scale = (variance + argument(operation, 7, "eps", 1e-5)).rsqrt().view(shape)
    normed, g = (x - mean.view(shape)) * scale, delta if weight is None else delta * weight.view(shape)
    centred = g - g.mean(over, keepdim=True) - normed * (g * normed).mean(over, keepdim=True) if training else g
    yield x, scale * centred
    if weight is not None:
        yield weight, (delta * normed).sum(over)
    if bias is not None:
        yield bias, delta.sum(over)


@rule("layer_norm", output=False)
def _layer_norm(operation: Operation, delta: Tensor) -> Pulled:
    x, shape = operation.input, argument(operation, 1, "normalized_shape", ())
    weight, bias = argument(operation, 2, "weight", None), argument(operation, 3, "bias", None)
    over = tuple(range(-len(shape), 0))
    variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
    scale = (variance + argument(operation, 4, "eps", 1e-5)).rsqrt()
    normed, g = (x - mean) * scale, delta if weight is None else delta * weight
    yield x, scale * (g - g.mean(over, keepdim=True) - normed * (g * normed).mean(over, keepdim=True))
    if weight is not None:
        yield weight, summed_to(delta * normed, weight)
    if bias is not None:
        yield bias, summed_to(delta, bias)


@rule("rms_norm", output=False)
def _rms_norm(operation: Operation, delta: Tensor) -> Pulled:
    x, shape = operation.input, argument(operation, 1, "normalized_shape", ())
    weight, eps = argument(operation, 2, "weight", None), argument(operation, 3, "eps", None)
    over = tuple(range(-len(shape), 0))
    scale = (x.square().mean(over, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    normed, g = x * scale, delta if weight is None else delta * weight
    yield x, scale * (g - normed * (g * normed).mean(over, keepdim=True))
    if weight is not None:
        yield weight, summed_to(delta * normed, weight)


@rule("var", "std")
def _variance(operation: Operation, delta: Tensor) -> Pulled:
    x, dims, unbiased = operation.input, argument(operation, 1, "dim", None), argument(operation, 2, "unbiased", True)
    if isinstance(dims, bool):  # x.var(unbiased)
        dims, unbiased = None, dims
    over, kept = _reduced(x, dims)
    freedom = math.prod(x.shape[d] for d in over) - operation.kwargs.get("correction", int(unbiased))
    slope, centred = delta.reshape(kept) / freedom, x - x.mean(over, keepdim=True)
    if operation.name == "var":
        yield x, 2 * slope * centred
    else:
        std = operation.output.reshape(kept)
        yield x, torch.where(std == 0, 0, slope / std) * centred


@rule("norm", "vector_norm")
def _norm(operation: Operation, delta: Tensor) -> Pulled:
    x, dims = operation.input, argument(operation, 2, "dim", None)
    order = argument(operation, 1, "p", operation.kwargs.get("ord"))
    if order not in (None, "fro", 2) or (order == 2 and isinstance(dims, Sequence) and len(dims) > 1):
        raise NotImplementedError("a norm other than the Euclidean: set p=2 and one dimension")
    _, kept = _reduced(x, dims)
    norm = operation.output.reshape(kept)
    yield x, torch.where(norm == 0, 0, delta.reshape(kept) / norm) * x


def _reduced(x: Tensor, dims: int | Sequence[int] | None) -> tuple[tuple[int, ...], list[int]]:
    """Return the dimensions that a function reduces, and the shape of x with these of size one."""
    given = range(x.ndim) if dims is None else (dims if isinstance(dims, Sequence) else (dims,))
    over = tuple(d % x.ndim for d in given)
    return over, [1 if d in over else size for d, size in enumerate(x.shape)]
