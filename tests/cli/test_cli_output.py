"""Output in any encoding, to places that cannot be written, and of runs that are only tried or planned."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from command_line import command, environment, splitfg

from splitfg_lab import cli
from splitfg_lab.commands.output import explain, plain
from splitfg_lab.runs import RunFolder, find_folders


def raw(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command(*arguments), cwd=cwd, env=environment(**more), capture_output=True, timeout=300)


LOCALES = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "cp1252": {"PYTHONIOENCODING": "cp1252"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "POSIX": {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
}


@pytest.mark.parametrize("name", LOCALES)
@pytest.mark.parametrize("verb", [["show", "toy_variance"], ["show", "tiny/adam"], ["report", "tiny"]])
def test_every_encoding_can_show_everything(tmp_path: Path, name: str, verb: list[str]) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "tiny.json").write_text('{"schema": 1, "runs": []}')
    done = raw(*verb, cwd=tmp_path, **LOCALES[name])
    assert (done.returncode, done.stderr) == (0, b"")
    done.stdout.decode("ascii" if name == "POSIX" else name)


def test_characters_become_their_nearest_words(tmp_path: Path) -> None:
    assert plain("82.5 ± 0.4, ‖ĝ − g‖² ≤ ρ …") == "82.5 +- 0.4, ||g - g||^2 <= rho ..."
    assert plain("┌──┐│") == "+--+|"
    assert plain("\N{SNOWMAN}") == "?"
    assert b"0.5 +- 0.1" in raw("show", "tiny/adam", cwd=tmp_path, PYTHONIOENCODING="ascii").stdout
    assert "0.5 ± 0.1".encode("cp1252") in raw("show", "tiny/adam", cwd=tmp_path, PYTHONIOENCODING="cp1252").stdout


def test_a_run_logs_any_character_in_any_locale(tmp_path: Path) -> None:
    done = raw("run", "tiny/sgd", cwd=tmp_path, **LOCALES["ascii"])
    assert done.returncode == 0, done.stdout
    log = RunFolder(tmp_path / "runs/tiny/sgd/seed0").log_path
    assert log.read_text(encoding="utf-8") == "printed by the experiment: ρ → 0\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("verb", [["ls"], ["show", "tiny/adam"], ["run", "tiny/sgd"], ["run", "tiny", "--dry-run"]])
def test_output_that_cannot_be_written_is_an_error(tmp_path: Path, verb: list[str]) -> None:
    (tmp_path / "results").mkdir()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(*verb), cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == f"error: cannot write the output: {os.strerror(errno.ENOSPC)}\n"


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    process = subprocess.Popen(
        command("show", "language_cost/eager"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(60)


def test_an_error_with_a_file_names_it() -> None:
    assert explain(OSError(errno.ENOSPC, "No space left on device", "x/y.svg")) == "x/y.svg: No space left on device"


def test_ctrl_c_while_modules_are_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "make_app", interrupted)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130


@pytest.mark.parametrize("off", ["", "1"])
def test_no_color_is_followed_in_a_terminal(tmp_path: Path, off: str) -> None:
    pty = pytest.importorskip("pty")
    here, there = pty.openpty()
    # empty is as if it were not there
    subprocess.run(command("ls", "tiny"), cwd=tmp_path, env=environment(NO_COLOR=off), stdout=there, stderr=there)
    text = os.read(here, 65536)
    os.close(here)
    os.close(there)
    assert b"There is no folder results here" in text
    assert (b"\x1b[3" in text) == (not off)


def can_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None


@pytest.fixture
def full_disk(tmp_path: Path) -> object:
    """A file system of 60 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a small file system")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.skipif(not can_mount(), reason="needs to mount a small file system")
