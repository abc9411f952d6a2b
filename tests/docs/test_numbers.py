"""Every number in the README, the notes of the results pages and the ladder is recorded, in tables and in prose."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator

import pytest
from docs_claims import CLAIMS, RESULTS_IN_PROTOCOLS, Claim
from docs_records import ROOT, experiment, paper, recorded, runs_of, shown
from docs_tables import TABLES
from docs_tabular import holm_p

from splitfg_lab.experiments import Paired
from splitfg_lab.experiments.tabular._sets import DATA

NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
IN_PROSE = re.compile(rf"(?<![\w.^/-]){NUMBER}")  # not the 8 of small8, nor the 103 of WikiText-103
README = (ROOT / "README.md").read_text(encoding="utf-8")
HEADLINE = {
    "Backprop": "backprop",
    "Learned feedback": "learned_layers",
    "Activity tangents": "activity_fg",
    "Split-FG": "split_fg",
    "Pure forward gradient": "pure_fg",
}
"""Columns of the README's table, by method; a new column is one more line here."""
NETWORK_COLUMNS = ("Backprop", "Learned feedback", "Split-FG", "Frozen trunk")
_FULL = ("backprop", "learned", "split_fg", "frozen")
NETWORKS = {
    "CIFAR-10, 60 epochs": ("images", "accuracy", 1, [f"cifar10-{m}" for m in _FULL]),
    "CIFAR-100, 60 epochs": ("images", "accuracy", 1, [f"cifar100-{m}" for m in _FULL]),
    "CIFAR-10, flat head, 6,000 steps": ("images", "accuracy", 1, [f"flat-{m}" for m in _FULL]),
    "GPT, a tenth of an epoch": (
        "language",
        "val_ppl",
        1,
        ["tuned-rho0.3-10", "learned-layers-rho0.3-10", "split_fg-k4-rho0.1-10", "frozen-10"],
    ),
    "GPT, one epoch": (
        "language",
        "val_ppl",
        1,
        ["tuned-rho0.3", "learned-layers-rho0.3", "split_fg-k4-rho0.1", "frozen"],
    ),
}
"""Rows of the README's second table: experiment, metric, digits, and the presets of its columns."""

LADDER = {
    "Frozen trunk": ("frozen-10", "frozen"),
    "Split-FG, K = 4": ("split_fg-k4-rho0.1-10", "split_fg-k4-chunk4"),
    "Direct path": ("direct-eps-rho0.03-10", "direct"),
    "Maps": ("maps-rho0.03-10", "maps"),
    "Maps, tied_share = 0.1": ("maps-tied0.1-rho0.03-10", "maps"),
    "Maps, one pull": ("pull-maps-rho0.1-10", "pull-maps"),
    "Maps, two pulls": ("pull2-maps-rho0.1-10", "pull2-maps"),
    "Maps, four pulls": ("pull4-maps-rho0.1-10", "pull4-maps"),
    "Learned feedback": ("learned-layers-rho0.3-10", "learned-layers"),
    "Backprop": ("tuned-rho0.3-10", "backprop"),
}
"""Rows of the table of the ladder: the preset, and its variant in ``language_cost/ladder``."""
LADDER_PAGE = (ROOT / "docs" / "_parts" / "ladder.md").read_text(encoding="utf-8")


