"""Messages between the stages of a trunk: streams upwards, gradients downwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from splitfg.distributed._ranks import Ranks, answered

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HEADER = 8  # dtype, dimensions, and up to six sizes


class StageMessages:
    """Sends tensors between neighbouring ranks; a stage is a rank, the last one holds the head."""

    def __init__(self, ranks: Ranks) -> None:
        self.stage, self.stages = ranks.rank, ranks.size
        self._ranks = ranks
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send_up(self, x: Tensor) -> None:
        """Send a tensor to the next stage, without waiting; :meth:`flush` waits."""
        for part in (self._header(x), x):
            held = part.to(self._ranks.device).contiguous()
            self._sent.append((_started(partial(dist.isend, held, self.stage + 1)), held))

    def receive_from_below(self, device: torch.device) -> Tensor:
        """Return the next tensor of the stage before."""
        header = torch.empty(_HEADER, dtype=torch.int64, device=self._ranks.device)
        answered(lambda: dist.recv(header, self.stage - 1), "a message from the stage before")
        found = self._empty(header)
        answered(lambda: dist.recv(found, self.stage - 1), "a message from the stage before")
        return found.to(device)

    def send_down(self, x: Tensor) -> None:
        """Send a tensor to the stage before, without waiting; :meth:`flush` waits."""
        held = x.to(self._ranks.device).contiguous()
        self._sent.append((_started(partial(dist.isend, held, self.stage - 1)), held))

    def receive_from_above(self, like: Tensor) -> Tensor:
        """Return the next tensor of the stage above, shaped as ``like``."""
        found = torch.empty(like.shape, dtype=like.dtype, device=self._ranks.device)
        answered(lambda: dist.recv(found, self.stage + 1), "a message from the stage above")
        return found.to(like.device)

    def flush(self) -> None:
        """Wait until all sent tensors have arrived."""
        for work, _ in self._sent:
            answered(work.wait, "a message to another stage")
        self._sent.clear()

    def broadcast_from_top(self, values: Tensor | None, device: torch.device) -> Tensor:
        """Return the tensor of the last stage in all stages; the others pass ``None``."""
        top = self.stages - 1
        header = torch.empty(_HEADER, dtype=torch.int64) if values is None else self._header(values)
        header = self.broadcast(header, top)
        return self.broadcast(self._empty(header) if values is None else values, top).to(device)

    def broadcast(self, values: Tensor, source: int) -> Tensor:
        """Return a tensor of one stage in all stages; the others pass one of its shape and dtype."""
        found = values.detach().to(self._ranks.device).clone()
        answered(lambda: dist.broadcast(found, source), "a broadcast")
        return found.to(values.device)

    def from_above(self, own: Tensor, like: Tensor, distance: int = 1) -> Tensor | None:
        """Send a tensor ``distance`` stages down and return that from as far above, shaped as ``like``; or ``None``."""
        below, above, operations = self.stage - distance, self.stage + distance, []
        held = own.to(self._ranks.device).contiguous()
        found = torch.empty(like.shape, dtype=like.dtype, device=self._ranks.device)
        if below >= 0:
            operations.append(dist.P2POp(dist.isend, held, below))
        if above < self.stages:
            operations.append(dist.P2POp(dist.irecv, found, above))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            answered(work.wait, "a message between stages")
        return found.to(own.device) if above < self.stages else None

    def sum_above(self, own: Tensor) -> Tensor:
        """Return the sum of a tensor over all stages above, in 1 + log2(stages) messages of its size."""
        shifted = self.from_above(own, own)
        total = torch.zeros_like(own) if shifted is None else shifted
        distance = 1
        while distance < self.stages:
            further = self.from_above(total, total, distance)
            total = total if further is None else total + further
            distance *= 2
        return total

    def _header(self, x: Tensor) -> Tensor:
        sizes = [_DTYPES.index(x.dtype), x.ndim, *x.shape]
        return torch.tensor(sizes + [0] * (_HEADER - len(sizes)))

    def _empty(self, header: Tensor) -> Tensor:
        dtype, ndim, *sizes = header.tolist()
        return torch.empty(sizes[:ndim], dtype=_DTYPES[dtype], device=self._ranks.device)


def _started(operation: Callable[[], dist.Work | None]) -> dist.Work:
    work = answered(operation, "a message to another stage")
    assert work is not None
    return work
