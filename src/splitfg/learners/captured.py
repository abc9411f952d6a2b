"""Gradient learners with a compiled step that a CUDA graph replays."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from splitfg.compiled import Compile, whole
from splitfg.engines import ForwardMode
from splitfg.errors import SplitError, raise_if
from splitfg.estimators import Backprop, Estimator, ForwardGradient, MessagingEstimator, SplitFG
from splitfg.feedback import EveryNth
from splitfg.learners._agreement import (
    Rounding,
    descent_problems,
    disagreements,
    narrowest_dtype,
    precision,
    problems,
)
from splitfg.learners._capturable import capture_problems
from splitfg.learners.gradient import GradientLearner
from splitfg.splitting import Role
from splitfg.training.capture import DeviceRates, Replay, memory_pool, stream_aside
from splitfg.types import Estimate, Inputs, StepStats, Target

_Kind: TypeAlias = tuple[Hashable, ...]

_DRAWS = "the network draws random numbers, as dropout does"


class DeviceBatches(Protocol):
    """Returns the batch of a step without the host: by tensor indexing, without control flow on values."""

    def __call__(self, step: Tensor) -> tuple[Inputs, Target]:
        """Return inputs and target of a step, counted from 0 in a 0-d int64 tensor on the device."""


@dataclass(frozen=True)
class DeviceStep:
    """Placeholder for the batch of a step that a captured learner reads from the device."""

    step: int


class CapturedLearner:
    """A compiled and captured :class:`~splitfg.GradientLearner`.

    One CUDA graph contains data lookup, trunk, tangents, head, clipping, schedule and optimizer, and is replayed
    without work on the host; the heavy parts are compiled. Without a GPU the compiled code runs without a graph.
    It takes the same steps as the eager learner, up to rounding, with the same tangents, and either can resume from the
    other's checkpoints.

    Steps that measure the response of the trunk and steps that do not, as with ``Relay(every=4)``, have a graph each,
    and so do training and evaluation mode and every choice of trained parameters; all share their memory.

    The first step of every kind compares compiled and eager gradients. A network that draws random numbers, as dropout
    does, takes its masks from a seed of every step, which a CUDA graph cannot set: its steps run without a graph, with
    a warning. They are compiled for :class:`~splitfg.SplitFG` and :class:`~splitfg.ForwardGradient` with forward mode
    and :class:`~splitfg.Backprop`, and eager for others.

    A CUDA graph replays the numbers that Python read when it was captured. Make a value that changes during training,
    such as a temperature, a buffer that the network uses as a tensor, and change the buffer in place.

    With a :class:`~splitfg.distributed.DistributedEstimator`, the graph holds the messages of NCCL. Those of gloo pass
    through the host: steps then run compiled without a graph, with a warning. So do those of
    :class:`~splitfg.Projection` and of learners with a ``log``.

    Args:
        learner: The learner to speed up; the two share all state. Do not call its ``step`` any more.
        horizon: Number of steps to tabulate the schedule for, and the largest number of steps.
        batches: Reads the batch from device memory inside the captured step; pass :meth:`batch` to the training loop
            then. Without it, :meth:`step` copies every batch into the graph's inputs.
        compile_: Compiles a function; ``None`` for capture without compilation.

    Raises:
        SplitError: In :meth:`step`, if compiled and eager gradients differ by more than rounding.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import splitfg
        >>> from splitfg.recipes import Adam
        >>> network = splitfg.split(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
        >>> eager = splitfg.GradientLearner(network, splitfg.SplitFG(K=2), Adam().build(network, rho=0.3))
        >>> learner = splitfg.CapturedLearner(eager, horizon=100, compile_=None)
        >>> generator, x, y = torch.Generator(), torch.randn(16, 4), torch.randint(0, 3, (16,))
        >>> learner.step(x, y, generator=generator).loss.shape
        torch.Size([])
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
        device = next(learner.split.model.parameters()).device
        self._dtype = narrowest_dtype(learner.split.model)
        self._horizon, self._device = horizon, device
        self._aside, self._pool = stream_aside(device), memory_pool(device)
        self._no_target = torch.empty(0)
        self._x: Any = None
        self._y: Target | None = None
        self._measured = [maps for maps in learner.learned.values() if isinstance(maps, EveryNth)]
        self._modules, self._parameters = list(learner.split.model.modules()), list(learner.split.model.parameters())
        self._checked: set[_Kind] = set()
        self.eager = self._warned = False
        self._rates: DeviceRates
        self._replays: dict[_Kind, Replay[StepStats]] = {}
        self._generator: torch.Generator | None = None
        self._uncapturable = capture_problems(self._fast)
        if device.type == "cuda" and self._uncapturable:
            warnings.warn(f"{'; '.join(self._uncapturable)}: steps run without a CUDA graph", stacklevel=2)
        self._start()

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        return self._eager.steps

    @property
    def captured(self) -> bool:
        """Whether all steps replay a graph."""
        return bool(self._replays) and all(replay.captured for replay in self._replays.values())

    def batch(self, step: int) -> tuple[Inputs, Target]:
        """Return the arguments of :meth:`step` for a learner with ``batches``."""
        return (DeviceStep(step),), self._no_target

    def check(self, x: Inputs, y: Target | None = None, *, generator: torch.Generator) -> None:
        """Compare the compiled gradient with the eager one on a batch; restores the generator's state.

        Raises:
            SplitError: If they differ by more than rounding.
        """
        if self._fast is self._eager:
            return
        self._take(x, y)
        state = generator.get_state()
        with self._prepared(generator).aside():
            batch = self._look_up()
            expected = self._eager.estimate(*batch, generator=generator)
            generator.set_state(state)
            if self._random() and not _draws_alike(self._eager.estimator):
                self._run_eagerly("steps run in eager code")
                return
            found = self._fast.estimate(*batch, generator=generator)
            generator.set_state(state)
            found_problems = self._differences(batch, expected, found, generator)
            found_problems += self._search_problems(batch, expected)
        if found_problems and self._random():
            self._run_eagerly("compiled code draws others on this device, and steps run in eager code")
            return
        raise_if(found_problems)
        self._checked.add(self._kind)

    def step(self, x: Inputs, y: Target | None = None, *, generator: torch.Generator) -> StepStats:
        """Learn from one batch."""
        if self.steps >= self._horizon:
            raise SplitError([f"the schedule is tabulated for {self._horizon} steps: pass a larger horizon"])
        if self._kind not in self._checked:
            self.check(x, y, generator=generator)
        self._take(x, y)
        self._rates.follow()
        replay, estimator = self._prepared(generator), self._fast.estimator
        if replay.captured and isinstance(estimator, MessagingEstimator):
            estimator.before_replay(self._fast.split, generator)
        taken = [maps.taken for maps in self._measured]
        stats = replay()
        self._eager.update.optimizer.steps += 1
        for maps, before in zip(self._measured, taken, strict=True):
            maps.taken = before + 1  # a replayed step runs no code on the host
        return stats

    def predict(self, x: Inputs) -> Tensor:
        """Return the head's outputs."""
        return self._eager.predict(x)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the eager learner."""
        state = self._eager.state_dict()
        _restore_settings(state["optimizer"], self._rates.release())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a :meth:`state_dict` of a captured or an eager learner."""
        self._eager.load_state_dict(state)
        self._start()

    def _start(self) -> None:
        """Start from the eager learner's state; an earlier graph would read memory that is no longer in use."""
        self._rates = DeviceRates(self._eager.update.optimizer, horizon=self._horizon, device=self._device)
        self._replays, self._generator = {}, None

    def _prepared(self, generator: torch.Generator) -> Replay[StepStats]:
        """Return the replayed step of this generator, of the present step's kind."""
        if self._generator is None:
            self._generator = generator
        if generator is not self._generator:
            raise SplitError(["a captured step keeps the generator of its first call: pass the same one every time"])
        kind = self._kind
        if kind not in self._replays:
            self._replays[kind] = Replay(
                self._advance,
                device=self._device,
                generator=generator,
                aside=self._aside,
                eager=self._must_not_capture,
                pool=self._pool,
            )
        return self._replays[kind]

    @property
    def _kind(self) -> _Kind:
        """The kind of the present step, which determines its operations: maps that measure, modes, what is trained."""
        modes = (*(m.training for m in self._modules), *(p.requires_grad for p in self._parameters))
        return tuple(maps.due for maps in self._measured), modes

    def _random(self) -> bool:
        """Whether the network draws random numbers."""
        return self._eager.split.traits(self._look_up()[0]).random

    def _must_not_capture(self) -> bool:
        """Whether steps cannot be captured; warns of random numbers once."""
        random = self._random()
        if random and not self.eager and not self._warned:
            self._warned = True
            warnings.warn(f"{_DRAWS}: steps run without a CUDA graph", stacklevel=5)
        return random or bool(self._uncapturable)

    def _run_eagerly(self, words: str) -> None:
        self._fast, self.eager = self._eager, True
        warnings.warn(f"{_DRAWS}: {words}", stacklevel=4)

    def _advance(self) -> StepStats:
        """Take one step, entirely on the device."""
        assert self._generator is not None
        x, y = self._look_up()
        stats = self._fast.fill_grads(x, y, generator=self._generator)
        with self._fast.around_step(self._rates.factor):
            self._rates.step()
        return stats

    def _look_up(self) -> tuple[Inputs, Target]:
        if self._batches is not None:
            return self._batches(self._rates.counter)
        assert self._y is not None
        return self._x, self._y

    def _take(self, x: Inputs, y: Target | None) -> None:
        """Copy a batch to the inputs of the captured step, or validate that it stands for the next step."""
        x, y = self._eager.split.unpack(x, y)
        if self._batches is not None:
            if x != (DeviceStep(self.steps),):
                raise SplitError(
                    [
                        f"this learner reads the batch of step {self.steps} from the device: pass"
                        f" learner.batch({self.steps})"
                    ]
                )
            return
        if self._y is None:
            self._x, self._y = pytree.tree_map_only(Tensor, torch.clone, (x, y))
            return
        for place, value in _matched((self._x, self._y), (x, y)):
            place.copy_(value)

    def _search_problems(self, batch: tuple[Inputs, Target], expected: Estimate) -> list[str]:
        """Compare the line search's measurements along the estimate, where rounding is small beside the descent."""
        if self._eager.line_search is None:
            return []
        split = self._eager.split
        trained = {n: p for n, p in split.trunk_params().items() if split.roles[n] is Role.TRUNK}
        # all of them, as in every measurement: the compiler fails on norms whose weights have no tangent
        direction = {n: expected.grads.get(n, torch.zeros_like(p)) for n, p in trained.items()}
        wanted, got = (one.searched_descent(*batch, direction).item() for one in (self._eager, self._fast))
        return descent_problems(wanted, got, self._dtype)

    def _differences(
        self, batch: tuple[Inputs, Target], expected: Estimate, found: Estimate, generator: torch.Generator
    ) -> list[str]:
        """List the differences of compiled and eager estimates of a batch, tensor by tensor."""
        (x, y), split, state = batch, self._eager.split, generator.get_state()

        def run(x: Inputs) -> Estimate:
            generator.set_state(state)
            return self._eager.estimate(x, y, generator=generator)

        rounding = Rounding(split, precision(self._dtype, self._device)).measure(run, x, expected)
        generator.set_state(state)
        return problems(disagreements(expected, found, rounding, split.roles, self._dtype))


def _draws_alike(estimator: Estimator) -> bool:
    """Whether compiled code of an estimator draws the random numbers of eager code: every pass is one compiled call."""
    if not isinstance(estimator, SplitFG | ForwardGradient):
        return type(estimator) is Backprop
    return isinstance(estimator.engine, ForwardMode)


def _restore_settings(optimizer: dict[str, Any], settings: list[dict[str, Any]]) -> None:
    """Write the settings from before the adaptation to the state of an optimizer or a pair of optimizers."""
    parts = optimizer.get("parts", [optimizer])
    groups = [group for part in parts for group in part["param_groups"]]
    for group, kept in zip(groups, settings, strict=True):
        group.update(kept)


def _matched(old: Any, new: Any) -> list[tuple[Tensor, Tensor]]:
    """Pair the tensors of two batches.

    Raises:
        SplitError: If the batches differ in more than the values of tensors.
    """
    places, structure = pytree.tree_flatten(old)
    try:
        values = structure.flatten_up_to(new)
    except ValueError as error:
        raise SplitError(
            ["the batch has another structure than the first one, which a captured step keeps: pass the same structure"]
        ) from error
    found = []
    for place, value in zip(places, values, strict=True):
        tensors = isinstance(place, Tensor), isinstance(value, Tensor)
        if tensors == (True, True):
            found.append((place, value))
        elif tensors != (False, False) or not _same(place, value):
            raise SplitError(
                ["a captured step ignores new values that are not tensors: pass changing inputs as tensors"]
            )
    if any((place.shape, place.dtype) != (value.shape, value.dtype) for place, value in found):
        raise SplitError(["a captured step needs batches of one shape and dtype: drop a smaller last batch"])
    return found


def _same(first: Any, second: Any) -> bool:
    """Whether two inputs other than tensors are equal; compares arrays entry by entry."""
    if first is second:
        return True
    equal = first == second
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
