"""Measure rows in several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from splitfg_lab.compatibility._case import Case
from splitfg_lab.compatibility._record import Row, measured_rows

Key = tuple[str, str]
"""Library and name of a model class."""


def rows_in_parallel(cases: Sequence[Case], workers: int) -> Iterator[Row]:
    """Measure model classes in processes of one thread each, and yield rows as they end.

    Workers find a model class by library and name: ``cases`` must be some of :data:`~splitfg_lab.compatibility.CASES`.

    Args:
        cases: The model classes.
        workers: Processes. With one, this process measures itself, and rows keep their order.

    Raises:
        concurrent.futures.process.BrokenProcessPool: A process died, for example for lack of memory.
    """
    one_thread()
    if workers == 1 or len(cases) < 2:
        yield from measured_rows(cases)
        return
    context = multiprocessing.get_context("spawn")  # forked processes would share torch's threads
    with ProcessPoolExecutor(min(workers, len(cases)), mp_context=context, initializer=one_thread) as pool:
        for row in as_completed([pool.submit(_row, (case.library, case.name)) for case in cases]):
            yield row.result()


def one_thread() -> None:
    """Use one thread unless ``OMP_NUM_THREADS`` sets another number: the models are small."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _row(key: Key) -> Row:
    from splitfg_lab.compatibility import CASES

    (case,) = [case for case in CASES if (case.library, case.name) == key]
    (row,) = measured_rows([case])
    return row
