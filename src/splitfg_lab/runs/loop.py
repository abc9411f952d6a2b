"""The training loop: it steps a learner, logs, evaluates, saves and resumes in a run folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from splitfg.errors import NonFiniteError
from splitfg.types import Inputs, Learner, Target
from splitfg_lab.runs._errors import DivergedError, PhaseStoppedError, StoppedError
from splitfg_lab.runs._state import non_finite
from splitfg_lab.runs._window import Window
from splitfg_lab.runs.context import RunContext, require_finite
from splitfg_lab.runs.forecast import Forecast

Batches: TypeAlias = Callable[[int], tuple[Inputs, Target]]
"""step ↦ (x, y): the batch is a function of the step alone, so that resuming needs no replay."""

Evaluate: TypeAlias = Callable[[Learner], Mapping[str, float]]

_OVERFLOW = "without overflow"
"""Part of torch's message for a number that does not fit a tensor's type."""

_COUNTS = ("jvps", "trunk_backward", "block_backward")
"""Numbers of a step that are summed for the report instead of logged."""


def fit(
    learner: Learner,
    batches: Batches,
    *,
    steps: int,
    generator: torch.Generator,
    run: RunContext,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    log_every: int = 50,
) -> dict[str, float]:
    """Train for ``steps`` steps, from the run's checkpoint if it has one.

    On a CPU an interrupted and resumed run ends with the same parameters, metrics and log lines as an uninterrupted
    one: a checkpoint holds the learner, the random generators and the numbers not yet logged.

    Args:
        learner: The learner. A step may report ``jvps``, ``trunk_backward`` and ``block_backward``, which are summed
            for the report.
        batches: The batch of each step, counted from 0.
        steps: Steps in all.
        generator: The generator that the learner's steps draw from.
        run: The run to log and save to.
        evaluate: Returns metrics and leaves the learner unchanged. Also called after the last step. Wrap a long
            evaluation in :meth:`RunContext.phase`: it then shows a bar, and Ctrl-C interrupts it.
        evaluate_every: Steps between evaluations; ``None`` evaluates after the last step only.
        checkpoint_every: Steps between checkpoints; ``None`` saves twenty times in a run.
        log_every: Steps between log lines, each the mean over these steps; the GPU is synchronised only then.

    Returns:
        The metrics of the last evaluation.

    Raises:
        DivergedError: A loss, a metric or a parameter is not finite; the last checkpoint is from before.
        StoppedError: A signal asked to stop; the checkpoint is written.
    """
    rhythm = _Rhythm(
        steps,
        log_every,
        steps if evaluate_every is None else evaluate_every,
        max(1, steps // 20) if checkpoint_every is None else checkpoint_every,
    )
    run.claim_checkpoints()
    loop = _Loop(learner, batches, generator, evaluate, rhythm, run)
    with run.deferring_stops() as stop:
        if loop.unsettled:
            loop.settle(stopping=False)
        while loop.step < steps:
            loop.take_step()
            # read once: a request that arrives while the step settles is answered after the next step
            stopping = stop.made
            loop.settle(stopping=stopping)
            if stopping and loop.step < steps:
                raise StoppedError(loop.step)
    return dict(run.books.metrics)


@dataclass(frozen=True)
class _Rhythm:
    """Intervals in steps; logging, evaluation and saving are all due after the last step."""

    steps: int
    log: int
    evaluate: int
    save: int

    def __post_init__(self) -> None:
        wrong = [f"{name} is {value}" for name, value in vars(self).items() if value < 1]
        if wrong:
            raise ValueError(f"steps and intervals must be positive: {', '.join(wrong)}")

    def due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.steps

    def evaluations_after(self, step: int) -> int:
        return sum(self.due(later, self.evaluate) for later in range(step + 1, self.steps + 1))


class _Loop:
    """The state of a training loop between two steps."""

    def __init__(
        self,
        learner: Learner,
        batches: Batches,
        generator: torch.Generator,
        evaluate: Evaluate | None,
        rhythm: _Rhythm,
        run: RunContext,
    ) -> None:
        self.step = 0
        self._learner, self._batches, self._generator = learner, batches, generator
        self._evaluate, self._rhythm, self._run = evaluate, rhythm, run
        self._window = Window()
        self._loss: float | None = None
        self.unsettled = False
        remaining = rhythm.evaluations_after if evaluate is not None else (lambda _: 0)
        self._forecast = Forecast(rhythm.steps, remaining, run.note)
        # an attention mask may be infinite from the start; a tensor that becomes so later has diverged
        self._non_finite = non_finite(learner.state_dict())
        if run.restored is not None:
            self._restore(run.restored)
        self._lap_began = time.perf_counter()

    def take_step(self) -> None:
        x, y = self._batches(self.step)
        try:
            stats = self._learner.step(x, y, generator=self._generator)
        except NonFiniteError as error:
            raise DivergedError(self.step + 1, str(error)) from error
        except RuntimeError as error:
            if _OVERFLOW not in str(error):
                raise
            reason = "the optimizer's step does not fit the parameters' type; use a smaller learning rate"
            raise DivergedError(self.step + 1, reason) from error
        self._window.add(stats)
        self.step += 1
        self._run.progress(self.step, self._rhythm.steps, loss=self._loss)
        if self._run.device.type == "cpu":  # elsewhere the step may still be queued
            self._forecast.step(self.step)

    def settle(self, *, stopping: bool) -> None:
        """Log, evaluate and save, if these are due after this step."""
        rhythm = self._rhythm
        log, evaluate = rhythm.due(self.step, rhythm.log), rhythm.due(self.step, rhythm.evaluate)
        save = stopping or rhythm.due(self.step, rhythm.save)
        if not (log or evaluate or save):
            return
        self._read_window()
        self._forecast.step(self.step)
        metrics = self._measure(self._evaluate) if evaluate and self._evaluate is not None else {}
        values = {**(self._take_means() if log else {}), **metrics}
        self.unsettled = False
        if values:
            self._run.log(self.step, values)
        if save:
            if not stopping:  # the first process alone decides to stop
                self._run.compare(self._learner)
            self._save()
        self._lap_began = time.perf_counter()
        if metrics or save:
            self._forecast.restart()

    def _read_window(self) -> None:
        rows = self._window.fetch()
        if not rows:  # an earlier session counted them
            return
        seconds = time.perf_counter() - self._lap_began
        counts = {name: [row.pop(name) for row in rows if name in row] for name in _COUNTS}
        totals = {name: sum(values) for name, values in counts.items() if values}
        self._run.count(steps=len(rows), seconds=seconds, **totals)
        for step, row in enumerate(rows, start=self.step - len(rows) + 1):
            require_finite(step, row)

    def _take_means(self) -> dict[str, float]:
        means = self._window.take_means()
        self._loss = means["loss"]
        return means

    def _measure(self, evaluate: Evaluate) -> dict[str, float]:
        """Evaluate; if a signal interrupts that, save the step as it is before its evaluation.

        Raises:
            StoppedError: The evaluation was interrupted; the next session repeats it.
        """
        began = time.perf_counter()
        try:
            metrics = {name: float(value) for name, value in evaluate(self._learner).items()}
        except PhaseStoppedError as error:
            self.unsettled = True
            self._save()
            raise StoppedError(self.step) from error
        require_finite(self.step, metrics)
        self._run.books.metrics = metrics
        self._forecast.evaluated(self.step, time.perf_counter() - began)
        return metrics

    def _save(self) -> None:
        learner = self._learner.state_dict()
        broken = sorted(non_finite(learner) - self._non_finite)
        if broken:
            raise DivergedError(self.step, f"no longer finite: {', '.join(broken)}")
        self._run.save(
            {
                "step": self.step,
                "learner": learner,
                "generator": self._generator.get_state(),
                "rng": _global_rng(self._run.device),
                "window": self._window.rows,
                "loss": self._loss,
                "unsettled": self.unsettled,
            }
        )

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self._learner.load_state_dict(state["learner"])
        self._generator.set_state(state["generator"])
        _set_global_rng(self._run.device, state["rng"])
        self._window = Window(state["window"])
        self._loss = state["loss"]
        self.unsettled = state.get("unsettled", False)


def _global_rng(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of torch's global generators, from which modules such as dropout draw."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_global_rng(device: torch.device, states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
