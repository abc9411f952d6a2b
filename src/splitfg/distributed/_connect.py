"""Joining the processes that torchrun has started."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from splitfg.distributed._ranks import ROWS, TANGENTS, Ranks, answered
from splitfg.errors import SplitError, raise_if


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
