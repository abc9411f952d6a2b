"""Peak memory of several variants of a step, each in a process of its own: what one leaves behind changes the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from splitfg.errors import SplitError
from splitfg.runs import RunContext, RunError

Peak = Callable[..., dict[str, float]]
"""``(variant, config, seed, device) -> {what: MiB}``; a function of a module, since another process has to find it."""

_SIDE_BY_SIDE = 6


def peaks(measure: Peak, variants: Sequence[str], config: Any, seed: int, run: RunContext) -> dict[str, float]:
    """What ``measure`` finds for every variant, as ``what/variant``.

    Raises:
        RunError: There is no GPU, on which alone torch counts memory.
    """
    if run.device.type != "cuda":
        raise RunError("memory can only be measured on a GPU: pass --device cuda where there is one")
    found: dict[str, float] = {}
    with ProcessPoolExecutor(_SIDE_BY_SIDE, get_context("spawn"), max_tasks_per_child=1) as pool:
        jobs = {name: pool.submit(measure, name, config, seed, str(run.device)) for name in variants}
        for i, (name, job) in enumerate(jobs.items()):
            run.progress(i, len(jobs))
            try:
                found |= {f"{what}/{name}": value for what, value in job.result().items()}
            except (RuntimeError, SplitError) as error:
                # one variant that does not fit or does not compile leaves the others their numbers
                run.note(f"the memory of {name} was not measured: {error}")
    return found


def savings(metrics: Mapping[str, float]) -> dict[str, float]:
    """1 - peak / backprop's peak of every variant, in percent; empty without backprop."""
    reference = metrics.get("mib/backprop")
    if reference is None:
        return {}
    found = {name.removeprefix("mib/"): value for name, value in metrics.items() if name.startswith("mib/")}
    return {f"saved/{variant}": 100 * (1 - value / reference) for variant, value in found.items()}
