"""The whole report: one page that needs nothing but itself, safe text everywhere, and bad input that stops nothing."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))
from report_samples import (
    Config,
    config_json,
    report_json,
    sample_experiments,
    write_results,
    write_run,
    write_sample,
)

from splitfg_lab.experiments.spec import Cell, Experiment, Paper, Preset, Row, Table
from splitfg_lab.report import UnreadableWarning, build_report, print_report, write_figures
from splitfg_lab.report._views import ExperimentView, view_report
from splitfg_lab.runs import RunError

HOSTILE = "<script>alert('x')</script> | **b** & \"q\""


def small(title: str = "Preset A") -> Experiment:
    """One experiment, one table, one cell."""
    table = Table("t", "Accuracy", ("Ours",), (Row("row", (Cell("a", "accuracy", Paper(75.0)),)),))
    return Experiment("e", "Experiment E", "Table 1", "m:f", (Preset("a", title, Config()),), (table,))


def page(runs: Path, results: Path, *experiments: Experiment) -> str:
    return build_report(runs, results, runs.parent / "out", experiments or (small(),)).read_text(encoding="utf-8")


def printed(runs: Path, results: Path, *experiments: Experiment, width: int = 200, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_report(runs, results, console=console, experiments=experiments or (small(),), **options)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "runs", tmp_path / "results"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sample")
    runs, results = write_sample(root)
    with pytest.warns(UnreadableWarning, match="adult-es"):
        build_report(runs, results, root, sample_experiments())
    return root


class Elements(HTMLParser):
    """Every tag with its attributes, and whether the document nests as it should."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_figures_are_written_as_pictures_that_stand_alone(sample: Path, tmp_path: Path) -> None:
    experiments = sample_experiments()
    drawn = {
        e.name: write_figures(sample / "runs", sample / "results", tmp_path / e.name, e.name, experiments)
        for e in experiments
    }
    assert any(drawn.values())
    for experiment in experiments:
        assert {p.stem for p in drawn[experiment.name]} <= {f.key for f in experiment.figures}
    for path in (p for paths in drawn.values() for p in paths):
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 5


class TestPage:
    def test_it_asks_nobody_for_anything(self, sample):
        text = (sample / "report.html").read_text(encoding="utf-8")
        for tag, attributes in Elements(text).tags:
            for name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
                value = attributes.get(name)
                assert value is None or value.startswith(("#", "data:")), (tag, name, value)
        assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xlink",
        }
        assert "@import" not in text
        assert "url(http" not in text

    def test_names_within_the_page_are_unique_and_links_arrive(self, sample):
        tags = Elements((sample / "report.html").read_text(encoding="utf-8")).tags
        ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
        assert len(ids) == len(set(ids))
        links = [a["href"] for tag, a in tags if tag == "a"]
        assert links
        assert {link.removeprefix("#") for link in links if link} <= set(ids)

    def test_names_are_unique_in_the_report_of_all_experiments(self, folders):
        text = build_report(*folders, folders[0].parent / "out").read_text(encoding="utf-8")
        ids = Counter(attributes["id"] for _, attributes in Elements(text).tags if "id" in attributes)
        assert [name for name, count in ids.items() if count > 1] == []

    def test_it_names_the_paper(self, sample):
        title = "Backpropagation-Free Trunk Training via the Split Forward Gradients"
        text = (sample / "report.html").read_text(encoding="utf-8")
        assert f"<title>{title}" in text
        assert f"<h1>{title}</h1>" in text
        assert (sample / "report.md").read_text(encoding="utf-8").startswith(f"# {title}")

    def test_it_shows_every_experiment_and_every_state(self, sample):
        text = (sample / "report.html").read_text(encoding="utf-8")
        for expected in (
            "Tables: seven methods",
            "Language: GPT small8",
            "99 of 140",
            "paper</span> 84.2 ± 0.4",
            "not run",
            "diverged",
            "3 of 5 seeds",
            "K=64 (preset: 8)",
            "could not be read",
            "loss is inf",
            "language/rho-0.3/seed0",
            "splitfg run tabular",
        ):
            assert expected in text, expected

    def test_the_same_runs_give_the_same_bytes(self, sample, tmp_path):
        for name in ("report.html", "report.md"):
            (tmp_path / name).write_text("old")
        with pytest.warns(UnreadableWarning):
            build_report(sample / "runs", sample / "results", tmp_path, sample_experiments())
        for name in ("report.html", "report.md"):
            assert (tmp_path / name).read_bytes() == (sample / name).read_bytes()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.md"]

    def test_nothing_run_is_a_report_too(self, folders):
        text = page(*folders)
        assert "0 of 1" in text
        assert "not run" in text
        assert "75.0" in text

    def test_no_experiments_at_all(self, folders):
        assert build_report(*folders, folders[0].parent / "out", ()).exists()