def prose(page: str) -> str:
    """A page on one line, without code blocks, tables, comments, addresses and emphasis."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return " ".join(text.replace("**", "").replace("*", "").split())


def pattern(claim: Claim) -> re.Pattern[str]:
    return re.compile(re.escape(claim.text).replace(re.escape("{}"), f"({NUMBER})"))


@pytest.mark.parametrize(
    ("page", "claim"),
    [(page, c) for page, claims in (CLAIMS | RESULTS_IN_PROTOCOLS).items() for c in claims if c.values],
)
def test_prose(page, claim):
    found = pattern(claim).search(prose(page))
    assert found, f"{page} has no sentence like this: {claim.text}"
    for number, value in zip(found.groups(), claim.values, strict=True):
        value = value() if callable(value) else value
        assert shown(number.rstrip(","), value), f"{page} has {number} in {claim.text!r}; recorded: {value}"


@pytest.mark.parametrize("page", CLAIMS)
def test_no_other_number_in_prose(page):
    rest = prose(page)
    for claim in CLAIMS[page]:
        rest, count = pattern(claim).subn(" ", rest)
        assert count, f"{page} has no sentence like this: {claim.text}"
    unchecked = [rest[max(0, m.start() - 40) : m.end() + 20] for m in IN_PROSE.finditer(_without_settings(rest))]
    assert not unchecked, f"add claims to docs_claims.py for these numbers of {page}: {unchecked}"


def _without_settings(text: str) -> str:
    """Blank out K = 8, rho = 0.1 and the name of the 10% budget, keeping every position."""
    return re.sub(r"K = \d+|rho = [\d.]*\d|10% budget", lambda found: " " * len(found[0]), text)


def test_every_note_is_checked():
    assert set(NOTES) == {page for page in CLAIMS if page.startswith("docs/notes/")}


@pytest.mark.parametrize(
    ("old", "new"), [("1838.1", "1383.1"), ("450.8", "450.9"), ("77.5", "7.75"), ("41 standard", "14 standard")]
)
def test_a_planted_error_is_noticed(old, new, monkeypatch):
    (page,) = [page for page in CLAIMS if old in prose(page)]
    planted = prose(page).replace(old, new, 1)
    monkeypatch.setattr("test_numbers.prose", lambda _: planted)
    with pytest.raises(AssertionError):
        _check_page(page)


def _check_page(page: str) -> None:
    for claim in CLAIMS[page]:
        test_prose(page, claim)
    test_no_other_number_in_prose(page)


def tables(text: str) -> Iterator[list[list[str]]]:
    """The Markdown tables of a text: header first, then rows of stripped cells."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [[cell.strip(" *") for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        yield [lines[0], *lines[2:]]


NOTES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "notes").glob("*.md"))


@pytest.mark.parametrize("page", sorted({*NOTES, *TABLES}))
def test_tables_of_pages(page):
    grids = tables((ROOT / page).read_text(encoding="utf-8"))
    for (_, *body), expected in zip(grids, TABLES.get(page, ()), strict=True):
        assert [label for label, *_ in body] == list(expected)
        for label, *cells in body:
            numbers = re.findall(NUMBER, _without_settings(" ; ".join(_without_links(cells))))
            for number, value in zip(numbers, expected[label], strict=True):
                value = value() if callable(value) else value
                assert shown(number, value), f"{page} has {number} for {label}; recorded: {value}"


def _without_links(cells: list[str]) -> list[str]:
    """The cells without addresses and code."""
    return [re.sub(r"\]\([^)]*\)|`[^`]*`", "]", cell) for cell in cells]


def test_headline_table():
    (grid,) = [t for t in tables(README) if set(HEADLINE) <= set(t[0])]
    assert [row[0] for row in grid[1:]] == [data.label for data in DATA]
    for data, (_, *cells) in zip(DATA, grid[1:], strict=True):
        for text, column in zip(cells, grid[0][1:], strict=True):
            preset = f"{data.name}-{HEADLINE[column]}"
            ours, *theirs = re.findall(NUMBER, text)
            assert shown(ours, recorded("tabular", preset, data.metric)), f"{data.label}, {column}"
            quoted = {f"{value:.{data.decimals}f}" for value in paper("tabular", preset, data.metric)}
            assert set(theirs) == quoted, f"{data.label}, {column}: the paper has {quoted}"


