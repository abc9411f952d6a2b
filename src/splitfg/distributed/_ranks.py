"""The processes that share an estimate, and the messages between them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous
from torch.utils import _pytree as pytree

from splitfg.errors import LostRankError, SplitError, raise_if
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
        return self.rank == 0

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
        """Join the rows of all processes, which hold ``rows`` rows each."""
        widest = max(rows)
        padded = values.new_zeros((widest, *values.shape[1:]))
        padded[: values.shape[0]] = values
        return torch.cat([part[:count] for part, count in zip(self.gather(padded), rows, strict=True)])

    def texts(self, text: str) -> list[str]:
        """Return a text from every process of the process group, by rank; no pickle."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        sizes = _gathered(torch.tensor([len(data)], device=self.device), self.size)
        padded = data.new_zeros(max(1, int(max(sizes))))
        padded[: len(data)] = data
        found = _gathered(padded, self.size)
        return [bytes(part[: int(n)].tolist()).decode() for part, n in zip(found, sizes, strict=True)]

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
        """One group of all processes where the mesh holds them all, one along each dimension otherwise."""
        if self._mesh is None or self._mesh.size() == self.size:
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


def connect(
    *,
    tangents: int = 1,
    device: str | None = None,
    timeout: timedelta = timedelta(minutes=5),
    arrival: timedelta = timedelta(minutes=10),
) -> Ranks:
    """Join the processes that ``torchrun`` has started, and arrange them in a grid.

    Args:
        tangents: Processes that hold the same rows and divide the tangents; the others hold different rows.
        device: ``cpu`` (gloo) or ``cuda`` (NCCL); by default ``cuda`` where there is one.
        timeout: A process that does not answer for so long ends the step of all others.
        arrival: How long to wait until all processes have arrived.

    Raises:
        SplitError: If the program was not started by ``torchrun``, or the number of processes is no multiple of
            ``tangents``, or a host has more processes than GPUs.
        LostRankError: If not all processes arrive at the rendezvous.

    Example:
        >>> from splitfg.distributed import connect
        >>> try:
        ...     ranks = connect(tangents=2)  # torchrun --nproc-per-node 4: two parts of the rows
        ... except ValueError as error:
        ...     print(error)
        RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set: start the program with torchrun --nproc-per-node N
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        *most, last = missing
        names = f"{', '.join(most)} and {last}" if most else last
        verb = "are" if most else "is"
        raise SplitError([f"{names} {verb} not set: start the program with torchrun --nproc-per-node N"])
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        raise_if(_gpu_problems())
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        backend = "nccl" if kind == "cuda" else "gloo"
        answered(lambda: _meet(backend, arrival, timeout), f"the rendezvous at {where}")
        if backend == "gloo":
            atexit.register(_leave)
    size = dist.get_world_size()
    raise_if(
        []
        if tangents >= 1 and size % tangents == 0
        else [f"{size} processes cannot form groups of {tangents} that divide the tangents: start a multiple of it"]
    )
    if tangents == 1:
        return Ranks()
    mesh = init_device_mesh(kind, (size // tangents, tangents), mesh_dim_names=(ROWS, TANGENTS))
    for name in (ROWS, TANGENTS):
        _set_pg_timeout(timeout, mesh.get_group(name))
    return Ranks(mesh)


def _leave() -> None:
    """End the process group: a process that ends with gloo's threads running may abort after all its work is done."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _gpu_problems() -> list[str]:
    """Compare the processes of this host with its GPUs; NCCL takes one process per GPU."""
    here, found = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if found == 0:
        return ["torch sees no GPU on this host: pass device='cpu'"]
    if here <= found:
        return []
    return [
        f"{here} processes on a host with {found} GPU{'s' * (found != 1)}: start one for every GPU with torchrun"
        f" --nproc-per-node {found}, or pass device='cpu'"
    ]


def _meet(backend: str, arrival: timedelta, timeout: timedelta) -> None:
    """Connect all processes, which may take longer than a step may."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun keeps one store over its restarts, with the addresses of dead processes in it: read a new part of it
        store, rank, size = next(rendezvous("env://", timeout=arrival))
        fresh = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, timeout=arrival)
    else:
        dist.init_process_group(backend, timeout=arrival)
    _set_pg_timeout(timeout)


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


def _gathered(values: Tensor, size: int) -> list[Tensor]:
    found = [torch.empty_like(values) for _ in range(size)]
    answered(lambda: dist.all_gather(found, values), "an all-gather")
    return found


def answered(operation: Callable[[], T], what: str) -> T:
    """Call an operation of a process group, and return its result.

    Raises:
        LostRankError: If it fails, because another process is gone.
    """
    try:
        return operation()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise LostRankError(
            f"{what} failed, because a process died, hangs or is not there ({reason}): torchrun --max-restarts N starts"
            " all of them again, and a run goes on from its last checkpoint"
        ) from error
