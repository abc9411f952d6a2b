"""Explain GPU out-of-memory errors: suggest a ``chunk`` that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from splitfg import Split
from splitfg.recipes import PureFGMethod, SplitFGMethod
from splitfg_lab.data import Windows
from splitfg_lab.experiments.language._config import Language
from splitfg_lab.runs import RunError


@contextmanager
def explaining_memory(config: Language, split: Split, windows: Windows) -> Iterator[None]:
    """Replace an out-of-memory error by one that names a chunk that fits, found by trial.

    Raises:
        RunError: Instead of :class:`torch.OutOfMemoryError`.
    """
    try:
        yield
        return
    except torch.OutOfMemoryError as error:
        problem = str(error).splitlines()[0]
    # outside the handler: its traceback keeps the tensors alive
    raise RunError(f"{problem}\n{_advice(config, split, windows)}")


def _advice(config: Language, split: Split, windows: Windows) -> str:
    method = config.method
    if not isinstance(method, SplitFGMethod | PureFGMethod):
        return "A smaller batch or model.context, or fewer logits at once (block=1048576), take less."
    chunk = fitting_chunk(method.chunk or method.K, lambda c: _fits(replace(method, chunk=c), config, split, windows))
    if chunk is not None:
        return f"method.chunk={chunk} fits: it gives the same estimate, {chunk} of {method.K} tangents at a time."
    if isinstance(method, SplitFGMethod) and not method.lean:
        lean = replace(method, chunk=1, lean=True)
        if _fits(lean, config, split, windows):
            return "method.chunk=1 with method.lean=true fits: it gives the same estimate, one tangent at a time."
    return "Not even chunk=1 fits: use a smaller batch, model.context or block."


def fitting_chunk(too_many: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest of too_many / 2, / 4, ..., 1 that fits; ``None`` if none does."""
    while too_many > 1:
        too_many //= 2
        if fits(too_many):
            return too_many
    return None


def _fits(method: SplitFGMethod | PureFGMethod, config: Language, split: Split, windows: Windows) -> bool:
    device = next(split.model.parameters()).device
    torch.cuda.empty_cache()
    x, y = (part.to(device) for part in windows.step(0, config.batch))
    estimator = method.build()
    try:
        estimator(split, x, y, generator=torch.Generator(device))
    except torch.OutOfMemoryError:
        return False
    return True
