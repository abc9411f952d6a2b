"""Hopfield and kNN-LM retrieval against one dense softmax, and the store against sampling theory."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from splitfg.errors import SplitError
from splitfg.learners import _retrieval
from splitfg.learners._memory import Memory, fingerprint
from splitfg.learners._retrieval import Scaling
from splitfg.learners.hopfield import HopfieldReadout
from splitfg.learners.knn_lm import KnnLM, Retrieval
from splitfg.models import MLP

CLASSES, D = 3, 4
SCALINGS = [Scaling(standardise=s, unit=u) for s in (False, True) for u in (False, True)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


@pytest.fixture(params=[False, True], ids=["one block", "small blocks"])
def small_blocks(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(_retrieval, "_QUERY_ROWS", 3)
        monkeypatch.setattr(_retrieval, "_BLOCK_ELEMENTS", 21)
        monkeypatch.setattr(_retrieval, "_CACHED_ELEMENTS", 21)


def identity(x):
    return x


def scaled(scaling, keys, features):
    if scaling.standardise:
        features = (features - keys.mean(dim=0)) / keys.var(dim=0, unbiased=False).sqrt()
    return features / features.norm(dim=1, keepdim=True) if scaling.unit else features


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("beta", [0.3, 5.0])
def test_values_are_the_dense_softmax_mean(scaling, beta):
    keys, values, queries = 2 * normal(50, D) + 1, normal(50, 2, seed=1), normal(8, D, seed=2)
    learner = HopfieldReadout(identity, classes=None, beta=beta, scaling=scaling)
    for part in range(0, 50, 20):
        learner.step(keys[part : part + 20], values[part : part + 20], generator=generator())
    assert learner.stored == 50
    weights = (beta * scaled(scaling, keys, queries) @ scaled(scaling, keys, keys).T).softmax(dim=1)
    torch.testing.assert_close(learner.predict(queries), weights @ values)


@pytest.mark.usefixtures("small_blocks")
def test_classes_come_back_as_log_probabilities():
    keys, queries, y = normal(40, D), normal(8, D, seed=2), torch.arange(40) % CLASSES
    learner = HopfieldReadout(identity, classes=CLASSES, beta=2.0, scaling=Scaling(False, False))
    learner.step(keys, y, generator=generator())
    expected = (2.0 * queries @ keys.T).softmax(dim=1) @ F.one_hot(y).double()
    answer = learner.predict(queries)
    torch.testing.assert_close(answer.exp(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(answer.exp().sum(dim=1), torch.ones(8, dtype=torch.float64))


def test_a_class_without_examples_is_unlikely_but_not_impossible():
    learner = HopfieldReadout(identity, classes=3)
    learner.step(normal(10, D), torch.zeros(10, dtype=torch.int64), generator=generator())
    answer = learner.predict(normal(2, D))
    assert torch.isfinite(answer).all()
    assert (answer[:, 1:] < -10).all()


@pytest.mark.usefixtures("small_blocks")
def test_large_scores_do_not_overflow():
    keys = normal(30, D) * 1e3
    learner = HopfieldReadout(identity, classes=None, beta=1e3, scaling=Scaling(False, False))
    learner.step(keys, keys, generator=generator())
    best = (keys @ keys.T).argmax(dim=1)
    torch.testing.assert_close(learner.predict(keys), keys[best])


def test_a_constant_feature_is_harmless():
    keys = normal(30, D)
    keys[:, 1] = 7.0
    learner = HopfieldReadout(identity, classes=None)
    learner.step(keys, keys[:, :1], generator=generator())
    without = HopfieldReadout(identity, classes=None)
    without.step(keys[:, [0, 2, 3]], keys[:, :1], generator=generator())
    torch.testing.assert_close(learner.predict(keys), without.predict(keys[:, [0, 2, 3]]))


def test_tune_takes_the_best_held_out_setting():
    """The label is the direction, the length is noise: unit length with a sharp softmax must win."""
    angle = torch.rand(600, generator=generator(), dtype=torch.float64) * 2 * math.pi
    length = torch.exp(3 * normal(600, seed=1))
    x = length[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    learner = HopfieldReadout(identity, classes=None, beta=0.1, scaling=Scaling(False, False))
    learner.step(x, (3 * angle).sin(), generator=generator())
    losses = learner.tune(generator=generator(3))
    assert losses[learner.scaling, learner.beta] == min(losses.values())
    assert learner.scaling.unit
    assert learner.beta >= 4
    assert learner.stored == 600
    error = learner.predict(x).squeeze(1) - (3 * angle).sin()
    assert error.square().mean() < 0.1


def test_the_first_loss_is_chance_and_later_ones_are_lower():
    learner = HopfieldReadout(identity, classes=2)
    y = torch.arange(64) % 2
    x = normal(64, D) + 4 * y[:, None]
    first = learner.step(x, y, generator=generator()).loss
    second = learner.step(x, y, generator=generator()).loss
    assert float(first) == pytest.approx(math.log(2))
    assert second < 0.3


def filled(capacity, ids, batches=7):
    memory = Memory(capacity)
    for part in ids.tensor_split(batches):
        memory.add(part[:, None].float(), part, fingerprint(part))
    return memory


def test_memory_keeps_a_uniform_sample_of_everything():
    """80 of 200 examples, 400 times: each place in the stream keeps its example with probability 0.4."""
    kept = torch.zeros(200)
    for repetition in range(400):
        memory = filled(80, 1000 * repetition + torch.arange(200))
        assert memory.count == 80
        assert torch.equal(memory.keys[:, 0].long(), memory.values)
        kept[memory.values - 1000 * repetition] += 1
    z = (kept - 160) / math.sqrt(400 * 0.4 * 0.6)
    assert z.abs().max() < 4.5  # 200 comparisons
    assert abs(float(z[:80].mean())) < 0.5


def test_memory_does_not_care_about_order_and_repetition():
    ids = torch.arange(200)
    shuffled = ids.repeat(3)[torch.randperm(600, generator=generator())]
    for capacity in (80, 1000):
        once, often = filled(capacity, ids), filled(capacity, shuffled, batches=11)
        assert len(set(often.values.tolist())) == often.count == min(capacity, 200)
        assert sorted(once.values.tolist()) == sorted(often.values.tolist())


def test_fingerprints_tell_rows_apart_and_know_them_again():
    x = torch.randn(2000, 3, generator=generator())
    y = torch.arange(2000) % 2
    marks = fingerprint(x, y)
    assert torch.equal(marks.flip(0), fingerprint(x.flip(0), y.flip(0)))
    others = [fingerprint(x.flip(1), y), fingerprint(x, 1 - y), fingerprint(x + 1e-6, y)]
    assert len(torch.cat([marks, *others]).unique()) == 8000
    assert torch.equal(fingerprint(torch.zeros(1, 2)), fingerprint(-torch.zeros(1, 2)))


@pytest.mark.parametrize("values", [2, 256], ids=["bits", "bytes"])
def test_fingerprints_of_small_whole_numbers_as_floats(values):
    """Which end in dozens of zeros as doubles; all rows are distinct."""
    rows = torch.randint(0, values, (20_000, 64), generator=torch.Generator().manual_seed(0)).float()
    assert len(rows.unique(dim=0)) == len(rows)
    assert len(fingerprint(rows).unique()) == len(rows)


def test_fingerprints_are_spread_evenly():
    """Neighbouring numbers land anywhere: sixteen equal parts of the range get their share."""
    parts = (fingerprint(torch.arange(16_000)) >> 60) + 8
    counts = torch.bincount(parts, minlength=16).double()
    assert ((counts - 1000) / math.sqrt(1000 * 15 / 16)).abs().max() < 4


def test_examples_that_come_again_do_not_leak_into_tuning():
    """On pure noise the sharpest softmax is the worst, unless a query's twin is in the store."""
    x, y = normal(300, 3), normal(300, 1, seed=1)
    learner = HopfieldReadout(identity, classes=None)
    for _ in range(4):
        learner.step(x, y, generator=generator())
    assert learner.stored == 300
    losses = learner.tune(generator=generator())
    assert losses[Scaling(), 1024.0] > 1.5 * min(losses.values())
    assert learner.beta < 4


