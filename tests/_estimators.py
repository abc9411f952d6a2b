"""Small tables and settings for the tests of the scikit-learn estimators."""

import numpy as np

from splitfg.sklearn import SplitFGClassifier, SplitFGRegressor

SMALL = {"steps": 40, "batch_size": 64, "width": 24, "members": 2, "learning_rate": 1e-2, "random_state": 0}
QUICK = {**SMALL, "steps": 5}
BOTH = [SplitFGClassifier, SplitFGRegressor]


def blobs(rows=120, seed=0):
    """Three well separated groups in the plane, and a linear function of it."""
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % 3
    X = rng.normal(size=(rows, 2)) + 5.0 * np.array([[0, 0], [1, 0], [0, 1]])[y]
    return X, np.array(["a", "b", "c"])[y], 3.0 * X[:, 0] - 2.0 * X[:, 1] + 40.0


def data_for(kind):
    X, labels, values = blobs()
    return X, labels if kind is SplitFGClassifier else values


def outputs(estimator, X):
    return estimator.predict_proba(X) if isinstance(estimator, SplitFGClassifier) else estimator.predict(X)
