"""The trainer behind the estimators: the best weights come back, and new rates are taken over."""

import pickle

import numpy as np
import pytest

from splitfg.recipes import Adam, BackpropMethod, FrozenMethod
from splitfg.recipes.tables import Network, TableRecipe, TableShape
from splitfg.sklearn._trainer import EarlyStopping, EncodedRows, Trainer


def recipe(lr=1e-2, **settings):
    return TableRecipe(BackpropMethod(), Network(8, 1, 2), Adam(lr=lr), **settings)


def trainer():
    return Trainer(recipe(), TableShape(2, None), seed=0, device="cpu")


def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 2)).astype(np.float32)
    return EncodedRows(x, (x[:, :1] * 2).astype(np.float32))


@pytest.mark.parametrize("best", [0, 2, 5])
def test_the_weights_of_the_best_score_are_kept(best):
    seen = []

    def score(outputs):
        seen.append(outputs)
        return -abs(len(seen) - 1 - best)

    subject, data = trainer(), rows()
    stopping = EarlyStopping(data.x, score, every=4, patience=3)
    losses, scores = subject.fit(data, steps=100, batch=8, stopping=stopping)
    assert len(scores) == best + 1 + 3
    assert len(losses) == 4 * len(scores)
    np.testing.assert_array_equal(subject.predict(data.x), seen[best])
    assert not np.array_equal(seen[best], seen[-1])


@pytest.mark.parametrize(("steps", "every", "taken"), [(3, 20, [3]), (10, 4, [4, 8, 10]), (8, 4, [4, 8])])
def test_the_last_step_is_scored_too(steps, every, taken):
    subject, data, seen = trainer(), rows(), []

    def score(outputs):
        seen.append(outputs)
        return float(len(seen))

    stopping = EarlyStopping(data.x, score, every=every, patience=5)
    losses, scores = subject.fit(data, steps=steps, batch=8, stopping=stopping)
    assert len(losses) == steps
    assert len(scores) == len(taken)
    np.testing.assert_array_equal(subject.predict(data.x), seen[-1])


def test_without_stopping_all_steps_are_taken():
    losses, scores = trainer().fit(rows(), steps=17, batch=8, stopping=None)
    assert len(losses) == 17
    assert scores == []


def test_passes_take_new_orders():
    first, again = trainer(), trainer()
    data = rows()
    one = [first.learn_once(data, batch=8) for _ in range(2)]
    assert one[0] == again.learn_once(data, batch=8)
    assert len(one[0]) == 4


def parameters(subject):
    return {name: value.clone() for name, value in subject.snapshot()["model"].items()}


@pytest.mark.parametrize("pickled", [False, True])
def test_new_rates_are_taken_over_and_what_was_learned_stays(pickled):
    slow, same, data = trainer(), trainer(), rows()
    for each in (slow, same):
        each.learn_once(data, batch=8)
    before = parameters(slow)
    slow.go_on_with(recipe(lr=1e-12, rho=0.5), device="cpu")
    same.go_on_with(recipe(), device="cpu")
    if pickled:
        slow, same = (pickle.loads(pickle.dumps(each)) for each in (slow, same))
    assert slow.learn_once(data, batch=8)[0] == same.learn_once(data, batch=8)[0]
    for name, value in parameters(slow).items():
        np.testing.assert_allclose(value, before[name], atol=1e-9)
    assert any(not np.allclose(value, before[name], atol=1e-3) for name, value in parameters(same).items())


def test_another_network_is_refused():
    other = TableRecipe(FrozenMethod(), Network(16, 1, 2), Adam(lr=1e-2))
    with pytest.raises(ValueError, match=r"\(method, device, width\): call fit"):
        trainer().go_on_with(other, device="cuda")
