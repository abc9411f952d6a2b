"""Validate declared paths and activities against one forward pass of the trunk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfg.calling import version_of
from splitfg.numerics import close
from splitfg.sites._activities import Activities
from splitfg.sites._path import ResidualPath
from splitfg.sites._taps import tapped
from splitfg.splitting import Split
from splitfg.splitting.checks import skip_checks
from splitfg.types import Inputs


@dataclass(frozen=True)
class _Pass:
    """One pass of a trunk: outputs of the named modules, those with an overwritten input, and the input of the top."""

    h: Tensor
    writes: Mapping[str, Sequence[Tensor]]
    spoilt: Sequence[str]
    top: Tensor
    given: Tensor


def validate_path(split: Split, path: ResidualPath, x: Inputs) -> None:
    """Validate a residual path on the first batch of a split, and again after a change of training mode.

    Raises:
        SplitError: A named module is missing or not called, the writes do not sum to the top of the stream, or h is
            not the output of the top's module.
    """
    names = path.writers if path.top is None else (*path.writers, path.top)

    def problems() -> list[str]:
        found = path.problems(split.trunk)
        return found or _problems(split, names, path.top, x, lambda seen: _stream_problems(split, path, seen))

    _once(split, (names, path.top, tuple(path.added.items()), path.strict), problems)


def validate_activities(split: Split, chosen: Activities, x: Inputs) -> None:
    """Validate activities on the first batch; ignores layers that are not called.

    Raises:
        SplitError: A later operation overwrites an input of a layer, or h is not the output of the top's module.
    """
    names = (*chosen.names(split.trunk), *(() if chosen.top is None else (chosen.top,)))
    _once(split, (names, chosen.top), lambda: _problems(split, names, chosen.top, x, lambda _: []))


def _once(split: Split, key: Hashable, problems: Callable[[], list[str]]) -> None:
    if not skip_checks():
        split.validate_once(key, problems)


def _problems(
    split: Split, names: Sequence[str], top: str | None, x: Inputs, further: Callable[[_Pass], list[str]]
) -> list[str]:
    seen = _passed(split, names, top, x)
    if isinstance(seen, list):
        return seen
    if not seen.h.isfinite().all():
        return []  # the check of the loss raises a clearer error
    found = [
        f"what {name} reads is written over before the pass ends: take inplace=True and += out of what follows"
        for name in seen.spoilt
    ]
    if seen.given.numel() != seen.h.numel() or not close(seen.given.reshape(seen.h.shape), seen.h):
        words = f"h is not what {top} gives, flattened or not"
        found.append(f"{words}: cut the network before it, with split(model, at={top!r}), and name no top")
    return found or further(seen)


def _passed(split: Split, names: Sequence[str], top: str | None, x: Inputs) -> _Pass | list[str]:
    writes: dict[str, list[Tensor]] = defaultdict(list)
    reads: list[tuple[str, Tensor, int]] = []
    tops: list[tuple[Tensor, Tensor]] = []

    def tap(name: str, a: Tensor, z: Tensor) -> None:
        # what comes after may write into the same memory
        if name == top:
            tops.append((a.clone(), z.clone()))
        else:
            writes[name].append(z.clone())

    with tapped(split.trunk, names, tap, before=lambda name, a: reads.append((name, a, version_of(a)))):
        h = split.h(x)
    if top is not None and len(tops) != 1:
        how = f"called {len(tops)} times" if tops else "not called"
        return [f"{top} is {how} on the way to h: name the one module that reads the top and gives h"]
    spoilt = [name for name, a, version in reads if version_of(a) != version]
    return _Pass(h, writes, list(dict.fromkeys(spoilt)), *(tops[0] if tops else (h, h)))


def _stream_problems(split: Split, path: ResidualPath, seen: _Pass) -> list[str]:
    found = [
        f"{name} is not called on the way to h: name what is (nn.MultiheadAttention, for one, does not call its"
        " projection: write attention with an nn.Linear of its own)"
        for name in path.writers
        if name not in seen.writes
    ]
    writes = [(name, z) for name, calls in seen.writes.items() for z in calls]
    found += [
        f"{name} writes {tuple(z.shape)}, and the stream is {tuple(seen.top.shape)}: name modules whose outputs are"
        " added to the stream as they are"
        for name, z in writes
        if not broadcasts(z, seen.top)  # positions are the same for every sample
    ]
    beside = {name: read_rows(split.trunk.get_parameter(name), seen.top) for name in path.added}
    found += [
        f"{name} cannot be added to the stream, which is {tuple(seen.top.shape)}: name only what is, as it is"
        for name, read in beside.items()
        if read is None
    ]
    if found or not path.strict:
        return found
    parts = [*(z for _, z in writes), *(read for read in beside.values() if read is not None)]
    total = sum(parts, torch.zeros_like(seen.top))
    if close(total, seen.top):
        return []
    return [
        "what the writers write does not add up to the top of the stream: name everything that is added to it, and"
        " nothing else; where the stream is scaled or bent on its way, ResidualPath(..., strict=False) takes the path"
        " as an approximation"
    ]


def read_rows(parameter: Tensor, stream: Tensor) -> Tensor | None:
    """Return the rows of a parameter that are added to a stream, from its first; ``None`` if it does not fit."""
    read = parameter.detach()
    if read.ndim > stream.ndim:
        return None
    for dim in range(1, read.ndim + 1):
        if read.shape[-dim] > stream.shape[-dim]:
            read = read.narrow(read.ndim - dim, 0, stream.shape[-dim])
    fits = all(rows in (1, stream.shape[-1 - i]) for i, rows in enumerate(reversed(read.shape)))
    return read if fits else None


def broadcasts(written: Tensor, stream: Tensor) -> bool:
    """Return whether a value can be added to a stream without changing its shape."""
    sizes = zip(reversed(written.shape), reversed(stream.shape), strict=False)
    return written.ndim <= stream.ndim and all(own in (1, rows) for own, rows in sizes)
