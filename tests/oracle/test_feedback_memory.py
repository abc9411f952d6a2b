"""Learned feedback keeps of a pass what backpropagation keeps, and the lean step computes what the full tape gives."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._measure import peak_mib
from splitfg import Backprop, LearnedFeedback, LinearHead, Split
from splitfg.feedback import LayerDifference
from splitfg.feedback._responses import NoiseInTurn, white_noise
from splitfg.models import MLP, linear
from splitfg.models.resnet import ResNet
from splitfg.sites import record_lean_tape, record_tape, register_rule
from splitfg.sites._rule_table import RULES

DOUBLE = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Residual(nn.Module):
    """Norms, sums, pooling, a layer that is called twice, and activations with rules of all kinds."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.relu, self.twice = nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 8)

    def forward(self, x):
        s = self.relu(self.norm(self.stem(x)))
        s = torch.relu(self.second(F.gelu(self.first(s))) + s)
        h = F.max_pool2d(s, 2).mean((2, 3))
        return self.twice(torch.tanh(self.twice(h) * h)) - h


def residual():
    torch.manual_seed(0)
    split = Split(Residual().double(), LinearHead(nn.Linear(8, 3).double()))
    return split, torch.randn(6, 3, 8, 8, dtype=DOUBLE), torch.arange(6) % 3


def deep_mlp():
    g = generator()
    split = Split(MLP(6, widths=(16,) * 5, generator=g), LinearHead(linear(16, 3, generator=g)))
    split.model.double()
    return split, torch.randn(40, 6, dtype=DOUBLE), torch.arange(40) % 3


