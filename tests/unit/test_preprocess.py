"""Encoding of tables: every expectation is worked out by hand or by plain numpy."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, strategies as st

from splitfg.errors import DataError
from splitfg.sklearn.encoding import TableEncoding, TargetScale
from splitfg_lab.data import Table
from splitfg_lab.data.folds import folds


def encode(train, test=None, **settings):
    train = pd.DataFrame(train)
    encoding = TableEncoding.fit(train, **settings)
    return encoding.transform(train if test is None else pd.DataFrame(test))


def test_numbers_are_standardised_by_the_training_rows_alone():
    values = encode({"a": [1.0, 3.0, 5.0, 7.0]}, {"a": [4.0, 100.0]})
    deviation = np.sqrt(5.0)  # of 1, 3, 5, 7 around 4
    np.testing.assert_allclose(values[:, 0], [0.0, 96.0 / deviation], rtol=1e-6)


def test_a_missing_number_becomes_the_mean_of_those_present():
    values = encode({"a": [1.0, np.nan, 3.0]}, {"a": [np.nan, 2.0, 3.0]})
    np.testing.assert_allclose(values[:, 0], [0.0, 0.0, 1.0])


@pytest.mark.parametrize("column", [[0.1] * 7, [np.nan] * 7, [1e100] * 7])
def test_a_constant_or_missing_column_becomes_zero_whatever_comes_later(column):
    # the rounded mean of seven times 0.1 is not 0.1: dividing by a rounding error would give ±1
    values = encode({"a": column, "b": range(7)}, {"a": [5.0, 0.1], "b": [3, 3]})
    np.testing.assert_array_equal(values, 0.0)


def test_categories_are_coded_by_frequency_and_follow_the_numbers():
    train = {"c": ["b", "a", "b", "z", "z", "z"], "n": [0.0, 2.0, 0.0, 2.0, 0.0, 2.0]}
    values = encode(train, {"c": ["z", "b", "a", "new", None], "n": [2.0] * 5})
    np.testing.assert_array_equal(values[:, 1], [0, 1, 2, 3, -1])
    np.testing.assert_allclose(values[:, 0], 1.0)


def test_equally_frequent_categories_are_ordered_by_their_text():
    assert encode({"c": ["y", "x", "x", "y"]})[:, 0].tolist() == [1, 0, 0, 1]
    assert encode({"c": ["x", "y", "y", "x"]})[:, 0].tolist() == [0, 1, 1, 0]


def test_codes_are_standardised_on_request():
    train = {"c": ["a", "a", "a", "b"], "d": ["x"] * 4, "n": [0.0, 2.0, 0.0, 2.0]}
    later = {"c": ["a", "b", "new", None], "d": ["x", "y", None, "x"], "n": [2.0] * 4}
    values = encode(train, later, standardise_codes=True)
    deviation = np.sqrt(3.0) / 4.0  # of 0, 0, 0, 1 around 1/4
    np.testing.assert_allclose(values[:, 1], (np.array([0.0, 1.0, 2.0, -1.0]) - 0.25) / deviation, rtol=1e-6)
    np.testing.assert_array_equal(values[:, 2], 0.0)
    np.testing.assert_allclose(values[:, 0], 1.0)


def test_columns_that_do_not_vary_are_named():
    frame = pd.DataFrame({"c": ["a", "a"], "d": ["x", "y"], "n": [1.0, 1.0], "m": [0.0, 1.0]})
    assert TableEncoding.fit(frame, standardise_codes=True).constant == ("n", "c")


def test_an_ordered_categorical_keeps_its_order():
    column = pd.Series(["high", "high", "low"], dtype=pd.CategoricalDtype(["low", "middle", "high"], ordered=True))
    assert encode({"c": column})[:, 0].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    "column",
    [
        pd.Series(["a", None, "b"], dtype="object"),
        pd.Series(["a", None, "b"], dtype="string"),
        pd.Series(["a", None, "b"], dtype="category"),
    ],
    ids=str,
)
def test_every_kind_of_text_column_is_taken_as_categories(column):
    assert encode({"c": column})[:, 0].tolist() == [0, -1, 1]


def test_booleans_and_declared_integers_are_categories():
    assert encode({"c": [True, False, True]})[:, 0].tolist() == [0, 1, 0]
    assert encode({"c": [7, 7, 5]}, categorical=["c"])[:, 0].tolist() == [0, 0, 1]


def test_labels_of_several_types_are_told_apart():
    column = pd.Series([1, "1", "1", 2.5], dtype="object")
    assert encode({"c": column})[:, 0].tolist() == [1, 0, 0, 2]


def test_nullable_integers_are_numbers():
    values = encode({"a": pd.Series([1, None, 3], dtype="Int64")})
    np.testing.assert_allclose(values[:, 0], [-1.0, 0.0, 1.0])


four = {"min_size": 4, "max_size": 4}


@given(
    st.lists(st.integers(1, 4), **four),
    st.lists(st.floats(-1e3, 1e3), **four),
    st.lists(st.sampled_from("xyz"), **four),
    st.booleans(),
)
def test_whole_number_weights_are_repetitions(weights, numbers, labels, standardise_codes):
    frame = pd.DataFrame({"a": numbers, "c": labels})
    repeated = frame.iloc[np.repeat(np.arange(4), weights)]
    settings = {"standardise_codes": standardise_codes}
    by_weight = TableEncoding.fit(frame, weight=np.array(weights, dtype=float), **settings).transform(frame)
    by_repeating = TableEncoding.fit(repeated, **settings).transform(frame)
    np.testing.assert_allclose(by_weight, by_repeating, rtol=1e-5, atol=1e-6)


def test_all_wrong_columns_are_named_at_once():
    frame = pd.DataFrame({"a": [1.0, np.inf], "b": [-np.inf, 0.0], "c": [1.0, 2.0]})
    with pytest.raises(DataError, match="infinite") as caught:
        TableEncoding.fit(frame)
    assert [p.split()[0] for p in caught.value.problems] == ["'a'", "'b'"]


def test_numbers_far_outside_stay_finite_in_single_precision():
    values = encode({"a": [0.0, 1e-30]}, {"a": [1e20, -1e20]})
    np.testing.assert_array_equal(values[:, 0], [1e6, -1e6])


@pytest.mark.parametrize("unit", [1e-310, 1e-200, 1.0, 1e140])
def test_squares_that_do_not_fit_a_float_do_not_matter(unit):
    values = np.array([1.0, 2.0, 6.0])
    expected = (values - 3.0) / values.std()
    np.testing.assert_allclose(encode({"a": values * unit})[:, 0], expected, rtol=1e-5)
    scale = TargetScale.fit(values * unit)
    np.testing.assert_allclose(scale.transform(values * unit), expected, rtol=1e-5)
    np.testing.assert_allclose(scale.inverse(scale.transform(values * unit)), values * unit, rtol=1e-5)


def test_text_where_a_number_was_is_refused():
    encoding = TableEncoding.fit(pd.DataFrame({"a": [1.0, 2.0]}))
    with pytest.raises(DataError, match="'a' holds text"):
        encoding.transform(pd.DataFrame({"a": ["one", "two"]}))


@pytest.mark.parametrize(
    ("columns", "said"),
    [(["a"], "'b' is missing"), (["a", "b", "x"], "'x' is new"), (["b", "a"], "in another order")],
)
def test_other_columns_are_refused(columns, said):
    encoding = TableEncoding.fit(pd.DataFrame({"a": [1.0, 2.0], "b": [1.0, 2.0]}))
    with pytest.raises(DataError, match=said):
        encoding.transform(pd.DataFrame({c: [0.0] for c in columns}))


def test_an_empty_table_is_refused():
    with pytest.raises(DataError, match="no rows or columns to learn from"):
        TableEncoding.fit(pd.DataFrame({"a": []}))


def test_targets_are_scaled_and_come_back():
    values = np.array([10.0, 20.0, 30.0])
    scale = TargetScale.fit(values)
    scaled = scale.transform(np.array([20.0, 30.0]))
    np.testing.assert_allclose(scaled, [0.0, np.sqrt(1.5)], rtol=1e-6)
    np.testing.assert_allclose(scale.inverse(scaled), [20.0, 30.0], rtol=1e-6)


def test_a_constant_target_keeps_its_unit():
    scale = TargetScale.fit(np.full(7, 0.1))
    np.testing.assert_allclose(scale.transform(np.array([1.1])), [1.0], rtol=1e-6)


def table(task, target):
    target = np.asarray(target)
    features = pd.DataFrame({"a": np.arange(len(target), dtype=float)})
    return Table("t", task, features, target, (), ("0", "1") if task == "binary" else (), "")


@pytest.mark.parametrize("task", ["binary", "regression"])
def test_folds_hold_every_row_out_once_and_are_always_the_same(task):
    data = table(task, np.arange(103) % 2 if task == "binary" else np.arange(103.0))
    dealt = folds(data)
    assert len(dealt) == 5
    np.testing.assert_array_equal(np.sort(np.concatenate([test for _, test in dealt])), np.arange(103))
    for train, test in dealt:
        assert not set(train) & set(test)
        assert len(train) + len(test) == 103
    for (train, _), (again, _) in zip(dealt, folds(data), strict=True):
        np.testing.assert_array_equal(train, again)
    assert not np.array_equal(dealt[0][1], np.arange(len(dealt[0][1]))), "rows must be shuffled"


def test_folds_of_classes_are_stratified():
    data = table("binary", np.r_[np.zeros(90, dtype=int), np.ones(10, dtype=int)])
    assert [int(data.target[test].sum()) for _, test in folds(data)] == [2] * 5
