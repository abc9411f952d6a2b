"""Recording one forward pass: h, the inputs of chosen modules, and the response to noise at their outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.utils import _pytree as pytree

from splitfg.errors import SplitError
from splitfg.sites._taps import Arguments, tapped
from splitfg.splitting import Split, explained
from splitfg.splitting.checks import skip_checks
from splitfg.tangents import row_noise
from splitfg.types import Inputs

Calls: TypeAlias = Mapping[str, Sequence[Tensor]]
"""From a module's name to a tensor for every call of it."""

Draw: TypeAlias = Callable[[str, Tensor], Tensor]
"""From a module's name and output to noise of the output's shape."""


@dataclass(frozen=True)
class TapPoints:
    """The modules of a trunk that a recorded pass taps.

    Attributes:
        read: Modules whose inputs are recorded.
        moved: Modules whose outputs get noise.
        top: The module whose input is the response to that noise; ``None`` for h.
        called: Modules whose further arguments are recorded.
        over_pixels: Draw one number for all pixels of a channel, rather than one for every pixel.
    """

    read: tuple[str, ...]
    moved: tuple[str, ...] = ()
    top: str | None = None
    called: tuple[str, ...] = ()
    over_pixels: bool = False

    def moved_part(self, z: Tensor) -> Tensor:
        """Return the part of a moved output that has the shape of its noise."""
        return z[..., :1, :1] if self.over_pixels and z.ndim == 4 else z


@dataclass(frozen=True)
class Recording:
    """The result of a recorded pass.

    Attributes:
        h: The representation.
        reads: Inputs of the read modules, one for every call.
        wrote: Shapes of their outputs, likewise.
        noise: Unit noise e added to the outputs of the moved modules, one for every call.
        response: J e, the change of the top's input to first order in all noise together; ``None`` without noise.
        further: Arguments of the called modules after the first, one entry for every call.
    """

    h: Tensor
    reads: Calls
    wrote: Mapping[str, Sequence[torch.Size]]
    noise: Calls
    response: Tensor | None
    further: Mapping[str, Sequence[Arguments]] = field(default_factory=dict)


class Recorder(Protocol):
    """Runs a trunk once and records the pass."""

    def __call__(self, split: Split, x: Inputs, points: TapPoints, generator: torch.Generator | None) -> Recording:
        """Record one pass; noise is drawn from the generator in the order in which modules are called."""


def record(split: Split, x: Inputs, points: TapPoints, generator: torch.Generator | None) -> Recording:
    """Record one pass in eager code. Forward mode carries the noise along, so the trunk runs once."""

    def draw(_: str, like: Tensor) -> Tensor:
        return row_noise(like, generator)

    run = partial(split.trunk_function(x), {})
    if skip_checks() or not points.moved:
        return record_run(split.trunk, run, points, draw)
    with explained(split, x):
        return record_run(split.trunk, run, points, draw)


def record_run(trunk: nn.Module, run: Callable[[], Tensor], points: TapPoints, draw: Draw) -> Recording:
    """Record a call of ``run``, which must run the trunk once.

    All noise is one direction, so the derivative is by one number t: moved modules write z + t e, at t = 0.
    """
    wrote: dict[str, list[torch.Size]] = defaultdict(list)

    def f(t: Tensor | None) -> tuple[Tensor, tuple[Tensor, Calls, Calls, Mapping[str, Sequence[Arguments]]]]:
        reads: dict[str, list[Tensor]] = defaultdict(list)
        noise: dict[str, list[Tensor]] = defaultdict(list)
        further: dict[str, list[Arguments]] = defaultdict(list)
        tops: list[Tensor] = []

        def keep(name: str, arguments: Arguments) -> None:
            if name in points.called:
                further[name].append(pytree.tree_map_only(Tensor, Tensor.detach, arguments))

        def tap(name: str, a: Tensor, z: Tensor) -> Tensor | None:
            if name == points.top:
                tops.append(a)
            if name in points.read:
                if not isinstance(a, Tensor) or not isinstance(z, Tensor):
                    raise SplitError([f"{name} takes or returns several values: name modules that map a tensor to one"])
                reads[name].append(a.detach())  # without its tangent
                wrote[name].append(z.shape)
            if t is None or name not in points.moved:
                return None
            noise[name].append(draw(name, points.moved_part(z)))
            return z + t * noise[name][-1]

        with tapped(trunk, _each(points), tap, arguments=keep if points.called else None):
            h = run()
        return (tops[0] if tops else h), (h, dict(reads), dict(noise), dict(further))

    if not points.moved:
        _, (h, reads, _, further) = f(None)
        return Recording(h, reads, wrote, {}, None, further)
    p = next(p for p in trunk.parameters() if p.is_floating_point())
    still = torch.zeros((), dtype=p.dtype, device=p.device)
    _, response, kept = jvp(f, (still,), (torch.ones_like(still),), has_aux=True)  # type: ignore[misc]
    h, reads, noise, further = kept
    return Recording(h, reads, wrote, noise, response, further)


def _each(points: TapPoints) -> Collection[str]:
    top = () if points.top is None else (points.top,)
    return dict.fromkeys((*points.read, *points.moved, *points.called, *top))
