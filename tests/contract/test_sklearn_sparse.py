"""Sparse tables: the same numbers as the dense table, without ever holding it."""

import pickle

import numpy as np
import pandas as pd
import pytest
from _estimators import BOTH, QUICK, SMALL, outputs
from scipy import sparse

from splitfg.sklearn import SplitFGClassifier, SplitFGRegressor
from splitfg.sklearn._examples import Examples
from splitfg.sklearn._sparse import SparseEncoding, compressed, row_keys
from splitfg.sklearn.encoding import TableEncoding

FORMATS = [sparse.csr_array, sparse.csr_matrix, sparse.csc_matrix, sparse.coo_array]


def mostly_zero(rows=150, columns=12):
    """A table with a constant column, a column far from 0, one without any entry, and missing values."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, columns)) * (rng.random((rows, columns)) < 0.3)
    X[:, 2] = 0.1
    X[:, 3] += 1000.0
    X[:, 4] = 0.0
    X[::40, 5] = np.nan
    return X


def target(kind, X):
    value = X[:, 0] - X[:, 1]
    return np.where(value > 0, "yes", "no") if kind is SplitFGClassifier else value


@pytest.mark.parametrize("unit", [1e-200, 1.0, 1e140])
@pytest.mark.parametrize("weight", [None, np.linspace(0.5, 3.0, 150)])
def test_the_encoding_is_that_of_the_dense_table(weight, unit):
    X = mostly_zero() * unit
    dense = TableEncoding.fit(pd.DataFrame(X), weight=weight)
    encoding = SparseEncoding.fit(compressed(sparse.csr_array(X)), range(12), weight=weight)
    np.testing.assert_allclose(encoding.mean, dense.mean, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(encoding.deviation, dense.deviation, rtol=1e-9)
    assert encoding.constant == dense.constant == (2, 4)
    assert encoding.width == dense.width
    rows = encoding.transform(compressed(sparse.csr_array(X)))
    np.testing.assert_allclose(rows.dense(), dense.transform(pd.DataFrame(X)), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(rows[np.array([3, 1])].dense(), rows.dense()[[3, 1]])


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("make", FORMATS)
def test_a_model_of_the_sparse_table_is_that_of_the_dense_one(kind, make):
    """By backprop on all rows at once, which does not depend on their order."""
    X = mostly_zero()
    y = target(kind, X)
    whole = {**SMALL, "batch_size": 150}
    dense, thin = kind("backprop", **whole).fit(X, y), kind("backprop", **whole).fit(make(X), y)
    np.testing.assert_allclose(outputs(thin, make(X)), outputs(dense, X), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", BOTH)
def test_either_kind_of_table_is_predicted_by_a_model_of_the_other(kind):
    X = mostly_zero()
    y = target(kind, X)
    for fit_on in (X, sparse.csr_array(X)):
        model = kind(**QUICK).fit(fit_on, y)
        np.testing.assert_allclose(outputs(model, X), outputs(model, sparse.csr_array(X)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", BOTH)
def test_the_order_of_sparse_rows_does_not_matter_and_pickles_go_on(kind):
    X = sparse.csr_array(mostly_zero())
    y = target(kind, X.toarray())
    order = np.random.default_rng(1).permutation(150)
    model, shuffled = kind(**QUICK).fit(X, y), kind(**QUICK).fit(X[order], y[order])
    np.testing.assert_array_equal(outputs(model, X), outputs(shuffled, X))
    twin = pickle.loads(pickle.dumps(model))
    for each in (model, twin):
        each.partial_fit(X[:50], y[:50])
    np.testing.assert_array_equal(outputs(model, X), outputs(twin, X))


def test_keys_depend_on_values_and_columns_alone():
    X = compressed(sparse.csr_array([[1.0, 0, 2], [2.0, 0, 1], [0, 0, 0], [1.0, 0, 2], [0, 1, 2], [-1.0, 0, 2]]))
    keys = row_keys(X).tolist()
    assert keys[0] == keys[3]
    assert len(set(keys)) == 5
    data, places, ends = np.array([2.0, 0.0, 0.5, 0.5]), np.array([2, 1, 0, 0]), np.array([0, 4])
    assert row_keys(compressed(sparse.csr_array((data, places, ends), shape=(1, 3)))).tolist() == keys[:1]


def test_the_users_matrix_stays_as_it_is():
    data, places, ends = np.array([2.0, 0.0, 0.5, 0.5]), np.array([2, 1, 0, 0]), np.array([0, 2, 4])
    X = sparse.csr_array((data.copy(), places.copy(), ends), shape=(2, 3))
    SplitFGClassifier(**QUICK).fit(X, [0, 1])
    np.testing.assert_array_equal(X.data, data)
    np.testing.assert_array_equal(X.indices, places)


def test_a_wide_table_is_never_dense_as_a_whole():
    """As a dense table of float32 it would take 40 GB."""
    X = sparse.random_array((20_000, 500_000), density=1e-6, rng=np.random.default_rng(0), format="csr")
    examples = Examples(compressed(X), np.arange(20_000)).canonical()
    encoding = SparseEncoding.fit(examples.table, range(500_000))
    batch = encoding.transform(examples.table)[np.arange(2)].dense()
    assert batch.shape == (2, 500_000)


def test_infinite_entries_raise():
    X = sparse.csr_array([[0.0, 1e200], [1.0, 0.0]])
    with pytest.raises(ValueError, match="column 1 holds infinite or too large values"):
        SplitFGRegressor(**QUICK).fit(X, [0.0, 1.0])


def test_text_where_a_sparse_table_had_numbers_raises():
    model = SplitFGRegressor(**QUICK).fit(sparse.csr_array(np.eye(3)), [0.0, 1.0, 2.0])
    with pytest.raises(ValueError, match="holds text"):
        model.predict(pd.DataFrame({0: [1.0], 1: ["a"], 2: [0.0]}))


def test_the_first_partial_fit_names_columns_that_do_not_vary():
    X = sparse.csr_array([[1.0, 0, 3], [2.0, 0, 3]])
    with pytest.warns(UserWarning, match=r"do not vary in its 2 rows \(1, 2\)"):
        SplitFGClassifier(**QUICK).partial_fit(X, [0, 1], classes=[0, 1])
