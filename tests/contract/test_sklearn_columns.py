"""Columns of a table as the estimators read them: text, categories, numbers, dates, what is missing or unseen."""

import datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from _estimators import BOTH, QUICK, SMALL, blobs

from splitfg.sklearn import SplitFGClassifier, SplitFGRegressor


def mixed(rows=120):
    X, labels, values = blobs(rows)
    frame = pd.DataFrame({"x": X[:, 0], "colour": np.where(X[:, 1] > 2.5, "red", "blue"), "flag": X[:, 1] > 0})
    return frame, labels, values


@pytest.mark.parametrize("dtype", ["object", "string", "category"])
def test_text_columns_of_a_frame_are_used(dtype):
    frame, _, _ = mixed()
    y = (frame["colour"] == "red").to_numpy()
    frame = frame.astype({"colour": dtype}).drop(columns="flag")
    model = SplitFGClassifier(**SMALL).fit(frame, y)
    assert model.score(frame, y) > 0.95
    assert model.feature_names_in_.tolist() == ["x", "colour"]


@pytest.mark.parametrize("kind", BOTH)
def test_a_column_of_many_texts_does_not_drown_the_others(kind):
    X, labels, values = blobs(600)
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "name": [f"person {i % 598}" for i in range(600)]})
    with pytest.warns(UserWarning, match=r"'name' \(598 different values in 600 rows\).*Drop"):
        model = kind(**SMALL).fit(frame, labels if kind is SplitFGClassifier else values)
    assert model.score(frame, labels if kind is SplitFGClassifier else values) > 0.85


def test_categories_that_come_again_get_no_warning():
    frame, y, _ = mixed()
    ordered = pd.CategoricalDtype([str(i) for i in range(120)], ordered=True)
    frame["place"] = pd.Series([str(i) for i in range(120)], dtype=ordered)
    frame["group"] = [f"group {i % 100}" for i in range(120)]
    SplitFGClassifier(**QUICK).fit(frame, y)


@pytest.mark.parametrize("make", [float, Decimal])
@pytest.mark.parametrize("missing", [None, np.nan, pd.NA])
def test_numbers_in_an_object_column_are_numbers(make, missing):
    X, y, _ = blobs()
    X[::7, 0] = np.nan
    plain = pd.DataFrame(X, columns=["a", "b"])
    objects = pd.DataFrame({"a": [missing if np.isnan(v) else make(v) for v in X[:, 0]], "b": X[:, 1]}).astype(object)
    expected = SplitFGClassifier(**QUICK).fit(plain, y)
    model = SplitFGClassifier(**QUICK).fit(objects, y)
    np.testing.assert_array_equal(model.predict_proba(objects), expected.predict_proba(plain))
    np.testing.assert_array_equal(model.predict_proba(plain), expected.predict_proba(plain))
    np.testing.assert_array_equal(expected.predict_proba(objects[:1]), expected.predict_proba(plain[:1]))


def test_objects_that_are_not_all_numbers_stay_categories():
    frame, y, _ = mixed()
    frame["mixed"] = pd.Series([1, "1"] * 60, dtype=object)
    frame["flag"] = frame["flag"].astype(object)
    frame["nothing"] = pd.Series([None] * 120, dtype=object)
    model = SplitFGClassifier(**QUICK).fit(frame, y)
    changed = frame.assign(mixed=pd.Series([1] * 120, dtype=object), nothing="text")
    assert not np.array_equal(model.predict_proba(frame)[1::2], model.predict_proba(changed)[1::2])
    np.testing.assert_array_equal(model.predict_proba(frame)[::2], model.predict_proba(changed)[::2])


UNREADABLE = {
    "day": pd.Series(pd.date_range("2020-01-01", periods=120)),
    "zoned": pd.Series(pd.date_range("2020-01-01", periods=120, tz="UTC")),
    "span": pd.Series(pd.timedelta_range("1h", periods=120)),
    "month": pd.Series(pd.period_range("2020-01", periods=120, freq="M")),
    "date": pd.Series([datetime.date(2020, 1, 1), None] * 60, dtype=object),
    "many": pd.Series([[1, 2], [3]] * 60, dtype=object),
    "phase": pd.Series([1 + 2j, 3j] * 60),
}
KINDS = {"many": "values that cannot be categories (type list)", "phase": "complex numbers"}


