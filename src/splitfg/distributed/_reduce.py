"""Sums over processes: one short message with the scores, and the gradients that have none."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from splitfg.distributed._ranks import Ranks
from splitfg.distributed._sharded_head import GivenUpError, ShardedHead
from splitfg.errors import NonFiniteError, SplitError
from splitfg.estimators import Partial, Share
from splitfg.heads import CrossEntropy
from splitfg.numerics import norm, wide
from splitfg.splitting import Split
from splitfg.splitting.checks import has_rows, skip_checks
from splitfg.types import Inputs, Params, Target

_ALONE = 2**18
"""Gradients with more numbers than this are sent by themselves; smaller ones together."""


@dataclass(frozen=True)
class Total:
    """Loss and fields of :class:`~splitfg.Stats` of the whole estimate."""

    loss: Tensor
    stats: dict[str, Any]


def reduced_message(
    ranks: Ranks, split: Split, x: Inputs, y: Target, part: Partial | None, share: Share, *, scores: int
) -> tuple[Tensor, Total | None]:
    """Sum scores, loss and targets over all processes, in one message of K + 4 numbers.

    The message is (failures, N, N · loss, (N ‖u‖)², N · d_1, ..., N · d_K).

    Returns:
        The weight N_r / N of this process, and the totals; ``None`` instead of these if a process failed.
    """
    if part is None:
        param = next(iter(split.trained_params().values()))
        message = torch.zeros(4 + scores, dtype=wide(param.dtype), device=param.device)
        message[0] = 1
        own = message[1]
    else:
        dtype = wide(part.loss.dtype)
        own = _targets(split, x, y).to(dtype)
        u = part.stats.norms.get("u", torch.zeros_like(own)).to(dtype)
        loss = part.loss.to(dtype)
        count = own / ranks.row_parts if isinstance(split.head, ShardedHead) else own
        facts = torch.stack([torch.zeros_like(own), count, count * loss, (own * u).square()])
        message = torch.cat([facts * float(share.first), own * part.stats.scores.to(facts)])
    ranks.sum_(message)
    if part is None or (not skip_checks() and bool(message[0] > 0)):
        return own, None
    _, count, loss, squares = message[:4]
    if not skip_checks() and bool(count == 0):
        raise SplitError(["no process has a target that counts, so the loss is 0/0: skip such batches"])
    norms = {**part.stats.norms, **({"u": squares.sqrt() / count} if "u" in part.stats.norms else {})}
    stats = {"scores": (message[4:] / count).to(part.stats.scores.dtype), "norms": norms}
    return own / count, Total((loss / count).to(part.loss.dtype), stats)


def averaged(ranks: Ranks, split: Split, x: Inputs, y: Target, values: Tensor, error: Exception | None) -> Tensor:
    """Average a vector over all processes by their numbers of targets.

    Raises:
        Exception: In all processes, if one has an error.
    """
    like = next(iter(split.trained_params().values()))
    own = torch.zeros((), device=like.device) if error is not None else _targets(split, x, y)
    failures = torch.full_like(own, float(error is not None))
    values = values.to(device=own.device, dtype=wide(like.dtype))
    message = ranks.sum_(torch.cat([torch.stack([failures, own]).to(values), own.to(values) * values]))
    if not skip_checks() and bool(message[0] > 0):
        raise failed(ranks, error)
    return (message[2:] / message[1]).to(like.dtype)


def reduced_grads(ranks: Ranks, grads: Params, weight: Tensor, kept: Collection[str]) -> Params:
    """Average gradients over all processes, by weight; ``kept`` ones stay those of this process."""
    names = sorted(name for name in grads if name not in kept)
    scaled = {name: grads[name] * weight.to(grads[name].dtype) for name in names}
    alone = [name for name in names if scaled[name].numel() > _ALONE]
    together = [name for name in names if scaled[name].numel() <= _ALONE]
    found = {name: ranks.sum_(scaled[name].contiguous()) for name in alone}
    if together:
        flat = ranks.sum_(torch.cat([scaled[name].reshape(-1) for name in together]))
        pieces = flat.split([scaled[name].numel() for name in together])
        found |= {name: piece.view(scaled[name].shape) for name, piece in zip(together, pieces, strict=True)}
    return {name: found.get(name, g) for name, g in grads.items()}


def summed(ranks: Ranks, sums: Params) -> Params:
    """Add tensors over all processes, without weights."""
    return {name: ranks.sum_(sums[name].clone()) for name in sorted(sums)}


def squares_elsewhere(ranks: Ranks, grads: Params, names: Sequence[str], like: Tensor) -> Params:
    """Return the squared norms of the gradients of these names that other processes hold; in one message.

    Args:
        ranks: The processes.
        grads: The gradients of this process, which may lack some of the names.
        names: The same in all processes.
        like: A tensor on the device of the gradients.
    """
    if not names:
        return {}
    own = torch.stack([norm({n: grads[n]} if n in grads else {}, like=like).double().square() for n in names])
    rest = (ranks.sum_(own.clone()) - own).clamp_min(0)
    return dict(zip(names, rest, strict=True))


def failed(ranks: Ranks, error: Exception | None) -> Exception:
    """Tell all processes what went wrong in some of them, and return the error to raise."""
    own: list[str] = []
    if error is not None and not isinstance(error, GivenUpError):
        own = list(error.problems) if isinstance(error, SplitError) else [f"{type(error).__name__}: {error}"]
    found = [json.loads(text) for text in ranks.texts(json.dumps([isinstance(error, NonFiniteError), own]))]
    problems = _problems(ranks, [problems for _, problems in found])
    if error is not None and not isinstance(error, SplitError):
        return error
    only_finite = all(finite for finite, problems in found if problems)
    return NonFiniteError(problems) if only_finite and problems else SplitError(problems or ["a process failed"])


def _problems(ranks: Ranks, found: Sequence[Sequence[str]]) -> list[str]:
    listed: dict[str, list[str]] = {}
    for rank, problems in zip(ranks.members, found, strict=True):
        for problem in problems:
            listed.setdefault(problem, []).append(str(rank))
    return [f"rank {', '.join(where)}: {problem}" for problem, where in listed.items()]


def with_targets(split: Split, y: Target) -> Target:
    """Return targets that count in place of those of a process none of whose targets counts; it has the weight 0."""
    loss = split.head.output_loss
    if skip_checks() or not isinstance(loss, CrossEntropy) or isinstance(split.head, ShardedHead):
        return y
    if not isinstance(y, Tensor) or not y.numel() or y.is_floating_point() or bool(_counts(loss, y).any()):
        return y
    weights = loss.class_weights
    return torch.full_like(y, 0 if weights is None else int(weights.argmax()))


def _counts(loss: CrossEntropy, y: Tensor) -> Tensor:
    """Return which targets add to the loss: those that are not ignored and whose class has a weight, or smoothing."""
    counted, weights = y != loss.ignore_index, loss.class_weights
    if weights is None or loss.label_smoothing:
        return counted
    return counted & (weights[y.long().clamp(0, len(weights) - 1)] != 0)


def _targets(split: Split, x: Inputs, y: Target) -> Tensor:
    """Return N of this process; 1 if the head has divided by N of all processes already."""
    head = split.head
    if isinstance(head, ShardedHead):
        return torch.ones((), device=y.device)
    if head.out_features is not None:
        return head.output_loss.normaliser(y, head.out_features)
    first = pytree.tree_map(lambda t: t[:1] if has_rows(t) else t, x)
    return head.normaliser(split.h(first), y)