class Scaled(nn.Module):
    """Products and quotients with constants, parameters and activations; tapes record dropout as a product."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 16)
        self.gain, self.shift = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x):
        z = self.first(x) * (torch.arange(16) % 3 > 0) * 0.5 / 3
        z = self.second(torch.mul(z, other=torch.arange(16, dtype=z.dtype)) * self.gain / self.shift)
        return 1 / (2 + (z * z / (1 + z * z)))


def scaled():
    torch.manual_seed(0)
    split = Split(Scaled().double(), LinearHead(nn.Linear(16, 3).double()))
    return split, torch.randn(40, 6, dtype=DOUBLE), torch.arange(40) % 3


NETWORKS = {"residual": residual, "mlp": deep_mlp, "scaled": scaled}


def by_full_tape(estimator, split, x, y, g):
    with torch.no_grad():
        tape = estimator.record(split, x)
        u = split.head(tape.h, y).u
        swept = estimator.sweep(split, tape, u)
        return split.named_trunk_grads(swept.grads), estimator.learn(split, x, tape, g)


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_a_lean_step_is_the_step_on_the_full_tape(make):
    split, x, y = make()
    estimator, g, other = LearnedFeedback(), generator(), generator()
    for _ in range(3):
        found = estimator(split, x, y, generator=g)
        grads, change = by_full_tape(estimator, split, x, y, other)
        for name, grad in grads.items():
            torch.testing.assert_close(found.grads[name], grad, rtol=1e-12, atol=1e-14)
        assert found.state_update.keys() == change.keys()
        for name, step in change.items():
            torch.testing.assert_close(found.state_update[name], step, rtol=1e-12, atol=1e-14)
        assert torch.equal(g.get_state(), other.get_state())
        estimator.update_state(split, found)
    assert all(grad.abs().max() > 0 for grad in grads.values())


def bytes_of(tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def of_tape(tape, given):
    values = torch.utils._pytree.tree_leaves([(o.args, dict(o.kwargs), o.output) for o in tape.operations])
    known = {t.untyped_storage()._cdata for t in given}
    return bytes_of(t for t in values if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in known)


def saved_by_autograd(split, x):
    saved, given = [], [x, *split.model.parameters()]
    known = {t.untyped_storage()._cdata for t in given}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        h = split.trunk(x)
    return bytes_of(t for t in [*saved, h] if t.untyped_storage()._cdata not in known)


def big_mlp():
    g = generator()
    return Split(MLP(64, widths=(64,) * 4, generator=g), LinearHead(linear(64, 4, generator=g))), torch.randn(512, 64)


def resnet():
    g = generator()
    trunk = ResNet(widths=(16, 32), blocks=(2, 2), generator=g)
    return Split(trunk, LinearHead(linear(32, 4, generator=g))), torch.randn(4, 3, 32, 32)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.read, self.encoder = nn.Linear(16, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        with sdpa_kernel(SDPBackend.MATH):  # autograd then keeps the attention weights too
            return self.encoder(self.read(x)).mean(1)


def encoder():
    return Split(Encoder(), LinearHead(nn.Linear(16, 4))), torch.randn(4, 64, 16)


def scores():
    """Scaled attention scores, as large as all else together."""

    class Trunk(nn.Module):
        def __init__(self):
            super().__init__()
            self.read = nn.Linear(16, 16)

        def forward(self, x):
            z = self.read(x)
            return (torch.softmax(z @ z.mT * 0.25 / 2, -1) @ z).mean(1)

    return Split(Trunk(), LinearHead(nn.Linear(16, 4))), torch.randn(4, 64, 16)


@pytest.mark.parametrize("make", [big_mlp, resnet, encoder, scores])
def test_a_lean_tape_holds_what_autograd_saves(make):
    split, x = make()
    trained = {id(p): name for name, p in split.trunk.named_parameters()}
    given, run = [x, *split.model.parameters()], partial(split.trunk, x)
    lean, full = (of_tape(record(split.trunk, run, trained), given) for record in (record_lean_tape, record_tape))
    assert lean <= 1.02 * saved_by_autograd(split, x)
    assert lean < 0.65 * full


@pytest.mark.parametrize("make", [big_mlp, resnet])
def test_an_estimate_needs_little_more_memory_than_backpropagation(make):
    split, x = make()
    y, estimator, g = torch.arange(len(x)) % 4, LearnedFeedback(), generator()
    estimator.update_state(split, estimator(split, x, y, generator=g))
    backprop = peak_mib(lambda: Backprop()(split, x, y))
    assert peak_mib(lambda: estimator(split, x, y, generator=g)) < 1.3 * backprop


def test_rules_from_outside_may_read_all_values():
    split, x, y = residual()
    built_in, read = RULES["relu"], []

    def relu(operation, delta):
        read.append(operation.input.isfinite().all() and operation.output.isfinite().all())
        yield operation.input, delta * (operation.input > 0)

    try:
        register_rule("relu", relu)
        LearnedFeedback()(split, x, y, generator=generator())
    finally:
        register_rule("relu", built_in)
    assert read == [True, True]  # the first batch is validated


def test_values_that_are_not_kept_are_not_numbers():
    split, x, _ = deep_mlp()
    trained = {id(p): name for name, p in split.trunk.named_parameters()}
    tape = record_lean_tape(split.trunk, partial(split.trunk, x), trained)
    layer, relu = tape.operations[:2]
    assert layer.output.isnan().all()
    assert layer.output is relu.input
    assert layer.output.shape == relu.output.shape
    assert torch.equal(relu.output, torch.relu(split.trunk.layers[0](x)))
    assert tape.is_active(layer.output)


def test_a_sweep_that_consumes_leaves_nothing_behind():
    split, x, y = deep_mlp()
    estimator = LearnedFeedback()
    with torch.no_grad():
        tape = estimator.record(split, x, lean=True)
        swept = estimator.sweep(split, tape, split.head(tape.h, y).u, consume=True)
    assert swept.grads
    assert not swept.deltas
    assert of_tape(tape, []) == 0
    assert tape.h.numel() == 0
    assert not tape.layers()


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_responds_to_noise_by_its_weight_alone(bias):
    """dz = W da exactly, for a whole pass with biases and activations around it."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4, bias=bias), nn.Tanh()).double()
    split, x = Split(trunk, LinearHead(nn.Linear(4, 3).double())), torch.randn(9, 5, dtype=DOUBLE)
    estimator = LearnedFeedback()
    tape = estimator.record(split, x, lean=True)
    noise = estimator.draw(split, tape, generator())
    ((place, (da, dz)),) = LayerDifference()(tape, None, noise).layers({2: 9}, dict(noise))
    assert place == 2
    torch.testing.assert_close(dz, da @ trunk[2].weight.T)


def test_noise_in_turn_is_noise_at_once():
    like = {3: torch.zeros(4), 5: torch.zeros(2, 2), 9: torch.zeros(3)}
    g, other = generator(), generator()
    expected = {place: white_noise(t, g) for place, t in like.items()}
    noise = NoiseInTurn(like, other)
    assert torch.equal(noise[5], expected[5])
    assert torch.equal(noise[3], expected[3])
    noise.forget(3)
    assert list(noise) == [3, 5, 9]
    noise.draw_rest()
    assert torch.equal(g.get_state(), other.get_state())
    with pytest.raises(KeyError):
        noise[4]
