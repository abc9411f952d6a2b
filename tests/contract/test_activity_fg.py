"""Activity tangents: pure, forward only, the same in chunks, and clear about what cannot work."""

import pytest
import torch
from _toolkit import classes, generator, mlp_split, noise, seeded
from test_estimator_contract import assert_untouched, photograph, same
from torch import nn

from splitfg import (
    Activities,
    ActivityFG,
    Backprop,
    CentralDifference,
    CosineWithWarmup,
    Estimator,
    ForwardMode,
    FrozenTrunk,
    GradientLearner,
    LinearHead,
    Split,
    SplitError,
    SquaredError,
    split,
)
from splitfg.models import FlatTrunk, TabM
from splitfg.recipes import Adam
from splitfg.sites import layer_gradients, pull_back

K = 3


def tables(dtype=torch.float64, **head):
    trunk = TabM(3, width=4, members=2, generator=generator()).to(dtype)
    return seeded(lambda: Split(trunk, LinearHead(nn.Linear(4, 3, dtype=dtype), **head)))


def problem():
    return tables(), noise(5, 3), classes(5, count=3)


def images():
    body = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.ReLU(), nn.Flatten())
    return seeded(lambda: Split(body.double(), LinearHead(nn.Linear(32, 3, dtype=torch.float64))))


def flat():
    trunk = FlatTrunk(width=8, generator=generator()).double()
    return seeded(lambda: Split(trunk, LinearHead(nn.Linear(128, 3, dtype=torch.float64))))


SPLITS = {
    "mlp": (lambda: mlp_split(3, 4, 4, 3), lambda: noise(5, 3)),
    "tables": (tables, lambda: noise(5, 3)),
    "images": (images, lambda: noise(5, 1, 4, 4)),
    "flat trunk": (flat, lambda: noise(5, 3, 4, 4)),
}
every_split = pytest.mark.parametrize("name", SPLITS)


@every_split
def test_keeps_to_the_protocol(name):
    (make, inputs), y = SPLITS[name], classes(5, count=3)
    s, x = make(), inputs()
    assert isinstance(ActivityFG(K), Estimator)
    before = photograph(s, x, y)
    estimate = ActivityFG(K)(s, x, y, generator=generator())
    assert_untouched(before, photograph(s, x, y))
    same(estimate, ActivityFG(K)(s, x, y, generator=generator()), rtol=0, atol=0)
    assert {n: g.shape for n, g in estimate.grads.items()} == {n: p.shape for n, p in s.trained_params().items()}
    assert not estimate.stats.biased
    assert (estimate.stats.jvps, estimate.stats.trunk_backward, estimate.stats.scores.shape) == (K, 0, (K,))
    exact = Backprop()(s, x, y)
    torch.testing.assert_close(estimate.loss, exact.loss)
    for n in s.head_params():
        torch.testing.assert_close(estimate.grads[n], exact.grads[n])


@every_split
@pytest.mark.parametrize("chunk", [1, 2])
def test_the_chunk_does_not_change_the_estimate(name, chunk):
    (make, inputs), y = SPLITS[name], classes(5, count=3)
    s, x = make(), inputs()
    chunked = ActivityFG(K, engine=ForwardMode(chunk))(s, x, y, generator=generator())
    same(ActivityFG(K)(s, x, y, generator=generator()), chunked)


def test_measured_on_a_device_that_only_runs_forward():
    s, x, y = problem()
    exact, measured = (
        ActivityFG(K, engine=e)(s, x, y, generator=generator()) for e in (ForwardMode(), CentralDifference())
    )
    same(exact, measured, rtol=1e-4, atol=1e-6)
    assert measured.stats.biased


def test_nothing_is_saved_for_backward():
    def refuse(t):
        raise AssertionError(f"saved a tensor of shape {tuple(t.shape)}")

    s, x, y = problem()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t):
        estimate = ActivityFG(K)(s, x, y, generator=generator())
    assert not any(g.requires_grad for g in estimate.grads.values())


def test_frozen_layers_are_left_out():
    s, x, y = problem()
    s.trunk.layers[0].requires_grad_(False)
    grads = ActivityFG(K)(s, x, y, generator=generator()).grads
    assert not any(n.startswith("trunk.layers.0") for n in grads)
    assert any(n.startswith("trunk.layers.1") for n in grads)