class TestText:
    @pytest.fixture
    def hostile(self, folders) -> tuple[Path, Path, Experiment]:
        runs, results = folders
        broken = {"device": HOSTILE, "versions": {HOSTILE: HOSTILE}, "git": HOSTILE, "memory_kind": HOSTILE}
        write_run(runs, report_json("e", "a", **broken))
        write_run(runs, report_json("e", "a", 1, status="diverged", message=HOSTILE))
        changed = config_json(Config(), data=HOSTILE)
        write_run(runs, report_json("e", "a", 2, config=changed), folder="a+1")
        write_run(runs, report_json("e", "stranger", 2))
        base = small(HOSTILE)
        table = Table(
            "t", HOSTILE, (HOSTILE,), (Row(HOSTILE, (Cell("a", "accuracy"),)), Row("x", (HOSTILE,))), note=HOSTILE
        )
        return runs, results, dataclasses.replace(base, title=HOSTILE, source=HOSTILE, tables=(table,))

    def test_nothing_in_the_page_can_run_but_its_own_script(self, hostile):
        tags = Elements(page(*hostile)).tags
        assert [tag for tag, _ in tags].count("script") == 1
        assert not [a for _, a in tags for name in a if name.startswith("on")]
        (policy,) = [a["content"] for tag, a in tags if a.get("http-equiv") == "Content-Security-Policy"]
        assert policy is not None
        assert "default-src 'none'" in policy
        assert re.search(r"script-src 'sha256-[\w+/=]+'(;|$)", policy)

    def test_markdown_keeps_its_tables(self, hostile):
        page(*hostile)
        text = (hostile[0].parent / "out" / "report.md").read_text(encoding="utf-8")
        assert "<script" not in text
        widths = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")]
        tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
        assert sum(table.count("\n") for table in tables) == len(widths)
        for table in tables:
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1

    def test_the_terminal_prints_it_as_it_is(self, folders):
        write_run(folders[0], report_json("e", "a", device="[bold red]x[/]"))
        assert "[bold red]x[/]" in printed(*folders)


class TestReading:
    def test_recorded_results_alone_make_a_report(self, folders):
        write_results(folders[1], "e", [report_json("e", "a") | {"curve": []}])
        assert "80.0 (1)" in page(*folders)

    def test_a_run_in_both_places_counts_once_and_the_folder_wins(self, folders):
        runs, results = folders
        write_results(results, "e", [report_json("e", "a", metrics={"accuracy": 10.0}) | {"curve": []}])
        write_run(runs, report_json("e", "a", metrics={"accuracy": 20.0}))
        text = page(runs, results)
        assert "20.0 (1)" in text
        assert "10.0 (1)" not in text

    def test_runs_of_presets_nobody_knows_are_listed(self, folders):
        write_run(folders[0], report_json("e", "unheard-of", 3))
        for text in (page(*folders), printed(*folders)):
            assert "e/unheard-of/seed3" in text

    def test_a_table_shows_a_number_of_another_experiment(self, folders):
        write_run(folders[0], report_json("e", "a", metrics={"accuracy": 81.5}))
        table = Table("t", "Borrowed", ("Ours",), (Row("row", (Cell("e/a", "accuracy"),)),))
        borrower = Experiment("f", "Experiment F", "Table 2", "m:f", (Preset("b", "Preset B", Config()),), (table,))
        (row,) = view_report(*folders, (small(), borrower)).experiments[1].tables[0].rows
        assert row.cells[0].text == "81.5 (1)"
        (row,) = view_report(*folders, (borrower,)).experiments[0].tables[0].rows
        assert row.cells[0].text == "–"

    @pytest.mark.parametrize(
        ("count", "words"), [(2, "Not run yet: Title 0; Title 1"), (9, "9 of 9 presets not run yet")]
    )
    def test_many_presets_without_runs_are_a_number_in_the_terminal(self, folders, count, words):
        presets = tuple(Preset(f"p{i}", f"Title {i}", Config()) for i in range(count))
        assert words in printed(*folders, Experiment("e", "Experiment E", "Table 1", "m:f", presets))

    def test_experiments_without_runs_are_one_line_in_the_terminal(self, folders):
        write_run(folders[0], report_json("e", "a"))
        others = [Experiment(n, f"Experiment {n}", "Table 2", "m:f", (Preset("b", "B", Config()),)) for n in "fg"]
        text = printed(*folders, small(), *others)
        assert "Not run yet: f, g. `splitfg run EXPERIMENT` runs one." in text
        assert "Experiment f" not in text


