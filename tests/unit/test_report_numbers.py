"""Numbers as the report prints them, against values worked out by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from splitfg_lab.experiments import EXPERIMENTS
from splitfg_lab.experiments.spec import Cell, Paper
from splitfg_lab.report._numbers import (
    Summary,
    difference,
    duration,
    is_share,
    measured,
    number,
    plus_minus,
    quoted,
    signed,
    significant,
    summarise,
)


def test_mean_and_sample_standard_deviation_by_hand():
    # deviations -3, -1, 1, 3: sum of squares 20, divided by n - 1 = 3
    summary = summarise([1.0, 3.0, 5.0, 7.0])
    assert (summary.n, summary.mean) == (4, 4.0)
    assert summary.std == pytest.approx(math.sqrt(20 / 3))


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_mean_and_standard_deviation_agree_with_exact_arithmetic(values):
    exact = [Fraction(v) for v in values]
    mean = sum(exact) / len(exact)
    variance = sum((v - mean) ** 2 for v in exact) / (len(exact) - 1)
    summary = summarise(values)
    assert summary.mean == pytest.approx(float(mean), rel=1e-12, abs=1e-300)
    assert summary.std == pytest.approx(math.sqrt(variance), rel=1e-9, abs=1e-100)


def test_one_value_has_no_spread_and_none_has_no_mean():
    assert summarise([2.0]).std is None
    assert summarise([]).mean is None


def test_values_that_are_as_good_as_infinite_count_as_diverged():
    summary = summarise([1.0, math.nan, math.inf, -math.inf, 1e308])
    assert summary == Summary((1.0,), diverged=4)


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (0.04, 1, "0.0"),
        (-0.04, 1, "0.0"),
        (-0.06, 1, "−0.1"),
        (40128.9, 1, "40,128.9"),
        (-1234567.0, 0, "−1,234,567"),
        (1.5e20, 1, "1.500e+20"),
    ],
)
def test_numbers_have_separators_and_no_negative_zero(value, decimals, text):
    assert number(value, decimals) == text


def test_spread_is_printed_only_where_there_is_one():
    assert plus_minus(61.94, 0.32, 1) == "61.9 ± 0.3"
    assert plus_minus(61.94, None, 1) == "61.9"
    assert measured(summarise([1.0, 3.0]), 1) == "2.0 ± 1.4 (2)"
    with pytest.raises(ValueError, match="no value"):
        measured(summarise([]), 1)


@pytest.mark.parametrize(
    ("paper", "text"),
    [
        (Paper(2.4), "2.4"),
        (Paper(0.7162), "0.7162"),
        (Paper(0.71625), "0.7163"),
        (Paper(61.0, 0.25), "61.00 ± 0.25"),
        (Paper(811), "811"),
        (Paper(40128.9), "40,128.9"),
    ],
)
def test_the_paper_is_quoted_with_no_more_digits_than_it_prints(paper, text):
    assert quoted(paper, 4) == text


@pytest.mark.parametrize(("value", "text"), [(0.3, "+0.3"), (-0.3, "−0.3"), (0.01, "0.0"), (-0.01, "0.0")])
def test_a_difference_says_its_direction_unless_it_rounds_to_zero(value, text):
    assert signed(value, 1) == text


@pytest.mark.parametrize(
    ("ours", "paper", "relative", "text"),
    [
        (409.9, 386.7, True, "+23.2 (+6.0%)"),
        (300.0, 400.0, True, "−100.0 (−25.0%)"),
        (1200.0, 400.0, True, "+800.0 (+200%)"),
        (82.0, 82.5, False, "−0.5"),
        (0.3, 0.0, True, "+0.3"),
        (-1.0, -2.0, True, "+1.0 (+50.0%)"),
    ],
)
def test_differences_are_ours_minus_the_papers(ours, paper, relative, text):
    assert difference(ours, Paper(paper), 1, relative=relative) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1234.5, "1,234"), (12.345, "12.3"), (0.01234, "0.0123"), (0.0000123, "1.23e−05"), (-3.0, "−3.00")],
)
def test_significant_digits(value, text):
    assert significant(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.25 s"), (59.0, "59 s"), (60.0, "1 min 0 s"), (200.4, "3 min 20 s"), (3600 * 5 + 61, "5 h 1 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    "metric",
    ["accuracy", "test_accuracy", "memsave_percent", "saved/split_fg-k4-chunk1", "trunk_share", "trunk_share_readout"],
)
def test_shares_are_known_by_their_names(metric):
    assert is_share(metric)


@pytest.mark.parametrize("metric", ["ppl", "step_ms", "saved_mib", "mib/saved", "shared_mib", "ratio/accuracy"])
def test_other_metrics_are_not(metric):
    assert not is_share(metric)


def test_every_metric_the_paper_prints_in_percent_is_a_share():
    cells = (
        (column, cell)
        for experiment in EXPERIMENTS
        for table in experiment.tables
        for row in table.rows
        for column, cell in zip(table.columns, row.cells, strict=True)
        if isinstance(cell, Cell) and cell.paper is not None
    )
    in_percent = {cell.metric for column, cell in cells if column.endswith((", %", " (%)"))}
    assert in_percent
    assert {metric for metric in in_percent if not is_share(metric)} == set()
