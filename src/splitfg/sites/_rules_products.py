"""Pullbacks of products, norms, look-ups and reductions over activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from splitfg.sites._rule_table import Pulled, argument, rule, summed_to
from splitfg.sites._tape import Operation


@rule("matmul", "bmm", "mm", output=False)
def _matmul(operation: Operation, delta: Tensor) -> Pulled:
    a, b = operation.input, (*operation.args, *operation.kwargs.values())[1]
    if a.ndim == 1 or b.ndim == 1:
        raise NotImplementedError("matmul with a vector: use matrices")
    yield a, summed_to(delta @ b.mT, a)
    yield b, summed_to(a.mT @ delta, b)


@rule("baddbmm", output=False)
def _baddbmm(operation: Operation, delta: Tensor) -> Pulled:
    x, a, b = (argument(operation, i, name, None) for i, name in enumerate(("input", "batch1", "batch2")))
    scaled = operation.kwargs.get("alpha", 1) * delta
    yield x, summed_to(operation.kwargs.get("beta", 1) * delta, x)
    yield a, scaled @ b.mT
    yield b, a.mT @ scaled


@rule("log_softmax", inputs=False)
def _log_softmax(operation: Operation, delta: Tensor) -> Pulled:
    dim = _softmax_dim(operation)
    yield operation.input, delta - operation.output.exp() * delta.sum(dim, keepdim=True)


@rule("logsumexp")
def _logsumexp(operation: Operation, delta: Tensor) -> Pulled:
    x, output = operation.input, operation.output
    if not argument(operation, 2, "keepdim", False):
        dim = argument(operation, 1, "dim", -1)
        for d in sorted([dim % x.ndim] if isinstance(dim, int) else [d % x.ndim for d in dim]):
            delta, output = delta.unsqueeze(d), output.unsqueeze(d)
    yield x, delta * (x - output).exp()


@rule("normalize")
def _normalize(operation: Operation, delta: Tensor) -> Pulled:
    x, y, dim = operation.input, operation.output, argument(operation, 2, "dim", 1)
    if argument(operation, 1, "p", 2.0) != 2:
        raise NotImplementedError("a norm other than the Euclidean: set p=2")
    eps, norm = argument(operation, 3, "eps", 1e-12), x.norm(dim=dim, keepdim=True)
    along = torch.where(norm > eps, (delta * y).sum(dim, keepdim=True), 0)
    yield x, (delta - along * y) / norm.clamp_min(eps)


@rule("cumsum", inputs=False, output=False)
def _cumsum(operation: Operation, delta: Tensor) -> Pulled:
    dim = argument(operation, 1, "dim", 0)
    yield operation.input, delta.flip(dim).cumsum(dim).flip(dim)


@rule("softmax", inputs=False)
def _softmax(operation: Operation, delta: Tensor) -> Pulled:
    p, dim = operation.output, _softmax_dim(operation)
    yield operation.input, p * (delta - (delta * p).sum(dim, keepdim=True))


def _softmax_dim(operation: Operation) -> int:
    dim: int | None = argument(operation, 1, "dim", None)
    if dim is None:
        raise NotImplementedError("a dimension that torch chooses: pass dim=-1")
    return dim


@rule("scaled_dot_product_attention", output=False)
def _attention(operation: Operation, delta: Tensor) -> Pulled:
    q, k, v = (argument(operation, i, name, None) for i, name in enumerate(("query", "key", "value")))
    mask, causal = argument(operation, 3, "attn_mask", None), argument(operation, 5, "is_causal", False)
    if argument(operation, 4, "dropout_p", 0.0):
        raise NotImplementedError("attention with dropout: set dropout to 0")
    groups = q.shape[-3] // k.shape[-3] if argument(operation, 7, "enable_gqa", False) else 1
    read_k, read_v = k, v
    k, v = (t.repeat_interleave(groups, -3) if groups > 1 else t for t in (k, v))
    given = argument(operation, 6, "scale", None)
    scale = q.shape[-1] ** -0.5 if given is None else given
    scores = scale * (q @ k.mT)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    p = scores.softmax(-1)
    if mask is not None:  # rows that attend to no key give zero
        p = p.masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)
    dp = delta @ v.mT
    ds = scale * p * (dp - (dp * p).sum(-1, keepdim=True))
    yield q, summed_to(ds @ k, q)
    yield read_k, summed_to(_over_groups(ds.mT @ q, groups), read_k)
    yield read_v, summed_to(_over_groups(p.mT @ delta, groups), read_v)
    if mask is not None and mask.is_floating_point():
        yield mask, summed_to(ds / scale, mask)


def _over_groups(share: Tensor, groups: int) -> Tensor:
    """Sum the shares of the queries that read the same keys and values."""
    return share if groups == 1 else share.unflatten(-3, (-1, groups)).sum(-3)


@rule("embedding", inputs=False, output=False)
def _embedding(operation: Operation, delta: Tensor) -> Pulled:
    tokens, weight = operation.input, argument(operation, 1, "weight", None)
    padding, by_frequency = argument(operation, 2, "padding_idx", None), argument(operation, 4, "scale_grad", False)
    if by_frequency or operation.kwargs.get("scale_grad_by_freq", False):
        raise NotImplementedError("embeddings scaled by frequency: set scale_grad_by_freq to False")
    row = -1 if padding is None else padding % len(weight)
    yield weight, torch.ops.aten.embedding_dense_backward(delta, tokens, len(weight), row, False)


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


@rule("mean", inputs=False, output=False)
def _mean(operation: Operation, delta: Tensor) -> Pulled:
    x = operation.input
    yield x, (_spread(operation, delta) / (x.numel() / max(1, operation.output.numel()))).expand(x.shape)


@rule("sum", inputs=False, output=False)
def _sum(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, _spread(operation, delta).expand(operation.input.shape)


@rule("amax", "amin")
def _extreme(operation: Operation, delta: Tensor) -> Pulled:
    """δ goes to the largest entry; equal ones share it."""
    x, dims = operation.input, argument(operation, 1, "dim", ())
    reduced = {d % x.ndim for d in (dims if isinstance(dims, Sequence) else (dims,))}
    kept = [1 if i in reduced else size for i, size in enumerate(x.shape)]
    hit = (x == operation.output.reshape(kept)).to(delta.dtype)
    yield x, delta.reshape(kept) * hit / hit.sum(tuple(reduced), keepdim=True)


def _spread(operation: Operation, delta: Tensor) -> Tensor:
    """δ with the reduced dimensions put back, of size one."""
    x, dims = operation.input, argument(operation, 1, "dim", None)
    every = range(x.ndim) if dims is None else (dims if isinstance(dims, Sequence) else (dims,))
    reduced = {d % x.ndim for d in every}
    return delta.reshape([1 if i in reduced else size for i, size in enumerate(x.shape)])
