"""A trunk step that finds its own size: a forward-only line search along the optimizer's update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor

from splitfg.engines import ForwardMode
from splitfg.errors import raise_if, shorten
from splitfg.estimators import Measure
from splitfg.learners.slopes import Slope, best_scales, slopes_along
from splitfg.splitting import Role, Split
from splitfg.types import Engine, Inputs, Params, Target

MeanOverRows: TypeAlias = Callable[[Measure, Inputs, Target, int], Tensor]
SlopesAlong: TypeAlias = Callable[[Sequence[Params]], Slope]


@dataclass(frozen=True)
class LineSearch:
    """Chooses the trunk's step scale rho from the slope and curvature of the loss along the trunk's updates.

    The optimizer steps at the head's learning rate (build it with rho = 1); D is the trunk's part of that step,
    without the schedule's factor. The learner keeps D until the next batch, which D does not depend on, and then moves
    the trunk by rho D. :func:`~splitfg.learners.slope_along` measures the descent d and the Gauss-Newton curvature
    c of that batch along a direction, with one Jacobian-vector product. No backward pass.

    The first steps use the best scale of a single one,

        rho = min(cap, E[d] / E[c]),

    with running means E; a negative rho is zero. Where an update is mostly noise, this ratio is too small for a whole
    training: noise of many steps averages out, while the ratio charges each step for its own. So later steps look back,
    along the decayed sum of past moves P ← h P + rho D: after a positive descent longer steps would have been better,
    after a negative one shorter steps,

        rho ← rho exp(clip(E[d_P] / E[c_P], -1, 1) / 10),

    beginning at cap / 1000 where the ratio is zero. With a ``horizon`` of 0, all steps use the ratio of single ones.

    With G groups of parameters, each has a rho of its own. All of them together minimise the quadratic
    -Σ_g E[d_g] s_g + Σ_gh s_g E[C_gh] s_h / 2, over 0 ≤ s ≤ cap for single steps and -1 ≤ s ≤ 1 for past moves, so that
    groups that move the same outputs do not do so twice; a step takes G Jacobian-vector products.

    The factor of a schedule multiplies the trunk's step as before. A measurement that is not finite leaves rho and the
    means as they are. The trunk never takes the last update of a training.

    Args:
        beta: Decay rate of the running means.
        cap: Largest rho.
        engine: How J D is found.
        groups: Glob patterns of parameter names. A parameter belongs to the first that matches; those that none matches
            are a further group. Without patterns there is one group.
        horizon: h: 0.99 looks back over about 100 steps; 0 uses the ratio of single steps.

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
    horizon: float = 0.99
    _state: Params = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        found = [] if 0 <= self.beta < 1 else [f"beta must be in [0, 1), got {self.beta}"]
        found += [] if self.cap > 0 else [f"cap must be positive, got {self.cap}"]
        found += [] if 0 <= self.horizon < 1 else [f"horizon must be in [0, 1), got {self.horizon}"]
        given: object = self.groups
        found += [f"groups is {given!r}: give a tuple of patterns, ({given!r},)"] if isinstance(given, str) else []
        raise_if(found)

    @property
    def rho(self) -> Tensor:
        """The scale of the next step, one for every group if there are several; zero before the first measurement."""
        found = self._state.get("rho", torch.zeros(1))
        return found[0] if len(found) == 1 else found

    def metrics(self) -> dict[str, Tensor]:
        """Return the scales by name, for logs."""
        rho = self.rho.clone()
        return {"rho": rho} if rho.ndim == 0 else {f"rho/{i}": part for i, part in enumerate(rho.unbind())}

    def advance(self, split: Split, x: Inputs, y: Target, *, mean: MeanOverRows | None = None) -> None:
        """Measure a batch along the waiting step, or along past ones, set rho, and take the step.

        Args:
            split: The network.
            x: Inputs.
            y: Target.
            mean: Averages the measurement over processes with other rows.
        """
        state, grouped = self._prepared(split), self._grouped(split)

        def slopes(directions: Sequence[Params]) -> Slope:
            return self._slopes(split, x, y, directions, mean)

        if self.horizon:
            self._look_back(slopes, state, grouped)
        else:
            self._look_ahead(slopes, state, grouped)
        params = dict(split.model.named_parameters())
        with torch.no_grad():
            for rho, names in zip(state["rho"], grouped, strict=True):
                for n in names:
                    step = state[f"step/{n}"]
                    params[n].addcmul_(rho.to(params[n].dtype), step)
                    if self.horizon:
                        state[f"past/{n}"].mul_(self.horizon).addcmul_(rho.to(params[n].dtype), step)
                    step.zero_()  # taken: an error before the next one must not repeat it

    def _slopes(
        self, split: Split, x: Inputs, y: Target, directions: Sequence[Params], mean: MeanOverRows | None
    ) -> Slope:
        """Return descents and curvatures, of the rows of all processes if several share the batch."""
        if mean is None:
            return slopes_along(split, x, y, directions, engine=self.engine)
        count = len(directions)

        def measured(x: Inputs, y: Target) -> Tensor:
            own = slopes_along(split, x, y, directions, engine=self.engine)
            return torch.cat([own.descent, own.curvature.flatten()])

        found = mean(measured, x, y, count + count**2)
        return Slope(found[:count], found[count:].reshape(count, count))

    def _look_ahead(self, measure: SlopesAlong, state: Params, grouped: list[list[str]]) -> None:
        """Set rho to the best scale of the waiting step."""
        slopes = measure([{n: state[f"step/{n}"] for n in names} for names in grouped])
        factor, diagonal = state["factor"], slopes.curvature.diagonal()
        diagonal.clamp_(min=0)
        share = (1 - self.beta) * _finite(slopes)
        found = {"descent": slopes.descent / factor, "curvature": slopes.curvature / factor**2}
        for name, value in found.items():
            _average(state[name], value, share)
        state["rho"].copy_(best_scales(state["descent"], state["curvature"], most=self.cap))

    def _look_back(self, measure: SlopesAlong, state: Params, grouped: list[list[str]]) -> None:
        """Set rho to the best scale of the waiting step at first, and later change it by the slope along past moves."""
        early = state["taken"] < _EARLY  # on the device: a captured step runs the same operations every time
        slopes = measure(
            [{n: torch.where(early, state[f"step/{n}"], state[f"past/{n}"]) for n in names} for names in grouped]
        )
        slopes.curvature.diagonal().clamp_(min=0)
        factor = torch.where(early, state["factor"], torch.ones_like(state["factor"]))
        for kind, weight in (("", early), ("past ", ~early)):
            share = (1 - self.beta) * (weight & _finite(slopes))
            _average(state[f"{kind}descent"], slopes.descent / factor, share)
            _average(state[f"{kind}curvature"], slopes.curvature / factor**2, share)
        ahead = best_scales(state["descent"], state["curvature"], most=self.cap)
        change = best_scales(state["past descent"], state["past curvature"], least=-1, most=1)
        rho = torch.where(state["rho"] > 0, state["rho"], _LEAST * self.cap)  # factors do not change a zero
        back = (rho * torch.exp(_PACE * change)).clamp(0, self.cap)
        state["rho"].copy_(torch.where(early, ahead, back))
        state["taken"] += 1

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
        """Return the state, on the network's device; steps begin at zero.

        Raises:
            SplitError: The trunk has no trained parameter, or the state is that of a search with other settings.
        """
        params, names = split.trunk_params(), self._names(split)
        raise_if([] if names else ["the trunk has no trained parameter of its own, so there is no step to scale"])
        like, groups = params[names[0]], len(self._grouped(split))
        if "rho" not in self._state:
            self._begin(groups, like)
        elif self._state["rho"].device != like.device:  # a checkpoint is read to the CPU
            self._state.update({name: value.to(like.device) for name, value in self._state.items()})
        raise_if(self._state_problems(groups))
        keys = {f"{kind}/{n}": n for kind in (("step", "past") if self.horizon else ("step",)) for n in names}
        self._state.update({key: torch.zeros_like(params[n]) for key, n in keys.items() if key not in self._state})
        return self._state

    def _begin(self, groups: int, like: Tensor) -> None:
        shapes: dict[str, tuple[int, ...]] = {"rho": (groups,), "descent": (groups,), "curvature": (groups, groups)}
        if self.horizon:
            shapes |= {"past descent": (groups,), "past curvature": (groups, groups), "taken": ()}
        made = {name: torch.zeros(shape, dtype=like.dtype, device=like.device) for name, shape in shapes.items()}
        self._state.update({**made, "factor": torch.ones((), dtype=like.dtype, device=like.device)})

    def _state_problems(self, groups: int) -> list[str]:
        """List the settings that a restored state does not fit."""
        count = len(self._state["rho"])
        found = [] if count == groups else [f"the line search has {groups} groups of parameters, its state {count}"]
        if self.horizon and "taken" not in self._state:
            found.append("the line search has a horizon, and its state is that of a search without one")
        return [
            f"{problem}: resume with the settings of the checkpoint, or begin with a new LineSearch"
            for problem in found
        ]


_EARLY = 11
"""Steps that a search with a horizon takes by the ratio of single ones; the first one has no length."""

_LEAST = 1e-3
"""Where a search with a horizon begins, as a share of the cap, if single steps find no descent."""

_PACE = 0.1
"""How far one measurement along past moves changes the logarithm of rho, at most."""


def _finite(slope: Slope) -> Tensor:
    """Return whether a measurement is finite, on its device."""
    return slope.descent.isfinite().all() & slope.curvature.isfinite().all()


def _average(mean: Tensor, value: Tensor, share: Tensor) -> None:
    """Move a running mean by a share of the way to a value, in place; not at all for a share of zero."""
    mean.copy_(torch.where(share > 0, mean + share.to(mean.dtype) * (value.to(mean.dtype) - mean), mean))


def _factor(optimizer: torch.optim.Optimizer, like: Tensor) -> Tensor:
    """Return the schedule's present factor: that of the first group, whose rates all share it."""
    group = optimizer.param_groups[0]
    lr, full = group["lr"], group.get("initial_lr")
    found = lr / full if full else like.new_ones(())
    return torch.as_tensor(found, dtype=like.dtype, device=like.device).clamp_min(1e-6)
