"""Layers that a trunk applies as functions: their parameters belong to no ``nn.Linear`` that the trunk calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def linear_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return an ``nn.Linear`` with these very tensors as its parameters."""
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.out_features, layer.in_features = weight.shape
    own: dict[str, Any] = layer._parameters  # tensors may stand for parameters
    own.update(weight=weight, bias=bias)
    return layer


def linear_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return input, weight and bias of a call of ``F.linear``."""
    names = ("input", "weight", "bias")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given["input"], given["weight"], given.get("bias")


def attention_in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,  # noqa: ARG001  # a hint: the mask is given as well
) -> tuple[Tensor, Tensor | None]:
    """Compute ``F.multi_head_attention_forward`` by ``F.linear``, matmul and softmax, each with a closed form.

    Raises:
        NotImplementedError: For settings without a closed form here.
    """
    wanted = {
        "bias_k or bias_v": bias_k is not None or bias_v is not None,
        "add_zero_attn": add_zero_attn,
        "static_k or static_v": static_k is not None or static_v is not None,
    }
    if any(wanted.values()):
        raise NotImplementedError(" and ".join(name for name, is_set in wanted.items() if is_set))
    batched = query.ndim == 3
    if not batched:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    E = embed_dim_to_check
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        parts = zip((query, key, value), weights, biases, strict=True)
        q, k, v = (F.linear(x, w, b) for x, w, b in parts if w is not None)
    else:
        assert in_proj_weight is not None
        q, k, v = _projected((query, key, value), in_proj_weight, in_proj_bias, E)
    q, k, v = (_heads(part, num_heads) for part in (q, k, v))
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    mask = _mask(attn_mask, key_padding_mask, scores)
    weights_ = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropout_p, training)
    rows = (weights_ @ v).permute(2, 0, 1, 3).flatten(2)  # (queries, batch, E)
    out = F.linear(rows, out_proj_weight, out_proj_bias)
    shown = (weights_.mean(1) if average_attn_weights else weights_) if need_weights else None
    if batched:
        return out, shown
    return out.squeeze(1), None if shown is None else shown.squeeze(0)


def dot_product_in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` by matmul, softmax and dropout, each with a closed form.

    Draws the random numbers of torch's kernel without fusion, which runs attention with dropout on a CPU.
    """
    groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
    key, value = (_repeated(t, groups) if groups > 1 else t for t in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        return F.dropout(torch.softmax(scores, -1), dropout_p) @ value
    scores = scores + (_as_sum(~attn_mask, scores) if attn_mask.dtype == torch.bool else attn_mask)
    nothing = (scores == -math.inf).all(-1, keepdim=True)  # rows that attend to no key give zero
    weights = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    return F.dropout(weights, dropout_p) @ value


def _repeated(heads: Tensor, groups: int) -> Tensor:
    """Repeat every head of keys or values for the queries that read it."""
    return heads.unsqueeze(-3).expand(*heads.shape[:-2], groups, *heads.shape[-2:]).flatten(-4, -3)


def _projected(inputs: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None, E: int) -> list[Tensor]:
    """Apply the packed projection to every distinct input, and return its third of each."""
    whole: dict[int, Tensor] = {}
    for x in inputs:
        if id(x) not in whole:
            whole[id(x)] = F.linear(x, weight, bias)
    return [whole[id(x)][..., i * E : (i + 1) * E] for i, x in enumerate(inputs)]


def _heads(rows: Tensor, count: int) -> Tensor:
    """(positions, batch, E) -> (batch, heads, positions, E / heads)."""
    return rows.reshape(*rows.shape[:-1], count, -1).permute(1, 2, 0, 3)


def _mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, scores: Tensor) -> Tensor | None:
    """Return the sum of both masks, to be added to the scores ``(batch, heads, queries, keys)``."""
    batch, heads = scores.shape[:2]
    found = None
    if attn_mask is not None:
        mask = attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (batch, heads))
        found = _as_sum(mask, scores)
    if key_padding_mask is not None:
        padding = _as_sum(key_padding_mask, scores)[:, None, None, :]
        found = padding if found is None else found + padding
    return found


def _as_sum(mask: Tensor, scores: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, -math.inf)
