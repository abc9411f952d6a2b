"""Processes that end without a word, or in a way nobody planned: what is said of them, and that others go on."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from splitfg_lab.runs import RunFolder
from splitfg_lab.runs.bars import choose_view
from splitfg_lab.runs.jobs import Job, Outcome, run_jobs
from splitfg_lab.runs.progress import Event, JsonView


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
        " starts over, as there is no checkpoint yet"
    )
    (folder.path / "checkpoint.json").touch()
    assert run_code(folder, KILL).message.endswith(f"`splitfg resume {folder.path}` resumes from its last checkpoint")


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


SAYS_DONE = """
import json, sys
print(json.dumps({"event": "finished", "run": sys.argv[1], "status": "done", "metrics": {"loss": 1.0}, "message": ""}))
"""


def job(folder: RunFolder, code: str) -> Job:
    return Job(folder, (sys.executable, "-c", code, folder.name))


def run_beside(troubled: Job, root: Path) -> tuple[Outcome, list[dict[str, object]]]:
    """How a job ends, and what is shown, while a job beside it must end well."""
    healthy = RunFolder.of(root, "tiny", "adam", 1)
    healthy.path.mkdir(parents=True)
    shown = io.StringIO()
    outcomes = run_jobs([troubled, job(healthy, SAYS_DONE)], at_once=1, view=JsonView(shown))
    assert outcomes[1] == Outcome(healthy.name, "done", "", {"loss": 1.0})
    return outcomes[0], [json.loads(line) for line in shown.getvalue().splitlines()]


def test_a_folder_that_vanished_fails_its_own_job_alone(folder: RunFolder, tmp_path: Path) -> None:
    shutil.rmtree(folder.path)
    outcome, shown = run_beside(job(folder, SAYS_DONE), tmp_path)
    message = f"its folder {folder.path} is gone: run it again to start over"
    assert outcome == Outcome(folder.name, "failed", message)
    assert shown[0] == {"event": "failed", "run": folder.name, "message": message, "folder": str(folder.path)}


def test_a_command_that_is_not_there_fails_its_own_job_alone(folder: RunFolder, tmp_path: Path) -> None:
    outcome, _ = run_beside(Job(folder, (str(tmp_path / "nothing"),)), tmp_path)
    assert outcome.status == "failed"
    assert outcome.message.startswith("cannot run: ")
    assert outcome.message.endswith(f"`splitfg resume {folder.path}` tries again")


def test_a_line_beyond_all_bounds_ends_its_process(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitfg_lab.runs.jobs._LINE_BYTES", 1000)
    code = f"""
import os, time
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
print("x" * 5000, flush=True)
time.sleep(20)
"""
    outcome, _ = run_beside(job(folder, code), tmp_path)
    assert outcome.status == "failed"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("line", ['{"event": "progress", "ru', "hello", "3", "[]", "{}", '{"event": "note"}', "\\xff"])
def test_a_line_that_is_no_event_is_passed_over(folder: RunFolder, tmp_path: Path, line: str) -> None:
    code = f"import sys; sys.stdout.buffer.write(b'{line}\\n'); sys.stdout.flush()\n{SAYS_DONE}"
    outcome, shown = run_beside(job(folder, code), tmp_path)
    assert outcome == Outcome(folder.name, "done", "", {"loss": 1.0})
    assert [event["event"] for event in shown] == ["finished", "finished"]


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="every signal of this platform has a name")
def test_a_signal_without_a_name_is_shown_by_its_number(folder: RunFolder, tmp_path: Path) -> None:
    number = signal.SIGRTMIN + 1
    outcome, _ = run_beside(job(folder, f"import os; os.kill(os.getpid(), {number})"), tmp_path)
    assert outcome == Outcome(folder.name, "failed", f"killed by signal {number}")


SAYS_ALL = """
import json, sys
for event in (
    {"event": "started", "step": 0, "device": "cpu"},
    {"event": "progress", "step": 1, "steps": 10**400, "loss": None, "metrics": {}},
    {"event": "finished", "status": "done", "metrics": {"loss": 1.0}, "message": ""},
):
    print(json.dumps(event | {"run": sys.argv[1]}), flush=True)