def test_layers_of_a_table_know_their_gradients():
    trunk = tables().trunk
    layer, x, delta = trunk.layers[0], noise(5, 1, 3), noise(5, 2, 4, seed=7)
    layer(x).backward(delta)
    with torch.no_grad():
        found = layer_gradients(layer, x, delta)
    for name, p in layer.named_parameters():
        torch.testing.assert_close(found[name], p.grad)
    members, u = noise(5, 2, 4).requires_grad_(), noise(5, 4, seed=8)
    trunk.mean(members).backward(u)
    torch.testing.assert_close(pull_back(trunk.mean, members.detach(), u)[0], members.grad)


def test_learns_nearly_as_backprop_does():
    def last_loss(estimator):
        s = tables(torch.float32, loss=SquaredError())
        x = noise(256, 3, dtype=torch.float32)
        y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs(), x.sum(1).sin()], dim=1)
        learner = GradientLearner(s, estimator, Adam(lr=1e-2).build(s), schedule=CosineWithWarmup(200, 10))
        draws = generator()
        return [float(learner.step(x, y, generator=draws).loss) for _ in range(200)][-1]

    backprop, ours, frozen = (last_loss(e) for e in (Backprop(), ActivityFG(4), FrozenTrunk()))
    assert frozen - ours > 0.8 * (frozen - backprop) > 0.1


def test_a_trunk_that_is_one_layer():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 4)

        def forward(self, x):
            return self.inner(x)

        def layer_gradients(self, a, delta):
            return {f"inner.{n}": g for n, g in layer_gradients(self.inner, a, delta).items()}

    s = Split(seeded(Whole).double(), LinearHead(nn.Linear(4, 3).double()))
    grads = ActivityFG(K)(s, noise(5, 3), classes(5, count=3), generator=generator()).grads
    assert {"trunk.inner.weight", "trunk.inner.bias"} <= set(grads)


