"""``torchrun -m splitfg_lab.cli run ...``: the processes of torchrun share every run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from splitfg_lab.commands._making import How, prepare
from splitfg_lab.commands.errors import EXIT_LOST, EXIT_OK, EXIT_STOPPED, EXIT_USAGE

if TYPE_CHECKING:
    from splitfg_lab.commands._targets import Plan


def under_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def run_here(plans: Sequence[Plan], root: Path, how: How) -> int:
    """Run plans one after another in the processes of torchrun, and return the exit code.

    The first process writes the configs and prints events as JSON lines. Ends with the first process that is lost, so
    that torchrun restarts all of them; finished runs are skipped then.
    """
    from splitfg_lab.commands.worker import join_ranks, run_folder

    ranks = join_ranks(how.device, how.timeout)
    assert ranks is not None
    refused = []
    if ranks.is_first:
        refused = [outcome.message for outcome in prepare(plans, root).refused]
    problems = ranks.texts("\n".join(refused))[0]
    if problems:
        if ranks.is_first:
            print(problems)
        return EXIT_USAGE
    worst = EXIT_OK
    for plan in plans:
        code = run_folder(plan.folder(root), how.device, tensorboard=how.tensorboard, ranks=ranks)
        if code in (EXIT_LOST, EXIT_STOPPED):
            return code
        worst = max(worst, code)
    return worst