CORRUPT: dict[str, bytes] = {
    "empty": b"",
    "cut off": json.dumps(report_json("e", "a")).encode()[:200],
    "not utf-8": b"\xff\xfe{}",
    "not an object": b"[1, 2]",
    "another schema": json.dumps(report_json("e", "a") | {"schema": 99}).encode(),
    "foreign": b'{"loss": 0.1, "epochs": 3}',
    "missing metrics": json.dumps({k: v for k, v in report_json("e", "a").items() if k != "metrics"}).encode(),
    "metrics of the wrong type": json.dumps(report_json("e", "a") | {"metrics": {"accuracy": "high"}}).encode(),
    "not a number": json.dumps(report_json("e", "a") | {"metrics": {"accuracy": float("nan")}}).encode(),
    "nested beyond reason": b"[" * 100_000,
}


class TestBadInput:
    def test_a_place_that_cannot_be_written_to(self, folders, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(RunError, match=r"cannot make the folder .*file"):
            build_report(*folders, tmp_path / "file", (small(),))
        with pytest.raises(RunError, match=r"cannot make the folder .*file/below"):
            write_figures(*folders, tmp_path / "file" / "below", "e", (small(),))

    @pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT.keys())
    def test_a_report_that_cannot_be_read_is_named_and_the_rest_is_shown(self, folders, content):
        runs, results = folders
        write_run(runs, report_json("e", "a", 1))
        broken = write_run(runs, report_json("e", "a", 2))
        (broken / "report.json").write_bytes(content)
        with pytest.warns(UnreadableWarning, match=re.escape(str(broken))):
            text = page(runs, results)
        assert str(broken) in text
        assert "80.0 (1)" in text
        unwrapped = printed(runs, results).replace("\n", "")
        assert str(broken) in unwrapped

    @pytest.mark.parametrize("content", [b"", b"{}", b'{"schema": 1, "experiment": "e", "runs": 3}', b'{"schema": 7}'])
    def test_so_is_a_results_file(self, folders, content):
        path = write_results(folders[1], "e", [])
        path.write_bytes(content)
        with pytest.warns(UnreadableWarning, match=re.escape(str(path))):
            assert str(path) in page(*folders)

    def test_so_are_damaged_metrics(self, folders):
        folder = write_run(folders[0], report_json("e", "a"))
        (folder / "metrics.jsonl").write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
        with pytest.warns(UnreadableWarning, match=r"metrics\.jsonl"):
            page(*folders)

    @pytest.mark.parametrize("place", ["report.json", "e/report.json", "e/a/elsewhere/report.json"])
    def test_a_report_where_no_run_is_does_not_go_unmentioned(self, folders, place):
        path = folders[0] / place
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(report_json("e", "a")))
        with pytest.warns(UnreadableWarning, match=re.escape(str(path))):
            page(*folders)

    def test_an_experiment_nobody_knows_is_an_error_that_lists_those_there_are(self, folders):
        with pytest.raises(ValueError, match=r"'toy'.*There are: e"):
            printed(*folders, experiment="toy")

    @settings(max_examples=30, deadline=None)
    @given(data=st.data())
    def test_no_value_of_any_field_can_break_a_report(self, tmp_path_factory, data):
        values = st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
            max_leaves=4,
        )
        report = report_json("e", "a")
        names = data.draw(st.lists(st.sampled_from(sorted(report)), min_size=1, max_size=3))
        runs = tmp_path_factory.mktemp("fuzz") / "runs"
        folder = write_run(runs, report)
        text = json.dumps(report | {name: data.draw(values) for name in names})
        (folder / "report.json").write_text(text)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            text = page(runs, runs.parent / "results")
        assert ("could not be read" in text) == any(w.category is UnreadableWarning for w in caught)
        Elements(text)


