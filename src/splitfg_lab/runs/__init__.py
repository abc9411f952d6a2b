"""Runs: configs, run folders, checkpoints, the training loop, progress, jobs and recorded results.

Modules that need torch are imported on first use, so reading and listing runs stays fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from splitfg_lab.runs._errors import CheckpointError, ConfigError, DivergedError, RunError, StoppedError
from splitfg_lab.runs._metrics import read_metrics
from splitfg_lab.runs.config import Difference, differences, from_json, to_json
from splitfg_lab.runs.folder import RunFolder, find_folders
from splitfg_lab.runs.overrides import override
from splitfg_lab.runs.record import RunReport
from splitfg_lab.runs.results import RunRecord, read_records

if TYPE_CHECKING:
    from splitfg_lab.runs._execute import Runner, execute
    from splitfg_lab.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
    from splitfg_lab.runs.context import RunContext
    from splitfg_lab.runs.draws import draw
    from splitfg_lab.runs.loop import fit

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "Difference",
    "DivergedError",
    "RunContext",
    "RunError",
    "RunFolder",
    "RunRecord",
    "RunReport",
    "Runner",
    "StoppedError",
    "differences",
    "draw",
    "execute",
    "find_folders",
    "fit",
    "from_json",
    "load_checkpoint",
    "override",
    "read_metrics",
    "read_records",
    "save_checkpoint",
    "to_json",
]

_NEEDS_TORCH = {
    "Checkpoint": "checkpoint",
    "RunContext": "context",
    "Runner": "_execute",
    "draw": "draws",
    "execute": "_execute",
    "fit": "loop",
    "load_checkpoint": "checkpoint",
    "save_checkpoint": "checkpoint",
}


def __getattr__(name: str) -> object:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'splitfg_lab.runs' has no attribute {name!r}")
    return getattr(importlib.import_module(f"splitfg_lab.runs.{_NEEDS_TORCH[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
