"""The trainer behind the estimators: the best weights come back, and new rates are taken over."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from splitfg.recipes import Adam, BackpropMethod, FrozenMethod
from splitfg.recipes.tables import Network, PlainNetwork, TableRecipe, TableShape
from splitfg.sklearn._progress import ProgressLines
from splitfg.sklearn._trainer import EarlyStopping, EncodedRows, Trainer


def recipe(lr=1e-2, **settings):
    return TableRecipe(BackpropMethod(), Network(width=8, layers=1, members=2), Adam(lr=lr), **settings)


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


def test_a_change_of_the_network_raises():
    other = TableRecipe(FrozenMethod(), Network(width=16, layers=1, members=2), Adam(lr=1e-2))
    with pytest.raises(ValueError, match=r"\(method, device, width\): call fit"):
        trainer().go_on_with(other, device="cuda")


def test_another_kind_of_network_raises():
    other = replace(recipe(), network=PlainNetwork(width=8, layers=1))
    with pytest.raises(ValueError, match=r"\(network\): call fit"):
        trainer().go_on_with(other, device="cpu")


def test_progress_lines_give_the_mean_loss_since_the_last_one(capsys):
    data = rows()
    losses, _ = trainer().fit(data, steps=7, batch=8, stopping=None, progress=ProgressLines(7, 3))
    assert capsys.readouterr().out.splitlines() == [
        f"step 3/7: loss {np.mean(losses[:3]):.4f}",
        f"step 6/7: loss {np.mean(losses[3:6]):.4f}",
        f"step 7/7: loss {losses[6]:.4f}",
    ]


def test_progress_lines_give_the_last_score_and_the_step_that_stops(capsys):
    data, scores = rows(), iter([0.5, 0.25, 0.125])
    stopping = EarlyStopping(data.x, lambda outputs: next(scores), every=2, patience=2)
    trainer().fit(data, steps=50, batch=8, stopping=stopping, progress=ProgressLines(50, 2, "accuracy"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 2/50", "step 4/50", "step 6/50"]
    assert [line.rpartition(", ")[2] for line in lines] == [
        f"validation accuracy {score}" for score in ("0.5000", "0.2500", "0.1250")
    ]
