"""Time as a median, memory as the peak of live tensor bytes."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def interleaved_ms(steps: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Median milliseconds of each step; they take turns, so that a slow moment of the machine hits all alike."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            _synchronise()
            start = time.perf_counter()
            step()
            _synchronise()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_mib(step: Callable[[], object]) -> float:
    """The most memory a step holds at once beyond what was there before it, in MiB."""
    step()
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with LiveBytes() as live:
        step()
    return live.peak / 2**20


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of all tensors made inside it, from their making to their release."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note what it made."""
        given = {id(t.untyped_storage()) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and id(t.untyped_storage()) not in given:
                self._note(t.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
