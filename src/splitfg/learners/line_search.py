"""A trunk step that finds its own size: a forward-only line search along the optimizer's update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp

from splitfg.engines import ForwardMode
from splitfg.errors import raise_if, shorten
from splitfg.splitting import Role, Split
from splitfg.types import Engine, Inputs, Params, Target


@dataclass(frozen=True)
class Slope:
    """The loss along a direction D of the trunk's parameters, L(θ + s D) ≈ L - descent s + curvature s² / 2.

    Attributes:
        descent: -<u, J D>; one number for every direction where there are several.
        curvature: d²/ds² of the loss of the head at h + s J D. For a head with linear outputs this is the Gauss-Newton
            curvature Dᵀ Jᵀ H J D.
    """

    descent: Tensor
    curvature: Tensor


def slope_along(split: Split, x: Inputs, y: Target, direction: Params, *, engine: Engine | None = None) -> Slope:
    """Measure descent and curvature of a batch's loss along a direction, with one Jacobian-vector product.

    Args:
        split: The network.
        x: Inputs.
        y: Target.
        direction: D, by parameter name.
        engine: How J D is found; forward mode by default.

    Example:
        >>> import torch
        >>> from splitfg.learners import slope_along
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> direction = {name: torch.ones_like(p) for name, p in split.trunk_params().items()}
        >>> bool(slope_along(split, x, y, direction).curvature >= 0)
        True
    """
    slopes = slopes_along(split, x, y, [direction], engine=engine)
    return Slope(slopes.descent[0], slopes.curvature[0, 0])


def slopes_along(
    split: Split, x: Inputs, y: Target, directions: Sequence[Params], *, engine: Engine | None = None
) -> Slope:
    """Measure descents and curvatures of a batch's loss along G directions, with G Jacobian-vector products.

    L(θ + Σ_g s_g D_g) ≈ L - Σ_g d_g s_g + Σ_gh s_g C_gh s_h / 2. The head is differentiated G (G + 1) / 2 times.

    Args:
        split: The network.
        x: Inputs.
        y: Target.
        directions: D_g by parameter name; parameters that a direction does not name stay.
        engine: How J D is found; forward mode by default.

    Returns:
        Descents d, shape ``(G,)``, and curvatures C, shape ``(G, G)``.

    Example:
        >>> import torch
        >>> from splitfg.learners import slopes_along
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> parts = [{name: torch.ones_like(p)} for name, p in split.trunk_params().items()]
        >>> slopes_along(split, x, y, parts).curvature.shape
        torch.Size([4, 4])
    """
    with torch.no_grad():
        own = split.trunk_params()
        names = list(dict.fromkeys(name for direction in directions for name in direction))
        tangents = {n: torch.stack([d.get(n, torch.zeros_like(own[n])) for d in directions]) for n in names}
        f, params = split.trunk_function(x), {n: own[n] for n in names}
        h, dh = (engine or ForwardMode())(f, params, tangents)
        descent, curvature = h.new_zeros(len(directions)), h.new_zeros(len(directions), len(directions))
        for a in range(len(directions)):
            for b in range(a + 1):
                first, second = _derivatives(split, h, y, dh[a], dh[b])
                curvature[a, b] = curvature[b, a] = second
            descent[a] = -first
    return Slope(descent, curvature)


def _derivatives(split: Split, h: Tensor, y: Target, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return d/ds and d²/dsdt of the head's loss at h + s a + t b."""
    normaliser, head = split.head.normaliser(h, y), split.head.params()
    zero, one = h.new_zeros(()), h.new_ones(())

    def slope(t: Tensor) -> Tensor:
        change: Tensor = jvp(lambda s: split.head.loss(head, h + s * a + t * b, y, normaliser), (zero,), (one,))[1]
        return change

    first, second = jvp(slope, (zero,), (one,))  # type: ignore[misc]
    return first, second


