"""Losses of any function, against autograd in float64."""

import pytest
import torch
from _toolkit import DOUBLE, generator, noise
from torch import nn
from torch.nn import functional as F

from splitfg import (
    Backprop,
    ForwardGradient,
    LearnedFeedback,
    LinearHead,
    ProbedHead,
    ReverseModeHead,
    RowLoss,
    Split,
    SplitError,
    SplitFG,
    split,
)


def labels(outputs, y):
    return F.binary_cross_entropy_with_logits(outputs, y, reduction="none").mean(1)


def tasks(outputs, y):
    return F.cross_entropy(outputs[:, :3], y[:, 0].long(), reduction="none") + (outputs[:, 3:].sum(1) - y[:, 1]) ** 2


def hinge(outputs, y):
    return F.multi_margin_loss(outputs, y, reduction="none")


CASES = {
    "labels": (RowLoss(labels), lambda *lead: (noise(*lead, 5) > 0).double()),
    "narrow labels": (RowLoss(labels), lambda *lead: (noise(*lead, 5) > 0).float()),
    "tasks": (RowLoss(tasks), lambda *lead: torch.stack([noise(*lead).abs().clamp(max=2).floor(), noise(*lead)], -1)),
    "classes": (RowLoss(hinge, target_dims=0), lambda *lead: torch.randint(0, 5, lead, generator=generator())),
}


def expected(model, function, x, y):
    outputs = model(x).flatten(0, -2)
    y = y.flatten(0, x.ndim - 2)
    loss = function(outputs, y.to(outputs.dtype) if y.is_floating_point() else y).mean()
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("block", [1, 7, 10**6])
@pytest.mark.parametrize("name", CASES)
def test_a_linear_head_gives_autograds_gradient(name, block, bias):
    loss, targets = CASES[name]
    h, layer = noise(4, 3, 6), nn.Linear(6, 5, bias=bias, dtype=DOUBLE)
    y = targets(4, 3)
    found, (value, grads) = LinearHead(layer, loss=loss, block=block)(h, y), expected(layer, loss.function, h, y)
    torch.testing.assert_close(found.loss, value)
    torch.testing.assert_close(tuple(found.grads.values()), grads)


@pytest.mark.parametrize("head", [ReverseModeHead, ProbedHead])
@pytest.mark.parametrize("name", CASES)
def test_other_heads_give_autograds_gradient(name, head):
    loss, targets = CASES[name]
    module, h = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5)).double(), noise(4, 3, 6)
    y = targets(4, 3)
    found, (value, grads) = head(module, loss)(h, y), expected(module, loss.function, h, y)
    torch.testing.assert_close(found.loss, value)
    torch.testing.assert_close(tuple(found.grads.values()), grads, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "estimator", [Backprop(), SplitFG(K=2, micro_batch=3), ForwardGradient(K=2), LearnedFeedback()]
)
def test_estimators_train_with_it(estimator):
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double(), noise(8, 4)
    y = (noise(8, 5) > 0).double()
    estimate = estimator(split(model, loss=RowLoss(labels)), x, y, generator=generator())
    value, grads = expected(model, labels, x, y)
    torch.testing.assert_close(estimate.loss, value)
    if not isinstance(estimator, ForwardGradient):
        torch.testing.assert_close(estimate.grads["2.weight"], grads[2])


class TestRefusals:
    def test_no_function(self):
        with pytest.raises(SplitError, match="must be a function"):
            RowLoss(nn.BCEWithLogitsLoss)
        with pytest.raises(SplitError, match="trained parameters"):
            RowLoss(nn.Linear(2, 1))

    def test_other_losses_name_it(self):
        with pytest.raises(SplitError, match=r"BCEWithLogitsLoss.*RowLoss\(f\)"):
            split(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)), loss=nn.BCEWithLogitsLoss())

    @pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(reduction="none"), nn.BCEWithLogitsLoss()])
    def test_no_loss_per_row(self, loss):
        with pytest.raises(SplitError, match=r"one loss per row.*mean\(1\)"):
            LinearHead(nn.Linear(4, 5), loss=RowLoss(loss))(torch.randn(8, 4), torch.ones(8, 5))

    def test_targets(self):
        network = Split(nn.Linear(4, 6), LinearHead(nn.Linear(6, 5), loss=RowLoss(labels)))
        x = torch.randn(8, 4)
        for y, words in ((torch.ones(8), "pass shape"), (torch.full((8, 5), torch.nan), "NaN")):
            with pytest.raises(SplitError, match=words):
                Backprop()(network, x, y, generator=generator())