def test_memory_divides_into_disjoint_parts():
    held, kept = filled(50, torch.arange(50)).divide(10, generator(1))
    assert sorted([*held.values.tolist(), *kept.values.tolist()]) == list(range(50))
    assert held.count == 10


@pytest.mark.parametrize(
    ("classes", "y", "message"),
    [
        (3, torch.tensor([0, 3]), r"0\.\.3"),
        (3, torch.tensor([0.0, 1.0]), "class indices"),
        (None, torch.tensor([0.0, torch.nan]), "finite"),
        (None, torch.tensor([1.0]), r"\(2,\)"),
    ],
)
def test_hopfield_refuses_bad_targets(classes, y, message):
    with pytest.raises(SplitError, match=message):
        HopfieldReadout(identity, classes=classes).step(normal(2, D), y, generator=generator())


def test_hopfield_refuses_an_empty_store_and_bad_settings():
    learner = HopfieldReadout(identity, classes=2)
    with pytest.raises(SplitError, match="0 pairs"):
        learner.predict(normal(2, D))
    with pytest.raises(SplitError, match="0 pairs"):
        learner.tune(generator=generator())
    with pytest.raises(SplitError) as error:
        HopfieldReadout(identity, classes=1, capacity=0, beta=0.0)
    assert len(error.value.problems) == 3
    with pytest.raises(SplitError, match="shape"):
        learner.step(normal(2, 3, D), torch.zeros(2).long(), generator=generator())


