"""Aligned feedback with backprop anchors: exact at anchors, aligned by true gradients, ordinary in between."""

import copy

import pytest
import torch
from _learning import assert_captured_and_resumed
from _toolkit import classes, generator, noise, seeded
from torch import nn

import splitfg
import splitfg.testing
from splitfg import Backprop, LearnedFeedback, LinearHead, Split, SplitError, Tied
from splitfg.estimators import AnchoredFeedback
from splitfg.feedback import AlignedMaps, Direct, Pace, Relay
from splitfg.models import GPT, MLP, GPTConfig

DOUBLE = torch.float64


def mlp():
    trunk = MLP(5, widths=(6, 7, 8), generator=generator()).double()
    split = seeded(lambda: Split(trunk, LinearHead(nn.Linear(8, 3, dtype=DOUBLE))))
    return split, noise(16, 5), classes(16, count=3)


def gpt():
    trunk = GPT(GPTConfig(layers=2, width=8, heads=2, context=6, vocab=20), generator=generator()).double()
    tokens = classes(3, 7, count=20)
    return Split(trunk, LinearHead(trunk.tied_linear()), tied=Tied.INCLUDE), tokens[:, :-1], tokens[:, 1:]


def convolutions():
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.ReLU(), nn.Flatten()
    split = seeded(lambda: Split(nn.Sequential(*layers).double(), LinearHead(nn.Linear(36, 3, dtype=DOUBLE))))
    return split, noise(5, 2, 7, 7), classes(5, count=3)


def anchored(every):
    return AnchoredFeedback(LearnedFeedback(Direct(AlignedMaps(rate=0.2))), Pace(every))


@pytest.mark.parametrize("make", [mlp, gpt, convolutions])
def test_anchors_are_backprop_and_other_steps_are_aligned_feedback(make):
    split, x, y = make()
    estimator, exact = anchored(3), Backprop()(split, x, y)
    for step in range(5):
        plain = copy.deepcopy(estimator.feedback)
        found = estimator(split, x, y, generator=generator(step))
        due = step % 3 == 0
        expected = exact if due else plain(split, x, y, generator=generator(step))
        assert found.stats.trunk_backward == due
        assert found.stats.jvps == (0 if due else 1)
        assert not found.stats.forward_only if due else found.stats.forward_only
        assert set(found.grads) == set(expected.grads)
        for name, g in expected.grads.items():
            torch.testing.assert_close(found.grads[name], g, msg=f"step {step}: {name}")
        estimator.update_state(split, found)


def test_an_anchor_turns_maps_by_the_cosine_with_true_gradients():
    """Written out for three layers with ReLUs: G = Σ over rows δᵀ g, by autograd, and one step along cos(M, G)."""
    split, x, y = mlp()
    estimator = anchored(1)
    layers = [m for m in split.trunk.modules() if isinstance(m, nn.Linear)]
    first = layers[0](x).relu().detach().requires_grad_()
    middle = layers[1](first).relu()
    middle.retain_grad()
    last = layers[2](middle)
    last.retain_grad()
    loss = torch.nn.functional.cross_entropy(split.head.get_submodule("0")(last.relu()), y)
    loss.backward()
    estimate = estimator(split, x, y, generator=generator())
    names = [n for n, m in split.trunk.named_modules() if m in layers[1:]]
    assert set(estimate.state_update) == set(names)
    for name, g in zip(names, (first.grad, middle.grad), strict=True):
        maps = AlignedMaps(rate=0.2).initial(name, 1, 8, g.shape[-1], g)[0]
        target = last.grad.T @ g
        size, toward = maps.norm(), target / target.norm()
        unit = maps / size
        turned = unit + 0.2 * (toward - (unit * toward).sum() * unit)
        expected = size * turned / turned.norm() - maps
        torch.testing.assert_close(estimate.state_update[name][0], expected)


def test_captured_and_resumed_steps_are_the_eager_ones():
    def build():
        split, x, y = mlp()
        return split, anchored(3), x, y

    metrics = assert_captured_and_resumed(build, steps=5)
    assert [m["trunk_backward"] for m in metrics] == [1, 0, 0, 1, 0]


def test_wrong_settings():
    with pytest.raises(SplitError, match="AlignedMaps"):
        AnchoredFeedback(LearnedFeedback(Relay()))
    with pytest.raises(SplitError, match="leave rest and only out"):
        AnchoredFeedback(LearnedFeedback(Direct(AlignedMaps()), only=("*",)))
    with pytest.raises(SplitError, match="every must be"):
        Pace(0)


def test_it_keeps_the_contract_of_estimators():
    splitfg.testing.check_estimator(lambda: anchored(2))
