"""Measure several variants of a step, each in its own process: work space of one changes the peak of the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from splitfg.errors import SplitError
from splitfg_lab.runs import RunError

if TYPE_CHECKING:
    from splitfg_lab.runs import RunContext

Peak = Callable[..., dict[str, float]]
"""``(variant, config, seed, device) -> {what: MiB}``; a function of a module, since another process has to find it."""

_SIDE_BY_SIDE = 6


def peaks(measure: Peak, variants: Sequence[str], config: Any, seed: int, run: RunContext) -> dict[str, float]:
    """Return the values of ``measure`` for every variant, as ``what/variant``.

    Raises:
        RunError: There is no GPU (torch counts memory only there), or all variants failed.
    """
    if run.device.type != "cuda":
        raise RunError("memory can only be measured on a GPU: pass --device cuda where there is one")
    return in_processes(measure, variants, config, seed, run)


def in_processes(measure: Peak, variants: Sequence[str], config: Any, seed: int, run: RunContext) -> dict[str, float]:
    """Call ``measure`` for every variant, each in its own process, and return its values as ``what/variant``.

    Variants that fail are left out, with a note.

    Raises:
        RunError: All variants failed, or a process was killed.
    """
    found: dict[str, float] = {}
    with _ended_with(ProcessPoolExecutor(_SIDE_BY_SIDE, get_context("spawn"), max_tasks_per_child=1)) as pool:
        jobs = {name: pool.submit(_attempt, measure, name, config, seed, str(run.device)) for name in variants}
        for i, (name, job) in enumerate(jobs.items()):
            run.progress(i, len(jobs))
            values, problem = job.result()
            found |= {f"{what}/{name}": value for what, value in values.items()}
            if problem:
                run.note(f"{name} was not measured: {problem}")
    if not found:
        raise RunError("nothing was measured; the notes above say why")
    return found


def _attempt(measure: Peak, *arguments: Any) -> tuple[dict[str, float], str]:
    """Return the values, or the text of an error: errors of a compiler cannot be pickled.

    A variant that does not fit or compile must not stop the others.
    """
    try:
        return measure(*arguments), ""
    except (RuntimeError, SplitError) as error:
        return {}, f"{type(error).__name__}: {error}"


@contextmanager
def _ended_with(pool: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """Whoever stops here does not wait for what is still to be measured."""
    try:
        yield pool
    except BaseException as error:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise RunError("a process was killed while it measured, perhaps for want of memory") from error
        raise
    pool.shutdown()


def savings(metrics: Mapping[str, float]) -> dict[str, float]:
    """1 - peak / backprop's peak of every variant, in percent; empty without backprop."""
    reference = metrics.get("mib/backprop")
    if reference is None:
        return {}
    found = {name.removeprefix("mib/"): value for name, value in metrics.items() if name.startswith("mib/")}
    return {f"saved/{variant}": 100 * (1 - value / reference) for variant, value in found.items()}
