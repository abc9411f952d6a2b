"""What the estimators promise beyond scikit-learn's own suite: methods, weights, settings, stopping, going on."""

import copy
import pickle

import numpy as np
import pytest
import torch
from _estimators import BOTH, QUICK, SMALL, blobs, data_for, outputs
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from splitfg import SplitError
from splitfg.recipes import Adam, HopfieldMethod, SplitFGMethod
from splitfg.recipes.tables import Network, PlainNetwork, TableRecipe, TableShape, table_methods
from splitfg.sklearn import SplitFGClassifier, SplitFGRegressor
from splitfg.sklearn._settings import DEFAULT_METHOD


@pytest.mark.parametrize("method", sorted(table_methods()))
def test_every_method_classifies(method):
    X, y, _ = blobs()
    model = SplitFGClassifier(method, **SMALL).fit(X, y)
    assert model.score(X, y) > 0.85
    probabilities = model.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    np.testing.assert_array_equal(model.classes_[probabilities.argmax(axis=1)], model.predict(X))


@pytest.mark.parametrize("method", sorted(set(table_methods()) - {"forward_forward"}))
def test_every_method_but_forward_forward_regresses(method):
    X, _, y = blobs()
    assert SplitFGRegressor(method, **SMALL).fit(X, y).score(X, y) > 0.6


def test_forward_forward_refuses_values():
    X, _, y = blobs()
    with pytest.raises(SplitError, match="cannot learn real values"):
        SplitFGRegressor("forward_forward", **SMALL).fit(X, y)


def test_a_recipe_is_taken_as_it_is():
    X, y, _ = blobs()
    by_name = SplitFGClassifier("split_fg", **QUICK).fit(X, y)
    same = SplitFGClassifier(SplitFGMethod(K=8, chunk=2), **QUICK).fit(X, y)
    other = SplitFGClassifier(SplitFGMethod(K=1), **QUICK).fit(X, y)
    np.testing.assert_array_equal(by_name.predict_proba(X), same.predict_proba(X))
    assert not np.array_equal(by_name.predict_proba(X), other.predict_proba(X))


@pytest.mark.parametrize("kind", BOTH)
def test_the_seed_decides_everything(kind):
    X, y = data_for(kind)
    first, again = (outputs(kind(**QUICK).fit(X, y), X) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, outputs(kind(**{**QUICK, "random_state": 1}).fit(X, y), X))


@pytest.mark.parametrize("kind", BOTH)
def test_a_prediction_does_not_depend_on_the_rows_beside_it(kind):
    X, y = data_for(kind)
    model = kind(**QUICK).fit(X, y)
    together = outputs(model, np.vstack([X, X]))
    alone = np.concatenate([outputs(model, X[i : i + 7]) for i in range(0, len(X), 7)])
    np.testing.assert_array_equal(together[: len(X)], alone)


@pytest.mark.parametrize("kind", BOTH)
def test_the_order_of_rows_does_not_matter(kind):
    X, y = data_for(kind)
    order = np.random.default_rng(0).permutation(len(y))
    model, shuffled = kind(**QUICK).fit(X, y), kind(**QUICK).fit(X[order], y[order])
    np.testing.assert_array_equal(outputs(model, X), outputs(shuffled, X))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("early_stopping", [False, True])
def test_whole_weights_are_repetitions_and_zero_leaves_out(kind, early_stopping):
    X, y = data_for(kind)
    weight = np.random.default_rng(0).integers(0, 4, size=len(y))
    model = kind(**{**QUICK, "early_stopping": early_stopping})
    weighted = outputs(clone(model).fit(X, y, sample_weight=weight), X)
    repeated = outputs(clone(model).fit(np.repeat(X, weight, axis=0), np.repeat(y, weight)), X)
    np.testing.assert_array_equal(weighted, repeated)
    assert not np.array_equal(weighted, outputs(clone(model).fit(X, y), X))


def test_fractional_weights_decide_between_contradicting_labels():
    X = np.repeat([[0.0], [1.0]], 40, axis=0)
    y = np.tile([0, 1], 40)
    weight = np.where(y == (X[:, 0] > 0.5), 0.9, 0.1)
    model = SplitFGClassifier(**SMALL).fit(X, y, sample_weight=weight)
    assert model.predict([[0.0], [1.0]]).tolist() == [0, 1]
    np.testing.assert_allclose(model.predict_proba([[0.0], [1.0]]).max(axis=1), 0.9, atol=0.1)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (np.zeros(120), "zero for every row"),
        (-np.ones(120), "negative"),
        (np.full(120, np.nan), "NaN"),
        (np.linspace(1.0, 2.0, 120) * 1e307, "divide all weights"),
        (np.ones(119), "one weight for each of 120 rows"),
        (np.ones((120, 1)), "one weight for each of 120 rows"),
    ],
)
def test_useless_weights_are_refused(kind, weight, said):
    X, y = data_for(kind)
    with pytest.raises(ValueError, match=said):
        kind(**QUICK).fit(X, y, sample_weight=weight)


