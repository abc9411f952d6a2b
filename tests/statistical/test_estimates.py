"""Whole estimates, drawn a fixed number of times: unbiased, as noisy as the theory says, and never the same twice."""

import pytest
import torch
from _toolkit import (
    TiedLanguageModel,
    classes,
    exact,
    fair,
    flat,
    generator,
    mlp_split,
    noise,
    seeded,
    trunk_names,
)
from torch import nn

from splitfg import (
    Activities,
    ActivityFG,
    Backprop,
    Conditioned,
    EvolutionStrategy,
    ForwardGradient,
    ForwardMode,
    LinearHead,
    Orthogonal,
    Rademacher,
    RunningMagnitude,
    Split,
    SplitError,
    SplitFG,
    Tied,
    split,
    theory,
)
from splitfg.models import GPT, GPTConfig, TabM

DRAWS, K = 600, 3


def problem():
    return mlp_split(2, 3, 3), noise(4, 2), classes(4, count=3)


def draw(estimator, s, x, y, names, **settings):
    """``DRAWS`` estimates from one generator, flat, shape ``(DRAWS, P)``."""
    g = generator(5)
    return torch.stack([flat(estimator(s, x, y, generator=g, **settings).grads, names) for _ in range(DRAWS)])


def test_gaussian_split_fg():
    """Mean, variance by coordinate, total variance and full second moment, from the same draws."""
    s, x, y = problem()
    grads = exact(s, x, y)
    names, head = trunk_names(s), flat(grads, list(s.head_params()))
    g = flat(grads, names)
    sample = draw(SplitFG(K), s, x, y, list(grads))
    assert fair(sample, flat(grads))
    assert (sample[:, g.numel() :] == sample[0, g.numel() :]).all()  # the head is exact every time
    trunk = sample[:, : g.numel()]
    errors = (trunk - g).square()
    assert fair(errors, theory.coordinate_variance(g, K))
    assert fair(errors.sum(1), theory.total_variance(g, K))
    assert not fair(errors.sum(1), theory.total_variance(g, K + 1))
    assert fair(sample.square().sum(1), theory.second_moment(g, head, K))


def test_rademacher_split_fg():
    s, x, y = problem()
    names = trunk_names(s)
    g = flat(exact(s, x, y), names)
    sample = draw(SplitFG(K, law=Rademacher(), engine=ForwardMode(chunk=2)), s, x, y, names)
    assert fair(sample, g)
    total = (sample - g).square().sum(1)
    assert fair(total, theory.total_variance(g, K, theory.RADEMACHER_FOURTH_MOMENT))
    assert not fair(total, theory.total_variance(g, K))


@pytest.mark.parametrize("name", ["mlp", "members", "images"])
def test_activity_tangents(name):
    """Unbiased, with less noise than weight tangents where weights are many; less still if members are scored apart."""
    s, x, y = {
        "mlp": lambda: (mlp_split(6, 8, 8, 3), noise(9, 6), classes(9, count=3)),
        "members": lambda: (members_split(), noise(9, 6), classes(9, count=3)),
        "images": lambda: (image_split(), noise(3, 1, 3, 3), classes(3, count=3)),
    }[name]()
    names = trunk_names(s)
    g = flat(exact(s, x, y), names)
    sample = draw(ActivityFG(K), s, x, y, names)
    assert fair(sample, g)
    total = (sample - g).square().sum(1).mean()
    assert (total < 0.5 * theory.total_variance(g, K)) == (name != "images")
    if name == "members":
        together = draw(ActivityFG(K, Activities(s.trunk.activities().layers)), s, x, y, names)
        assert fair(together, g)
        assert total < 0.5 * (together - g).square().sum(1).mean()


