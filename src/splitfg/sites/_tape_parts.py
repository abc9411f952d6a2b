"""Copies of a tape with other values: some of the samples, or none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from splitfg.sites._nested import leaves, mapped
from splitfg.sites._tape import Tape


def first_samples(tape: Tape, samples: int, batch: int) -> Tape | None:
    """Return a tape with the values of the first samples of a batch; ``None`` if a value cannot be cut by samples.

    Args:
        tape: Of the whole batch.
        samples: How many.
        batch: Samples of the whole batch; the leading dimension of every value is a multiple of it.
    """
    values = [t for o in tape.operations for t in leaves((o.args, dict(o.kwargs), o.output)) if tape.is_active(t)]
    if any(t.ndim == 0 or t.shape[0] % batch for t in values):
        return None

    def part(value: Tensor) -> Tensor:
        return value[: samples * value.shape[0] // batch]

    cut = _copied(tape, lambda value: part(value) if tape.is_active(value) else value)
    cut.h = part(tape.h)
    return cut


def hollow(tape: Tape) -> Tape:
    """Return a tape with the shapes and dtypes of another one, whose values are zeros that take no memory."""
    return _copied(tape, lambda value: torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape))


def _copied(tape: Tape, change: Callable[[Tensor], Tensor]) -> Tape:
    """Return the same operations on changed values; a value that several operations share stays one value."""
    known: dict[int, Tensor] = {}

    def changed(value: Tensor) -> Tensor:
        if id(value) not in known:
            known[id(value)] = change(value)
        return known[id(value)]

    copy = Tape(h=changed(tape.h), alone=tape.alone)
    for o in tape.operations:
        args, kwargs, output = mapped(Tensor, changed, (o.args, dict(o.kwargs), o.output))
        copy.add(o.holding(args, kwargs, output))
    return copy
