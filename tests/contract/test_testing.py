"""The importable contract: every estimator keeps it, and it notices estimators that do not."""

import dataclasses

import pytest
import torch
from torch import nn

import splitfg
from splitfg import SquaredError
from splitfg.feedback import Direct, FixedMaps, ForwardDerivative, MeanJacobian, Relay, UnchangedFeedback
from splitfg.models import GPT, GPTConfig
from splitfg.testing import check_estimator, example_split

EVERY = {
    "split_fg": lambda: splitfg.SplitFG(K=4),
    "split_fg_projection": lambda: splitfg.SplitFG(K=4, combine=splitfg.Projection()),
    "split_fg_difference": lambda: splitfg.SplitFG(K=4, engine=splitfg.CentralDifference()),
    "activity_fg": lambda: splitfg.ActivityFG(K=4),
    "activity_fg_predicted": lambda: splitfg.ActivityFG(K=4, prediction=splitfg.LearnedFeedback()),
    "forward_gradient": lambda: splitfg.ForwardGradient(K=4),
    "evolution": lambda: splitfg.EvolutionStrategy(K=4),
    "frozen": splitfg.FrozenTrunk,
    "backprop": splitfg.Backprop,
    "checkpointed": lambda: splitfg.CheckpointedBackprop(blocks=("layers.0",)),
    "predictive_coding": splitfg.PredictiveCoding,
    "learned_feedback": splitfg.LearnedFeedback,
    "learned_feedback_forward_mode": lambda: splitfg.LearnedFeedback(probe=ForwardDerivative()),
    "learned_feedback_direct": lambda: splitfg.LearnedFeedback(route=Direct()),
    "feedback_alignment": lambda: splitfg.LearnedFeedback(route=Relay(FixedMaps())),
}


@pytest.mark.parametrize("name", EVERY)
def test_every_estimator_keeps_the_contract(name):
    check_estimator(EVERY[name])


@pytest.mark.parametrize("feedback", [UnchangedFeedback, MeanJacobian])
def test_the_direct_path_keeps_the_contract_on_a_gpt(feedback):
    generator = torch.Generator().manual_seed(0)
    trunk = GPT(GPTConfig(layers=1, width=8, heads=2, context=6, vocab=7), generator=generator)
    split = splitfg.Split(trunk, splitfg.LinearHead(trunk.tied_linear()), tied=splitfg.Tied.INCLUDE)
    tokens = torch.randint(0, 7, (3, 7), generator=generator)
    check_estimator(
        lambda: splitfg.DirectPath(feedback=feedback()),
        split,
        tokens[:, :-1],
        tokens[:, 1:],
    )


class Wrong(splitfg.FrozenTrunk):
    """Doubles what it should not."""

    def __call__(self, split, x, y, *, generator=None):
        estimate = super().__call__(split, x, y, generator=generator)
        return self.spoil(split, estimate)


def wrong(spoil):
    return type("Spoilt", (Wrong,), {"spoil": staticmethod(spoil)})


def drawn_globally(split, estimate):
    torch.rand(1)
    return estimate


def moved(split, estimate):
    with torch.no_grad():
        next(split.model.parameters()).add_(1e-3)
    return estimate


def written(split, estimate):
    p = next(split.model.parameters())
    p.grad = torch.zeros_like(p)
    return estimate


def scaled(split, estimate):
    return dataclasses.replace(estimate, grads={n: 2 * g for n, g in estimate.grads.items()})


def unknown(split, estimate):
    return dataclasses.replace(estimate, grads={**estimate.grads, "stranger": torch.zeros(1)})


def lossy(split, estimate):
    return dataclasses.replace(estimate, loss=estimate.loss + 1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drawn_globally, "global generator"),
        (moved, "changed"),
        (written, "write_grads alone"),
        (scaled, "errors off"),
        (unknown, "stranger"),
        (lossy, "the loss is"),
    ],
)
def test_broken_contracts_are_found(spoil, message):
    with pytest.raises(AssertionError, match=message):
        check_estimator(wrong(spoil))


def test_regression_networks_too():
    trunk = nn.Sequential(nn.Linear(4, 6), nn.Tanh()).double()
    split = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(6, 2).double(), loss=SquaredError()))
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    check_estimator(splitfg.LearnedFeedback, split, x, y)


def test_the_example_has_no_dead_layer():
    split, x, y = example_split()
    assert all(g.norm() > 0 for g in splitfg.Backprop()(split, x, y).grads.values())


def test_an_estimator_itself_is_checked_as_its_class_is():
    estimator = splitfg.LearnedFeedback()
    check_estimator(estimator)
    assert not estimator.route.state_dict()  # copies of it learned
    with pytest.raises(AssertionError, match="write_grads alone"):
        check_estimator(wrong(written)())