def test_activity_tangents_of_a_gpt():
    """Unbiased for the layers of the blocks, with a score for every sequence; tables keep their values."""
    config = GPTConfig(layers=1, width=4, heads=2, context=3, vocab=5)
    trunk = GPT(config, generator=generator()).double()
    s = Split(trunk, LinearHead(trunk.tied_linear()), tied="exclude")
    x, y = torch.randint(0, 5, (2, 2, 3), generator=generator())
    estimate = ActivityFG(K)(s, x, y, generator=generator())
    names = [name for name in trunk_names(s) if "blocks" in name or "norm" in name]
    assert set(trunk_names(s)) - set(estimate.grads) == set(trunk_names(s)) - set(names) == {"trunk.position"}
    assert fair(draw(ActivityFG(K), s, x, y, names), flat(exact(s, x, y), names))
    # the table among the layers: the head alone trains it
    both = ActivityFG(K, Activities(("token", "blocks.0.mlp.out"), top="norm"))(s, x, y, generator=generator())
    alone = ActivityFG(K, Activities(("blocks.0.mlp.out",), top="norm"))(s, x, y, generator=generator())
    assert both.grads.keys() == alone.grads.keys()
    assert all(torch.equal(g, alone.grads[n]) for n, g in both.grads.items())
    with pytest.raises(SplitError, match="the head alone trains every layer of the activities"):
        ActivityFG(K, Activities(("token",), top="norm"))(s, x, y, generator=generator())
    with pytest.raises(SplitError, match=r"trunk.token.weight is trained as part of the trunk too .* Tied.EXCLUDE"):
        ActivityFG(K)(Split(trunk, LinearHead(trunk.tied_linear()), tied="include"), x, y, generator=generator())


def members_split():
    trunk = TabM(6, width=8, members=4, generator=generator()).double()
    return seeded(lambda: Split(trunk, LinearHead(nn.Linear(8, 3, dtype=torch.float64))))


def image_split():
    body = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten())
    return seeded(lambda: Split(body.double(), LinearHead(nn.Linear(27, 3, dtype=torch.float64))))


def test_orthogonal_split_fg():
    s, x, y = problem()
    names = trunk_names(s)
    g = flat(exact(s, x, y), names)
    sample = draw(SplitFG(K, law=Orthogonal()), s, x, y, names)
    assert fair(sample, g)
    assert fair((sample - g).square().sum(1), theory.orthogonal_total_variance(g, K))


def test_conditioned_split_fg():
    """Unbiased although every coordinate is perturbed by its own length."""
    s, x, y = problem()
    names, magnitude = trunk_names(s), RunningMagnitude()
    seen = {n: noise(*p.shape, seed=6) for n, p in s.trunk_params().items()}
    magnitude.update(seen)
    g = flat(exact(s, x, y), names)
    sample = draw(SplitFG(K, law=Conditioned(magnitude)), s, x, y, names)
    assert fair(sample, g)
    running = flat(seen, names).abs()  # after one update, what was seen
    relative = (running / running.square().mean().sqrt()).clamp_min(0.1)
    scale = relative / relative.square().mean().sqrt()
    assert fair((sample - g).square().sum(1), theory.conditioned_coordinate_variance(g, scale, K).sum())


@pytest.mark.parametrize("quality", ["good", "bad"])
def test_prediction_is_unbiased_whatever_it_is(quality):
    """And the noise is that of g - p: nearly none for a good prediction, more than without for a bad one."""
    s, x, y = problem()
    names, grads = trunk_names(s), exact(s, x, y)
    g = flat(grads, names)
    error = {n: noise(*grads[n].shape, seed=7) for n in names}
    size = (0.1 if quality == "good" else 3.0) * g.norm() / flat(error, names).norm()
    prediction = {n: grads[n] + size * error[n] for n in names}
    sample = draw(SplitFG(K), s, x, y, names, prediction=prediction)
    assert fair(sample, g)
    residual = g - flat(prediction, names)
    assert fair((sample - g).square().sum(1), theory.total_variance(residual, K))


@pytest.mark.parametrize("policy", [Tied.INCLUDE, Tied.EXCLUDE])
def test_tied_table(policy):
    """Unbiased for backprop through both roles, or for the readout-only surrogate."""
    s = split(seeded(lambda: TiedLanguageModel(vocab=3, width=2)).double(), tied=policy)
    x, y = classes(3, 2, count=3), classes(3, 2, count=3, seed=9)
    target = Backprop(readout_only=policy is Tied.EXCLUDE)(s, x, y).grads
    other = Backprop(readout_only=policy is not Tied.EXCLUDE)(s, x, y).grads
    sample = draw(SplitFG(8), s, x, y, list(target))
    assert fair(sample, flat(target))
    assert not fair(sample, flat(other, list(target)))


def test_forward_gradient():
    s, x, y = problem()
    grads = exact(s, x, y)
    sample = draw(ForwardGradient(K), s, x, y, list(grads))
    assert fair(sample, flat(grads))
    total = (sample - flat(grads)).square().sum(1)
    assert fair(total, theory.total_variance(flat(grads), K))


def test_evolution_strategy_is_unbiased_to_the_square_of_sigma():
    s, x, y = problem()
    grads = exact(s, x, y)
    assert fair(draw(EvolutionStrategy(K, sigma=1e-3), s, x, y, list(grads)), flat(grads))
