"""Pullbacks of products, look-ups and reductions over activations."""

from __future__ import annotations

import string
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


@rule("einsum", output=False)
def _einsum(operation: Operation, delta: Tensor) -> Pulled:
    equation, *given = operation.args
    operands = given[0] if len(given) == 1 and isinstance(given[0], list | tuple) else given
    if not isinstance(equation, str):
        raise NotImplementedError("lists of dimensions: pass an equation as a string")
    terms, result = _letters(equation, operands)
    if any(len(set(term)) < len(term) for term in terms):
        raise NotImplementedError("a letter twice in one operand: use diagonal")
    for i, (x, term) in enumerate(zip(operands, terms, strict=True)):
        others, read = [*operands[:i], *operands[i + 1 :]], [*terms[:i], *terms[i + 1 :]]
        kept = "".join(c for c in term if c in "".join([result, *read]))
        share = torch.einsum(f"{','.join([result, *read])}->{kept}", delta, *others)
        for place, letter in enumerate(term):  # a dimension that is summed alone
            share = (
                share
                if letter in kept
                else share.unsqueeze(place).expand(*share.shape[:place], x.shape[place], *share.shape[place:])
            )
        yield x, summed_to(share, x)


def _letters(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """Return the letters of every operand and of the result of an equation, without ellipsis and implicit result."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    free = [c for c in string.ascii_letters if c not in equation]
    terms = left.split(",")
    covered = [x.ndim - len(t) + 3 if "..." in t else 0 for t, x in zip(terms, operands, strict=True)]
    shared = "".join(free[: max(covered)])
    if not arrow:
        once = sorted(c for c in set(left) - set(",.") if left.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    named = [t.replace("...", shared[len(shared) - n :]) for t, n in zip(terms, covered, strict=True)]
    return named, right.replace("...", shared)


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