def test_dates_and_lists_are_refused_by_name():
    frame, y, _ = mixed()
    with pytest.raises(ValueError, match=r"convert them to numbers .* or drop") as caught:
        SplitFGClassifier(**QUICK).fit(frame.assign(**UNREADABLE), y)
    for name in UNREADABLE:
        assert f"{name!r} holds {KINDS.get(name, 'dates or times')}" in str(caught.value)
    assert "'colour'" not in str(caught.value)


@pytest.mark.parametrize("odd", ["day", "many"])
def test_dates_and_lists_are_refused_where_text_was(odd):
    frame, y, _ = mixed()
    model = SplitFGClassifier(**QUICK).fit(frame, y)
    with pytest.raises(ValueError, match="'colour' holds"):
        model.predict(frame.assign(colour=UNREADABLE[odd]))


def test_dates_in_an_array_are_refused():
    X = np.array([["2020-01-01"], ["2020-01-02"]], dtype="datetime64[D]")
    with pytest.raises(ValueError, match="0 holds dates"):
        SplitFGClassifier(**QUICK).fit(X, [0, 1])


def test_unseen_categories_and_missing_values_are_predicted():
    frame, y, _ = mixed()
    model = SplitFGClassifier(**QUICK).fit(frame, y)
    strange = pd.DataFrame({"x": [np.nan, 0.0], "colour": ["green", None], "flag": [True, False]})
    assert np.isfinite(model.predict_proba(strange)).all()


def test_a_missing_number_counts_as_the_mean():
    X, y, _ = blobs()
    model = SplitFGClassifier(**QUICK).fit(X, y)
    mean = X[:, 0].mean()
    np.testing.assert_allclose(model.predict_proba([[np.nan, 1.0]]), model.predict_proba([[mean, 1.0]]), rtol=1e-4)


@pytest.mark.parametrize("kind", BOTH)
def test_other_columns_than_those_of_fit_are_refused(kind):
    frame, labels, values = mixed()
    model = kind(**QUICK).fit(frame, labels if kind is SplitFGClassifier else values)
    for wrong in (frame.drop(columns="x"), frame[["colour", "x", "flag"]], frame.rename(columns={"x": "z"})):
        with pytest.raises(ValueError, match="feature names"):
            model.predict(wrong)
    with pytest.raises(ValueError, match="'x' holds text"):
        model.predict(frame.astype({"x": str}))


@pytest.mark.parametrize(
    ("X", "y", "said"),
    [
        ([["a"], ["b"]], [0, 1], "becomes categories"),
        ([[np.inf], [0.0]], [0, 1], "infinity"),
        ([[1.0], [0.0]], [0, 0], "one class only"),
        ([[1.0], [0.0]], [0, 1, 1], "inconsistent numbers of samples"),
        (np.empty((0, 2)), [], "0 sample"),
        (pd.DataFrame({"c": pd.Series([], dtype="object")}), [], "0 sample"),
        ([[1.0], [0.0]], [0.5, 1.5], "Unknown label type"),
        ([[1.0], [0.0]], ["yes", None], "missing values"),
    ],
)
def test_bad_input_is_refused_with_a_reason(X, y, said):
    with pytest.raises(ValueError, match=said):
        SplitFGClassifier(**QUICK).fit(X, y)


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (pd.date_range("2020-01-01", periods=2), "dates or times"),
        (pd.Series(pd.date_range("2020-01-01", periods=2, tz="UTC")), "dates or times"),
        ([1.0, None], "NaN"),
        ([1e200, 0.0], "divide all of them"),
    ],
)
def test_bad_values_are_refused_with_a_reason(y, said):
    with pytest.raises(ValueError, match=said):
        SplitFGRegressor(**QUICK).fit([[1.0], [0.0]], y)


def test_extended_precision_is_read_as_float64():
    X, y, _ = blobs()
    wide, plain = (SplitFGClassifier(**QUICK).fit(A, y) for A in (X.astype(np.longdouble), X))
    np.testing.assert_array_equal(wide.predict_proba(X.astype(np.longdouble)), plain.predict_proba(X))


def test_constant_columns_change_nothing():
    X, y, _ = blobs()
    model = SplitFGClassifier(**SMALL).fit(np.column_stack([X, np.full(len(X), 0.1)]), y)
    assert model.score(np.column_stack([X, np.full(len(X), 7.0)]), y) > 0.85
