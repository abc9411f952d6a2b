"""Training steps captured in a CUDA graph, with learning rates in device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from splitfg.errors import raise_if
from splitfg.training._pair import OptimizerPair
from splitfg.training._update import ScheduledOptimizer

T = TypeVar("T")

_FLAGS = ("lr", "capturable", "foreach", "fused")
# The first calls allocate optimizer state and compile, which is not allowed during capture.
_WARM_UPS = 3


def stream_aside(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream to capture on; ``None`` without a GPU.

    Use one per learner: cuBLAS allocates a workspace of tens of MiB for every stream with matrix products.
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def memory_pool(device: torch.device) -> Any:
    """Return a memory pool for graphs that are never replayed at the same time; ``None`` without a GPU."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


class Replay(Generic[T]):
    """Captures a function without arguments in a CUDA graph, and replays it.

    The first calls run the function eagerly, then one call captures it, and all further calls replay the graph; each
    call executes the function once. Without a GPU every call runs it eagerly. After capture, every call returns the
    same tensors with new values.

    Args:
        function: Reads and writes tensors in place; no control flow may depend on their values.
        device: Device of the tensors.
        generator: Source of randomness of the function; callers may read and set its state between calls.
        aside: Stream to run on, from :func:`stream_aside`.
        eager: Whether the function must run eagerly; asked before capture.
        pool: Memory that the graph shares with others, from :func:`memory_pool`; ``None`` for its own.
    """

    def __init__(
        self,
        function: Callable[[], T],
        *,
        device: torch.device,
        generator: torch.Generator,
        aside: torch.cuda.Stream | None,
        eager: Callable[[], bool] = lambda: False,
        pool: Any = None,
    ) -> None:
        self._function, self._device, self._generator, self._eager = function, device, generator, eager
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._made: T | None = None
        self._aside, self._pool = aside, pool

    @property
    def captured(self) -> bool:
        """Whether calls replay the graph."""
        return self._graph is not None

    def __call__(self) -> T:
        """Run or replay the function once."""
        if self._device.type != "cuda":
            return self._function()
        if self._graph is None:
            self._calls += 1
            if self._calls <= _WARM_UPS or self._eager():
                return self._warm_up()
            self._graph, self._made = self._capture()
        self._graph.replay()
        assert self._made is not None
        return self._made

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run the body on the stream of the replays; without a GPU, run it as it is."""
        if self._aside is None:
            yield
            return
        here = torch.cuda.current_stream(self._device)
        self._aside.wait_stream(here)
        with torch.cuda.stream(self._aside):
            yield
        here.wait_stream(self._aside)

    def _warm_up(self) -> T:
        with self.aside():
            return self._function()

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        # thread_local: autograd's and the user's threads may allocate memory meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"):
            made = self._function()
        return graph, made


# The updates of these are not linear in the learning rate.
_NOT_LINEAR = (torch.optim.Adafactor, torch.optim.Rprop, torch.optim.ASGD)


class DeviceRates:
    """Steps an optimizer with learning rates in device memory.

    Adam and AdamW read their learning rates from tensors. Any other optimizer steps at its full rate, and the update is
    then scaled, θ ← θ + factor (θ' - θ): the same step if the update is linear in the rate, at the cost of a copy of
    the parameters.

    Args:
        scheduled: The optimizer, adapted in place, and its schedule. Without a schedule, :meth:`follow` copies rates
            that were set in the optimizer's groups.
        horizon: Number of steps to tabulate the schedule for.
        device: Device of the rates.

    Attributes:
        counter: Number of the next step, a 0-d int64 tensor on the device.

    Raises:
        SplitError: If the optimizer's updates are not linear in a learning rate that changes, by a schedule or in
            :meth:`follow`.
    """

    def __init__(self, scheduled: ScheduledOptimizer, *, horizon: int, device: torch.device) -> None:
        optimizer, rates = scheduled.optimizer, scheduled.full_rates
        self._factors = torch.tensor([scheduled.schedule(i) for i in range(horizon)], device=device)
        self.counter = torch.full((), scheduled.steps, dtype=torch.int64, device=device)
        parts = optimizer.parts if isinstance(optimizer, OptimizerPair) else (optimizer,)
        if scheduled.scheduled:
            raise_if([problem for part in parts for problem in _not_linear_problems(part)])
        left = iter(rates)
        self._scheduled = scheduled.scheduled
        self._parts = [_part_rates(part, [next(left) for _ in part.param_groups]) for part in parts]

    def follow(self) -> None:
        """Without a schedule, copy learning rates that were set in the groups since the last step."""
        if not self._scheduled:
            for part in self._parts:
                part.follow()

    @property
    def factor(self) -> Tensor:
        """The schedule's factor of the next step, on the device."""
        return self._factors.take(self.counter)

    def step(self) -> None:
        """Take one step at the schedule's factor times the full rates, and advance the counter."""
        factor = self.factor if self._scheduled else None
        for part in self._parts:
            part.step(factor)
        self.counter += 1

    def release(self) -> list[dict[str, Any]]:
        """Return the groups' settings from before the adaptation, for checkpoints."""
        return [dict(kept) for part in self._parts for kept in part.settings(own_rates=not self._scheduled)]


def _not_linear_problems(optimizer: torch.optim.Optimizer) -> list[str]:
    if not isinstance(optimizer, _NOT_LINEAR):
        return []
    return [
        f"the updates of {type(optimizer).__name__} are not linear in the learning rate, which a captured step"
        " requires: use an eager GradientLearner, or a constant rate"
    ]


def _part_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> _ReadRates | _ShortenedSteps:
    return (_ReadRates if isinstance(optimizer, torch.optim.Adam) else _ShortenedSteps)(optimizer, rates)


class _ReadRates:
    """For optimizers that read learning rates from tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
        self._kept, self._groups = _adapted(optimizer), optimizer.param_groups
        self._optimizer = optimizer
        device = optimizer.param_groups[0]["params"][0].device
        self._rates = [torch.tensor(rate, device=device) for rate in rates]
        self._places = [rate.clone() for rate in self._rates]
        for group, place in zip(self._groups, self._places, strict=True):
            group["lr"] = place

    def follow(self) -> None:
        for group, place in zip(self._groups, self._places, strict=True):
            if group["lr"] is not place:
                place.fill_(group["lr"])
                group["lr"] = place

    def step(self, factor: Tensor | None) -> None:
        if factor is not None:
            for place, rate in zip(self._places, self._rates, strict=True):
                place.copy_(rate * factor)
        self._optimizer.step()

    def settings(self, *, own_rates: bool) -> list[dict[str, Any]]:
        return _settings(self._kept, self._groups, own_rates)


class _ShortenedSteps:
    """For optimizers that take learning rates as Python numbers only."""

    def __init__(self, optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
        self._kept, self._groups = _adapted(optimizer), optimizer.param_groups
        self._optimizer, self._rates = optimizer, [float(rate) for rate in rates]
        self._params = [group["params"] for group in self._groups]
        self._before: list[list[Tensor]] = []
        self._known, self._factors = list(self._rates), [torch.ones((), device=p[0].device) for p in self._params]
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate

    def follow(self) -> None:
        for i, (group, rate) in enumerate(zip(self._groups, self._rates, strict=True)):
            if float(group["lr"]) != self._known[i]:
                raise_if([] if rate else ["a captured step cannot change a learning rate of zero: start with another"])
                raise_if(_not_linear_problems(self._optimizer))
                self._known[i] = float(group["lr"])
                self._factors[i].fill_(self._known[i] / rate)

    @torch.no_grad()
    def step(self, factor: Tensor | None) -> None:
        if not self._before:
            self._before = [[torch.empty_like(p) for p in params] for params in self._params]
        for before, params in zip(self._before, self._params, strict=True):
            torch._foreach_copy_(before, params)
        self._step_at_full_rates()
        for before, params, own in zip(self._before, self._params, self._factors, strict=True):
            torch._foreach_sub_(params, before)
            torch._foreach_mul_(params, own if factor is None else factor)
            torch._foreach_add_(params, before)

    def _step_at_full_rates(self) -> None:
        """Step at the full rates, and keep the rates that callers have set in the groups."""
        given = [group["lr"] for group in self._groups]
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate
        self._optimizer.step()
        for group, rate in zip(self._groups, given, strict=True):
            group["lr"] = rate

    def settings(self, *, own_rates: bool) -> list[dict[str, Any]]:
        return _settings(self._kept, self._groups, own_rates)


def _adapted(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Enable the fused kernel and step counts on the device if supported; return the previous settings."""
    kept = [{flag: group[flag] for flag in _FLAGS if flag in group} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "capturable" not in group:
            continue
        device = group["params"][0].device
        group.update(foreach=False, capturable=device.type == "cuda", **({"fused": True} if "fused" in group else {}))
        for state in (optimizer.state[p] for p in group["params"] if p in optimizer.state):
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(device)
    return kept


def _settings(kept: list[dict[str, Any]], groups: list[dict[str, Any]], own_rates: bool) -> list[dict[str, Any]]:
    """Return the settings from before the adaptation, with the groups' current learning rates if ``own_rates``."""
    if not own_rates:
        return kept
    return [{**before, "lr": float(group["lr"])} for before, group in zip(kept, groups, strict=True)]
