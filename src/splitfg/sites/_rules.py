"""Closed-form pullbacks of torch functions: from δ at an output to δ at the inputs, without a tape of autograd.

A rule reads the values that its operation read and wrote, and no weight. Matrix products are between activations; a
product with a parameter belongs into a layer such as ``nn.Linear``, whose feedback is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.nn import functional as F

from splitfg.sites._tape import ACTIVATIONS, Operation

Pulled: TypeAlias = Iterable[tuple[Any, Tensor]]
"""Inputs, each with its share of δ; entries that are no tensors are skipped."""

Rule: TypeAlias = Callable[[Operation, Any], Pulled]
"""From an operation and δ at its output (a list for several outputs, ``None`` where there is none) to shares."""

_RULES: dict[str, Rule] = {}


def rule_for(operation: Operation) -> Rule | None:
    """Return the rule of a function or an activation module; ``None`` if there is none."""
    if operation.module is None:
        return _RULES.get(operation.name)
    return _activation if type(operation.module) in ACTIVATIONS else None


def register_rule(name: str, rule: Rule) -> None:
    """Add the pullback of a torch function.

    Args:
        name: The function's own name, such as ``"roll"`` for :func:`torch.roll` and :meth:`torch.Tensor.roll`.
        rule: Yields ``(input, δ_input)`` pairs from an :class:`~splitfg.sites.Operation` and δ at its output, one
            for every input that depends on trained parameters.

    Example:
        >>> from splitfg.sites import register_rule
        >>> register_rule("neg", lambda operation, delta: [(operation.args[0], -delta)])
    """
    _RULES[name] = rule


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def derivative(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return f'(x) of an elementwise function, by its own forward-mode rule."""
    pushed: Tensor = jvp(function, (x,), (torch.ones_like(x),))[1]
    return pushed


def _argument(operation: Operation, place: int, name: str, default: Any) -> Any:
    return operation.args[place] if len(operation.args) > place else operation.kwargs.get(name, default)


def _first_and_rest(operation: Operation) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    settings = {name: value for name, value in operation.kwargs.items() if name != "input"}
    return operation.input, operation.args[1:], settings


def _operands(operation: Operation) -> tuple[Any, Any]:
    return _argument(operation, 0, "input", None), _argument(operation, 1, "other", None)


def _summed_to(delta: Tensor, like: Tensor) -> Tensor:
    """Sum δ over the dimensions along which an input was broadcast."""
    return delta.sum_to_size(like.shape) if delta.shape != like.shape else delta


# Elementwise ---------------------------------------------------------------------------------------------------------


