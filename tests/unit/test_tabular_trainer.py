"""The trainer behind the estimators: the best weights come back."""

import numpy as np
import pytest

from splitfg.recipes import Adam, BackpropMethod
from splitfg.recipes.tables import Network, TableRecipe, TableShape
from splitfg.sklearn._trainer import EarlyStopping, EncodedRows, Trainer


def trainer():
    return Trainer(
        TableRecipe(BackpropMethod(), Network(8, 1, 2), Adam(lr=1e-2)), TableShape(2, None), seed=0, device="cpu"
    )


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
