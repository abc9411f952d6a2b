"""One pass of a trunk: h, what its modules read on the way, and how far noise on what they write moves the top."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import jvp

from splitfg._split import Split
from splitfg._validate import skip_checks
from splitfg.estimators._push import explained
from splitfg.sites import tapped
from splitfg.types import Inputs

Calls: TypeAlias = Mapping[str, Sequence[Tensor]]
"""From a module's name to a tensor for every call of it."""

Draw: TypeAlias = Callable[[str, Tensor], Tensor]
"""From a module's name and what it wrote to noise of that shape."""


@dataclass(frozen=True)
class Sites:
    """Which modules of a trunk are looked at.

    Attributes:
        read: Those whose inputs are kept.
        moved: Those whose outputs get noise.
        top: The one whose input is what noise moves; ``None`` for h.
    """

    read: tuple[str, ...]
    moved: tuple[str, ...] = ()
    top: str | None = None


@dataclass(frozen=True)
class Seen:
    """What a pass showed.

    Attributes:
        h: The representation.
        reads: What modules read.
        wrote: The shapes of what they wrote, likewise.
        noise: Unit noise e on what the moved ones wrote, by call.
        response: How far all of it together moves the top, J e to first order; ``None`` where nothing was moved.
    """

    h: Tensor
    reads: Calls
    wrote: Mapping[str, Sequence[torch.Size]]
    noise: Calls
    response: Tensor | None


class Look(Protocol):
    """Runs a trunk once."""

    def __call__(self, split: Split, x: Inputs, sites: Sites, generator: torch.Generator | None) -> Seen:
        """What there is to see; noise is drawn from the generator in the order in which modules write."""


def look(split: Split, x: Inputs, sites: Sites, generator: torch.Generator | None) -> Seen:
    """As :class:`Look` says. Noise rides along with the pass by forward mode: nothing is run twice."""

    def draw(_: str, like: Tensor) -> Tensor:
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)

    run = partial(split.trunk_function(x), {})
    if skip_checks() or not sites.moved:
        return observe(split.trunk, run, sites, draw)
    with explained(split, x):
        return observe(split.trunk, run, sites, draw)


def observe(trunk: nn.Module, run: Callable[[], Tensor], sites: Sites, draw: Draw) -> Seen:
    """The pass itself: what ``run`` gives, what the taps saw, and the derivative along the noise.

    All noise is one direction, so the derivative is by one number t: what is moved writes z + t e, at t = 0.
    """
    wrote: dict[str, list[torch.Size]] = defaultdict(list)

    def f(t: Tensor | None) -> tuple[Tensor, tuple[Tensor, Calls, Calls]]:
        reads: dict[str, list[Tensor]] = defaultdict(list)
        noise: dict[str, list[Tensor]] = defaultdict(list)
        tops: list[Tensor] = []

        def tap(name: str, a: Tensor, z: Tensor) -> Tensor | None:
            if name == sites.top:
                tops.append(a)
            if name in sites.read:
                reads[name].append(a.detach())  # without its tangent
                wrote[name].append(z.shape)
            if t is None or name not in sites.moved:
                return None
            noise[name].append(draw(name, z))
            return z + t * noise[name][-1]

        with tapped(trunk, _each(sites), tap):
            h = run()
        return (tops[0] if tops else h), (h, dict(reads), dict(noise))

    if not sites.moved:
        _, (h, reads, _) = f(None)
        return Seen(h, reads, wrote, {}, None)
    p = next(p for p in trunk.parameters() if p.is_floating_point())
    still = torch.zeros((), dtype=p.dtype, device=p.device)
    _, response, (h, reads, noise) = jvp(f, (still,), (torch.ones_like(still),), has_aux=True)  # type: ignore[misc]
    return Seen(h, reads, wrote, noise, response)


def _each(sites: Sites) -> Collection[str]:
    return dict.fromkeys((*sites.read, *sites.moved, *(() if sites.top is None else (sites.top,))))
