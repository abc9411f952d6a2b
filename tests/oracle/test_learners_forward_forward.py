"""Forward-Forward against autograd of each layer's own loss, and against prediction spelled out."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from splitfg.errors import SplitError
from splitfg.learners import forward_forward
from splitfg.learners.forward_forward import ForwardForward
from splitfg.learners.goodness import Contrast, HardNegatives, Threshold, UniformNegatives
from splitfg.models import MLP

FEATURES, CLASSES, ROWS, SCALE = 5, 4, 6, 2.0


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Fixed:
    """Wrong labels known to the test."""

    def __init__(self, labels):
        self.labels = labels

    def __call__(self, y, classes, goodness, generator):
        return self.labels


def batch():
    x = torch.randn(ROWS, FEATURES, generator=generator(1), dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    return x, y, (y + 1) % CLASSES


def make(*, lr=1.0, widths=(7, 6, 5), **options):
    mlp = MLP(FEATURES + CLASSES, widths=widths, generator=generator()).double()
    optimizer = torch.optim.SGD(mlp.parameters(), lr=lr)
    return ForwardForward(mlp, optimizer, classes=CLASSES, label_scale=SCALE, max_norm=None, **options)


def activities(mlp, x, labels):
    """Every layer's input and activation, written out."""
    v, seen = torch.cat([x, SCALE * torch.eye(CLASSES, dtype=x.dtype)[labels]], dim=1), []
    for layer in mlp.layers:
        a = torch.relu(layer(v.detach()))
        seen.append((v, a))
        v = a / (a.pow(2).mean(dim=1, keepdim=True).sqrt() + 1e-6)
    return seen


