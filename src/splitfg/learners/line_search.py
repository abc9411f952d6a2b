"""A trunk step that finds its own size: rho is learned during training, forward only."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from splitfg.compiled import Compile, with_compiled_tangents
from splitfg.engines import ForwardMode
from splitfg.errors import raise_if, shorten
from splitfg.estimators import Measure
from splitfg.learners.slopes import descents_along
from splitfg.splitting import Role, Split
from splitfg.types import Engine, Inputs, Params, Target

MeanOverRows: TypeAlias = Callable[[Measure, Inputs, Target, int], Tensor]


@dataclass(frozen=True)
class LineSearch:
    """Learns the trunk's step scale rho along with the network, with one Jacobian-vector product a step.

    The optimizer steps at the head's learning rate (build it with rho = 1); D_i is the trunk's part of step i. The
    trunk's parameters are

        θ = θ_0 + rho (D_1 + ... + D_t),

    so that rho scales past steps as well as the next one, and the loss is a function of rho. Its descent in log rho,

        d = -dL / d log rho = -<u, J (θ - θ_0)>,

    is positive if longer steps would have been better all along, and negative if shorter ones would. The search
    measures it on every batch before the step on that batch, so that in the first epoch no earlier step has used the
    batch. Then

        log rho ← log rho + f clip(d / rms(d), -1, 1) / sqrt(calm + t),

    with a running root mean square over about 30 measurements, and the factor f of the learner's schedule at the last
    step; rho is at least 0.0001 and at most ``cap``.

    A search along single steps, or along the last hundred, chooses steps that are too short: it measures mostly the
    noise of these steps, most of which averages out over a training. The path from θ_0 is the sum of all steps. It is
    short at first, so rho changes slowly for the first thousand measurements: on a GPT, a search that was three times
    faster cut rho to a thirtieth within as many steps, and raised it again too late.

    A measurement that is not finite leaves rho as it is. The search follows one network, and keeps a copy of its θ_0.
    Parameters in half precision round small changes away, so that they follow the formula for θ only roughly.

    Args:
        cap: Largest rho.
        engine: Computes J (θ - θ_0).
        groups: Glob patterns of parameter names. A parameter belongs to the first that matches; those that none matches
            are a further group. Each group has a rho of its own and takes a Jacobian-vector product of its own. Without
            patterns there is one group.
        start: rho of the first step, unless ``cap`` is smaller; 1 is the head's step.
        calm: Number of measurements over which rho changes at a constant pace, by at most 1/sqrt(calm) of itself each
            time; more slowly after them.

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
        >>> 0 < stats[-1].metrics["rho"] <= 3
        tensor(True)
    """

    cap: float = 3.0
    engine: Engine = field(default_factory=ForwardMode)
    groups: tuple[str, ...] = ()
    start: float = 1.0
    calm: int = 1000
    _state: Params = field(default_factory=dict, repr=False)
    _owner: _Owner = field(default_factory=lambda: _Owner(), repr=False, compare=False)

    def __post_init__(self) -> None:
        found = [] if self.cap > 0 else [f"cap must be positive, got {self.cap}"]
        found += [] if self.start > 0 else [f"start must be positive, got {self.start}"]
        found += [] if self.calm >= 0 else [f"calm must not be negative, got {self.calm}"]
        given: object = self.groups
        found += [f"groups is {given!r}: give a tuple of patterns, ({given!r},)"] if isinstance(given, str) else []
        raise_if(found)

    @property
    def rho(self) -> Tensor:
        """The scale of the next step, one for every group if there are several."""
        found = self._state.get("rho", torch.full((1,), min(self.start, self.cap)))
        return found[0] if len(found) == 1 else found

    @property
    def jvps(self) -> int:
        """Jacobian-vector products of a measurement, one for every group; zero before the first."""
        return len(self._state.get("rho", ()))

    def metrics(self) -> dict[str, Tensor]:
        """Return the scales by name, for logs."""
        rho = self.rho.clone()
        return {"rho": rho} if rho.ndim == 0 else {f"rho/{i}": part for i, part in enumerate(rho.unbind())}

    def compiled(self, split: Split, compile_: Compile) -> tuple[Split, LineSearch]:
        """Return a network and a search that measures it in compiled code; the two searches share their state."""
        fast, engine = with_compiled_tangents(split, self.engine, compile_)
        return fast, replace(self, engine=engine)

    def advance(self, split: Split, x: Inputs, y: Target, *, mean: MeanOverRows | None = None) -> None:
        """Measure a batch along the trunk's path, change rho, and scale the path with it.

        Args:
            split: The network.
            x: Inputs.
            y: Target.
            mean: Averages the measurement over processes with other rows.
        """
        (state, grouped), params = self._prepared(split), dict(split.model.named_parameters())
        with torch.no_grad():
            paths = [{n: params[n] - state[f"start/{n}"] for n in names} for names in grouped]
            growth = self._growth(self._descents(split, x, y, paths, mean))
            for share, path in zip(growth, paths, strict=True):
                for n, moved in path.items():
                    params[n].addcmul_(share.to(moved.dtype), moved)

    def _growth(self, descents: Tensor) -> Tensor:
        """Change rho by a measurement, and return the relative change."""
        state = self._state
        rho, squares, taken = state["rho"], state["squares"], state["taken"]
        descents = descents.to(rho.dtype)
        finite = descents.square().isfinite()
        descents = torch.where(finite, descents, 0)
        squares.copy_(torch.where(finite, _BETA * squares + (1 - _BETA) * descents.square(), squares))
        taken += finite
        mean = (squares / (1 - _BETA ** taken.clamp_min(1))).clamp_min(torch.finfo(rho.dtype).tiny)
        change = state["factor"] * (descents / mean.sqrt()).clamp(-1, 1) / (self.calm + taken).sqrt()
        new = (rho * change.exp()).clamp(min(_LEAST, self.cap), self.cap)
        growth = new / rho - 1
        rho.copy_(new)
        return growth

    def _descents(
        self, split: Split, x: Inputs, y: Target, paths: Sequence[Params], mean: MeanOverRows | None
    ) -> Tensor:
        """Return the descent along every path, of the rows of all processes if several share the batch."""

        def measured(x: Inputs, y: Target) -> Tensor:
            return descents_along(split, x, y, paths, engine=self.engine)

        return measured(x, y) if mean is None else mean(measured, x, y, len(paths))

    @contextmanager
    def scaling(self, split: Split, factor: Tensor | float) -> Iterator[None]:
        """Scale the trunk's part of the optimizer's step in the body by rho, and note the schedule's factor."""
        (state, grouped), params = self._prepared(split), dict(split.model.named_parameters())
        before = {n: params[n].detach().clone() for names in grouped for n in names}
        yield
        with torch.no_grad():
            for rho, names in zip(state["rho"], grouped, strict=True):
                for n in names:
                    step = params[n] - before[n]
                    params[n].copy_(before[n]).addcmul_(rho.to(step.dtype), step)
            state["factor"].fill_(factor)

    def state_dict(self) -> dict[str, Tensor]:
        """Return rho, the mean square of descents, the schedule's factor and θ_0."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`.

        Raises:
            SplitError: The state is that of another kind of search, or of one with other groups.
        """
        found = []
        if state and "squares" not in state:
            found.append("the checkpoint's line search is of an earlier version: train anew, or leave line_search out")
        if int(state.get("patterns", _checksum(self.groups))) != int(_checksum(self.groups)):
            found.append("the checkpoint's line search has other groups: resume with its groups, or train anew")
        raise_if(found)
        self._owner.forget()
        self._state.clear()
        self._state.update({name: value.clone() for name, value in state.items()})

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

    def _prepared(self, split: Split) -> tuple[Params, list[list[str]]]:
        """Return the state, on the network's device, and names by group; a path begins when it is first trained.

        Raises:
            SplitError: The trunk has no trained parameter, the state is that of a search with other groups, or the
                search belongs to another network.
        """
        self._owner.claim(split.model)
        params, names = split.trunk_params(), self._names(split)
        raise_if([] if names else ["the trunk has no trained parameter of its own, so there is no step to scale"])
        like, grouped = params[names[0]], self._grouped(split)
        groups = len(grouped)
        if "rho" not in self._state:
            exact = torch.promote_types(like.dtype, torch.float32)
            zeros = torch.zeros(groups, dtype=exact, device=like.device)
            own = {
                "rho": zeros + min(self.start, self.cap),
                "squares": zeros,
                "taken": zeros.clone(),
                "factor": zeros.new_ones(()),
                "patterns": _checksum(self.groups),
            }
            self._state.update(own)
        elif self._state["rho"].device != like.device:  # a checkpoint is read to the CPU
            self._state.update({name: value.to(like.device) for name, value in self._state.items()})
        raise_if(self._changed(groups))
        new = [n for n in names if f"start/{n}" not in self._state]
        self._state.update({f"start/{n}": params[n].detach().clone() for n in new})
        return self._state, grouped

    def _changed(self, groups: int) -> list[str]:
        """List the problem of a state with other groups."""
        count = len(self._state["rho"])
        if count == groups:
            return []
        words = f"the line search has {groups} groups of parameters, its state {count}"
        return [f"{words}, as after a group was frozen or unfrozen: begin with a new LineSearch"]