def test_hopfield_leaves_its_trunk_alone():
    trunk = MLP(D, generator=generator())
    before = {n: p.detach().clone() for n, p in trunk.named_parameters()}
    learner = HopfieldReadout(trunk, classes=2, capacity=10)
    for seed in range(3):
        learner.step(normal(8, D, seed=seed).float(), torch.arange(8) % 2, generator=generator())
    assert learner.stored == 10
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in trunk.named_parameters())


# --- the language model -----------------------------------------------------------------------------------------

VOCAB = 6
UNIGRAM = torch.tensor([0.3, 0.2, 0.2, 0.1, 0.1, 0.1], dtype=torch.float64)


def features(x):
    """A frozen 'trunk' from ids (B, T) to (B, T, D), in which no two windows look the same: no ties."""
    table, place = normal(VOCAB, D, seed=9), normal(1, x.shape[1], D, seed=8)
    return table[x] + 0.3 * place + 0.1 * (table[x] * place).sum(dim=1, keepdim=True)


def windows(count, seed):
    ids = torch.randint(0, VOCAB, (count, 8), generator=generator(seed))
    return ids[:, :-1], ids[:, 1:]


def stored_lm(setting):
    lm = KnnLM(features, UNIGRAM, retrieval=setting)
    x, y = windows(12, seed=0)
    for start in range(0, 12, 5):
        lm.step(x[start : start + 5], y[start : start + 5], generator=generator())
    return lm, x, y


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("scaling", [Scaling(False, False), Scaling(True, True)])
@pytest.mark.parametrize("k", [1, 10, 1000])
def test_knn_lm_is_the_brute_force_mixture(scaling, k):
    lm, x, y = stored_lm(Retrieval(k=k, beta=1.5, smoothing=0.25, scaling=scaling))
    asked, following = windows(3, seed=5)
    keys, queries = (scaled(scaling, features(x).flatten(0, 1), features(v).flatten(0, 1)) for v in (x, asked))
    scores = queries @ keys.T
    order = scores.sort(dim=1, descending=True)
    expected = []
    for row, near in zip(order.values[:, :k], order.indices[:, :k], strict=True):
        found = torch.zeros(VOCAB, dtype=torch.float64)
        for weight, at in zip((1.5 * row).softmax(dim=0), near, strict=True):
            found[y.flatten()[at]] += weight
        expected.append((0.75 * found + 0.25 * UNIGRAM).log())
    expected = torch.stack(expected).view(3, 7, VOCAB)
    torch.testing.assert_close(lm.predict(asked), expected)
    chosen = expected.gather(-1, following.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(lm.nll(asked, following), -chosen)


def test_knn_lm_probabilities_sum_to_one():
    lm, x, _ = stored_lm(Retrieval(k=5))
    torch.testing.assert_close(lm.predict(x).exp().sum(dim=-1), torch.ones(12, 7, dtype=torch.float64))


def test_knn_lm_tune_reports_what_each_setting_costs():
    lm, _, _ = stored_lm(Retrieval())
    x, y = windows(4, seed=6)
    grid = [Retrieval(k=k, beta=1.0, smoothing=s, scaling=c) for k in (2, 20) for s in (0.2, 1.0) for c in SCALINGS[:2]]
    losses = lm.tune(x, y, grid=grid)
    assert list(losses) == sorted(grid, key=lambda r: SCALINGS.index(r.scaling))
    assert losses[lm.retrieval] == min(losses.values())
    for setting in grid:
        lm.retrieval = setting
        assert losses[setting] == pytest.approx(float(lm.nll(x, y).mean()))
    alone = -UNIGRAM[y].log().mean()
    assert losses[grid[2]] == pytest.approx(float(alone)), "smoothing 1 is the unigram"


def test_knn_lm_learns_a_deterministic_successor():
    ids = torch.arange(VOCAB).repeat(40)[:201]
    lm = KnnLM(lambda x: normal(VOCAB, D, seed=9)[x], UNIGRAM, retrieval=Retrieval(k=8, beta=50.0, smoothing=0.01))
    lm.step(ids[None, :-1], ids[None, 1:], generator=generator())
    assert lm.nll(ids[None, :-1], ids[None, 1:]).mean() < 0.05


def test_knn_lm_refusals():
    with pytest.raises(SplitError, match="positive"):
        KnnLM(features, torch.tensor([0.0, 1.0]))
    with pytest.raises(SplitError) as error:
        Retrieval(k=0, beta=0.0, smoothing=0.0)
    assert len(error.value.problems) == 3
    lm = KnnLM(features, UNIGRAM)
    x, y = windows(2, seed=0)
    with pytest.raises(SplitError, match="the store is empty"):
        lm.predict(x)
    with pytest.raises(SplitError, match="14 positions"):
        lm.step(x, y[:1], generator=generator())
    for targets in (y + VOCAB, y - VOCAB):
        for use in (partial(lm.step, generator=generator()), lm.nll, lm.tune):
            with pytest.raises(SplitError, match=r"unigram has 6"):
                use(x, targets)
