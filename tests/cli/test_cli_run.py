"""Running, interrupting, resuming and recording from the command line, as people and as machines do it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from command_line import command, environment, splitfg

from splitfg_lab.runs import RunFolder, find_folders, read_records


def events_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """All presets of the plug-in, two at a time: some done, one diverged, one failed."""
    place = tmp_path_factory.mktemp("made")
    return place, splitfg("run", "tiny", "-j", "2", "--json", cwd=place)


def test_one_failure_does_not_stop_the_others(made: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    place, done = made
    assert done.returncode == 1
    events = events_in(done.stdout)
    assert events[-1] == {"event": "summary", "done": 3, "diverged": 1, "failed": 1}
    ended = {e["run"]: e.get("status", e["event"]) for e in events if e["event"] in ("finished", "failed")}
    assert ended == {
        "tiny/adam/seed0": "done",
        "tiny/adam/seed1": "done",
        "tiny/sgd/seed0": "done",
        "tiny/diverges/seed0": "diverged",
        "tiny/fails/seed0": "failed",
    }
    assert RunFolder(place / "runs/tiny/adam/seed0").report().threads == 1


def test_what_a_run_prints_is_in_its_log(made: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    place, _ = made
    assert (place / "runs/tiny/adam/seed0/log.txt").read_text(encoding="utf-8") == "printed by the experiment: ρ → 0\n"
    log = (place / "runs/tiny/fails/seed0/log.txt").read_text()
    assert "Traceback" in log
    assert "RuntimeError: failed on purpose" in log


def test_finished_runs_are_skipped(made: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    place, _ = made
    done = splitfg("run", "tiny/adam", "tiny/sgd", cwd=place)
    assert (done.returncode, done.stdout.strip()) == (0, "3 finished before")
    assert done.stderr == "see the results with: splitfg report tiny\n"


def test_ls_knows_what_is_done(made: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    place, _ = made
    lines = [line.split() for line in splitfg("ls", "tiny", cwd=place).stdout.splitlines()]
    assert ["adam", "with", "Adam", "here", "2/2"] in lines
    assert ["diverges", "on", "purpose", "here", "1/1,", "1", "diverged"] in lines
    assert ["fails", "on", "purpose", "1", "unfinished", "here"] in lines


def test_a_run_whose_config_changed_is_refused_with_the_difference(
    made: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    place, _ = made
    source = place / "runs/tiny/adam/seed0/config.json"
    data = json.loads(source.read_text())
    data["config"]["noise"] = 0.7
    target = tmp_path / "runs/tiny/adam/seed0/config.json"
    target.parent.mkdir(parents=True)
    target.write_text(json.dumps(data))
    done = splitfg("run", "tiny/adam", "--seeds", "0", cwd=tmp_path)
    assert done.returncode == 1
    assert "noise: 0.7 -> 0.1" in done.stdout
    assert [path.name for path in target.parent.iterdir()] == ["config.json"]


def test_results_travel(made: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    place, _ = made
    done = splitfg("results", "add", "--runs", place / "runs", "--results", tmp_path / "results")
    assert done.returncode == 0
    assert "skipped, not finished" in done.stderr
    records = read_records(tmp_path / "none", tmp_path / "results")
    assert [(r.report.preset, r.report.seed, r.report.status) for r in records.runs] == [
        ("adam", 0, "done"),
        ("adam", 1, "done"),
        ("diverges", 0, "diverged"),
        ("sgd", 0, "done"),
    ]
    assert "recorded 2/2" in splitfg("ls", "tiny/adam", cwd=tmp_path).stdout


def test_a_finished_run_without_its_result_is_named_and_stops_nothing_else(
    made: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    place, _ = made
    shutil.copytree(place / "runs", tmp_path / "runs")
    folder = RunFolder(tmp_path / "runs/tiny/adam/seed0")
    before = folder.report()
    (folder.path / "report.json").write_text("{")

    for verb in (["run", "tiny/adam"], ["resume", "tiny/adam"]):
        done = splitfg(*verb, cwd=tmp_path)
        assert done.returncode == 1
        assert "marked as finished, but its result is lost" in done.stdout
        assert "1 failed, 1 finished before" in done.stdout

    done = splitfg("results", "add", "tiny/adam", cwd=tmp_path)
    assert done.returncode == 1
    assert "skipped: runs/tiny/adam/seed0/report.json is not valid JSON" in done.stderr
    assert [r.report.seed for r in read_records(tmp_path / "none", tmp_path / "results").runs] == [1]

    # as the message says
    (folder.path / "DONE").unlink()
    assert splitfg("resume", "tiny/adam", cwd=tmp_path).returncode == 0
    after = folder.report()
    assert (after.status, after.metrics, after.steps) == (before.status, before.metrics, before.steps)


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_places_that_cannot_be_written_to_are_clear_errors(
    made: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, place: str
) -> None:
    runs = made[0] / "runs"
    (tmp_path / "file").touch()
    for verb in (["report", "tiny", "--out", place], ["results", "add", "--results", place]):
        done = splitfg(*verb, "--runs", runs, cwd=tmp_path)
        assert done.returncode == 1
        assert f"error: cannot make the folder {place}: " in done.stderr
        assert "Traceback" not in done.stderr


def test_a_run_that_is_refused_before_its_first_step_leaves_nothing_behind(tmp_path: Path) -> None:
    done = splitfg("run", "tiny/sgd", "--device", "cuda", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "torch sees no GPU here" in done.stdout
    assert list((tmp_path / "runs").iterdir()) == []


def test_seeds_of_tables_are_folds(tmp_path: Path) -> None:
    done = splitfg("run", "tabular/adult-backprop", "--seeds", "7", cwd=tmp_path)
    assert done.returncode == 1
    assert "there is no fold 7: the seeds are the folds here, 0 to 4" in done.stdout
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_that_was_there_before_stays_where_it_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs/tiny/sgd/seed0")
    identity = {"schema": 1, "experiment": "tiny", "preset": "sgd", "seed": 0}
    folder.path.mkdir(parents=True)
    config = {"optimizer": {"type": "Sgd"}}
    (folder.path / "config.json").write_text(json.dumps(identity | {"config": config}))
    done = splitfg("run", "tiny/sgd", "--device", "cuda", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert folder.status() == "unfinished"


def test_report_prints_and_writes(made: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    place, _ = made
    done = splitfg("report", "tiny", "--runs", place / "runs", "--out", tmp_path / "page", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    error = RunFolder(place / "runs/tiny/adam/seed0").report().metrics["error"]
    assert f"{error:.0f}." in done.stdout
    assert {path.name for path in (tmp_path / "page").iterdir()} >= {"report.html", "report.md"}


def test_report_mentions_an_unreadable_file_once(tmp_path: Path) -> None:
    broken = tmp_path / "runs" / "tiny" / "adam" / "seed0"
    broken.mkdir(parents=True)
    (broken / "report.json").write_text("{")
    done = splitfg("report", "tiny", cwd=tmp_path, COLUMNS="500")
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count(str(broken.relative_to(tmp_path))) == 1


def test_a_run_is_refused_at_once_where_its_revision_is_nonsense(tmp_path: Path) -> None:
    no_git = {"PATH": str(tmp_path), "SPLITFG_REVISION": "main"}
    done = splitfg("run", "tiny/sgd", cwd=tmp_path, **no_git)
    assert done.returncode == 1
    assert "SPLITFG_REVISION is 'main'" in done.stdout + done.stderr
    assert not (tmp_path / "runs/tiny/sgd/seed0/metrics.jsonl").exists()


def test_a_stated_revision_is_recorded(tmp_path: Path) -> None:
    done = splitfg("run", "tiny/sgd", cwd=tmp_path, PATH=str(tmp_path), SPLITFG_REVISION="0123abcd-dirty")
    assert done.returncode == 0, done.stderr
    report = RunFolder(tmp_path / "runs/tiny/sgd/seed0").report()
    assert (report.git, report.git_dirty) == ("0123abcd", True)


class Watched:
    """A command line whose JSON events are read as they come."""

    def __init__(self, place: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            command(*arguments, "--json"),
            cwd=place,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self._lines: Iterator[str] = iter(self.process.stdout)

    def wait_for_step(self, step: int) -> None:
        for line in self._lines:
            event = json.loads(line)
            if event["event"] == "progress" and event["step"] >= step:
                return
        raise AssertionError("the run ended first")

    def rest(self) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in self._lines]
        self.process.wait(60)
        return events

    def said(self) -> str:
        """What people were told, once it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def close(self) -> None:
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def wait_until_free(folder: RunFolder) -> None:
    """Wait until no process is in the folder any more."""
    from splitfg_lab.runs import RunError

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with folder.locked():
                return
        except RunError:
            time.sleep(0.05)
    raise AssertionError("the run goes on with nobody watching")