def test_all_wrong_settings_are_named_at_once():
    X, y, _ = blobs()
    model = SplitFGClassifier(steps=0, width=2.5, learning_rate=-1.0, rho=-1.0, validation_fraction=1.0)
    with pytest.raises(ValueError, match=r"steps.*width.*learning_rate.*rho.*validation_fraction"):
        model.fit(X, y)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"learning_rate": None}, "learning_rate must be a positive number, got None"),
        ({"clip": None}, "clip must be a positive number, got None"),
        ({"clip": "1"}, "clip must be a positive number, got '1'"),
        ({"rho": None}, "rho must be above 0"),
        ({"rho": 0.0}, 'use method="frozen"'),
        ({"validation_fraction": None}, "validation_fraction must be between"),
        ({"device": "nowhere"}, "device 'nowhere' is missing or unknown"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings, said):
    X, y, _ = blobs()
    with pytest.raises(ValueError, match=said):
        SplitFGClassifier(**{**QUICK, **settings}).fit(X, y)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    X, y, _ = blobs()
    with pytest.raises(ValueError, match=r"device 'cuda' is missing.*'cpu'"):
        SplitFGClassifier(**QUICK, device="cuda").fit(X, y)


def test_an_infinite_bound_clips_nothing():
    X, y, _ = blobs()
    wide = SplitFGClassifier(**QUICK, clip=1e9).fit(X, y)
    unbounded = SplitFGClassifier(**QUICK, clip=float("inf")).fit(X, y)
    np.testing.assert_array_equal(wide.predict_proba(X), unbounded.predict_proba(X))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"method": "backpropp"},
            r"method 'backpropp' is unknown \(did you mean 'backprop'\?\): choose one of .*frozen",
        ),
        ({"method": "Split-FG"}, "did you mean 'split_fg'"),
        ({"method": "xyz"}, "method 'xyz' is unknown: choose one of"),
        ({"method": 3}, "method must be a name or a recipe .* got int"),
        ({"network": "mpl"}, r"network 'mpl' is unknown \(did you mean 'mlp'\?\): choose one of tabm, mlp"),
        ({"network": None}, "network must be a name or a recipe .* got NoneType"),
        ({"method": "backpropp", "network": "mpl", "steps": 0}, "(?s)'backprop'.*'mlp'.*steps must be"),
    ],
)
def test_an_unknown_method_or_network_raises_with_the_nearest_name(settings, said):
    X, y, _ = blobs()
    with pytest.raises(ValueError, match=said):
        SplitFGClassifier(**{**QUICK, **settings}).fit(X, y)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("method", ["learned_feedback", "split_fg", "predictive_coding", "hopfield"])
def test_torchs_default_dtype_may_be_float64(kind, method):
    X, y = data_for(kind)
    torch.set_default_dtype(torch.float64)
    try:
        model = kind(method=method, **QUICK).fit(X, y)
    finally:
        torch.set_default_dtype(torch.float32)
    again = pickle.loads(pickle.dumps(model))
    assert torch.get_default_dtype() == torch.float32
    np.testing.assert_array_equal(outputs(again, X), outputs(model, X))


def test_the_default_method_runs_forward_only():
    assert SplitFGClassifier().method == SplitFGRegressor().method == DEFAULT_METHOD
    recipe = TableRecipe(table_methods()[DEFAULT_METHOD], Network(width=8, members=2), Adam())
    generator = torch.Generator().manual_seed(0)
    learner = recipe.build(TableShape(3, 2), generator)
    stats = learner.step(torch.randn(10, 3, generator=generator), torch.arange(10) % 2, generator=generator)
    assert stats.metrics["trunk_backward"] == 0


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("method", [DEFAULT_METHOD, "split_fg"])
def test_a_plain_mlp_learns(kind, method):
    X, y = data_for(kind)
    model = kind(method, network="mlp", **{**SMALL, "steps": 100})
    assert model.fit(X, y).score(X, y) > 0.8


