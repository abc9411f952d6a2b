"""Validation by a batch that heads are functions of h and that rows do not mix where an estimate divides them."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from splitfg.calling import random_state, same_generators
from splitfg.heads import Head, LinearHead, ProbedHead
from splitfg.numerics import close
from splitfg.splitting._batches import parts
from splitfg.splitting._split import Split
from splitfg.types import Inputs, Target


def draws(head: Head, h: Tensor) -> bool:
    """Return whether a head draws random numbers; shows, too, which buffers it writes to in place."""
    with same_generators():
        before = random_state()
        with suppress(Exception):  # check_h explains why h does not fit the head
            head.predict(h)
        return not before.same_in_torch(random_state())


def head_hooks(head: Head) -> tuple[int, ...]:
    """Return the ids of the forward hooks on the layers of a linear head."""
    layers = head.layers if isinstance(head, LinearHead) else ()
    held = (hooks for layer in layers for hooks in (layer._forward_hooks, layer._forward_pre_hooks))
    return tuple(id(hook) for hooks in held for hook in hooks.values())


def hook_problems(split: Split, x: Inputs) -> list[str]:
    """List the problem of hooks that change the outputs of a linear head, whose closed form does not run them."""
    assert isinstance(split.head, LinearHead)
    with torch.no_grad():
        h = split.h(x)[:2]
        outputs = h
        for layer in split.head.layers:
            outputs = layer(outputs)
        if close(outputs, split.head.predict(h)):
            return []
    return ["a hook changes the outputs of the head, which its closed form ignores: remove it, or use ReverseModeHead"]


def mixing_problems(split: Split, x: Inputs, y: Target, *, divided: bool) -> list[str]:
    """List the problem of rows whose result depends on other rows of the batch.

    Args:
        split: The network.
        x: Inputs.
        y: Target.
        divided: Whether the estimate takes the batch in parts; a probed head measures all rows at once in any case.
    """
    probed = isinstance(split.head, ProbedHead)
    if y.shape[0] < 2 or not (divided or probed) or split.traits(x).random:
        return []
    with torch.no_grad():
        h = split.h(x)
        rows = len(h) // 2
        if divided:
            some, _ = next(parts(x, y, y.shape[0] // 2))
            own = split.h(some)
            rows = len(own)
            if not close(own, h[:rows]):
                return [f"the trunk {_MIXES}: pass micro_batch=None"]
        if split.head.out_features is not None or close(split.head.predict(h[:rows]), split.head.predict(h)[:rows]):
            return []
    return [f"the head {_MIXES}: {'use ReverseModeHead' if probed else 'pass micro_batch=None'}"]


_MIXES = "mixes the rows of a batch, as with h - h.mean(0), so that a part of a batch gives another result"
