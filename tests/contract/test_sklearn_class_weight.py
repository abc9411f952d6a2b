"""Class weights: each is defined by the row weights it stands for."""

import numpy as np
import pytest
from _estimators import QUICK, SMALL, blobs

from splitfg.sklearn import SplitFGClassifier


def fitted(y, *, weight=None, **settings):
    X, _, _ = blobs()
    return SplitFGClassifier(**{**QUICK, **settings}).fit(X, y, sample_weight=weight).predict_proba(X)


def uneven():
    """60 rows of "a", 40 of "b", 20 of "c"."""
    return np.repeat(["a", "b", "c"], [60, 40, 20])


def test_a_dict_multiplies_the_weights_of_rows():
    y = uneven()
    weight = np.arange(120) % 3
    by_row = weight * np.where(y == "b", 2, 1)
    weighted = fitted(y, weight=weight, class_weight={"b": 2})
    np.testing.assert_array_equal(weighted, fitted(y, weight=by_row))
    assert not np.array_equal(weighted, fitted(y, weight=weight))


def test_balanced_gives_every_class_the_same_weight():
    y = uneven()
    by_row = np.select([y == "a", y == "b"], [120 / (3 * 60), 120 / (3 * 40)], 120 / (3 * 20))
    balanced = fitted(y, class_weight="balanced")
    np.testing.assert_array_equal(balanced, fitted(y, weight=by_row))
    assert not np.array_equal(balanced, fitted(y))


def test_balanced_counts_rows_by_their_weight():
    y, weight = uneven(), np.ones(120)
    weight[:30] = 0.0  # 30 rows of "a" are left
    by_row = weight * np.select([y == "a", y == "b"], [90 / (3 * 30), 90 / (3 * 40)], 90 / (3 * 20))
    np.testing.assert_array_equal(fitted(y, weight=weight, class_weight="balanced"), fitted(y, weight=by_row))


def test_balanced_classes_are_left_as_they_are():
    _, y, _ = blobs()
    np.testing.assert_array_equal(fitted(y, class_weight="balanced"), fitted(y))


def test_a_rare_class_is_found_once_it_counts_enough():
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], [950, 50])
    X = rng.normal(size=(1000, 1)) + y[:, None]  # they overlap, so that without weights "1" is seldom worth a guess
    plain, balanced = (
        SplitFGClassifier(**{**SMALL, "steps": 60}, class_weight=chosen).fit(X, y) for chosen in (None, "balanced")
    )
    assert plain.predict(X).mean() < 0.05
    assert 0.2 < balanced.predict(X).mean() < 0.5  # at equal weights half-way between the means: P(N > 1/2) = 0.31


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("balance", "must be a dict, 'balanced' or None, got 'balance'"),
        ({"a": -1, "b": "x"}, "of 'a' must be a non-negative number, got -1; class_weight of 'b' .* got 'x'"),
        ({"A": 2, "B": 3}, "no weight of any class: its keys must be among 'a', 'b', 'c'"),
    ],
)
def test_invalid_class_weights_raise(chosen, said):
    with pytest.raises(ValueError, match=said):
        fitted(uneven(), class_weight=chosen)


def test_partial_fit_takes_a_dict_and_raises_for_balanced():
    X, y, _ = blobs()
    with pytest.raises(ValueError, match="'balanced' needs all rows at once"):
        SplitFGClassifier(**QUICK, class_weight="balanced").partial_fit(X, y, classes=["a", "b", "c"])
    model = SplitFGClassifier(**QUICK, class_weight={"c": 2}).partial_fit(X, y, classes=["a", "b", "c"])
    model.partial_fit(X[y == "a"], y[y == "a"])  # rows of classes without a weight of their own
    same = SplitFGClassifier(**QUICK).partial_fit(X, y, ["a", "b", "c"], sample_weight=np.where(y == "c", 2, 1))
    same.partial_fit(X[y == "a"], y[y == "a"])
    np.testing.assert_array_equal(model.predict_proba(X), same.predict_proba(X))
