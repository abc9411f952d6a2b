"""A trunk step that finds its own size: a forward-only line search along the optimizer's update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp

from splitfg.engines import ForwardMode
from splitfg.errors import raise_if
from splitfg.splitting import Role, Split
from splitfg.types import Engine, Inputs, Params, Target


@dataclass(frozen=True)
class Slope:
    """The loss along a direction D of the trunk's parameters, L(θ + s D) ≈ L - descent s + curvature s² / 2.

    Attributes:
        descent: -<u, J D>.
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
    with torch.no_grad():
        own = split.trunk_params()
        params = {name: own[name] for name in direction}
        tangents = {name: d[None] for name, d in direction.items()}
        h, dh = (engine or ForwardMode())(split.trunk_function(x), params, tangents)
        normaliser, head = split.head.normaliser(h, y), split.head.params()
        zero, one = h.new_zeros(()), h.new_ones(())

        def loss(s: Tensor) -> Tensor:
            return split.head.loss(head, h + s * dh[0], y, normaliser)

        def slope(s: Tensor) -> Tensor:
            change: Tensor = jvp(loss, (s,), (one,))[1]
            return change

        first, second = jvp(slope, (zero,), (one,))  # type: ignore[misc]
    return Slope(-first, second)


@dataclass(frozen=True)
class LineSearch:
    """Scales the trunk's update by the step that minimises the loss along it, averaged over steps.

    The optimizer steps at the head's learning rate (build it with rho = 1); D is the trunk's part of that step,
    without the schedule's factor. The trunk waits for the next batch, which D does not depend on, and then moves by
    rho D. With the descent d and the Gauss-Newton curvature c of that batch along D, by :func:`slope_along`,

        rho = min(cap, E[d] / E[c]),

    with running means E; a negative rho is zero. The factor of a schedule multiplies the trunk's step as before.

    One Jacobian-vector product a step; no backward pass. The last step of a training waits for ever.

    Args:
        beta: Decay rate of the running means.
        cap: Largest rho.
        engine: How J D is found.

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
    _state: Params = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        found = [] if 0 <= self.beta < 1 else [f"beta must be in [0, 1), got {self.beta}"]
        raise_if(found + ([] if self.cap > 0 else [f"cap must be positive, got {self.cap}"]))

    @property
    def rho(self) -> Tensor:
        """The scale of the next step; zero before the first measurement."""
        return self._state.get("rho", torch.zeros(()))

    def advance(self, split: Split, x: Inputs, y: Target) -> None:
        """Measure a batch along the waiting step, set rho, and take the step."""
        state, names = self._prepared(split), self._names(split)
        slope = slope_along(split, x, y, {n: state[f"step/{n}"] for n in names}, engine=self.engine)
        factor = state["factor"]
        found = {"descent": slope.descent / factor, "curvature": slope.curvature.clamp_min(0) / factor**2}
        for name, value in found.items():
            state[name].lerp_(value.to(state[name].dtype), 1 - self.beta)
        rho = state["descent"] / state["curvature"].clamp_min(torch.finfo(factor.dtype).tiny)
        state["rho"].copy_(rho.clamp(0, self.cap))
        params = dict(split.model.named_parameters())
        with torch.no_grad():
            for n in names:
                params[n].addcmul_(state["rho"].to(params[n].dtype), state[f"step/{n}"])

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
        self._state.update({name: value.clone() for name, value in state.items()})

    def _names(self, split: Split) -> list[str]:
        return [name for name, role in split.roles.items() if role is Role.TRUNK]

    def _prepared(self, split: Split) -> Params:
        """Return the state, on the network's device; begin with a step of zero."""
        params, names = split.trunk_params(), self._names(split)
        raise_if([] if names else ["the trunk has no trained parameter of its own, so there is no step to scale"])
        like = params[names[0]]
        if "rho" not in self._state:
            scalars = ("rho", "descent", "curvature")
            self._state.update({name: torch.zeros((), dtype=like.dtype, device=like.device) for name in scalars})
            self._state["factor"] = torch.ones((), dtype=like.dtype, device=like.device)
            self._state.update({f"step/{n}": torch.zeros_like(params[n]) for n in names})
        elif self._state["rho"].device != like.device:  # a checkpoint is read to the CPU
            self._state.update({name: value.to(like.device) for name, value in self._state.items()})
        return self._state


def _factor(optimizer: torch.optim.Optimizer, like: Tensor) -> Tensor:
    """Return the schedule's present factor: that of the first group, whose rates all share it."""
    group = optimizer.param_groups[0]
    lr, full = group["lr"], group.get("initial_lr")
    found = lr / full if full else like.new_ones(())
    return torch.as_tensor(found, dtype=like.dtype, device=like.device).clamp_min(1e-6)