@_rule("relu", "relu_")
def _relu(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, delta * (operation.output > 0)


_ELEMENTWISE = (
    *(name for name in ACTIVATIONS.values() if name != "relu"),
    *("abs", "clamp", "cos", "erf", "exp", "expm1", "log", "log1p", "neg", "pow", "reciprocal", "rsqrt", "sin"),
    *("sqrt", "square", "softsign", "logsigmoid", "hardshrink", "threshold"),
)


def _elementwise(operation: Operation, delta: Tensor) -> Pulled:
    function = getattr(F, operation.name, None) or getattr(torch, operation.name)
    x, rest, settings = _first_and_rest(operation)
    yield x, delta * derivative(lambda a: function(a, *rest, **settings), x)


_RULES.update(dict.fromkeys(_ELEMENTWISE, _elementwise))


def _activation(operation: Operation, delta: Tensor) -> Pulled:
    if isinstance(operation.module, nn.ReLU):
        return _relu(operation, delta)
    assert operation.module is not None
    # the class's own forward: hooks on the module belong to the pass, not to its derivative
    function = partial(type(operation.module).forward, operation.module)
    return [(operation.input, delta * derivative(function, operation.input))]


@_rule("dropout")
def _dropout(operation: Operation, delta: Tensor) -> Pulled:
    kept = not _argument(operation, 2, "training", True) or _argument(operation, 1, "p", 0.5) == 0
    if not kept:
        raise NotImplementedError("dropout in training mode: call .eval() on it or set p=0")
    yield operation.input, delta


@_rule("add")
def _add(operation: Operation, delta: Tensor) -> Pulled:
    a, b = _operands(operation)
    yield from _terms(a, b, delta, operation.kwargs.get("alpha", 1))


@_rule("sub")
def _sub(operation: Operation, delta: Tensor) -> Pulled:
    a, b = _operands(operation)
    yield from _terms(a, b, delta, -operation.kwargs.get("alpha", 1))


@_rule("rsub")
def _rsub(operation: Operation, delta: Tensor) -> Pulled:
    b, a = _operands(operation)
    yield from _terms(a, b, delta, -operation.kwargs.get("alpha", 1))


def _terms(a: Any, b: Any, delta: Tensor, scale: float) -> Pulled:
    if isinstance(a, Tensor):
        yield a, _summed_to(delta, a)
    if isinstance(b, Tensor):
        yield b, _summed_to(delta if scale == 1 else scale * delta, b)


@_rule("mul")
def _mul(operation: Operation, delta: Tensor) -> Pulled:
    a, b = _operands(operation)
    if isinstance(a, Tensor):
        yield a, _summed_to(delta * b, a)
    if isinstance(b, Tensor):
        yield b, _summed_to(delta * a, b)


@_rule("div")
def _div(operation: Operation, delta: Tensor) -> Pulled:
    a, b = _operands(operation)
    if operation.kwargs.get("rounding_mode") is not None:
        raise NotImplementedError("a rounded quotient: detach it")
    if isinstance(a, Tensor):
        yield a, _summed_to(delta / b, a)
    if isinstance(b, Tensor):
        yield b, _summed_to(-delta * operation.output / b, b)


@_rule("rdiv")
def _rdiv(operation: Operation, delta: Tensor) -> Pulled:
    x, _ = _operands(operation)
    yield x, -delta * operation.output / x


@_rule("masked_fill")
def _masked_fill(operation: Operation, delta: Tensor) -> Pulled:
    x, mask = operation.args[:2]
    yield x, _summed_to(delta.masked_fill(mask, 0), x)


@_rule("where")
def _where(operation: Operation, delta: Tensor) -> Pulled:
    condition, a, b = operation.args
    if isinstance(a, Tensor):
        yield a, _summed_to(torch.where(condition, delta, 0), a)
    if isinstance(b, Tensor):
        yield b, _summed_to(torch.where(condition, 0, delta), b)


# Products and sums over activations ----------------------------------------------------------------------------------


@_rule("matmul", "bmm", "mm")
def _matmul(operation: Operation, delta: Tensor) -> Pulled:
    a, b = operation.input, (*operation.args, *operation.kwargs.values())[1]
    if a.ndim == 1 or b.ndim == 1:
        raise NotImplementedError("matmul with a vector: use matrices")
    yield a, _summed_to(delta @ b.mT, a)
    yield b, _summed_to(a.mT @ delta, b)


@_rule("softmax")
def _softmax(operation: Operation, delta: Tensor) -> Pulled:
    p, dim = operation.output, _argument(operation, 1, "dim", -1)
    yield operation.input, p * (delta - (delta * p).sum(dim, keepdim=True))


@_rule("scaled_dot_product_attention")
def _attention(operation: Operation, delta: Tensor) -> Pulled:
    q, k, v = (_argument(operation, i, name, None) for i, name in enumerate(("query", "key", "value")))
    mask, causal = _argument(operation, 3, "attn_mask", None), _argument(operation, 5, "is_causal", False)
    if _argument(operation, 4, "dropout_p", 0.0):
        raise NotImplementedError("attention with dropout: set dropout to 0")
    groups = q.shape[-3] // k.shape[-3] if _argument(operation, 7, "enable_gqa", False) else 1
    read_k, read_v = k, v
    k, v = (t.repeat_interleave(groups, -3) if groups > 1 else t for t in (k, v))
    scale = _argument(operation, 6, "scale", None) or q.shape[-1] ** -0.5
    scores = scale * (q @ k.mT)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    p = scores.softmax(-1)
    dp = delta @ v.mT
    ds = scale * p * (dp - (dp * p).sum(-1, keepdim=True))
    yield q, _summed_to(ds @ k, q)
    yield read_k, _summed_to(_over_groups(ds.mT @ q, groups), read_k)
    yield read_v, _summed_to(_over_groups(p.mT @ delta, groups), read_v)
    if mask is not None and mask.is_floating_point():
        yield mask, _summed_to(ds / scale, mask)


def _over_groups(share: Tensor, groups: int) -> Tensor:
    """Sum the shares of the queries that read the same keys and values."""
    return share if groups == 1 else share.unflatten(-3, (-1, groups)).sum(-3)


@_rule("embedding")
def _embedding(operation: Operation, delta: Tensor) -> Pulled:
    tokens, weight = operation.input, _argument(operation, 1, "weight", None)
    padding, by_frequency = _argument(operation, 2, "padding_idx", None), _argument(operation, 4, "scale_grad", False)
    if by_frequency or operation.kwargs.get("scale_grad_by_freq", False):
        raise NotImplementedError("embeddings scaled by frequency: set scale_grad_by_freq to False")
    row = -1 if padding is None else padding % len(weight)
    yield weight, torch.ops.aten.embedding_dense_backward(delta, tokens, len(weight), row, False)


@_rule("batch_norm")
def _batch_norm(operation: Operation, delta: Tensor) -> Pulled:
    x, names = operation.input, ("running_mean", "running_var", "weight", "bias", "training")
    mean, variance, weight, bias, training = (_argument(operation, i, n, None) for i, n in enumerate(names, start=1))
    over, shape = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
    if training:
        variance, mean = torch.var_mean(x, over, correction=0)
    scale = (variance + _argument(operation, 7, "eps", 1e-5)).rsqrt().view(shape)
    normed, g = (x - mean.view(shape)) * scale, delta if weight is None else delta * weight.view(shape)
    centred = g - g.mean(over, keepdim=True) - normed * (g * normed).mean(over, keepdim=True) if training else g
    yield x, scale * centred
    if weight is not None:
        yield weight, (delta * normed).sum(over)
    if bias is not None:
        yield bias, delta.sum(over)


@_rule("layer_norm")
def _layer_norm(operation: Operation, delta: Tensor) -> Pulled:
    x, shape = operation.input, _argument(operation, 1, "normalized_shape", ())
    weight, bias = _argument(operation, 2, "weight", None), _argument(operation, 3, "bias", None)
    over = tuple(range(-len(shape), 0))
    variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
    scale = (variance + _argument(operation, 4, "eps", 1e-5)).rsqrt()
    normed, g = (x - mean) * scale, delta if weight is None else delta * weight
    yield x, scale * (g - g.mean(over, keepdim=True) - normed * (g * normed).mean(over, keepdim=True))
    if weight is not None:
        yield weight, _summed_to(delta * normed, weight)
    if bias is not None:
        yield bias, _summed_to(delta, bias)


@_rule("mean")
def _mean(operation: Operation, delta: Tensor) -> Pulled:
    x = operation.input
    yield x, (_spread(operation, delta) / (x.numel() / max(1, operation.output.numel()))).expand(x.shape)


@_rule("sum")
def _sum(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, _spread(operation, delta).expand(operation.input.shape)


@_rule("amax", "amin")
def _extreme(operation: Operation, delta: Tensor) -> Pulled:
    """δ goes to the largest entry; equal ones share it."""
    x, dims = operation.input, _argument(operation, 1, "dim", ())
    reduced = {d % x.ndim for d in (dims if isinstance(dims, Sequence) else (dims,))}
    kept = [1 if i in reduced else size for i, size in enumerate(x.shape)]
    hit = (x == operation.output.reshape(kept)).to(delta.dtype)
    yield x, delta.reshape(kept) * hit / hit.sum(tuple(reduced), keepdim=True)


def _spread(operation: Operation, delta: Tensor) -> Tensor:
    """δ with the reduced dimensions put back, of size one."""
    x, dims = operation.input, _argument(operation, 1, "dim", None)
    every = range(x.ndim) if dims is None else (dims if isinstance(dims, Sequence) else (dims,))
    reduced = {d % x.ndim for d in every}
    return delta.reshape([1 if i in reduced else size for i, size in enumerate(x.shape)])


# Moving entries around -----------------------------------------------------------------------------------------------


@_rule("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone", "view_as")
def _same_entries(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, delta.reshape(operation.input.shape)


@_rule("to", "float", "double", "half", "bfloat16", "type_as")
def _cast(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, delta.to(operation.input)


@_rule("detach", "zeros_like", "ones_like")
def _detach(operation: Operation, delta: Tensor) -> Pulled:  # noqa: ARG001
    return ()


@_rule("expand", "expand_as", "broadcast_to")
def _expand(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, _summed_to(delta, operation.input)


@_rule("repeat")
def _repeat(operation: Operation, delta: Tensor) -> Pulled:
    x, rest, _ = _first_and_rest(operation)
    counts = operation.kwargs.get("repeats", rest[0] if len(rest) == 1 and isinstance(rest[0], Sequence) else rest)
    sizes = (*[1] * (len(counts) - x.ndim), *x.shape)
    pairs = [n for pair in zip(counts, sizes, strict=True) for n in pair]
    yield x, delta.reshape(pairs).sum(tuple(range(0, len(pairs), 2))).reshape(x.shape)


@_rule("transpose", "swapaxes")
def _transpose(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, delta.transpose(_argument(operation, 1, "dim0", 0), _argument(operation, 2, "dim1", 1))


@_rule("mT", "T", "t")
def _last_two(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, delta.mT


@_rule("permute")
def _permute(operation: Operation, delta: Tensor) -> Pulled:
    x, rest, _ = _first_and_rest(operation)
    dims = operation.kwargs.get("dims", rest[0] if len(rest) == 1 and isinstance(rest[0], Sequence) else rest)
    order = [d % x.ndim for d in dims]
    yield x, delta.permute([order.index(d) for d in range(x.ndim)])


@_rule("getitem")
def _getitem(operation: Operation, delta: Tensor) -> Pulled:
    x, index = operation.args
    indices = index if isinstance(index, tuple) else (index,)
    share = torch.zeros_like(x)
    if any(isinstance(i, Tensor | list) for i in indices):  # rows may be read more than once
        places = torch.arange(x.numel(), device=x.device).view(x.shape)[index]
        share.view(-1).index_add_(0, places.reshape(-1), delta.reshape(-1))
    else:
        share[index] = delta
    yield x, share


@_rule("cat", "concat")
def _cat(operation: Operation, delta: Tensor) -> Pulled:
    parts, dim = _argument(operation, 0, "tensors", ()), _argument(operation, 1, "dim", 0)
    yield from zip(parts, delta.split([p.shape[dim] for p in parts], dim), strict=True)


@_rule("stack")
def _stack(operation: Operation, delta: Tensor) -> Pulled:
    yield from zip(_argument(operation, 0, "tensors", ()), delta.unbind(_argument(operation, 1, "dim", 0)), strict=True)


@_rule("unbind")
def _unbind(operation: Operation, delta: Sequence[Tensor | None]) -> Pulled:
    yield operation.input, torch.stack(_filled(operation, delta), _argument(operation, 1, "dim", 0))


@_rule("split", "chunk", "tensor_split", "split_with_sizes")
def _split(operation: Operation, delta: Sequence[Tensor | None]) -> Pulled:
    yield operation.input, torch.cat(_filled(operation, delta), _argument(operation, 2, "dim", 0))


def _filled(operation: Operation, delta: Sequence[Tensor | None]) -> list[Tensor]:
    return [torch.zeros_like(o) if d is None else d for o, d in zip(operation.output, delta, strict=True)]


@_rule("pad")
def _pad(operation: Operation, delta: Tensor) -> Pulled:
    x, sizes = operation.input, _argument(operation, 1, "pad", ())
    if _argument(operation, 2, "mode", "constant") != "constant":
        raise NotImplementedError("padding by entries: pad with a constant")
    for dim, (before, _) in enumerate(zip(sizes[::2], sizes[1::2], strict=True), start=1):
        delta = delta.narrow(-dim, max(before, 0), x.shape[-dim])
        if min(sizes) < 0:
            raise NotImplementedError("negative padding: use slices")
    yield x, delta


@_rule("gather")
def _gather(operation: Operation, delta: Tensor) -> Pulled:
    x, dim, index = operation.input, _argument(operation, 1, "dim", None), _argument(operation, 2, "index", None)
    yield x, torch.zeros_like(x).scatter_add_(dim, index, delta)


@_rule("adaptive_avg_pool1d", "adaptive_avg_pool2d")
def _global_pool(operation: Operation, delta: Tensor) -> Pulled:
    x, pooled = operation.input, operation.output.shape[-1 if operation.name.endswith("1d") else -2 :]
    if pooled.numel() > 1:
        raise NotImplementedError("adaptive pooling to more than one pixel: use avg_pool2d")
    yield x, (delta / (x.numel() / operation.output.numel())).expand(x.shape)


@_rule("avg_pool2d")
def _avg_pool(operation: Operation, delta: Tensor) -> Pulled:
    pair: Callable[[Any], list[int]] = lambda v: [v, v] if isinstance(v, int) else list(v)  # noqa: E731
    size = pair(_argument(operation, 1, "kernel_size", None))
    stride = _argument(operation, 2, "stride", None)
    padding = pair(_argument(operation, 3, "padding", 0))
    ceil, counted = _argument(operation, 4, "ceil_mode", False), _argument(operation, 5, "count_include_pad", True)
    steps = size if stride is None else pair(stride)
    x, backward = operation.input, torch.ops.aten.avg_pool2d_backward
    yield x, backward(delta, x, size, steps, padding, ceil, counted, _argument(operation, 6, "divisor_override", None))


@_rule("max_pool2d", "boolean_dispatch", "fn")
def _max_pool(operation: Operation, delta: Tensor) -> Pulled:
    x, rest, settings = _first_and_rest(operation)
    settings.pop("return_indices", None)
    _, indices = F.max_pool2d(x, *rest[:5], **settings, return_indices=True)
    share = torch.zeros_like(x).flatten(-2)
    yield x, share.scatter_add_(-1, indices.flatten(-2), delta.flatten(-2)).view(x.shape)