def test_table_of_images_and_text():
    (grid,) = [t for t in tables(README) if t[0][1:] == list(NETWORK_COLUMNS)]
    assert [row[0] for row in grid[1:]] == list(NETWORKS)
    for label, *cells in grid[1:]:
        name, metric, decimals, presets = NETWORKS[label]
        for text, preset in zip(cells, presets, strict=True):
            runs = runs_of(name, preset)
            assert bool(text) == bool(runs), f"{label}, {preset}"
            if runs:
                ours, *theirs = re.findall(NUMBER, text)
                assert shown(ours, statistics.mean(run.metrics[metric] for run in runs)), f"{label}, {preset}"
                quoted = {f"{value:.{decimals}f}" for value in paper(name, preset, metric)}
                assert set(theirs) == quoted, f"{label}, {preset}: the paper has {quoted}"


def test_table_of_the_ladder():
    (grid,) = tables(LADDER_PAGE)
    header = ["", "A tenth of an epoch", "One epoch", "Step time", "Reverse passes", "A gradient passes"]
    assert grid[0] == header
    assert [row[0] for row in grid[1:]] == list(LADDER)
    for (preset, variant), (_, tenth, epoch, ratio, passes, _) in zip(LADDER.values(), grid[1:], strict=True):
        runs = []
        for budget, text in ((preset, tenth), (preset.removesuffix("-10"), epoch)):
            made = runs_of("language", budget)
            assert bool(text) == bool(made), budget
            assert not made or shown(text, statistics.mean(run.metrics["val_ppl"] for run in made)), budget
            runs += made
        assert shown(ratio, recorded("language_cost", "ladder", f"ratio/{variant}")), preset
        count, _, where = passes.partition(", ")
        inside, through = (int(count), 0) if where == "inside blocks" else (0, int(count))
        assert {(run.block_backward or 0, run.trunk_backward) for run in runs} == {(inside, through)}, preset


def test_only_checked_tables_hold_measurements():
    others = [t for t in tables(README) if "Backprop" not in t[0]]
    assert not [cell for t in others for row in t for cell in row if re.search(r"\d\.\d", cell)]


# conclusions in words


def _better(data, method, than="split_fg"):
    a, b = (recorded("tabular", f"{data.name}-{m}", data.metric) for m in (method, than))
    return a > b if data.better == "higher" else a < b


def test_baselines_that_lead_split_fg():
    having = {m: [d for d in DATA if m in d.paper] for m in ("forward_forward", "predictive_coding", "hopfield")}
    assert [len(having["forward_forward"]), len(having["predictive_coding"]), len(having["hopfield"])] == [4, 8, 8]
    leads = {m: sum(_better(d, m) for d in sets) for m, sets in having.items()}
    assert leads == {"forward_forward": 4, "predictive_coding": 8, "hopfield": 6}


def test_split_fg_leads_pure_fg_and_es_everywhere():
    assert all(_better(d, "split_fg", other) for d in DATA for other in ("pure_fg", "es"))


def test_activity_tangents_lead_split_fg_everywhere():
    assert all(_better(d, "activity_fg") for d in DATA)
    assert [d.name for d, p in zip(DATA, holm_p(), strict=True) if p >= 0.01] == ["diamond"]
    with_one = {d.name: _better(d, "activity_fg_k1") for d in DATA}
    assert [name for name, better in with_one.items() if not better] in (["black_friday"], ["diamond", "black_friday"])


def test_number_of_paired_tests():
    (leads,) = [t for t in experiment("tabular").tables if t.key == "tabular-tests"]
    assert sum(isinstance(cell, Paired) for row in leads.rows for cell in row.cells) == 44


@pytest.mark.parametrize(
    ("number", "value", "expected"),
    [
        ("0.4", 0.4417, True),
        ("0.5", 0.4417, False),
        ("-12", -11.69, True),
        ("1,706.2", 1706.24, True),
        ("1", 1.4, True),
    ],
)
def test_numbers_are_compared_to_the_digits_they_are_given_with(number, value, expected):
    assert shown(number, value) == expected