def test_interrupted_runs_save_and_resume(tmp_path: Path) -> None:
    arguments = ("run", "tiny/adam", "--set", "pause_s=0.02", "--set", "steps=150", "--set", "checkpoint_every=1000")
    folder = RunFolder(tmp_path / "runs/tiny/adam+steps=150,checkpoint_every=1000,pause_s=0.02/seed0")

    watched = Watched(tmp_path, *arguments)
    watched.wait_for_step(5)
    os.kill(watched.process.pid, signal.SIGINT)
    events = watched.rest()
    watched.close()
    assert watched.process.returncode == 130
    assert next(e["message"] for e in events if e["event"] == "stopped").startswith("stopped after step")
    assert events[-1] == {"event": "summary", "stopped": 1, "waiting": 1}
    assert (folder.path / "checkpoint.json").exists()

    with folder.locked():
        busy = splitfg("resume", str(folder.path), cwd=tmp_path)
    assert busy.returncode == 1
    assert "another process is running" in busy.stdout

    # whoever watches may be killed: the run notices, saves and stops
    orphan = Watched(tmp_path, "resume", str(folder.path))
    orphan.wait_for_step(1)
    first = json.loads((folder.path / "checkpoint.json").read_text())["state"]["state"]["step"]
    orphan.process.kill()
    orphan.process.wait()
    orphan.close()
    wait_until_free(folder)
    assert not folder.finished
    assert json.loads((folder.path / "checkpoint.json").read_text())["state"]["state"]["step"] > first

    done = splitfg("resume", folder.path, cwd=tmp_path)
    assert done.returncode == 0
    assert "resumes from step" in done.stdout
    assert "1 done" in done.stdout
    assert folder.report().steps == 150


