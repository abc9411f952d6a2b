"""The processes that share an estimate, and the messages between them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from splitfg.errors import LostRankError, raise_if
from splitfg.splitting.checks import has_rows
from splitfg.types import Inputs, Target

T = TypeVar("T")

ROWS: Final = "rows"
TANGENTS: Final = "tangents"


class Ranks:
    """The processes that share an estimate, as a grid: some hold different rows, some divide the tangents.

    Args:
        mesh: A :class:`~torch.distributed.device_mesh.DeviceMesh` whose dimensions are named ``rows``, ``tangents`` or
            both. Processes along ``rows`` hold different rows of the batch; processes along ``tangents`` hold the same
            rows and divide the K tangents. By default all processes hold different rows.

    Raises:
        SplitError: If there is no process group, or the mesh has other dimensions.

    Example:
        >>> from splitfg.distributed import Ranks, connect
        >>> try:
        ...     ranks = connect()  # in a program that torchrun starts
        ... except ValueError as error:
        ...     print(error)
        RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set: start the program with torchrun --nproc-per-node N
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        raise_if(_mesh_problems(mesh))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._mesh: DeviceMesh | None = None
        self.row_part, self.row_parts, self.tangent_part, self.tangent_parts = self.rank, self.size, 0, 1
        if mesh is not None:
            self._use(mesh)

    def __repr__(self) -> str:
        return f"Ranks(rank {self.rank}: rows {self.row_part + 1} of {self.row_parts}, tangents" + (
            f" {self.tangent_part + 1} of {self.tangent_parts})"
        )

    @property
    def device(self) -> torch.device:
        """The device of messages: a GPU with NCCL, the CPU with gloo."""
        backend = str(dist.get_backend(self._groups[0]))
        return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == self.members[0]

    @property
    def members(self) -> list[int]:
        """The ranks of all processes that share the estimate, in the order of :meth:`texts`."""
        if self._mesh is None:
            return list(range(self.size))
        found: list[int] = self._mesh.mesh.flatten().tolist()
        return found

    def sum_(self, values: Tensor) -> Tensor:
        """Replace a tensor by its sum over all processes."""
        for group in self._groups:
            answered(partial(dist.all_reduce, values, group=group), "an all-reduce")
        return values

    def mean_rows_(self, values: Tensor) -> Tensor:
        """Replace a tensor by its mean over the processes with different rows."""
        if self.row_parts == 1:
            return values
        answered(lambda: dist.all_reduce(values, group=self._row_group), "an all-reduce")
        return values.div_(self.row_parts)

    def gather(self, values: Tensor) -> Tensor:
        """Stack a tensor of equal shape from the processes with different rows."""
        if self.row_parts == 1:
            return values[None]
        own = values.to(self.device).contiguous()  # gloo gathers tensors of the host alone
        found = [torch.empty_like(own) for _ in range(self.row_parts)]
        answered(lambda: dist.all_gather(found, own, group=self._row_group), "an all-gather")
        return torch.stack(found).to(values.device)

    def gather_rows(self, values: Tensor, rows: Sequence[int]) -> Tensor:
        """Join the first rows of every process, ``rows`` of them; sends no others."""
        own = values[: rows[self.row_part]]
        if self.row_parts > 1 and not any(rows[1:]):
            return self._from_first(own if self.row_part == 0 else values.new_empty((rows[0], *values.shape[1:])))
        padded = values.new_zeros((max(rows), *values.shape[1:]))
        padded[: len(own)] = own
        return torch.cat([part[:count] for part, count in zip(self.gather(padded), rows, strict=True)])

    def _from_first(self, values: Tensor) -> Tensor:
        """Return a tensor of the first process with other rows in all of them."""
        found = values.to(self.device).contiguous()
        answered(lambda: dist.broadcast(found, group=self._row_group, group_src=0), "a broadcast")
        return found.to(values.device)

    def texts(self, text: str) -> list[str]:
        """Return a text from every process that shares the estimate, in the order of :attr:`members`; no pickle."""
        found = [text]
        for group in reversed(self._groups):
            gathered = _texts(json.dumps(found), self.device, group)
            found = [one for part in gathered for one in json.loads(part)]
        return found

    def own_rows(self, x: Inputs, y: Target) -> tuple[Inputs, Target]:
        """Return this process's rows of a batch that all processes have: contiguous parts, as even as possible."""
        count = y.shape[0]
        own = slice(count * self.row_part // self.row_parts, count * (self.row_part + 1) // self.row_parts)
        taken: Inputs = pytree.tree_map(lambda t: t[own] if has_rows(t) else t, x)
        return taken, y[own]

    # Groups are found when they are needed: a group that is held here would outlive destroy_process_group, and with it
    # gloo's threads, which abort a process that ends.

    @property
    def _groups(self) -> Sequence[dist.ProcessGroup | None]:
        """One group of all processes where the mesh holds them all in order, one along each dimension otherwise."""
        if self._mesh is None or self.members == list(range(self.size)):
            return (None,)
        return [self._mesh.get_group(name) for name in self._mesh.mesh_dim_names or ()]

    @property
    def _row_group(self) -> dist.ProcessGroup | None:
        """The processes with different rows; ``None`` for all processes."""
        return None if self._mesh is None else self._mesh.get_group(ROWS)

    def _use(self, mesh: DeviceMesh) -> None:
        self._mesh, names = mesh, mesh.mesh_dim_names or ()
        place = {name: (mesh.get_local_rank(name), mesh.size(i)) for i, name in enumerate(names)}
        self.row_part, self.row_parts = place.get(ROWS, (0, 1))
        self.tangent_part, self.tangent_parts = place.get(TANGENTS, (0, 1))


def _mesh_problems(mesh: object) -> list[str]:
    if not dist.is_available() or not dist.is_initialized():
        return ["there is no process group: call splitfg.distributed.connect(), in a program that torchrun starts"]
    if mesh is None:
        return []
    if not isinstance(mesh, DeviceMesh):
        return [f"mesh must be a DeviceMesh, got {type(mesh).__name__}: use torch's init_device_mesh"]
    names = mesh.mesh_dim_names or ()
    if names and set(names) <= {ROWS, TANGENTS}:
        return []
    return [f"the mesh has dimensions {names}: name them with mesh_dim_names=({ROWS!r}, {TANGENTS!r}), or one of these"]


def _texts(text: str, device: torch.device, group: dist.ProcessGroup | None) -> list[str]:
    """Return a text from every process of a group."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    sizes = _gathered(torch.tensor([len(data)], device=device), group)
    padded = data.new_zeros(max(1, int(max(sizes))))
    padded[: len(data)] = data
    found = _gathered(padded, group)
    return [bytes(part[: int(n)].tolist()).decode() for part, n in zip(found, sizes, strict=True)]


def _gathered(values: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    found = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    answered(lambda: dist.all_gather(found, values, group=group), "an all-gather")
    return found


def answered(operation: Callable[[], T], what: str) -> T:
    """Call an operation of a process group, and return its result.

    Raises:
        LostRankError: If it fails, because another process is gone.
    """
    try:
        return operation()
    except RuntimeError as error:
        reason = re.sub(r"^\[\S*\.cc:\d+\] ", "", str(error).strip().splitlines()[0])  # without gloo's own source file
        raise LostRankError(
            f"{what} failed, because a process died, hangs or is not there ({reason}): torchrun --max-restarts N starts"
            " all of them again, and a run goes on from its last checkpoint"
        ) from error