def test_the_network_is_the_one_that_was_named():
    X, y, _ = blobs()

    def fitted(**settings):
        return SplitFGClassifier("backprop", **{**QUICK, **settings}).fit(X, y).predict_proba(X)

    np.testing.assert_array_equal(fitted(network="mlp"), fitted(network=PlainNetwork(width=24)))
    np.testing.assert_array_equal(fitted(network="mlp"), fitted(network="mlp", members=5))
    np.testing.assert_array_equal(fitted(), fitted(network=Network(width=24, members=2), width=7, members=5))
    assert not np.array_equal(fitted(), fitted(network="mlp"))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("method", ["split_fg", "predictive_coding", "hopfield"])
def test_pickled_models_predict_and_go_on_the_same(kind, method):
    X, y = data_for(kind)
    model = kind(method, **QUICK).fit(X, y)
    twin = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(outputs(model, X), outputs(twin, X))
    for each in (model, twin):
        each.partial_fit(X[:50], y[:50])
    np.testing.assert_array_equal(outputs(model, X), outputs(twin, X))


@pytest.mark.parametrize("kind", BOTH)
def test_partial_fit_learns_batch_by_batch(kind):
    X, y = data_for(kind)
    model = kind(SplitFGMethod(K=8), **{**SMALL, "batch_size": 20})
    first = {"classes": np.unique(y)} if kind is SplitFGClassifier else {}
    for _ in range(15):
        for part in np.split(np.arange(len(y)), 2):
            model.partial_fit(X[part], y[part], **first)
    assert model.n_iter_ == len(model.loss_curve_) == 15 * 2 * 3
    assert model.score(X, y) > 0.8


def first_part(kind, X, y, rows):
    """Arguments of a first ``partial_fit``."""
    return (X[rows], y[rows], np.unique(y)) if kind is SplitFGClassifier else (X[rows], y[rows])


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("rows", [[0], [3, 3, 3]])
def test_a_first_partial_fit_without_any_difference_is_refused(kind, rows):
    X, y = data_for(kind)
    model = kind(**QUICK)
    with pytest.raises(ValueError, match=f"no column varies in its {len(rows)} sample.*at least 2 rows that differ"):
        model.partial_fit(*first_part(kind, X, y, rows))
    with pytest.raises(NotFittedError):
        model.predict(X)
    model.partial_fit(*first_part(kind, X, y, slice(None)))
    assert len(np.unique(outputs(model.partial_fit(X[:1], y[:1]), X), axis=0)) > 1


def test_columns_that_the_first_partial_fit_cannot_scale_are_named():
    X, y, _ = blobs()
    X = np.column_stack([X, np.ones(len(X))])
    with pytest.warns(UserWarning, match=r"do not vary in its 120 rows \(2\)"):
        SplitFGClassifier(**QUICK).partial_fit(X, y, classes=["a", "b", "c"])
    with pytest.warns(UserWarning, match="all its targets are the same"):
        SplitFGRegressor(**QUICK).partial_fit(X[:, :2], np.ones(len(X)))


@pytest.mark.parametrize("kind", BOTH)
def test_a_learning_rate_set_between_calls_takes_effect(kind):
    X, y = data_for(kind)
    model = kind(**QUICK).fit(X, y)
    before = outputs(model, X)
    still = outputs(copy.deepcopy(model).set_params(learning_rate=1e-12).partial_fit(X, y), X)
    np.testing.assert_allclose(still, before, rtol=1e-5, atol=1e-5)
    assert not np.allclose(outputs(model.partial_fit(X, y), X), before, rtol=1e-3, atol=1e-3)


def test_another_network_between_calls_is_refused():
    X, y, _ = blobs()
    model = SplitFGClassifier(**QUICK).fit(X, y).set_params(width=48, method="frozen")
    with pytest.raises(ValueError, match=r"\(method, width\): call fit"):
        model.partial_fit(X, y)
    assert model.fit(X, y).partial_fit(X, y).n_iter_ > 5


@pytest.mark.parametrize("kind", BOTH)
def test_partial_fit_refuses_early_stopping(kind):
    X, y = data_for(kind)
    with pytest.raises(ValueError, match="early_stopping=False"):
        kind(**QUICK, early_stopping=True).partial_fit(*first_part(kind, X, y, slice(None)))


def test_a_refused_partial_fit_leaves_nothing_behind():
    X, y = np.random.default_rng(0).normal(size=(30, 3)), np.tile([0, 1], 15)
    model = SplitFGClassifier(**QUICK)
    with pytest.raises(ValueError, match="inconsistent numbers"):
        model.partial_fit(X, y[:10], classes=["a", "b"])
    assert model.fit(X, y).classes_.tolist() == [0, 1]