"""


@pytest.fixture
def namesakes(tmp_path: Path) -> list[RunFolder]:
    """Two folders, in two places, that have one name."""
    found = [RunFolder.of(tmp_path / place, "tiny", "adam", 0) for place in ("here", "there")]
    for folder in found:
        folder.path.mkdir(parents=True)
    return found


def test_runs_that_share_a_name_are_told_apart(namesakes: list[RunFolder]) -> None:
    shown = io.StringIO()
    jobs = [job(folder, SAYS_ALL) for folder in namesakes]
    assert [outcome.status for outcome in run_jobs(jobs, at_once=2, view=JsonView(shown))] == ["done", "done"]
    events = [json.loads(line) for line in shown.getvalue().splitlines()]
    for folder in namesakes:
        kinds = [event["event"] for event in events if event["folder"] == str(folder.path)]
        assert kinds == ["started", "progress", "finished"]


def test_a_view_that_fails_is_switched_off_and_stops_nothing(
    namesakes: list[RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(JsonView):
        def show(self, event: Event) -> None:
            raise KeyError(event["run"])

    jobs = [job(folder, SAYS_ALL) for folder in namesakes]
    outcomes = run_jobs(jobs, at_once=2, view=Broken(io.StringIO()))
    assert outcomes == [Outcome("tiny/adam/seed0", "done", "", {"loss": 1.0})] * 2
    said = "cannot show progress any more (KeyError: 'tiny/adam/seed0'); the runs continue\n"
    assert capsys.readouterr().err == said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # bars are drawn in a thread too
def test_bars_that_cannot_be_drawn_give_the_terminal_back(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with more steps than a float can count."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with choose_view(console, total=1, as_json=False) as view:
        view.show({"event": "started", "run": folder.name, "step": 0, "device": "cpu"})
        for _ in range(2):
            view.show(
                {"event": "progress", "run": folder.name, "step": 1, "steps": 10**400, "loss": None, "metrics": {}}
            )
        view.show({"event": "note", "run": folder.name, "text": "drawn with the bars"})
        (outcome,) = run_jobs([job(folder, SAYS_DONE)], at_once=1, view=view)
    assert outcome.status == "done"
    assert capsys.readouterr().err.count("cannot show progress any more (OverflowError: ") == 1
    assert "\x1b[?25h" in console.file.getvalue()  # the cursor is back


def test_all_save_and_stop_when_nobody_reads_what_is_shown(folder: RunFolder, tmp_path: Path) -> None:
    """As where ``| head`` has read enough."""

    class Closed(JsonView):
        def show(self, event: Event) -> None:
            raise BrokenPipeError

    code = """
import json, signal, sys, time
stopped = {"event": "stopped", "run": sys.argv[1], "message": "saved"}
signal.signal(signal.SIGTERM, lambda *_: (print(json.dumps(stopped)), sys.exit()))
print(json.dumps({"event": "note", "run": sys.argv[1], "text": "begun"}), flush=True)
while True:  # signal.pause() would miss a signal that comes just before it
    time.sleep(0.05)
"""
    waiting = RunFolder.of(tmp_path, "tiny", "adam", 1)
    waiting.path.mkdir(parents=True)
    outcomes = run_jobs([job(folder, code), job(waiting, SAYS_DONE)], at_once=1, view=Closed(io.StringIO()))
    assert outcomes == [Outcome(folder.name, "stopped", "saved"), Outcome(waiting.name, "waiting")]


SAYS_COUNT = """\
import json, os
metrics = {"count": float(os.environ["SPLITFG_SIDE_BY_SIDE"])}
print(json.dumps({"event": "finished", "run": "x", "status": "done", "message": "", "metrics": metrics}))
"""


@pytest.mark.parametrize(("at_once", "count"), [(1, 1), (2, 2), (8, 2)])
def test_workers_learn_how_many_share_the_machine(
    namesakes: list[RunFolder], monkeypatch: pytest.MonkeyPatch, at_once: int, count: int
) -> None:
    monkeypatch.delenv("SPLITFG_SIDE_BY_SIDE", raising=False)
    jobs = [job(folder, SAYS_COUNT) for folder in namesakes]
    outcomes = run_jobs(jobs, at_once=at_once, view=JsonView(io.StringIO()))
    assert [outcome.metrics for outcome in outcomes] == [{"count": count}] * 2


def test_a_count_set_from_outside_is_not_lowered(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITFG_SIDE_BY_SIDE", "10")
    assert run_code(folder, SAYS_COUNT).metrics == {"count": 10}