LOSSES = {
    "threshold": (Threshold(0.3), lambda p, n: torch.log1p((0.3 - p).exp()) + torch.log1p((n - 0.3).exp())),
    "contrast": (Contrast(4.0), lambda p, n: torch.log1p((-4.0 * (p - n)).exp())),
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_layer_follows_autograd_of_its_own_loss_alone(name):
    objective, written_out = LOSSES[name]
    x, y, wrong = batch()
    learner = make(objective=objective, negatives=Fixed(wrong))
    before = {n: p.detach().clone() for n, p in learner.mlp.named_parameters()}
    total = torch.zeros((), dtype=torch.float64)
    expected = {}
    pairs = zip(activities(learner.mlp, x, y), activities(learner.mlp, x, wrong), strict=True)
    for i, ((_, right), (_, false)) in enumerate(pairs):
        loss = written_out(right.pow(2).mean(dim=1), false.pow(2).mean(dim=1)).mean()
        names = [f"layers.{i}.weight", f"layers.{i}.bias"]
        grads = torch.autograd.grad(loss, [learner.mlp.get_parameter(n) for n in names])
        expected |= dict(zip(names, grads, strict=True))
        total = total + loss.detach()
    stats = learner.step(x, y, generator=generator())
    torch.testing.assert_close(stats.loss, total)
    for n, p in learner.mlp.named_parameters():
        assert expected[n].abs().max() > 0
        torch.testing.assert_close(before[n] - p, expected[n])


@pytest.mark.parametrize("block", [2**22, 1, 5 * 7])
def test_goodness_of_every_class_in_blocks(block, monkeypatch):
    monkeypatch.setattr(forward_forward, "_BLOCK_ELEMENTS", block)
    learner, (x, _, _) = make(), batch()
    expected = [
        sum(a.pow(2).mean(dim=1) for _, a in activities(learner.mlp, x, torch.full((ROWS,), c))) for c in range(CLASSES)
    ]
    torch.testing.assert_close(learner.predict(x), torch.stack(expected, dim=1))


def test_no_reverse_mode_pass_at_all(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("reverse mode was used")

    monkeypatch.setattr(torch.autograd, "backward", refuse)
    monkeypatch.setattr(torch.autograd, "grad", refuse)
    learner, (x, y, _) = make(), batch()
    stats = learner.step(x, y, generator=generator())
    assert not stats.loss.requires_grad
    assert stats.metrics["trunk_backward"] == stats.metrics["jvps"] == 0


def test_uniform_negatives_are_uniform_over_the_other_classes():
    y = torch.arange(CLASSES).repeat_interleave(10_000)
    wrong = UniformNegatives()(y, CLASSES, None, generator())
    counts = F.one_hot(y, CLASSES).T.double() @ F.one_hot(wrong, CLASSES).double()
    assert not counts.diagonal().any()
    others = counts[~torch.eye(CLASSES, dtype=torch.bool)]
    p = 1 / (CLASSES - 1)
    z = (others - 10_000 * p) / math.sqrt(10_000 * p * (1 - p))
    assert z.abs().max() < 4.5  # 12 comparisons


def test_hard_negatives_follow_the_goodness_of_the_other_classes():
    goodness = torch.tensor([[0.1, 0.4, 0.2, 0.0]])
    y = torch.ones(20_000, dtype=torch.int64)
    wrong = HardNegatives(5.0)(y, CLASSES, lambda: goodness.expand(20_000, -1), generator())
    p = torch.tensor([math.exp(0.5), 0.0, math.exp(1.0), 1.0], dtype=torch.float64)
    p = p / p.sum()
    counts = torch.bincount(wrong, minlength=CLASSES).double()
    assert counts[1] == 0
    z = (counts - 20_000 * p) / (20_000 * p * (1 - p)).sqrt().clamp(min=1)
    assert z.abs().max() < 4


def test_hard_negatives_keep_off_the_true_label_however_good_it_looks():
    goodness = torch.tensor([[1e4, -1e4, -1e4]])
    y = torch.zeros(50, dtype=torch.int64)
    assert (HardNegatives()(y, 3, lambda: goodness.expand(50, -1), generator()) > 0).all()


def test_a_layer_cannot_inherit_goodness():
    """Scaling a layer's activity changes its own goodness, and nothing above it."""
    learner, (x, _, _) = make(), batch()
    before = learner.predict(x)
    first = activities(learner.mlp, x, torch.zeros(ROWS, dtype=torch.int64))[0][1].pow(2).mean(dim=1)
    with torch.no_grad():
        for parameter in learner.mlp.layers[0].parameters():
            parameter.mul_(3.0)
    torch.testing.assert_close(learner.predict(x)[:, 0] - before[:, 0], 8 * first, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(3).long(), r"shape \(3, 4\)"),
        (torch.zeros(0, FEATURES), torch.zeros(0).long(), "at least 1"),
        (torch.full((3, FEATURES), torch.nan), torch.zeros(3).long(), "NaN"),
        (torch.zeros(3, FEATURES), torch.zeros(2).long(), r"pass shape \(3,\)"),
        (torch.zeros(3, FEATURES), torch.zeros(3), "class indices"),
        (torch.zeros(3, FEATURES), torch.full((3,), CLASSES), r"4\.\.4"),
        (torch.zeros(3, FEATURES), torch.full((3,), -1), r"-1\.\.-1"),
        (torch.zeros(3, FEATURES).long(), torch.zeros(3).long(), "float"),
        ((torch.zeros(3, FEATURES),), torch.zeros(3).long(), "one tensor"),
    ],
)
def test_bad_batches_are_refused(x, y, message):
    with pytest.raises(SplitError, match=message):
        make().step(x, y, generator=generator())


def test_bad_settings_are_all_named():
    mlp = MLP(1, widths=(3,), generator=generator())
    with pytest.raises(SplitError) as error:
        ForwardForward(mlp, torch.optim.SGD(mlp.parameters()), classes=1, label_scale=0.0)
    assert len(error.value.problems) == 3


def test_widths_are_those_of_the_network():
    learner = make(widths=(7, 3))
    assert learner.features == FEATURES
    assert [tuple(layer.weight.shape) for layer in learner.mlp.layers] == [
        (m, n) for n, m in pairwise([FEATURES + CLASSES, 7, 3])
    ]
