"""The line search in trouble: batches that are not finite, errors between steps, changed settings, no descent."""

import pytest
import torch
from _toolkit import classes, generator, mlp_split, noise

from splitfg import Backprop, CosineWithWarmup, GradientLearner, LineSearch, SplitError
from splitfg.recipes import SGD, Adam

X, Y = noise(32, 5), classes(32, count=3)
SEARCHES = [{}, {"horizon": 0.0}, {"groups": ("*weight",)}, {"groups": ("*weight",), "horizon": 0.0}]


def learner(optimizer=None, **settings):
    s = mlp_split(5, 6, 4, 3)
    optimizer = (optimizer or Adam(1e-2)).build(s)
    return GradientLearner(s, Backprop(), optimizer, max_norm=None, line_search=LineSearch(**settings))


def stepped(made, count):
    return [made.step(X, Y, generator=generator()) for _ in range(count)]


def weights(made):
    return {n: p.detach().clone() for n, p in made.split.model.named_parameters()}


@pytest.mark.parametrize("settings", SEARCHES)
def test_a_batch_that_is_not_finite_leaves_network_and_search_usable(settings):
    made = learner(**settings)
    stepped(made, 14)
    bad, known = X.clone(), {n: v.clone() for n, v in made.line_search.state_dict().items() if "/" not in n}
    bad[0, 0] = float("nan")
    with pytest.raises(SplitError, match="not finite"):
        made.step(bad, Y, generator=generator())
    assert all(p.isfinite().all() for p in weights(made).values())
    for name in ("descent", "curvature"):
        assert torch.equal(made.line_search.state_dict()[name], known[name])
    before = float(stepped(made, 1)[0].loss)
    assert float(stepped(made, 5)[-1].loss) < before


def test_an_error_after_the_trunks_step_does_not_repeat_it():
    made = learner(SGD(0.1), cap=0.25)
    stepped(made, 3)
    start, step = weights(made), made.line_search.state_dict()
    waiting = {n.removeprefix("step/"): v.clone() for n, v in step.items() if n.startswith("step/")}
    bad = X.clone()
    bad[0, 0] = float("nan")
    for _ in range(2):
        with pytest.raises(SplitError, match="not finite"):
            made.step(bad, Y, generator=generator())
    rho = made.line_search.rho
    assert rho == 0.25
    for n, moved in waiting.items():
        torch.testing.assert_close(weights(made)[n], start[n] + rho * moved)


def test_parameters_may_thaw():
    made = learner()
    layer = made.split.trunk[0]
    layer.requires_grad_(False)
    stepped(made, 3)
    before = weights(made)
    layer.requires_grad_(True)
    stepped(made, 3)
    moved = [n for n, p in weights(made).items() if not torch.equal(p, before[n])]
    assert {"trunk.0.weight", "trunk.2.weight"} <= set(moved)


@pytest.mark.parametrize(
    ("saved", "settings", "words"),
    [
        ({"groups": ("*weight",)}, {}, "has 1 groups of parameters, its state 2"),
        ({"horizon": 0.0}, {}, "has a horizon, and its state is that of a search without one"),
    ],
)
def test_a_checkpoint_of_other_settings_raises(saved, settings, words):
    first, second = learner(**saved), learner(**settings)
    stepped(first, 2)
    second.load_state_dict(first.state_dict())
    with pytest.raises(SplitError, match=f"{words}: resume with the settings of the checkpoint"):
        stepped(second, 1)


def test_patterns_as_one_text_raise():
    with pytest.raises(SplitError, match=r"groups is '\*weight': give a tuple of patterns, \('\*weight',\)"):
        LineSearch(groups="*weight")


def test_a_horizon_goes_on_where_single_steps_find_no_descent():
    made = learner(SGD(0.1), horizon=0.9, cap=2.0)
    for _ in range(11):
        stepped(made, 1)
        for name, value in made.line_search.state_dict().items():
            if name.startswith("step/"):
                value.neg_()  # uphill
    assert made.line_search.rho == 0
    found = [float(s.metrics["rho"]) for s in stepped(made, 40)]
    assert found[0] == pytest.approx(2e-3, rel=0.2)
    assert found[-1] > found[0]  # downhill again: longer steps would have been better


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