def test_a_full_disk_is_named_as_the_cause(tmp_path: Path, full_disk: Path) -> None:
    done = splitfg("run", "demo/split_fg", "--set", "steps=40", "--runs", full_disk / "runs", cwd=tmp_path)
    assert done.returncode == 1
    assert "cannot write a checkpoint" in done.stdout
    assert "No space left on device" in done.stdout
    (full_disk / "filler").write_bytes(bytes((shutil.disk_usage(full_disk).free // 4096) * 4096))
    place = ["--runs", full_disk / "runs"]
    for verb in (
        ["run", "tiny/sgd", "--runs", full_disk / "more"],
        ["report", "tiny", *place, "--out", full_disk / "page"],
    ):
        done = splitfg(*verb, cwd=tmp_path)
        assert done.returncode == 1
        assert "No space left on device" in done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr


def test_a_smoke_test_runs_a_few_steps_and_leaves_nothing(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = splitfg("run", "tiny/adam", "tiny/sgd", "--smoke", cwd=tmp_path, TMPDIR=str(scratch))
    assert done.returncode == 0, done.stdout
    assert "2 done" in done.stdout  # one seed of each
    assert "smoke test: nothing was recorded" in done.stdout
    assert list(scratch.glob("splitfg-smoke-*")) == []
    assert not (tmp_path / "runs").exists()


def test_a_failed_smoke_test_keeps_its_log(tmp_path: Path) -> None:
    done = splitfg("run", "tiny/fails", "--smoke", cwd=tmp_path, TMPDIR=str(tmp_path))
    assert done.returncode == 1
    (kept,) = tmp_path.glob("splitfg-smoke-*")
    assert f"logs are in {kept}" in done.stderr
    (folder,) = find_folders(kept)
    assert "failed on purpose" in folder.log_path.read_text()


def test_settings_win_over_those_of_the_smoke_test(tmp_path: Path) -> None:
    done = splitfg("run", "tiny/adam", "--smoke", "--set", "steps=5", "--json", cwd=tmp_path)
    steps = [event["steps"] for event in map(json.loads, done.stdout.splitlines()[:-1]) if event["event"] == "progress"]
    assert set(steps) == {5}


def test_a_dry_run_tells_the_state_and_writes_nothing(tmp_path: Path) -> None:
    before = splitfg("run", "tiny/adam", "--dry-run", cwd=tmp_path)
    assert before.returncode == 0
    assert [line.split()[:2] for line in before.stdout.splitlines()[:2]] == [
        ["tiny/adam/seed0", "new"],
        ["tiny/adam/seed1", "new"],
    ]
    assert list(tmp_path.iterdir()) == []
    splitfg("run", "tiny/adam", "--seeds", "0", cwd=tmp_path)
    folder = RunFolder(tmp_path / "runs/tiny/adam/seed1")
    folder.path.mkdir(parents=True)
    data = json.loads((tmp_path / "runs/tiny/adam/seed0/config.json").read_text())
    folder.config_path.write_text(json.dumps(data | {"seed": 1}))
    after = splitfg("run", "tiny/adam", "--dry-run", cwd=tmp_path)
    assert "tiny/adam/seed0  finished before" in after.stdout
    assert "tiny/adam/seed1  starts over: no checkpoint yet" in after.stdout
    data["config"]["noise"] = 0.7
    folder.config_path.write_text(json.dumps(data | {"seed": 1}))
    assert "noise: 0.7 -> 0.1" in splitfg("run", "tiny/adam", "--dry-run", cwd=tmp_path).stdout


def test_runs_without_checkpoints_and_recorded_times_are_announced(tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "results"
    done = splitfg("run", "language_cost/eager", "toy_variance", "--dry-run", "--results", results, cwd=tmp_path)
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "if interrupted, it starts over" in rows["language_cost/eager/seed0"]
    assert "starts over" not in rows["toy_variance/ce-c50/seed0"]
    assert "recorded: " in rows["toy_variance/ce-c50/seed0"]


def test_a_failure_that_many_runs_share_is_printed_once(tmp_path: Path) -> None:
    done = splitfg("run", "tiny/fails", "--seeds", "0-2", "-j", "2", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.count("RuntimeError: failed on purpose") == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("failed like ")]
    named = line.removeprefix("failed like ").replace(":", ",").split(", ")
    assert sorted(named) == [f"tiny/fails/seed{i}" for i in range(3)]
    assert done.stdout.splitlines()[-1] == "3 failed"


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_a_terminal_that_closes_saves_the_run(tmp_path: Path) -> None:
    settings = ["--set", "pause_s=0.02", "--set", "steps=5000", "--set", "checkpoint_every=100000"]
    process = subprocess.Popen(
        command("run", "tiny/sgd", *settings, "--json"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "progress":
            os.killpg(process.pid, signal.SIGHUP)  # to all processes of the terminal
            break
    rest = [json.loads(line) for line in process.stdout]
    process.communicate()
    assert process.returncode == 130
    assert any(e["event"] == "stopped" and e["message"].startswith("stopped after step") for e in rest)
    (folder,) = find_folders(tmp_path / "runs")
    assert folder.has_checkpoint
