"""The line search in trouble: batches that are not finite, changed settings, parameters that thaw, resumed runs."""

import pytest
import torch
from _toolkit import classes, generator, mlp_split, noise

from splitfg import Backprop, CosineWithWarmup, GradientLearner, LineSearch, SplitError
from splitfg.recipes import SGD, Adam

X, Y = noise(32, 5), classes(32, count=3)
SEARCHES = [{}, {"groups": ("*weight",)}]


def learner(optimizer=None, **settings):
    s = mlp_split(5, 6, 4, 3)
    optimizer = (optimizer or Adam(1e-2)).build(s)
    return GradientLearner(s, Backprop(), optimizer, max_norm=None, line_search=LineSearch(**settings))


def stepped(made, count):
    return [made.step(X, Y, generator=generator()) for _ in range(count)]


def weights(made):
    return {n: p.detach().clone() for n, p in made.split.model.named_parameters()}


@pytest.mark.parametrize("settings", SEARCHES)
@pytest.mark.parametrize("steps", [0, 14])
def test_a_batch_that_is_not_finite_leaves_network_and_search_as_they_are(settings, steps):
    made = learner(**settings)
    stepped(made, steps)
    bad, start = X.clone(), weights(made)
    known = {n: v.clone() for n, v in made.line_search.state_dict().items()}
    bad[0, 0] = float("nan")
    for _ in range(2):
        with pytest.raises(SplitError, match="not finite"):
            made.step(bad, Y, generator=generator())
    assert all(torch.equal(p, start[n]) for n, p in weights(made).items())
    for name, value in known.items():
        assert torch.equal(made.line_search.state_dict()[name], value)
    before = float(stepped(made, 1)[0].loss)
    assert float(stepped(made, 5)[-1].loss) < before


def test_a_parameters_path_begins_when_it_thaws():
    made = learner()
    layer = made.split.trunk[0]
    layer.requires_grad_(False)
    stepped(made, 3)
    layer.requires_grad_(True)
    with torch.no_grad():
        layer.weight.add_(1.0)
    before = weights(made)
    stepped(made, 3)
    assert torch.equal(made.line_search.state_dict()["start/trunk.0.weight"], before["trunk.0.weight"])
    moved = [n for n, p in weights(made).items() if not torch.equal(p, before[n])]
    assert {"trunk.0.weight", "trunk.2.weight"} <= set(moved)


def test_a_checkpoint_of_other_groups_raises():
    first, second = learner(groups=("*weight",)), learner()
    stepped(first, 2)
    second.load_state_dict(first.state_dict())
    with pytest.raises(SplitError, match="has 1 groups of parameters, its state 2: resume with the settings of the"):
        stepped(second, 1)


def test_a_checkpoint_of_an_earlier_version_raises():
    with pytest.raises(SplitError, match="is of an earlier version: train anew"):
        LineSearch().load_state_dict({"rho": torch.ones(1), "descent": torch.ones(1)})


def test_patterns_as_one_text_raise():
    with pytest.raises(SplitError, match=r"groups is '\*weight': give a tuple of patterns, \('\*weight',\)"):
        LineSearch(groups="*weight")


def test_a_trunk_without_trained_parameters_raises():
    made = learner(SGD(0.1))
    made.split.trunk.requires_grad_(False)
    with pytest.raises(SplitError, match="no trained parameter of its own"):
        stepped(made, 1)


def test_rho_of_a_half_precision_trunk_is_a_float():
    """Changes of rho are smaller than the steps between numbers of bfloat16."""
    made = learner()
    made.split.model.bfloat16()
    made.line_search._prepared(made.split)
    assert made.line_search.rho.dtype == torch.float32


@pytest.mark.parametrize("settings", SEARCHES)
def test_resumed_training_is_the_same_bit_for_bit(settings):
    def made():
        s = mlp_split(5, 6, 4, 3)
        schedule = CosineWithWarmup(30, 3)
        return GradientLearner(
            s, Backprop(), Adam(1e-2).build(s), schedule=schedule, line_search=LineSearch(**settings)
        )

    whole, begun, resumed = made(), made(), made()
    stepped(whole, 24)
    stepped(begun, 13)
    resumed.load_state_dict(begun.state_dict())
    stepped(resumed, 11)
    assert torch.equal(whole.line_search.rho, resumed.line_search.rho)
    expected = weights(resumed)
    assert all(torch.equal(p, expected[n]) for n, p in weights(whole).items())