def _results(view: ExperimentView) -> Iterator[str]:
    cells = [cell for table in view.tables for row in table.rows for cell in row.cells]
    return (text for cell in cells for text in (cell.text, cell.paper, cell.difference))


def _costs(view: ExperimentView) -> Iterator[str]:
    assert view.costs is not None
    return (cell.text for row in view.costs.rows for cell in row.cells if not cell.is_words)


class TestTerminal:
    def test_the_papers_layout_where_it_fits(self, folders):
        write_run(folders[0], report_json("e", "a"))
        lines = printed(*folders).splitlines()
        (row,) = [line for line in lines if line.startswith(" row") or line.startswith("row")]
        assert "80.0 (1)" in row
        assert "paper 75.0" in lines[lines.index(row) + 1]

    @pytest.mark.parametrize("width", [50, 60, 70, 80, 100, 120, 160, 400])
    def test_no_number_is_cut_off_however_narrow(self, sample, width):
        places = sample / "runs", sample / "results"
        for view in view_report(*places, sample_experiments()).experiments:
            text = printed(*places, *sample_experiments(), width=width, experiment=view.experiment.name)
            assert "…" not in text
            for number in (*_results(view), *_costs(view)):
                assert number in text, number
            assert max(map(len, text.splitlines())) <= width

    def test_a_column_of_words_among_the_costs_is_wrapped(self, folders):
        where = "cuda: a device with a name of many words, and a longer one than any terminal has room for"
        write_run(folders[0], report_json("e", "a", 0, step_ms=1234.5))
        write_run(folders[0], report_json("e", "a", 1, device=where))
        for width in (60, 100, 120):
            text = printed(*folders, width=width)
            assert "1,234" in text
            assert set(where.split()) <= set(text.split())

    def test_a_pipe_has_room_for_everything(self, folders):
        write_run(folders[0], report_json("e", "a", config=config_json(Config(), data="x" * 300)))
        code = (
            "from pathlib import Path; from report_samples import Config;"
            "from splitfg_lab.report import print_report; from splitfg_lab.experiments.spec import Experiment, Preset;"
            "e = Experiment('e', 'E', 'here', 'm:f', (Preset('a', 'Preset A', Config()),));"
            f"print_report(Path({str(folders[0])!r}), Path({str(folders[1])!r}), experiments=(e,))"
        )
        environment = {**os.environ, "COLUMNS": "40", "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
        lines = done.stdout.decode().splitlines()
        assert any("x" * 300 in line for line in lines)
        assert len(lines[0]) <= 100, "a rule that is not drawn forever"

    def test_the_summary_comes_first(self, sample):
        text = printed(sample / "runs", sample / "results", *sample_experiments(), width=120)
        assert "Summary" in text.splitlines()[0]
        assert "Covertype: accuracy" not in text, "without a run there is no headline"

    def test_a_table_that_was_not_run_is_one_line(self, sample):
        text = printed(sample / "runs", sample / "results", *sample_experiments(), width=120)
        assert "Covertype alone: not run yet." in text

    def test_one_experiment_alone(self, sample):
        text = printed(sample / "runs", sample / "results", *sample_experiments(), experiment="language")
        assert "Language: GPT small8" in text
        assert "Tables: seven methods" not in text


def test_experiments_are_in_the_papers_order():
    from splitfg_lab.experiments import EXPERIMENTS

    sections = [re.search(r"Sections? ([\d.]+)", e.source) for e in EXPERIMENTS if not e.source.startswith("New here")]
    numbers = [[int(n) for n in found[1].strip(".").split(".")] for found in sections if found]
    assert len(numbers) > 5
    assert numbers == sorted(numbers)
    new = [e.source.startswith("New here") for e in EXPERIMENTS]
    assert new == sorted(new), "new experiments come last"


def test_importing_and_printing_need_neither_torch_nor_matplotlib(tmp_path):
    code = (
        "import sys; from pathlib import Path; from splitfg_lab.report import print_report;"
        "print_report(Path('runs'), Path('results'), experiments=());"
        "assert not {'torch', 'matplotlib', 'jinja2', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
