"""Models that are awkward to take apart: shared modules and parameters, work in place, changes after the cut."""

import pytest
import torch
import torch.nn.functional as F
from _toolkit import classes, generator, noise, seeded
from torch import nn

from splitfg import (
    Backprop,
    CentralDifference,
    CheckpointedBackprop,
    ForwardGradient,
    FrozenTrunk,
    GradientLearner,
    LinearHead,
    Orthogonal,
    ProbedHead,
    ReverseModeHead,
    Split,
    SplitFG,
    split,
)
from splitfg.estimators import compiled

WIDTH = 4


def twice():
    """One layer called twice."""
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh())


def thrice():
    """One block in three places, after a layer of its own."""
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), block, block, block)


def tied():
    """Two layers with one weight, of which one is used twice."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), first)


every_trunk = pytest.mark.parametrize("trunk", [twice, thrice, tied])


def problem(trunk):
    module, readout = seeded(lambda: (trunk().double(), nn.Linear(WIDTH, 3, dtype=torch.float64)))
    x, y = noise(6, WIDTH), classes(6, count=3)
    F.cross_entropy(readout(module(x)), y).backward()
    expected = {f"trunk.{n}": p.grad for n, p in module.named_parameters()}
    module.zero_grad()
    readout.zero_grad()
    return Split(module, LinearHead(readout)), x, y, expected


@every_trunk
@pytest.mark.parametrize(
    "estimator",
    [
        lambda P: SplitFG(P, law=Orthogonal()),
        lambda P: SplitFG(P, law=Orthogonal(), engine=CentralDifference()),
        lambda P: Backprop(),
        lambda P: Backprop(closed_head=True),
        lambda P: CheckpointedBackprop(),
    ],
)
def test_the_gradient_is_autograds(trunk, estimator):
    s, x, y, expected = problem(trunk)
    count = sum(p.numel() for p in s.trunk_params().values())
    grads = estimator(count)(s, x, y, generator=generator()).grads
    for name, g in expected.items():
        torch.testing.assert_close(grads[name], g, rtol=1e-6, atol=1e-8)


@every_trunk
@pytest.mark.parametrize(
    "estimator", [SplitFG(2), ForwardGradient(2), FrozenTrunk(), Backprop(), CheckpointedBackprop()]
)
def test_parameters_stay_what_they_were(trunk, estimator):
    s, x, y, _ = problem(trunk)
    before, roles = dict(s.model.named_parameters()), s.roles
    estimator(s, x, y, generator=generator())
    after = dict(s.model.named_parameters())
    assert s.roles == roles
    assert all(after[n] is p and isinstance(p, nn.Parameter) for n, p in before.items())


@pytest.mark.parametrize("head", [ReverseModeHead, ProbedHead])
def test_in_a_head(head):
    layer = nn.Linear(WIDTH, WIDTH)
    module = seeded(lambda: nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(WIDTH, 3))).double()
    s = Split(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), head(module))
    x, y = noise(6, WIDTH), classes(6, count=3)
    F.cross_entropy(module(s.trunk(x)), y).backward()
    expected = {f"head.module.{n}": p.grad for n, p in module.named_parameters()}
    grads = FrozenTrunk()(s, x, y).grads
    for name, g in expected.items():
        torch.testing.assert_close(grads[name], g, rtol=1e-5, atol=1e-7)
    assert all(isinstance(p, nn.Parameter) for p in module.parameters())


@every_trunk
def test_in_compiled_code(trunk):
    s, x, y, _ = problem(trunk)
    for estimator in (SplitFG(2), Backprop()):
        twin, fast = compiled(s, estimator, lambda f: torch.compile(f, dynamic=False, backend="aot_eager"))
        expected = estimator(s, x, y, generator=generator()).grads
        found = fast(twin, x, y, generator=generator()).grads
        for name, g in expected.items():
            torch.testing.assert_close(found[name], g)
    torch.compiler.reset()


@pytest.mark.parametrize("act", [nn.SiLU, nn.LeakyReLU, nn.ELU])
@pytest.mark.parametrize("head", [ReverseModeHead, ProbedHead])
@pytest.mark.parametrize(
    "estimator", [SplitFG(20, law=Orthogonal()), Backprop(), SplitFG(20, law=Orthogonal(), lean=True)]
)
def test_a_head_that_begins_in_place(act, head, estimator):
    model = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), act(inplace=True), nn.Linear(WIDTH, 3))).double()
    x, y = noise(6, WIDTH), classes(6, count=3)
    s = split(model, at="1", head=head)
    grads = estimator(s, x, y, generator=generator()).grads
    F.cross_entropy(model(x), y).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-5, atol=1e-7, msg=name)


class Sums(nn.Module):
    """Parameters whose gradients autograd hands out as one tensor, or expanded."""

    def __init__(self):
        super().__init__()
        self.w, self.dw = nn.Parameter(torch.ones(3, WIDTH)), nn.Parameter(torch.zeros(3, WIDTH))
        self.offsets = nn.Parameter(torch.zeros(5))

    def forward(self, h):
        return F.linear(h, self.w + self.dw) + self.offsets.sum()


def test_gradients_of_a_head_can_be_clipped_in_place():
    module = Sums()
    s = Split(seeded(lambda: nn.Linear(WIDTH, WIDTH)), ReverseModeHead(module))
    optimizer = torch.optim.SGD(s.model.parameters(), lr=1.0)
    before = {n: p.clone() for n, p in s.model.named_parameters()}
    learner = GradientLearner(s, FrozenTrunk(), optimizer, max_norm=0.1)
    learner.step(10 * noise(6, WIDTH, dtype=torch.float32), classes(6, count=3), generator=generator())
    moved = torch.cat([(p - before[n]).flatten() for n, p in s.model.named_parameters()])
    assert moved.norm().item() == pytest.approx(0.1, rel=1e-5)
    torch.testing.assert_close(module.w - before["head.module.w"], module.dw - before["head.module.dw"])


class Gained(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.body = 1.0, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.readout = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.readout(self.gain * self.body(x))


def test_a_cut_model_follows_what_is_set_in_it():
    model = seeded(Gained).double()
    s, x, y = split(model), noise(6, WIDTH), classes(6, count=3)
    for change in (lambda: None, lambda: setattr(model, "gain", 3.0), lambda: model.body.__setitem__(1, nn.ReLU())):
        change()
        loss = FrozenTrunk()(s, x, y).loss
        torch.testing.assert_close(loss, F.cross_entropy(model(x), y).detach())
