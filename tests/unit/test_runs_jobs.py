"""Processes that end without a word: what is said of them."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from splitfg.runs import RunFolder
from splitfg.runs.jobs import Job, Outcome, run_jobs
from splitfg.runs.progress import JsonView


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder.of(tmp_path, "tiny", "adam", 0)
    found.path.mkdir(parents=True)
    return found


def run_code(folder: RunFolder, code: str) -> Outcome:
    """How a process that runs this code ends."""
    (outcome,) = run_jobs([Job(folder, (sys.executable, "-c", code))], at_once=1, view=JsonView(io.StringIO()))
    return outcome


KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def test_a_killed_run_says_how_to_go_on_and_names_no_empty_log(folder: RunFolder) -> None:
    outcome = run_code(folder, KILL)
    assert outcome.status == "failed"
    assert outcome.message == (
        f"killed by SIGKILL. It may have run out of memory; `splitfg resume {folder.path}`"
        " begins anew, as nothing was saved yet"
    )
    (folder.path / "checkpoint.json").touch()
    assert run_code(folder, KILL).message.endswith(f"`splitfg resume {folder.path}` goes on from its last checkpoint")


@pytest.mark.parametrize("code", [KILL, "raise SystemExit(3)"])
def test_a_log_is_named_where_it_says_something(folder: RunFolder, code: str) -> None:
    spoken = run_code(folder, f"import sys; print('why', file=sys.stderr, flush=True); {code}")
    assert f"; see {folder.log_path}" in spoken.message


def test_a_silent_exit_is_told_by_its_code(folder: RunFolder) -> None:
    assert run_code(folder, "raise SystemExit(3)").message == "exit code 3"


@pytest.mark.parametrize("refused", [True, False])
def test_a_process_can_say_that_it_was_refused(folder: RunFolder, refused: bool) -> None:
    event = {"event": "failed", "run": folder.name, "message": "no", "refused": refused}
    outcome = run_code(folder, f"import json; print(json.dumps({event!r}))")
    assert outcome == Outcome(folder.name, "failed", "no", refused=refused)