@dataclass(frozen=True)
class LineSearch:
    """Scales the trunk's update by the step that minimises the loss along it, averaged over steps.

    The optimizer steps at the head's learning rate (build it with rho = 1); D is the trunk's part of that step,
    without the schedule's factor. The trunk waits for the next batch, which D does not depend on, and then moves by
    rho D. With the descent d and the Gauss-Newton curvature c of that batch along D, by :func:`slope_along`,

        rho = min(cap, E[d] / E[c]),

    with running means E; a negative rho is zero. The factor of a schedule multiplies the trunk's step as before.

    With G groups of parameters, each has a rho of its own: all of them together minimise the quadratic
    -Σ_g E[d_g] rho_g + Σ_gh rho_g E[C_gh] rho_h / 2 over 0 ≤ rho_g ≤ cap, so that groups that move the same outputs do
    not do so twice.

    G Jacobian-vector products a step; no backward pass. The last step of a training waits for ever.

    The ratio is the best for a single step. Where an update is mostly noise, that is less than what serves a whole
    training: noise of many steps averages out, while the ratio charges each step for its own.

    Args:
        beta: Decay rate of the running means.
        cap: Largest rho.
        engine: How J D is found.
        groups: Glob patterns of parameter names. A parameter belongs to the first that matches; those that none matches
            are a further group. Without patterns there is one group.

    Example:
        >>> import torch
        >>> import splitfg
        >>> from splitfg.recipes import Adam
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> learner = splitfg.GradientLearner(
        ...     split, splitfg.SplitFG(K=2), Adam(lr=1e-2).build(split), line_search=splitfg.LineSearch()
        ... )
        >>> stats = [learner.step(x, y, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        >>> 0 <= stats[-1].metrics["rho"] <= 3
        tensor(True)
    """

    beta: float = 0.97
    cap: float = 3.0
    engine: Engine = field(default_factory=ForwardMode)
    groups: tuple[str, ...] = ()
    _state: Params = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        found = [] if 0 <= self.beta < 1 else [f"beta must be in [0, 1), got {self.beta}"]
        raise_if(found + ([] if self.cap > 0 else [f"cap must be positive, got {self.cap}"]))

    @property
    def rho(self) -> Tensor:
        """The scale of the next step, one for every group if there are several; zero before the first measurement."""
        found = self._state.get("rho", torch.zeros(1))
        return found[0] if len(found) == 1 else found

    def metrics(self) -> dict[str, Tensor]:
        """Return the scales by name, for logs."""
        rho = self.rho.clone()
        return {"rho": rho} if rho.ndim == 0 else {f"rho/{i}": part for i, part in enumerate(rho.unbind())}

    def advance(self, split: Split, x: Inputs, y: Target) -> None:
        """Measure a batch along the waiting step, set rho, and take the step."""
        state, grouped = self._prepared(split), self._grouped(split)
        directions = [{n: state[f"step/{n}"] for n in names} for names in grouped]
        slopes = slopes_along(split, x, y, directions, engine=self.engine)
        factor, diagonal = state["factor"], slopes.curvature.diagonal()
        diagonal.clamp_(min=0)
        found = {"descent": slopes.descent / factor, "curvature": slopes.curvature / factor**2}
        for name, value in found.items():
            state[name].lerp_(value.to(state[name].dtype), 1 - self.beta)
        state["rho"].copy_(_minimiser(state["descent"], state["curvature"], self.cap))
        params = dict(split.model.named_parameters())
        with torch.no_grad():
            for rho, names in zip(state["rho"], grouped, strict=True):
                for n in names:
                    params[n].addcmul_(rho.to(params[n].dtype), state[f"step/{n}"])

    @contextmanager
    def waiting(self, split: Split, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Take the trunk's part out of the optimizer's step in the body, and keep it for the next batch."""
        state, params = self._prepared(split), dict(split.model.named_parameters())
        names = self._names(split)
        before = {n: params[n].detach().clone() for n in names}
        yield
        with torch.no_grad():
            for n in names:
                torch.sub(params[n], before[n], out=state[f"step/{n}"])
                params[n].copy_(before[n])
            state["factor"].copy_(_factor(optimizer, params[names[0]]))

    def state_dict(self) -> dict[str, Tensor]:
        """Return rho, the running means and the waiting step."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        self._state.clear()
        for name, value in state.items():
            old = name in ("rho", "descent", "curvature") and value.ndim == 0  # saved before there were groups
            self._state[name] = value.clone().reshape((1, 1) if name == "curvature" else (1,)) if old else value.clone()

    def _grouped(self, split: Split) -> list[list[str]]:
        """Return the names of every group's parameters, without empty groups.

        Raises:
            SplitError: A pattern matches no parameter that another does not take first.
        """
        left, found = self._names(split), []
        for pattern in self.groups:
            found.append([n for n in left if fnmatchcase(n, pattern)])
            left = [n for n in left if n not in found[-1]]
        raise_if(
            [
                f"groups: {pattern!r} matches no parameter that is left, of {shorten(self._names(split))}"
                for pattern, names in zip(self.groups, found, strict=True)
                if not names
            ]
        )
        return [*found, left] if left else found

    def _names(self, split: Split) -> list[str]:
        return [name for name, role in split.roles.items() if role is Role.TRUNK]

    def _prepared(self, split: Split) -> Params:
        """Return the state, on the network's device; begin with a step of zero."""
        params, names = split.trunk_params(), self._names(split)
        raise_if([] if names else ["the trunk has no trained parameter of its own, so there is no step to scale"])
        like = params[names[0]]
        if "rho" not in self._state:
            count = len(self._grouped(split))
            shapes = {"rho": (count,), "descent": (count,), "curvature": (count, count)}
            made = {name: torch.zeros(shape, dtype=like.dtype, device=like.device) for name, shape in shapes.items()}
            self._state.update(made)
            self._state["factor"] = torch.ones((), dtype=like.dtype, device=like.device)
            self._state.update({f"step/{n}": torch.zeros_like(params[n]) for n in names})
        elif self._state["rho"].device != like.device:  # a checkpoint is read to the CPU
            self._state.update({name: value.to(like.device) for name, value in self._state.items()})
        return self._state


_SWEEPS = 20
"""Rounds of coordinate descent: enough for a few groups."""


def _minimiser(descent: Tensor, curvature: Tensor, cap: float) -> Tensor:
    """Return the minimiser of -d·ρ + ρᵀCρ / 2 over the box 0 ≤ ρ ≤ cap, by coordinate descent."""
    rho = torch.zeros_like(descent)
    own = curvature.diagonal().clamp_min(torch.finfo(descent.dtype).tiny)
    for _ in range(_SWEEPS if len(descent) > 1 else 1):
        for g in range(len(descent)):
            rest = descent[g] - curvature[g] @ rho + curvature[g, g] * rho[g]
            rho[g] = (rest / own[g]).clamp(0, cap)
    return rho


def _factor(optimizer: torch.optim.Optimizer, like: Tensor) -> Tensor:
    """Return the schedule's present factor: that of the first group, whose rates all share it."""
    group = optimizer.param_groups[0]
    lr, full = group["lr"], group.get("initial_lr")
    found = lr / full if full else like.new_ones(())
    return torch.as_tensor(found, dtype=like.dtype, device=like.device).clamp_min(1e-6)
