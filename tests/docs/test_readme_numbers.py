"""Every number in the README's tables of results is the recorded one, and what stands beside it is the paper's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from splitfg_lab.experiments import EXPERIMENTS, Cell
from splitfg_lab.experiments.language._presets import tenth
from splitfg_lab.experiments.language_cost import split_fg
from splitfg_lab.experiments.tabular._sets import DATA, METHOD_TITLES
from splitfg_lab.report._views import view_report
from splitfg_lab.runs import RunReport
from splitfg_lab.runs.results import read_results

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
NOTHING = ("", "–")

Grid = list[list[str]]


def tables(text: str) -> Iterator[Grid]:
    """The Markdown tables of a text: header first, then rows of stripped cells."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [[cell.strip(" *") for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        yield [lines[0], *lines[2:]]


RESULTS = {tuple(grid[0]): grid[1:] for grid in tables(README.partition("\n## Results\n")[2].partition("\n## ")[0])}
TOY = ("classes", "measured ratio", "energy theory", "relative error, %", "standard error, %")
TABULAR = ("", "Backprop", "Pure FG", "ES", "FF", "PC", "Hopfield", "Split-FG")
LEADS = ("Split-FG's lead over", "Backprop", "Pure FG", "ES", "FF", "PC", "Hopfield")
ACTIVITY = ("", "Backprop", "Split-FG, K = 8", "Activity tangents, K = 8", "Activity tangents, K = 1")
TABULAR_MEMORY = ("peak GPU memory, MiB", "epochs", "Backprop", "Split-FG", "MemSave, %")
LANGUAGE = ("", "10%", "paper", "one epoch", "paper")
COST = ("", "ms", "against backprop", "peak MiB", "saved")
_LEAN = "Split-FG, K = 4, one by one, 2^22 logits, lean"
DEPTH = ("layers", "backprop", "chunked head", "checkpointed, chunked head", _LEAN)


@cache
def reports(experiment: str) -> list[RunReport]:
    return [record.report for record in read_results(ROOT / "results" / f"{experiment}.json")]


def recorded(experiment: str, preset: str, metric: str) -> float:
    """The mean over the seeds that make up the preset's result, all of which must be there.

    Runs that were made as the preset says today, or, where there are none, as it said once.
    """
    found = {e.name: e for e in EXPERIMENTS}[experiment]
    runs = [report for report in reports(experiment) if report.preset == preset]
    of_preset = found.preset(preset)
    today = [r for r in runs if not found.changes(of_preset, r.config)]
    closest = max((found.closeness(of_preset, r.config) for r in today), default=None)
    runs = [r for r in today if found.closeness(of_preset, r.config) == closest] or runs
    assert {r.seed for r in runs} == set(found.preset(preset).seeds), f"{experiment}/{preset}"
    assert len(runs) == len(found.preset(preset).seeds)
    return fmean(r.metrics[metric] for r in runs)


def printed_by_the_paper(experiment: str, preset: str, metric: str) -> set[float]:
    """What the experiment's tables quote beside this number."""
    (found,) = [e for e in EXPERIMENTS if e.name == experiment]
    cells = [c for table in found.tables for row in table.rows for c in row.cells if isinstance(c, Cell)]
    return {c.paper.mean for c in cells if c.paper and (c.preset, c.metric) == (preset, metric)}


def numbers(text: str) -> list[str]:
    return [found.replace(",", "") for found in NUMBER.findall(text)]


def shown(number: str, value: float) -> bool:
    """Whether a number is this value, rounded to the digits it is given with."""
    return number == f"{value:.{len(number.partition('.')[2])}f}"


def check(text: str, experiment: str, preset: str, metric: str, paper: tuple[str, str] | None = None) -> None:
    """Our number, and the paper's behind it in brackets if it has one; ``paper`` is where its number is quoted."""
    ours, *quoted = numbers(text)
    value = recorded(experiment, preset, metric)
    assert shown(ours, value), f"README says {ours}, {preset} has {metric} = {value}"
    theirs = printed_by_the_paper(experiment, *(paper or (preset, metric)))
    for number in quoted:
        assert any(shown(number, p) for p in theirs), f"README quotes {number} for {preset}, the paper has {theirs}"


def test_tables_of_results_are_those_checked_here():
    assert set(RESULTS) == {TOY, TABULAR, LEADS, ACTIVITY, TABULAR_MEMORY, LANGUAGE, COST, DEPTH}


def test_toy():
    metrics = ("measured_ratio", "energy_ratio", "relative_error_percent", "standard_error_percent")
    for classes, *cells in RESULTS[TOY]:
        for text, metric in zip(cells, metrics, strict=True):
            check(text, "toy_variance", f"ce-c{classes.replace(',', '')}", metric)


def test_tabular():
    assert [row[0] for row in RESULTS[TABULAR]] == [data.label for data in DATA]
    for data, (_, *cells) in zip(DATA, RESULTS[TABULAR], strict=True):
        for text, method in zip(cells, METHOD_TITLES, strict=True):
            assert (text in NOTHING) == (method not in data.paper)
            if method in data.paper:
                assert len(numbers(text)) == 2
                check(text, "tabular", f"{data.name}-{method}", data.metric)


