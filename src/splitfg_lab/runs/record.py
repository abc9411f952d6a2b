"""``report.json``: the result of a finished run, typed and validated."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from splitfg_lab.runs._errors import ConfigError
from splitfg_lab.runs.config import from_json, to_json
from splitfg_lab.runs.digests import config_digest
from splitfg_lab.runs.names import is_plain
from splitfg_lab.runs.storage import read_json, write_json

Status = Literal["done", "diverged"]
Matrix: TypeAlias = tuple[tuple[float, ...], ...]
"""Rows of numbers."""


@dataclass(frozen=True)
class RunReport:
    """The result of a finished run. A quantity that was not measured is ``None``, never zero.

    Attributes:
        schema: The version of this format.
        experiment: Name of the experiment.
        preset: Name of the preset; ``config`` shows whether fields of it were overridden.
        seed: Seed.
        status: ``diverged`` if the loss, a metric or a parameter stopped being finite.
        message: Why it diverged; empty for ``done``.
        metrics: The final metrics; the last finite ones of a run that diverged.
        versions: Versions of Python and packages.
        git: Revision of the source, if it ran from a checkout or ``SPLITFG_REVISION`` names it.
        git_dirty: Whether tracked files differed from that revision.
        device: Kind and name of the device.
        threads: CPU threads that torch could use; sums are rounded differently with another number.
        side_by_side: How many runs shared the machine: 1 for a run that had it alone, ``None`` where not recorded.
            Times of runs that shared a machine, or may have, are not comparable, and reports leave them out. Other
            programs are not counted: record times on a quiet machine.
        ranks: Processes that shared the run, in its last session.
        started: UTC time, ISO 8601.
        finished: UTC time, ISO 8601.
        wall_s: Seconds it took, all sessions of an interrupted run together.
        steps: Training steps taken.
        step_ms: Milliseconds per training step, without warm-up, evaluation and checkpoints.
        peak_memory_mib: Most memory held at once.
        memory_kind: The kind of memory that ``peak_memory_mib`` counts.
        jvps_per_step: Jacobian-vector products through the trunk per step.
        trunk_backward: Reverse passes through the trunk per step.
        block_backward: Reverse passes inside single blocks of the trunk per step; ``None`` for none.
        config: The config as JSON.
        config_digest: SHA-256 of ``config``; empty in reports from before there were digests.
        data_digests: SHA-256 of each data set that the run read, by name.
        matrices: Small matrices for figures, by name (``confusion``, ``filters_before``, ``filters_after``).
    """

    schema: Literal[1] = field(default=1, kw_only=True)
    experiment: str
    preset: str
    seed: int
    status: Status
    metrics: dict[str, float]
    versions: dict[str, str]
    git: str | None
    git_dirty: bool | None
    device: str
    threads: int
    started: str
    finished: str
    wall_s: float
    steps: int
    step_ms: float | None
    peak_memory_mib: float
    memory_kind: str
    jvps_per_step: float | None
    trunk_backward: float | None
    config: dict[str, Any]
    message: str = ""
    side_by_side: int | None = None
    ranks: int = 1
    config_digest: str = ""
    data_digests: dict[str, str] = field(default_factory=dict)
    matrices: dict[str, Matrix] = field(default_factory=dict)
    block_backward: float | None = None

    @property
    def forward_only(self) -> bool:
        """Whether the trunk ran no reverse pass, not even inside a block."""
        return self.trunk_backward == 0 and not self.block_backward

    @property
    def timed_alone(self) -> bool:
        """Whether the run had its machine to itself; ``False`` if it did not record that."""
        return self.side_by_side == 1

    def __post_init__(self) -> None:
        wrong = [f"{kind}: {name!r} is not a plain name" for kind, name in self._names() if not is_plain(name)]
        if self.config_digest and self.config_digest != config_digest(self.config):
            wrong.append("config: its digest is not config_digest, so one of them was edited after the run")
        if wrong:
            raise ValueError("; ".join(wrong))

    def _names(self) -> tuple[tuple[str, str], ...]:
        """Return the names that become folders and files."""
        return ("experiment", self.experiment), ("preset", self.preset)


def write_report(path: Path, report: RunReport) -> None:
    """Write ``report.json``."""
    write_json(path, to_json(report))


def read_report(path: Path) -> RunReport:
    """Read ``report.json``.

    Raises:
        RunError: It is missing, damaged, edited or of another format; the error lists every problem.
    """
    data = read_json(path)
    try:
        return from_json(RunReport, data)
    except ConfigError as error:
        raise ConfigError(error.problems, what=str(path)) from None
