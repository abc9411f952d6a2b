"""A gradient learner whose whole step is compiled and, on a GPU, captured in one CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from splitfg.compiled import Compile, whole
from splitfg.errors import SplitError
from splitfg.learners.gradient import GradientLearner
from splitfg.numerics import norm
from splitfg.splitting import Role
from splitfg.training.capture import DeviceRates, Replay, stream_aside
from splitfg.types import Estimate, Inputs, Params, StepStats, Target

# How far a compiled gradient may be from the eager one, relative to its norm: rounding, TF32 included, and no more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 0.05}
_NARROW_TOLERANCE = 0.3


class DeviceBatches(Protocol):
    """Gives the batch of a step without asking the host: indexing by a tensor, no decision on its value."""

    def __call__(self, step: Tensor) -> tuple[Inputs, Target]:
        """Inputs and target of a step, counted from 0 in a 0-d int64 tensor on the device."""


@dataclass(frozen=True)
class DeviceStep:
    """Stands for the batch of a step that a captured learner looks up on the device."""

    step: int


class CapturedLearner:
    """A :class:`~splitfg.learners.GradientLearner` at the speed of the device.

    Data lookup, trunk, tangents, head, clipping, schedule and optimizer become one CUDA graph that is replayed with
    no work on the host; the heavy parts are compiled before. Without a GPU the same code runs eagerly, compiled parts
    included. It takes the steps that the eager learner would take, up to rounding, draws the same tangents, and its
    checkpoints are the eager learner's: either goes on from the other's.

    Before the first step, compiled and eager gradients of the first batch are compared; if they are not the same,
    the learner refuses to start.

    Args:
        learner: What to speed up; it shares all state and is not to be stepped itself any more.
        horizon: Steps for which the schedule is tabulated; no step can be taken beyond it.
        batches: Looks the batch up on the device, inside the captured step. Hand :meth:`batch` to
            :func:`splitfg_lab.runs.fit` then; without it, every batch is copied into place before a replay.
        compile_: What compiles a function; ``None`` for capture alone.
    """

    def __init__(
        self,
        learner: GradientLearner,
        *,
        horizon: int,
        batches: DeviceBatches | None = None,
        compile_: Compile | None = whole,
    ) -> None:
        self._eager, self._batches = learner, batches
        self._fast = learner if compile_ is None else learner.with_compiled(compile_)
        first = next(learner.split.model.parameters())
        self._dtype, device = first.dtype, first.device
        self._horizon, self._device = horizon, device
        self._aside = stream_aside(device)
        self._no_target = torch.empty(0)
        self._x: Any = None
        self._y: Target | None = None
        self._checked = compile_ is None
        self._rates: DeviceRates
        self._replay: Replay[StepStats] | None = None
        self._generator: torch.Generator | None = None
        self._start()

    @property
    def steps(self) -> int:
        """Steps taken."""
        return self._eager.steps

    @property
    def captured(self) -> bool:
        """Whether steps are replays by now."""
        return self._replay is not None and self._replay.captured

    def batch(self, step: int) -> tuple[Inputs, Target]:
        """Return the arguments of :meth:`step` where batches are looked up on the device."""
        return (DeviceStep(step),), self._no_target

    def check(self, x: Inputs, y: Target, *, generator: torch.Generator) -> None:
        """Compare the compiled gradient with the eager one on a batch; the generator stays as it was.

        Raises:
            SplitError: They differ by more than rounding.
        """
        if self._fast is self._eager:
            return
        self._take(x, y)
        state = generator.get_state()
        with self._prepared(generator).aside():
            batch = self._look_up()
            expected = self._eager.estimate(*batch, generator=generator)
            generator.set_state(state)
            found = self._fast.estimate(*batch, generator=generator)
            generator.set_state(state)
            self._compare(expected, found)
        self._checked = True

    def step(self, x: Inputs, y: Target, *, generator: torch.Generator) -> StepStats:
        """Learn from one batch."""
        if self.steps >= self._horizon:
            raise SplitError([f"the schedule was tabulated for {self._horizon} steps: give a longer horizon"])
        if not self._checked:
            self.check(x, y, generator=generator)
        self._take(x, y)
        self._rates.follow()
        stats = self._prepared(generator)()
        self._eager.update.optimizer.steps += 1
        return stats

    def predict(self, x: Inputs) -> Tensor:
        """The head's outputs."""
        return self._eager.predict(x)

    def state_dict(self) -> dict[str, Any]:
        """What the eager learner would save."""
        state = self._eager.state_dict()
        _restore_settings(state["optimizer"], self._rates.release())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, this learner's or an eager one's."""
        self._eager.load_state_dict(state)
        self._start()

    def _start(self) -> None:
        """From the eager learner's state; whatever was captured before reads memory that is no longer in use."""
        self._rates = DeviceRates(self._eager.update.optimizer, horizon=self._horizon, device=self._device)
        self._replay = self._generator = None

    def _prepared(self, generator: torch.Generator) -> Replay[StepStats]:
        """The step, about to be captured with this generator or captured with it before."""
        if self._replay is None:
            self._generator = generator
            self._replay = Replay(self._advance, device=self._device, generator=generator, aside=self._aside)
        if generator is not self._generator:
            raise SplitError(["a captured step draws from the generator it was captured with: pass the same one"])
        return self._replay

    def _advance(self) -> StepStats:
        """The step itself: all of it on the device."""
        assert self._generator is not None
        x, y = self._look_up()
        stats = self._fast.fill_grads(x, y, generator=self._generator)
        self._rates.step()
        return stats

    def _look_up(self) -> tuple[Inputs, Target]:
        if self._batches is not None:
            return self._batches(self._rates.counter)
        assert self._y is not None
        return self._x, self._y

    def _take(self, x: Inputs, y: Target) -> None:
        """Put a batch where the captured step reads it, or see that it is the one the device will look up."""
        if self._batches is not None:
            if x != (DeviceStep(self.steps),):
                raise SplitError(
                    [
                        f"the batch of step {self.steps} is looked up on the device: pass batch({self.steps}) here,"
                        " or learner.batch to fit"
                    ]
                )
            return
        if self._y is None:
            self._x, self._y = pytree.tree_map_only(Tensor, torch.clone, (x, y))
            return
        for place, value in _matched((self._x, self._y), (x, y)):
            place.copy_(value)

    def _compare(self, expected: Estimate, found: Estimate) -> None:
        roles = self._eager.split.roles
        problems = []
        for what, held in (("trunk", (Role.TRUNK,)), ("head", (Role.HEAD, Role.TIED))):
            names = [n for n in expected.grads if roles[n] in held]
            far = _distance(expected.grads, found.grads, names) if names else 0.0
            if not far <= (allowed := _TOLERANCE.get(self._dtype, _NARROW_TOLERANCE)):
                problems.append(
                    f"compiled code gives another gradient for the {what} than eager code (relative difference"
                    f" {far:.2g}, allowed {allowed:g}): pass compile_=None, and report it with your torch version"
                )
        if problems:
            raise SplitError(problems)