def test_interrupted_jobs_go_on_with_the_threads_they_began_with(tmp_path: Path) -> None:
    settings = ("--set", "pause_s=0.02", "--set", "steps=100")
    watched = Watched(tmp_path, "run", "tiny/adam", *settings, "--jobs", "2", "--device", "cpu", "--runs", "my runs")
    watched.wait_for_step(5)
    os.kill(watched.process.pid, signal.SIGINT)
    watched.rest()
    assert watched.said() == "resume with: splitfg resume --jobs 2 --device cpu --runs 'my runs'\n"
    watched.close()

    done = splitfg("resume", "--runs", "my runs", cwd=tmp_path, OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    began = {folder.name: folder.report().threads for folder in find_folders(tmp_path / "my runs")}
    assert 1 in began.values()


def test_a_terminal_shows_bars_and_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    """Behind a pseudo-terminal, as a person would see it."""
    import pty

    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command("run", "tiny/sgd", "--set", "pause_s=0.02", "--set", "steps=5000"),
        cwd=tmp_path,
        env=environment(TERM="xterm-256color"),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    seen = b""
    stopped = False
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:
            break
        if not part:
            break
        seen += part
        if not stopped and b"error" in seen:
            os.killpg(process.pid, signal.SIGINT)
            stopped = True
    os.close(leader)
    assert process.wait(60) == 130
    text = seen.decode()
    for part in ("/5,000", "/s", "loss", "error", "stopped after step", "resume with: splitfg resume"):
        assert part in text
