"""Execute one run, from its beginning or its checkpoint to its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from splitfg_lab.runs._books import utc_now
from splitfg_lab.runs._errors import DivergedError, RunError
from splitfg_lab.runs.checkpoint import Checkpoint, drop_previous, load_checkpoint
from splitfg_lab.runs.config import to_json
from splitfg_lab.runs.context import Emit, RunContext, require_finite
from splitfg_lab.runs.digests import config_digest, require_same_run
from splitfg_lab.runs.environment import (
    Revision,
    cpu_threads,
    describe_device,
    resolve_device,
    source_revision,
    versions,
)
from splitfg_lab.runs.folder import RunFolder, RunIdentity
from splitfg_lab.runs.lease import Lease, leased
from splitfg_lab.runs.record import RunReport, Status

if TYPE_CHECKING:
    from splitfg.distributed import Ranks


class Runner(Protocol):
    """A function that runs one preset."""

    def __call__(self, config: Any, *, seed: int, run: RunContext) -> Mapping[str, float]:
        """Build the model and data that the config names, train or measure, and return the final metrics."""


def execute(
    folder: RunFolder, runner: Runner, config: Any, *, device: str, emit: Emit, ranks: Ranks | None = None
) -> RunReport:
    """Run a prepared folder, from its checkpoint if it has one, and write its report.

    Args:
        folder: A folder with ``config.json``.
        runner: The runner of the experiment.
        config: The config in ``config.json`` as the runner's dataclass; the report stores it with all its fields.
        device: ``auto``, ``cpu``, ``cuda``, ...; a run resumes on the kind of device on which it began, with as many
            CPU threads.
        emit: Receives the events of the run.
        ranks: The processes that share the run, which all call this function. The first one locks the folder and
            writes its files; a run may resume with another number of processes.

    Returns:
        The report, which is also in the folder. A finished run is not run again.

    Raises:
        StoppedError: A signal asked to stop; the checkpoint is written.
        RunError: Another process uses the folder, its config or its data changed since the run began, a file is
            damaged, the disk is full, or the device does not exist.
    """
    leads = ranks is None or ranks.is_first
    with _held(folder) if leads else nullcontext() as lease:
        finished = _agreed(folder.finished, ranks)
        report = folder.report() if finished else _make_report(folder, runner, config, device, emit, ranks, lease)
    if not leads:
        return report
    ending = {"status": report.status, "metrics": report.metrics, "message": report.message}
    emit({"event": "finished", "run": folder.name, **ending})
    return report


@contextmanager
def _held(folder: RunFolder) -> Iterator[Lease]:
    """Hold the folder's lock against processes of this host, and its lease against other hosts."""
    with folder.locked(), leased(folder.path) as lease:
        yield lease


def _agreed(finished: bool, ranks: Ranks | None) -> bool:
    """Return whether the first process found the run finished: the others may look after it has finished it."""
    return finished if ranks is None else ranks.texts(str(finished))[0] == "True"


def _make_report(
    folder: RunFolder,
    runner: Runner,
    config: Any,
    device: str,
    emit: Emit,
    ranks: Ranks | None,
    lease: Lease | None,
) -> RunReport:
    # read at once: it is the revision of the loaded code, and files may change during the run
    identity, revision = folder.identity(), source_revision()
    checkpoint = load_checkpoint(folder.path)
    if checkpoint is not None and "run" in checkpoint.state:
        require_same_run(folder.config_path, checkpoint.state["run"], asdict(identity))
    if ranks is not None:
        ranks.texts("")  # all have read the checkpoint before the first one can write another
    chosen = _choose_device(device, checkpoint)
    # sums are rounded differently with another number of threads: a run keeps the one it began with
    threads = checkpoint.state.get("threads") if checkpoint is not None else None
    with (
        cpu_threads(threads),
        RunContext(folder, checkpoint, device=chosen, emit=emit, identity=identity, ranks=ranks, lease=lease) as run,
    ):
        run.emit("started", step=run.books.steps, device=describe_device(chosen))
        outcome = _run(runner, config, identity.seed, run)
        report = _report(replace(identity, config=to_json(config)), revision, run, outcome)
    if lease is None:
        return report
    lease.require()
    if report.status == "done":
        drop_previous(folder.path)
    folder.finish(report)
    return report


@dataclass(frozen=True)
class _Outcome:
    status: Status
    metrics: dict[str, float]
    message: str = ""


def _run(runner: Runner, config: Any, seed: int, run: RunContext) -> _Outcome:
    # runners draw from their own generators; modules such as dropout draw from the global one
    torch.manual_seed(seed)
    try:
        metrics = {name: float(value) for name, value in runner(config, seed=seed, run=run).items()}
        require_finite(run.books.steps, metrics)
    except DivergedError as error:
        return _Outcome("diverged", run.books.metrics, str(error))
    return _Outcome("done", metrics)


def _choose_device(name: str, checkpoint: Checkpoint | None) -> torch.device:
    """Return the device; it must be of the kind to which the checkpoint's random generators belong."""
    began_on = checkpoint.state["device"] if checkpoint is not None else None
    device = resolve_device(began_on if name == "auto" and began_on is not None else name)
    if began_on not in (None, device.type):
        raise RunError(
            f"the run began on {began_on} and cannot resume on {device.type}: its random numbers would be others."
            f" Use --device {began_on}, or delete the run folder to start over."
        )
    return device


def _report(identity: RunIdentity, revision: Revision | None, run: RunContext, outcome: _Outcome) -> RunReport:
    run.close_books()
    books = run.books
    return RunReport(
        experiment=identity.experiment,
        preset=identity.preset,
        seed=identity.seed,
        status=outcome.status,
        message=outcome.message,
        metrics=outcome.metrics,
        versions=versions(),
        git=revision.commit if revision else None,
        git_dirty=revision.dirty if revision else None,
        device=describe_device(run.device),
        threads=torch.get_num_threads(),
        started=books.started,
        finished=utc_now(),
        wall_s=round(books.wall_s, 3),
        steps=books.steps,
        step_ms=None if books.step_ms is None else round(books.step_ms, 4),
        peak_memory_mib=round(books.peak_memory_mib, 1),
        memory_kind=run.memory.kind,
        jvps_per_step=books.per_step(books.jvps),
        trunk_backward=books.per_step(books.trunk_backward),
        block_backward=books.per_step(books.block_backward),
        config=identity.config,
        config_digest=config_digest(identity.config),
        data_digests=dict(run.data),
        side_by_side=books.side_by_side,
        ranks=1 if run.ranks is None else run.ranks.size,
        matrices=run.matrices,
    )