def test_tabular_leads():
    chosen = [e for e in EXPERIMENTS if e.name == "tabular"]
    (experiment,) = view_report(ROOT / "no runs", ROOT / "results", chosen).experiments
    (leads,) = [view for view in experiment.tables if view.table.key == "tabular-tests"]
    # the README names p once, above the table
    rows = [[row.label, *(re.sub(r"p (= )?", "", cell.text) for cell in row.cells)] for row in leads.rows]
    assert RESULTS[LEADS] == rows


def test_activity_tangents():
    assert [row[0] for row in RESULTS[ACTIVITY]] == [data.label for data in DATA]
    for data, (_, *cells) in zip(DATA, RESULTS[ACTIVITY], strict=True):
        for text, method in zip(cells, ("backprop", "split_fg", "activity_fg", "activity_fg_k1"), strict=True):
            check(text, "tabular", f"{data.name}-{method}", data.metric)


def test_tabular_memory():
    (experiment,) = [e for e in EXPERIMENTS if e.name == "tabular_memory"]
    metrics = ("epochs", "backprop_mib", "split_fg_mib", "memsave_percent")
    assert len(RESULTS[TABULAR_MEMORY]) == len(experiment.presets)
    for preset, (label, *cells) in zip(experiment.presets, RESULTS[TABULAR_MEMORY], strict=True):
        assert label == preset.title
        for text, metric in zip(cells, metrics, strict=True):
            assert len(numbers(text)) == 2
            check(text, "tabular_memory", preset.name, metric)


def test_language():
    names = {
        "backprop + Adam": "backprop",
        "backprop, tuned (AdamW, rho = 0.3)": "backprop-tuned",
        "Hopfield memory (kNN-LM), on a CPU": "knn_lm",
        "pure forward gradient + Adam, K = 1": "fg-adam-k1",
        "pure forward gradient + Adam, K = 4": "fg-adam-k4",
        "pure forward gradient + SGD, K = 1": "fg-sgd-k1",
        "antithetic ES + Adam, K = 1": "es-adam-k1",
        "frozen trunk": "frozen",
        "interpolated bigram": "bigram",
        "Split-FG + Muon, K = 4, rho = 0.03": "split_fg-muon",
        "Split-FG + AdamW, K = 4, rho = 0.03": "split_fg-adamw",
        "Split-FG + SGD, K = 4, rho = 0.03": "split_fg-sgd",
        "conditioned tangents, K = 4, rho = 0.1": "conditioned-rho0.1",
        "direct path, rho = 0.03": "direct-rho0.03",
        "direct path, mean-Jacobian maps, rho = 0.1": "direct-maps-rho0.1",
        "direct path, mean-Jacobian maps, rho = 0.03": "direct-maps-rho0.03",
        "light trunk, K = 4, rho = 1": "light-rho1",
        "light trunk, K = 4, rho = 0.03": "light-rho0.03",
    }
    for label, *cells in RESULTS[LANGUAGE]:
        found = re.match(r"Split-FG, K = (\d+), rho = ([\d.]+)", label)
        full = f"split_fg-k{found[1]}-rho{found[2]}" if found else names.get(label, label)
        for preset, ours, paper in ((tenth(full) or "", *cells[:2]), (full, *cells[2:])):
            if ours not in NOTHING:
                check(f"{ours} {paper}", "language", preset, "val_ppl")
            quoted = {f"{p:.1f}" for p in printed_by_the_paper("language", preset, "val_ppl")}
            assert (paper in quoted) if quoted else paper in NOTHING, label


def variant(label: str) -> str:
    tangents = re.fullmatch(r"Split-FG, K = (\d+), (all at once|one by one)(?:, 2\^(\d+) logits)?(, lean)?", label)
    if tangents:
        K, how, block, lean = tangents.groups()
        chunk = int(K) if how == "all at once" else 1
        return split_fg(int(K), chunk, None if block is None else int(block), lean=bool(lean))
    return {
        "backprop": "backprop",
        "backprop, chunked head": "backprop-chunked",
        "backprop, checkpointed": "backprop-checkpointed",
        "backprop, checkpointed, chunked head": "backprop-both",
        "frozen trunk": "frozen",
    }[label]


def test_cost():
    for label, *cells in RESULTS[COST]:
        name = variant(label)
        one_by_one = re.sub(r"chunk\d+", "chunk1", name)  # the paper's way
        for text, metric in zip(cells, ("ms", "ratio", "mib", "saved"), strict=True):
            preset = "compiled" if metric in ("ms", "ratio") else "compiled-memory"
            if text not in NOTHING:
                check(text, "language_cost", preset, f"{metric}/{name}", (preset, f"{metric}/{one_by_one}"))


def test_depth():
    variants = ("backprop", "backprop-chunked", "backprop-both", variant(_LEAN))
    for layers, *cells in RESULTS[DEPTH]:
        for text, name in zip(cells, variants, strict=True):
            check(text, "language_cost", f"depth-{layers}", f"mib/{name}")


@pytest.mark.parametrize(
    ("number", "value", "expected"),
    [("0.4", 0.4417, True), ("0.5", 0.4417, False), ("-12", -11.69, True), ("1706.2", 1706.24, True), ("1", 1.4, True)],
)
def test_numbers_are_compared_to_the_digits_they_are_given_with(number, value, expected):
    assert shown(number, value) == expected