class TestRefusals:
    @pytest.mark.parametrize(("times", "words"), [(1, "h is not what norm gives"), (2, "norm is called 2 times")])
    def test_a_top_that_does_not_give_h(self, times, words):
        class Normed(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)

            def forward(self, x):
                x = self.norm(self.inner(x))
                return 2 * x if times == 1 else self.norm(x)

        s = Split(seeded(Normed).double(), LinearHead(nn.Linear(4, 3).double()))
        (problem,) = self.refused(ActivityFG(K, Activities(("inner",), top="norm")), s)
        assert words in problem

    def refused(self, estimator, s, x=None):
        with pytest.raises(SplitError) as caught:
            estimator(s, noise(5, 3) if x is None else x, classes(5, count=3), generator=generator())
        return caught.value.problems

    def test_layers_that_are_not_there_or_know_nothing(self):
        chosen = Activities(("0", "9", "1"), top="1")
        problems = self.refused(ActivityFG(K, chosen), mlp_split(3, 4, 4, 3))
        for words in ("no module named '9'", "1 (Tanh) does not know its own gradient", "no closed form for 1 (Tanh)"):
            assert any(words in p for p in problems), words
        assert len(problems) == 3

    def test_parameters_that_nobody_would_train(self):
        class Free(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.offset = nn.Linear(3, 4), nn.Parameter(torch.zeros(4))

            def forward(self, x):
                return self.layer(x) + self.offset

        s = Split(Free().double(), LinearHead(nn.Linear(4, 3, dtype=torch.float64)))
        (problem,) = self.refused(ActivityFG(K), s)
        assert problem.startswith("offset belongs to no layer")
        chosen = ActivityFG(K, Activities(("layer",)))(s, noise(5, 3), classes(5, count=3), generator=generator())
        assert "trunk.offset" not in chosen.grads

    def test_a_layer_that_is_called_twice(self):
        one, other = nn.Linear(3, 3), nn.Linear(3, 3)
        s = split(nn.Sequential(one, other, nn.Tanh(), one, other, nn.Tanh(), nn.Linear(3, 3)).double())
        (problem,) = self.refused(ActivityFG(K), s)
        assert problem.startswith("layers (0, 1) are called twice")

    def test_rows_that_layers_do_not_have(self):
        (problem,) = self.refused(ActivityFG(K, Activities(rows=2)), self.mixed())
        assert "does not begin with the (5, 2) rows" in problem

    def mixed(self):
        class Folded(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 4)

            def forward(self, x):
                return self.layer(x).unflatten(1, (2, 2))

        trunk = nn.Sequential(Folded(), nn.Linear(2, 2))
        return Split(trunk.double(), LinearHead(nn.Linear(2, 3, dtype=torch.float64)))

    def test_a_frozen_trunk(self):
        s = mlp_split(3, 4, 3)
        s.trunk.requires_grad_(False)
        assert "no layer of the trunk is trained" in self.refused(ActivityFG(K), s)[0]

    @pytest.mark.parametrize("settings", [{"K": 0}, {"K": True}, {"engine": ForwardMode}])
    def test_settings(self, settings):
        with pytest.raises(SplitError):
            ActivityFG(**settings)

    def test_no_rows(self):
        with pytest.raises(SplitError, match="rows must be at least 1"):
            Activities(rows=0)


class Mixing(nn.Module):
    """Attention between the samples of a batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.second((h @ h.T).softmax(-1) @ h)


class ReadElsewhere(nn.Module):
    """Uses a layer's weight a second time, without calling the layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return nn.functional.linear(h, self.second.weight)


class Scaled(nn.Module):
    """A forward hook scales a layer's output."""

    def __init__(self, changes=True):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.second.register_forward_hook(lambda module, args, output: output * (3.0 if changes else 1.0))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class WrongGradient(nn.Linear):
    def layer_gradients(self, a, delta):
        return {"weight": 2 * delta.T @ a, "bias": delta.sum(0)}


class TestBias:
    """Estimates that would be biased raise on the first batch, with the cause and the cure."""

    x, y = noise(6, 3), classes(6, count=3)

    def problems(self, trunk, x=x, dtype=torch.float64, **settings):
        s = Split(trunk.to(dtype), LinearHead(nn.Linear(4, 3, dtype=dtype)))
        with pytest.raises(SplitError) as caught:
            ActivityFG(K, **settings)(s, x.to(dtype), self.y, generator=generator())
        return caught.value.problems

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("engine", [ForwardMode(), CentralDifference()], ids=["exact", "measured"])
    def test_samples_that_mix(self, dtype, engine):
        (problem,) = self.problems(seeded(Mixing), dtype=dtype, engine=engine)
        assert "rows of a batch mix" in problem
        assert "SplitFG" in problem

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_a_weight_that_is_read_elsewhere(self, dtype):
        (problem,) = self.problems(seeded(ReadElsewhere), dtype=dtype)
        assert "trunk.second.weight" in problem
        assert "F.linear" in problem
        assert "first" not in problem

    def test_a_hook_that_scales(self):
        (problem,) = self.problems(seeded(Scaled))
        assert "a hook changes the output of second (Linear)" in problem

    def test_a_layer_with_a_wrong_gradient(self):
        (problem,) = self.problems(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), WrongGradient(4, 4)))
        assert "2 (WrongGradient) returns wrong gradients" in problem

    def test_a_single_row_first(self):
        s = Split(seeded(Mixing).double(), LinearHead(nn.Linear(4, 3).double()))
        ActivityFG(K)(s, self.x[:1], self.y[:1], generator=generator())
        with pytest.raises(SplitError, match="mix"):
            ActivityFG(K)(s, self.x, self.y, generator=generator())

    def test_hooks_that_change_nothing_are_fine(self):
        s = Split(seeded(lambda: Scaled(changes=False)).double(), LinearHead(nn.Linear(4, 3).double()))
        assert ActivityFG(K)(s, self.x, self.y, generator=generator()).grads

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", ["mlp", "images"])
    def test_sound_trunks_pass_in_narrow_dtypes(self, name, dtype):
        make, inputs = SPLITS[name]
        s = make()
        s.model.to(dtype)
        assert ActivityFG(K)(s, inputs().to(dtype), classes(5, count=3), generator=generator()).grads

    def test_a_padding_row(self):
        trunk = nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Tanh(), nn.Linear(4, 4))
        s = Split(trunk, LinearHead(nn.Linear(4, 3)))
        tokens = torch.tensor([[0, 1], [2, 0], [3, 4]])
        assert ActivityFG(K)(s, tokens, classes(3, 2, count=3), generator=generator()).grads
