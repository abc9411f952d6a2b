"""A step that a GPU replays by itself: one CUDA graph, with learning rates that live on the device."""

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
# The first calls allocate optimizer state and compile; none of that may happen inside a capture.
_WARM_UPS = 3


def stream_aside(device: torch.device) -> torch.cuda.Stream | None:
    """A stream to capture on; ``None`` elsewhere than on a GPU.

    One is enough for a learner: every stream on which matrices are multiplied keeps tens of MiB as work space.
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class Replay(Generic[T]):
    """A function of nothing that changes tensors in place: captured once on a GPU, replayed from then on.

    The first calls run it as it is; each call is one run of it, captured or not. Elsewhere than on a GPU every
    call runs it as it is. What it returns after capture is the same tensors every time, with new values.

    Args:
        function: Reads and writes tensors that stay where they are; no host decision may depend on their values.
        device: Where they are.
        generator: Drawn from by the function; its state can be read and set between calls.
        aside: The stream it runs on, of :func:`stream_aside`.
    """

    def __init__(
        self,
        function: Callable[[], T],
        *,
        device: torch.device,
        generator: torch.Generator,
        aside: torch.cuda.Stream | None,
    ) -> None:
        self._function, self._device, self._generator = function, device, generator
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._made: T | None = None
        self._aside = aside

    @property
    def captured(self) -> bool:
        """Whether calls are replays by now."""
        return self._graph is not None

    def __call__(self) -> T:
        """Run or replay the function once."""
        if self._device.type != "cuda":
            return self._function()
        if self._graph is None:
            self._calls += 1
            if self._calls <= _WARM_UPS:
                return self._warm_up()
            self._graph, self._made = self._capture()
        self._graph.replay()
        assert self._made is not None
        return self._made

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work on the stream of the replays; elsewhere than on a GPU there is none."""
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
        # thread_local: the backward pass and other people's threads may allocate meanwhile
        with torch.cuda.graph(graph, stream=self._aside, capture_error_mode="thread_local"):
            made = self._function()
        return graph, made


# The steps of these are not linear in the rate.
_NOT_LINEAR = (torch.optim.Adafactor, torch.optim.Rprop, torch.optim.ASGD)


class DeviceRates:
    """Steps an optimizer with learning rates that live on the device.

    Adam and AdamW read their rates from tensors. Of any other optimizer the step is taken at its full rate and
    then shortened, θ ← θ + factor (θ' - θ): the same step where it is linear in the rate, at the price of a copy of
    its parameters.

    Args:
        scheduled: The optimizer, adapted in place, and its schedule. Without a schedule, :meth:`follow` copies rates
            that were set in the optimizer's groups.
        horizon: Steps for which the schedule is tabulated.
        device: Where the rates live.

    Attributes:
        counter: Number of the next step, a 0-d int64 tensor on the device.

    Raises:
        SplitError: The optimizer's steps are not linear in a rate that changes.
    """

    def __init__(self, scheduled: ScheduledOptimizer, *, horizon: int, device: torch.device) -> None:
        optimizer, rates = scheduled.optimizer, scheduled.full_rates
        self._factors = torch.tensor([scheduled.schedule(i) for i in range(horizon)], device=device)
        self.counter = torch.full((), scheduled.steps, dtype=torch.int64, device=device)
        parts = optimizer.parts if isinstance(optimizer, OptimizerPair) else (optimizer,)
        raise_if(
            [
                f"the steps of {type(part).__name__} are not linear in their rate, which a captured step needs: take"
                " eager steps, or a constant rate"
                for part in parts
                if scheduled.scheduled and isinstance(part, _NOT_LINEAR)
            ]
        )
        left = iter(rates)
        self._scheduled = scheduled.scheduled
        self._parts = [_part_rates(part, [next(left) for _ in part.param_groups]) for part in parts]

    def follow(self) -> None:
        """Take over rates that were set in the groups since the last step, where there is no schedule."""
        if not self._scheduled:
            for part in self._parts:
                part.follow()

    def step(self) -> None:
        """Take one step at the schedule's factor times the full rates, and advance the counter."""
        factor = self._factors.take(self.counter)
        for part in self._parts:
            part.step(factor if self._scheduled else None)
        self.counter += 1

    def release(self) -> list[dict[str, Any]]:
        """The groups' settings from before, to be written into a checkpoint instead of the adapted ones."""
        return [dict(kept) for part in self._parts for kept in part.settings(own_rates=not self._scheduled)]


def _part_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> _ReadRates | _ShortenedSteps:
    return (_ReadRates if isinstance(optimizer, torch.optim.Adam) else _ShortenedSteps)(optimizer, rates)


class _ReadRates:
    """Of an optimizer that reads its rates from tensors."""

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

    def settings(self, *, own_rates: bool) -> Iterator[dict[str, Any]]:
        for kept, group in zip(self._kept, self._groups, strict=True):
            yield {**kept, "lr": float(group["lr"])} if own_rates else kept


class _ShortenedSteps:
    """Of an optimizer that knows its rates as numbers alone."""

    def __init__(self, optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
        self._kept, self._groups = _adapted(optimizer), optimizer.param_groups
        self._optimizer, self._rates = optimizer, [float(rate) for rate in rates]
        self._params = [group["params"] for group in self._groups]
        self._before: list[list[Tensor]] = []
        self._seen, self._factors = list(self._rates), [torch.ones((), device=p[0].device) for p in self._params]
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate

    def follow(self) -> None:
        for i, (group, rate) in enumerate(zip(self._groups, self._rates, strict=True)):
            if float(group["lr"]) != self._seen[i]:
                raise_if([] if rate else ["a captured step cannot leave a rate of zero: begin with another"])
                self._seen[i] = float(group["lr"])
                self._factors[i].fill_(self._seen[i] / rate)

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
        """Rates that somebody has set in the groups stay there, for whoever goes on from them."""
        given = [group["lr"] for group in self._groups]
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate
        self._optimizer.step()
        for group, rate in zip(self._groups, given, strict=True):
            group["lr"] = rate

    def settings(self, *, own_rates: bool) -> Iterator[dict[str, Any]]:
        for kept, group in zip(self._kept, self._groups, strict=True):
            yield {**kept, "lr": float(group["lr"])} if own_rates else kept


def _adapted(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Ask for one kernel and step counts on the device, where the optimizer knows how; gives what was before."""
    kept = [{flag: group[flag] for flag in _FLAGS if flag in group} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "capturable" not in group:
            continue
        device = group["params"][0].device
        group.update(fused=True, foreach=False, capturable=device.type == "cuda")
        for state in (optimizer.state[p] for p in group["params"] if p in optimizer.state):
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(device)
    return kept