def test_partial_fit_wants_all_classes_first_and_no_others_later():
    X, y, _ = blobs()
    with pytest.raises(ValueError, match="first call to partial_fit"):
        SplitFGClassifier(**QUICK).partial_fit(X, y)
    model = SplitFGClassifier(**QUICK).partial_fit(X[:6], y[:6], classes=["a", "b", "c"])
    with pytest.raises(ValueError, match="not among those of the first call"):
        model.partial_fit(X[:2], ["a", "z"])
    with pytest.raises(ValueError, match="not those of the first call"):
        model.partial_fit(X[:2], y[:2], classes=["a", "b"])


def test_fit_begins_anew():
    X, y, _ = blobs()
    fresh = SplitFGClassifier(**QUICK).fit(X, y)
    used = SplitFGClassifier(**QUICK).fit(X[:, ::-1], y).fit(X, y)
    np.testing.assert_array_equal(fresh.predict_proba(X), used.predict_proba(X))


@pytest.mark.parametrize("kind", BOTH)
def test_early_stopping_stops_and_counts(kind):
    X, y = data_for(kind)
    model = kind(SplitFGMethod(K=8), **{**SMALL, "steps": 2000}, early_stopping=True, evaluate_every=5, patience=3).fit(
        X, y
    )
    scores = model.validation_scores_
    assert model.n_iter_ == 5 * len(scores) < 2000
    assert len(scores) - 1 - int(np.argmax(scores)) == 3


@pytest.mark.parametrize("kind", BOTH)
def test_early_stopping_scores_at_least_once(kind):
    X, y = data_for(kind)
    model = kind(**QUICK, early_stopping=True, evaluate_every=20).fit(X, y)
    assert len(model.validation_scores_) == 1


def test_early_stopping_names_the_class_of_which_there_is_one_row():
    X, y, _ = blobs()
    lonely = np.where(np.arange(len(y)) == 5, "rare", y)
    with pytest.raises(ValueError, match=r"one row only: \['rare'\].*early_stopping=False"):
        SplitFGClassifier(**QUICK, early_stopping=True).fit(X, lonely)


def test_the_readout_stores_and_warns_that_it_ignores_early_stopping():
    X, y, _ = blobs()
    with pytest.warns(UserWarning, match="stores the rows.*early_stopping=False"):
        model = SplitFGClassifier(HopfieldMethod(capacity=50), **SMALL, early_stopping=True).fit(X, y)
    assert model.n_iter_ == 2
    assert model.validation_scores_ == []


def test_it_works_in_pipelines_and_searches():
    X, y, values = blobs()
    pipeline = make_pipeline(FunctionTransformer(), SplitFGClassifier(**SMALL))
    search = GridSearchCV(pipeline, {"splitfgclassifier__method": ["frozen", "backprop"]}, cv=2, error_score="raise")
    assert search.fit(X, y).best_score_ > 0.85
    assert cross_val_score(SplitFGRegressor("backprop", **SMALL), X, values, cv=2).min() > 0.8


def test_clones_are_equal_and_unfitted():
    model = SplitFGClassifier(SplitFGMethod(K=2), steps=7)
    twin = clone(model)
    assert twin.get_params() == model.get_params()
    assert not hasattr(twin, "classes_")


@pytest.mark.parametrize("kind", BOTH)
def test_verbose_prints_progress_and_changes_nothing_else(kind, capsys):
    X, y = data_for(kind)
    silent = outputs(kind(**QUICK).fit(X, y), X)
    assert capsys.readouterr().out == ""
    model = kind(**QUICK, verbose=True, evaluate_every=2).fit(X, y)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 2/5", "step 4/5", "step 5/5"]
    assert lines[0].endswith(f"loss {np.mean(model.loss_curve_[:2]):.4f}")
    np.testing.assert_array_equal(outputs(model, X), silent)
    model.partial_fit(X, y)
    assert capsys.readouterr().out.startswith("pass over 120 rows: 2 steps, loss ")


def test_verbose_names_the_validation_score(capsys):
    X, y, values = blobs()
    for kind, target, name in ((SplitFGClassifier, y, "accuracy"), (SplitFGRegressor, values, "R²")):
        model = kind(**QUICK, verbose=True, early_stopping=True).fit(X, target)
        assert f"validation {name} {model.validation_scores_[-1]:.4f}" in capsys.readouterr().out
