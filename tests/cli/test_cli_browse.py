"""Listing and showing: fast, without torch, helpful when a name is misspelt."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from command_line import command, environment, splitfg, splitfg_here
from report_samples import Config, config_json, report_json, write_run
from typer.testing import CliRunner

from splitfg_lab.cli import make_app
from splitfg_lab.commands._standing import standings
from splitfg_lab.experiments.spec import Experiment, Preset
from splitfg_lab.runs import find_folders
from splitfg_lab.runs.results import add_results

HEAVY = ("torch", "pandas", "matplotlib", "numpy", "sklearn", "asyncio")


@pytest.mark.parametrize("arguments", [["ls"], ["--help"], ["run", "--help"], ["show", "tiny/adam"], ["data", "ls"]])
def test_starting_imports_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    code = f"""
import sys
from splitfg_lab.cli import main
sys.argv = ["splitfg", *{arguments!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print([name for name in {HEAVY!r} if name in sys.modules])
print(len(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    *_, heavy, modules = done.stdout.splitlines()
    assert heavy == "[]"
    assert int(modules) < 600, "all that is imported, the standard library included"


def test_help_names_every_verb_and_the_exit_codes() -> None:
    done = splitfg("--help")
    assert done.returncode == 0
    verbs = ("ls", "show", "run", "resume", "report", "results", "data", "diagnose", "doctor", "demo")
    for word in (*verbs, "Exit codes", "130"):
        assert word in done.stdout


def test_ls_shows_presets_and_that_nothing_is_done(tmp_path: Path) -> None:
    done = splitfg("ls", "tiny", cwd=tmp_path)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert "tiny" in lines[0]
    assert "Table 0" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["adam", "sgd", "diverges", "fails"]
    assert all(line.rstrip().endswith("not run") for line in lines[1:])


def test_names_are_never_cut(tmp_path: Path) -> None:
    """In a pipe every preset has one line; in a terminal titles wrap, however narrow it is."""
    from splitfg_lab.experiments import EXPERIMENTS

    names = [experiment.name for experiment in EXPERIMENTS]
    piped = splitfg("ls", *names, cwd=tmp_path, COLUMNS="40").stdout.splitlines()
    for experiment in EXPERIMENTS:
        for preset in experiment.presets:
            assert any(line.split()[:1] == [preset.name] and preset.title in line for line in piped), preset.name
    seen = in_a_terminal(40, "ls", "tabular_future", cwd=tmp_path)
    names = [p.name for e in EXPERIMENTS if e.name == "tabular_future" for p in e.presets]
    assert [word for line in seen.splitlines() for word in line.split()[:1] if word in names] == names
    assert "…" not in seen


def test_fields_are_never_cut(tmp_path: Path) -> None:
    from splitfg_lab.experiments.language_cost import VARIANTS

    assert ",".join(VARIANTS) in splitfg("show", "language_cost/eager", cwd=tmp_path, COLUMNS="40").stdout
    assert "…" not in in_a_terminal(80, "show", "language_cost/eager", cwd=tmp_path)


def in_a_terminal(width: int, *arguments: str, cwd: Path) -> str:
    """What ``splitfg ARGUMENTS`` shows behind a pseudo-terminal of this width."""
    import os
    import pty

    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command(*arguments), cwd=cwd, env=environment(TERM="dumb", COLUMNS=str(width)), stdin=follower, stdout=follower
    )
    os.close(follower)
    seen = b""
    with contextlib.suppress(OSError):  # that is how the end shows
        while part := os.read(leader, 4096):
            seen += part
    os.close(leader)
    assert process.wait(60) == 0
    return seen.decode()


@pytest.mark.parametrize(
    ("target", "presets"),
    [("tiny/errors", ["adam"]), ("tiny/*s", ["diverges", "fails"]), ("tiny/sgd", ["sgd"])],
)
def test_targets_can_be_tables_and_patterns(tmp_path: Path, target: str, presets: list[str]) -> None:
    rows = json.loads(splitfg("ls", target, "--json", cwd=tmp_path).stdout)
    assert [row["preset"] for row in rows] == presets


def test_ls_for_machines(tmp_path: Path) -> None:
    (row,) = json.loads(splitfg("ls", "tiny/adam", "--json", cwd=tmp_path).stdout)
    assert (row["experiment"], row["preset"], row["seeds"], row["done"]) == ("tiny", "adam", [0, 1], [])


def test_a_run_that_differs_in_immaterial_fields_counts_as_done(tmp_path: Path) -> None:
    preset = Preset("a", "A", Config())
    strict = Experiment("e", "E", "Table 0", "m:f", (preset,))
    write_run(tmp_path / "runs", report_json("e", "a", config=config_json(Config(), K=2)))
    for experiment, done, overridden in ((strict, (), 1), (replace(strict, immaterial=("K",)), (0,), 0)):
        (found,), _ = standings([(experiment, preset)], tmp_path / "runs", tmp_path / "results")
        assert (found.done, found.overridden) == (done, overridden)


def test_show_explains_fields_and_prints_the_paper(tmp_path: Path) -> None:
    done = splitfg("show", "tiny/adam", cwd=tmp_path)
    lines = done.stdout.splitlines()
    for field, kind in (
        ("optimizer = Adam", "    Adam | Sgd"),
        ("optimizer.betas = 0.9,0.99", "    tuple[float, float]"),
        ("noise = 0.1", "    float. Standard deviation of the noise that is added to gradients, in every coordinate."),
        ("diverge_at = none", "    int | none. Step at which the loss becomes infinite."),
    ):
        assert lines[lines.index(field) + 1].rstrip() == kind
    assert "paper: error 0.5 ± 0.1" in done.stdout


def test_ls_fits_on_one_screen_and_breaks_no_word(tmp_path: Path) -> None:
    from splitfg_lab.experiments import EXPERIMENTS

    seen = in_a_terminal(80, "ls", cwd=tmp_path).splitlines()
    assert len(seen) <= 24 + 2  # with the plug-in's line
    assert max(map(len, seen)) <= 80
    words = {word for line in seen for word in line.split()}
    for experiment in EXPERIMENTS:
        assert {experiment.name, *experiment.title.split()} <= words


@pytest.mark.parametrize("target", ["language_energy", "language_cost", "tabular_future"])
@pytest.mark.parametrize("width", [40, 80])
def test_listings_break_no_word(tmp_path: Path, target: str, width: int) -> None:
    from splitfg_lab.experiments import EXPERIMENTS

    experiment = next(e for e in EXPERIMENTS if e.name == target)
    words = set(in_a_terminal(width, "ls", target, cwd=tmp_path).split())
    assert {*experiment.source.split()} <= words
    for preset in experiment.presets:
        assert {preset.name, *preset.title.split()} <= words


def test_recorded_and_local_runs_are_told_apart(tmp_path: Path) -> None:
    preset = Preset("a", "A", Config(), seeds=(0, 1, 2))
    experiment = Experiment("e", "E", "Table 0", "m:f", (preset,))
    for seed, place in ((0, "there"), (1, "there"), (1, "runs"), (2, "runs")):
        write_run(tmp_path / place, report_json("e", "a", seed=seed, config=config_json(Config())))
    add_results(find_folders(tmp_path / "there"), tmp_path / "results")
    (found,), _ = standings([(experiment, preset)], tmp_path / "runs", tmp_path / "results")
    assert (found.recorded, found.local, found.done) == ((0, 1), (1, 2), (0, 1, 2))
    assert found.summary() == "recorded 2/3, here 2/3"


def test_the_version_is_printed(tmp_path: Path) -> None:
    from importlib.metadata import version

    done = splitfg("--version", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == f"splitfg {version('splitfg')}"


def test_show_an_experiment_prints_its_protocol(tmp_path: Path) -> None:
    done = splitfg("show", "tiny", cwd=tmp_path)
    assert "small enough to kill and resume" in " ".join(done.stdout.split())


@pytest.mark.parametrize("verb", ["ls", "show", "run"])
def test_misspelt_names_get_suggestions(tmp_path: Path, verb: str) -> None:
    done = splitfg_here(verb, "demo/split_gf", cwd=tmp_path)
    assert done.returncode == 2
    assert "no experiment or preset is called 'demo/split_gf'; did you mean demo/split_fg" in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_overrides_are_listed_before_anything_runs(tmp_path: Path) -> None:
    done = splitfg("run", "tiny/adam", "--set", "stepz=3", "--set", "noise=loud", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean steps?" in done.stderr
    assert "noise: expected float, got 'loud'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_no_run_could_use_are_refused_before_anything_runs(tmp_path: Path) -> None:
    done = splitfg_here("run", "demo", "--set", "steps=-5", "--set", "rho=0", "--set", "optimizer.lr=-1", cwd=tmp_path)
    assert done.returncode == 2
    assert "optimizer: lr must be at least 0, got -1.0" in done.stderr
    again = splitfg_here("run", "demo", "--set", "steps=-5", "--set", "rho=0", cwd=tmp_path)
    assert "steps must be at least 1, got -5" in again.stderr
    assert "rho must be in (0, 1], got 0.0" in again.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", [["run", "demo/split_fg"], ["resume"], ["doctor"]])
def test_what_is_no_device_is_refused_before_anything_runs(tmp_path: Path, verb: list[str]) -> None:
    done = splitfg_here(*verb, "--device", "gpu", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: --device gpu: expected auto, cpu, cuda or cuda:1\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seeds", [f"{2**64}", f"0,{2**32}", f"0-{2**40}"])
def test_seeds_that_no_generator_takes_are_refused(tmp_path: Path, seeds: str) -> None:
    done = splitfg_here("run", "demo/split_fg", "--seeds", seeds, cwd=tmp_path)
    assert done.returncode == 2
    assert f"is too large; the largest seed is {2**32 - 1}" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seeds", ["x", "1-", ""])
def test_bad_seeds_are_refused(tmp_path: Path, seeds: str) -> None:
    done = splitfg_here("run", "demo/split_fg", "--seeds", seeds, cwd=tmp_path)
    assert done.returncode == 2
    assert "0,1,2 or 0-4" in done.stderr


def test_unknown_options_are_usage_errors() -> None:
    assert splitfg("run", "--frobnicate").returncode == 2


def test_names_complete_in_the_shell(tmp_path: Path) -> None:
    done = splitfg(cwd=tmp_path, _SPLITFG_COMPLETE="complete_bash", COMP_WORDS="splitfg run tiny/a", COMP_CWORD="2")
    assert done.stdout.split() == ["tiny/adam"]


@pytest.mark.parametrize("verb", [["resume", "nowhere"], ["results", "add", "nowhere"], ["results", "add"]])
def test_runs_that_are_not_there_are_usage_errors(tmp_path: Path, verb: list[str]) -> None:
    done = splitfg_here(*verb, cwd=tmp_path)
    assert done.returncode == 2
    assert "no run folder at nowhere" in done.stderr or "no finished runs" in done.stderr


def test_a_place_without_runs_is_named_once(tmp_path: Path) -> None:
    done = splitfg_here("resume", tmp_path / "runz", cwd=tmp_path)
    assert done.stderr.strip() == f"error: no run folder at {tmp_path / 'runz'}"
    both = splitfg_here("resume", "runz", cwd=tmp_path)
    assert both.stderr.strip() == "error: no run folder at runz or runs/runz"


def test_a_results_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    done = splitfg_here("results", "add", "foo.json", cwd=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (2, "error: there is no results file foo.json")


@pytest.mark.parametrize("verb", ["report", "ls"])
def test_a_results_folder_that_is_not_there_is_a_usage_error(tmp_path: Path, verb: str) -> None:
    done = splitfg_here(verb, "--results", "nope", cwd=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (2, "error: --results nope: there is no such folder")


@pytest.mark.parametrize("arguments", [["ls"], ["ls", "demo", "--json"], ["show", "demo"], ["show", "demo/split_fg"]])
def test_a_missing_default_folder_of_results_is_noted(tmp_path: Path, arguments: list[str]) -> None:
    done = splitfg_here(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert "no folder results here" in done.stderr
    assert "--results FOLDER" in done.stderr
    (tmp_path / "results").mkdir()
    assert splitfg_here(*arguments, cwd=tmp_path).stderr == ""


def test_a_report_on_nothing_leaves_an_earlier_one_alone(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.md").write_text("earlier")
    done = splitfg_here("report", cwd=tmp_path)
    expected = "error: no runs in runs and no results in results: pass --runs FOLDER or --results FOLDER"
    assert (done.returncode, done.stderr.strip()) == (2, expected)
    assert [path.read_text() for path in (tmp_path / "report").iterdir()] == ["earlier"]


@pytest.mark.parametrize("experiment", ["images/cifar10-split_fg", "language/split_fg-k4-rho0.03"])
def test_settings_of_a_line_search_need_one(tmp_path: Path, experiment: str) -> None:
    done = splitfg_here("run", experiment, "--set", "search.start=0.3", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert "search is that of a line search: set adaptive=true" in done.stderr


@pytest.mark.parametrize("verb", ["prepare", "fetch", "verify"])
def test_misspelt_data_sets_get_suggestions(tmp_path: Path, verb: str) -> None:
    done = splitfg_here("data", verb, "adlt", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "there is no data set 'adlt'; did you mean adult" in done.stderr
    assert "Traceback" not in done.stderr


def test_data_commands_say_what_is_wrong(tmp_path: Path) -> None:
    done = splitfg_here("data", "prepare", "adult", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "adult" in done.stderr
    assert "Traceback" not in done.stderr


def test_prepare_takes_several_data_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prepared: list[str] = []

    def prepare(name: str, *_: object) -> list[Path]:
        prepared.append(name)
        return [tmp_path / name]

    monkeypatch.setattr("splitfg_lab.data.prepare", prepare)
    done = CliRunner().invoke(make_app(), ["data", "prepare", "adult", "otto"])
    assert (done.exit_code, prepared) == (0, ["adult", "otto"])
    assert f"otto: {tmp_path / 'otto'}" in done.stdout.replace("\n", "")


def test_prepare_takes_the_files_of_one_data_set_only(tmp_path: Path) -> None:
    done = splitfg_here("data", "prepare", "adult", "otto", "--from", tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "error: --from is one data set's: prepare adult and otto one by one",
    )


def test_data_ls_for_machines(tmp_path: Path) -> None:
    rows = json.loads(splitfg_here("data", "ls", "--json", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path)).stdout)
    assert {row["state"] for row in rows} == {"missing"}
    assert "adult" in {row["name"] for row in rows}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nonsense", "MODULE:FUNCTION"),
        ("no_such_module:f", "no_such_module"),
        ("json:nothing", "no function"),
        ("json:loads", "json:loads needs arguments (missing a required argument: 's')"),
    ],
)
def test_diagnose_says_what_it_cannot_find(tmp_path: Path, target: str, message: str) -> None:
    done = splitfg_here("diagnose", target, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