def _distance(expected: Params, found: Params, names: Sequence[str]) -> float:
    """‖found - expected‖ / ‖expected‖ over these parameters."""
    size = norm({n: expected[n] for n in names}).clamp_min(torch.finfo(torch.float32).tiny)
    return (norm({n: found[n] - expected[n] for n in names}) / size).item()


def _restore_settings(optimizer: dict[str, Any], settings: list[dict[str, Any]]) -> None:
    """Write the settings from before adaptation into an optimizer's state, a pair's parts included."""
    parts = optimizer.get("parts", [optimizer])
    groups = [group for part in parts for group in part["param_groups"]]
    for group, kept in zip(groups, settings, strict=True):
        group.update(kept)


def _matched(old: Any, new: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors of two batches of one structure, by the first one's places.

    Raises:
        SplitError: They differ in more than the values of tensors.
    """
    places, structure = pytree.tree_flatten(old)
    try:
        values = structure.flatten_up_to(new)
    except ValueError as error:
        raise SplitError(["a captured step takes batches of one structure, and this one has another"]) from error
    found = []
    for place, value in zip(places, values, strict=True):
        tensors = isinstance(place, Tensor), isinstance(value, Tensor)
        if tensors == (True, True):
            found.append((place, value))
        elif tensors != (False, False) or not _same(place, value):
            raise SplitError(["a captured step sees new values of tensors alone: pass what changes as a tensor"])
    if any((place.shape, place.dtype) != (value.shape, value.dtype) for place, value in found):
        raise SplitError(["a captured step takes batches of one shape and dtype: leave a smaller last batch out"])
    return found


def _same(first: Any, second: Any) -> bool:
    """Whether two inputs that are no tensors are one and the same; arrays are compared entry by entry."""
    if first is second:
        return True
    equal = first == second
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