class _Owner:
    """The model whose path a search follows; a copy of the search may follow another one."""

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None

    def claim(self, model: nn.Module) -> None:
        """Raise an error if the search follows another model."""
        if self._model is None:
            self._model = weakref.ref(model)
        words = "this LineSearch follows the path of another network: make a new LineSearch() for every network"
        raise_if([] if self._model() is model else [words])

    def forget(self) -> None:
        """Let the search follow the next model."""
        self._model = None

    def __reduce__(self) -> tuple[type[_Owner], tuple[()]]:
        return _Owner, ()


def _checksum(patterns: Sequence[str]) -> Tensor:
    """Return a number that tells patterns apart, for checkpoints, which hold tensors alone."""
    return torch.tensor(zlib.crc32("\n".join(patterns).encode()))


def rho_of_its_own(optimizer: torch.optim.Optimizer) -> list[str]:
    """List the problem of an optimizer that a line search would scale a second time."""
    scales = sorted({float(group.get("step_scale", 1.0)) for group in optimizer.param_groups} - {1.0})
    return [f"line_search learns rho: build the optimizer with rho=1, got rho={rho:g}" for rho in scales]


_BETA = 0.97
"""Decay rate of the mean square of descents."""

_LEAST = 1e-4
"""Smallest rho: a path that is all but gone tells nothing about its length."""
