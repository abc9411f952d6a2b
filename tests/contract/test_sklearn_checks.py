"""scikit-learn's own suite, for both estimators, with nothing expected to fail."""

import pytest

pytest.importorskip("sklearn")

from sklearn.utils.estimator_checks import parametrize_with_checks

from splitfg.sklearn import SplitFGClassifier, SplitFGRegressor

SMALL = {"steps": 25, "batch_size": 64, "width": 24, "members": 2, "learning_rate": 2e-2}


@parametrize_with_checks([SplitFGClassifier(**SMALL), SplitFGRegressor(**SMALL)])
def test_estimator_check(estimator, check):
    check(estimator)
