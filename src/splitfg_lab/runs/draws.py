"""Repeated measurements that save and resume."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from splitfg_lab.runs._errors import StoppedError
from splitfg_lab.runs.context import RunContext


def draw(
    measure: Callable[[int], Tensor],
    *,
    count: int,
    generator: torch.Generator,
    run: RunContext,
    jvps: float,
    save_every: int | None = None,
) -> Tensor:
    """Measure ``count`` times, from the run's checkpoint if it has one.

    An interrupted and resumed run returns the same numbers as an uninterrupted one: a checkpoint holds the numbers so
    far and the state of the generator.

    Args:
        measure: Returns the number of draw 0, 1, ..., drawing from ``generator`` alone.
        count: Draws in all.
        generator: The generator.
        run: The run to save to.
        jvps: Jacobian-vector products per draw, for the report.
        save_every: Draws between checkpoints; ``None`` saves twenty times.

    Returns:
        The numbers, shape ``(count,)``, on the CPU.

    Raises:
        StoppedError: A signal asked to stop; the checkpoint is written.
    """
    run.claim_checkpoints()
    every = max(1, count // 20) if save_every is None else save_every
    values = torch.empty(count)
    done = _restore(values, generator, run)
    with run.deferring_stops() as stop:
        began = time.perf_counter()
        unsaved = 0
        while done < count:
            values[done] = measure(done)
            done, unsaved = done + 1, unsaved + 1
            run.progress(done, count)
            stopping = stop.made
            if stopping or done % every == 0 or done == count:
                seconds = time.perf_counter() - began
                run.count(steps=unsaved, seconds=seconds, jvps=jvps * unsaved, trunk_backward=0)
                run.save({"step": done, "values": values[:done], "generator": generator.get_state()})
                began, unsaved = time.perf_counter(), 0
            if stopping and done < count:
                raise StoppedError(done)
    return values


def _restore(values: Tensor, generator: torch.Generator, run: RunContext) -> int:
    """Restore the numbers of earlier sessions and the generator, and return how many there are."""
    if run.restored is None:
        return 0
    done = int(run.restored["step"])
    values[:done] = run.restored["values"]
    generator.set_state(run.restored["generator"])
    return done
