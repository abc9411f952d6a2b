"""Learned feedback against backpropagation, autograd and brute-force Jacobians, in float64."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import splitfg
from splitfg import Backprop, LearnedFeedback, LinearHead, Split, SplitError, SplitFG, Tied
from splitfg.feedback import (
    AlignedMaps,
    DeltaRule,
    Difference,
    Direct,
    FixedMaps,
    ForwardDerivative,
    ForwardDFA,
    Proximal,
    Relay,
    sweep,
)
from splitfg.feedback._map_rules import _solve_by_products
from splitfg.models import GPT, MLP, FlatTrunk, GPTConfig, TabM, resnet20
from splitfg.sites import pull_back, record_tape
from splitfg.testing import example_split

DOUBLE = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def noise(*shape, seed=0):
    return torch.randn(*shape, dtype=DOUBLE, generator=generator(seed))


def network(trunk, width, classes=3, **settings):
    torch.manual_seed(1)
    return Split(trunk.double(), LinearHead(nn.Linear(width, classes).double()), **settings)


def taught(estimator, split, x, y, steps):
    """Let the maps learn on a fixed network; returns the last estimate."""
    draws = generator(7)
    for _ in range(steps):
        estimate = estimator(split, x, y, generator=draws)
        estimator.update_state(split, estimate)
    return estimator(split, x, y, generator=draws)


def errors(split, estimate, x, y):
    exact = Backprop()(split, x, y).grads
    return {n: float((estimate.grads[n] - g).norm() / g.norm().clamp_min(1e-12)) for n, g in exact.items()}


class Skipping(nn.Module):
    """Skip connections, two readers of one tensor, one layer called twice, a scaled branch."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.twice, self.norm, self.gain = nn.Linear(8, 8), nn.LayerNorm(8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = F.silu(self.first(x))
        x = x + self.left(x).tanh() * self.right(x).sigmoid()
        x = x + self.gain * self.twice(self.norm(x))
        return self.twice(F.gelu(x)) / 2


TRUNKS = {
    "relu": (lambda: MLP(5, widths=(8, 8, 8), generator=generator()), 8, lambda: noise(32, 5)),
    "gelu": (lambda: nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 6), nn.GELU()), 6, lambda: noise(32, 5)),
    "mixed": (
        lambda: nn.Sequential(
            nn.Linear(5, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6), nn.Softplus()
        ),
        6,
        lambda: noise(32, 5),
    ),
    "skips": (Skipping, 8, lambda: noise(32, 5)),
    "one member": (lambda: TabM(5, width=8, layers=3, members=1, generator=generator()), 8, lambda: noise(32, 5)),
    "flat": (lambda: FlatTrunk(width=8, generator=generator()), 8 * 36, lambda: noise(4, 3, 6, 6)),
    "grouped": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=4), nn.Flatten()
        ),
        8 * 9,
        lambda: noise(6, 3, 8, 8),
    ),
}


@pytest.mark.parametrize("probe", [Difference(), ForwardDerivative()], ids=["difference", "forward mode"])
@pytest.mark.parametrize("name", TRUNKS)
def test_relayed_feedback_becomes_the_gradient(name, probe):
    make, width, inputs = TRUNKS[name]
    torch.manual_seed(0)
    split, x = network(make(), width), inputs()
    y = torch.randint(0, 3, (len(x),), generator=generator())
    found = errors(split, taught(LearnedFeedback(probe=probe), split, x, y, 60), x, y)
    assert max(found.values()) < 1e-4, found


def test_attention_and_tied_tables_are_relayed():
    trunk = GPT(GPTConfig(layers=2, width=16, heads=2, context=12, vocab=11), generator=generator())
    split = Split(trunk.double(), LinearHead(trunk.tied_linear()), tied=Tied.INCLUDE)
    tokens = torch.randint(0, 11, (6, 13), generator=generator())
    x, y = tokens[:, :-1], tokens[:, 1:]
    found = errors(split, taught(LearnedFeedback(), split, x, y, 80), x, y)
    assert max(found.values()) < 1e-2, found


def test_direct_feedback_is_the_gradient_of_a_linear_trunk():
    trunk = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 6))
    split, x = network(trunk, 6), noise(64, 5)
    y = torch.randint(0, 3, (64,), generator=generator())
    found = errors(split, taught(LearnedFeedback(route=Direct()), split, x, y, 150), x, y)
    assert max(found.values()) < 1e-4, found


def test_direct_maps_are_the_mean_jacobian():
    """Brute force: the mean over rows of dz_last / da, by autograd's own Jacobian."""
    trunk = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    split, x = network(trunk, 3), noise(256, 4)
    y = torch.randint(0, 3, (256,), generator=generator())
    estimator, draws = LearnedFeedback(route=Direct(Proximal(rate=0.5)), probe=ForwardDerivative()), generator(3)
    total = torch.zeros(3, 5, dtype=DOUBLE)
    for step in range(400):
        estimator.update_state(split, estimator(split, x, y, generator=draws))
        total += estimator.route.state_dict()["2"][0] if step >= 100 else 0
    after = torch.func.vmap(torch.func.jacrev(lambda a: trunk[4](trunk[3](trunk[2](a)))))(trunk[:2](x))
    expected = after.mean(0).detach()
    assert float((total / 300 - expected).norm() / expected.norm()) < 0.05


def test_differences_tend_to_the_forward_derivative():
    trunk = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    split, x = network(trunk, 3), noise(16, 4)
    y = torch.randint(0, 3, (16,), generator=generator())

    def change(probe):
        return LearnedFeedback(route=Direct(), probe=probe)(split, x, y, generator=generator(5)).state_update["2"]

    exact = change(ForwardDerivative())
    far = [float((change(Difference(step, central=True)) - exact).norm() / exact.norm()) for step in (0.3, 0.03, 0.003)]
    assert far[0] > far[1] > far[2]
    assert far[2] < 1e-4
    assert far[0] / far[1] == pytest.approx(100, rel=0.3)  # O(step²)


@given(
    rows=st.integers(1, 12), inputs=st.integers(1, 8), rate=st.floats(0.05, 1.0), ridge=st.floats(1e-3, 10.0),
    scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_proximal_steps_never_enlarge_the_error(rows, inputs, rate, ridge, scale, seed):
    """Whatever the rows, their scale and their correlation."""
    truth, maps = noise(1, 3, inputs, seed=seed), noise(1, 3, inputs, seed=seed + 1)
    e = scale * noise(1, rows, inputs, seed=seed + 2) @ noise(1, inputs, inputs, seed=seed + 3)
    moved = maps + Proximal(rate, ridge).change(maps, e, e @ truth.mT)
    assert float((moved - truth).norm()) <= float((maps - truth).norm()) * (1 + 1e-9)


@given(rows=st.integers(1, 12), inputs=st.integers(1, 8), ridge=st.floats(1e-4, 10.0), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_proximal_steps_by_products_are_never_longer_than_solved_ones(rows, inputs, ridge, seed):
    """On GPUs the series replaces the solve; well-conditioned systems get the same answer."""
    e = noise(1, rows, inputs, seed=seed) @ noise(1, inputs, inputs, seed=seed + 1)
    matrix = e.mT @ e
    matrix = matrix + ridge * matrix.diagonal(dim1=-2, dim2=-1).mean() * torch.eye(inputs)
    approximate, exact = _solve_by_products(matrix, torch.eye(inputs)[None]), torch.linalg.inv(matrix)
    shares = torch.linalg.eigvals(approximate @ matrix).real
    assert float(shares.min()) >= -1e-9
    assert float(shares.max()) <= 1 + 1e-9
    if float(torch.linalg.cond(matrix)) < 20:
        assert torch.allclose(approximate, exact, rtol=1e-6)


@pytest.mark.parametrize("rule", [Proximal(), DeltaRule(0.4), ForwardDFA(0.05), AlignedMaps(rate=0.2)], ids=repr)
def test_rules_turn_maps_towards_the_response(rule):
    truth = noise(1, 4, 6)
    maps = rule.initial("layer", 1, 4, 6, truth)
    for step in range(300):
        e = noise(1, 64, 6, seed=step)
        maps = maps + rule.change(maps, e, e @ truth.mT)
    cosine = float((maps * truth).sum() / (maps.norm() * truth.norm()))
    assert cosine > (0.95 if not isinstance(rule, Proximal | DeltaRule) else 1 - 1e-9)


def test_fixed_maps_are_drawn_by_name_and_stay():
    rule, like = FixedMaps(seed=3), noise(1)
    first, second = (rule.initial(name, 1, 40, 50, like) for name in ("a", "b"))
    assert not torch.equal(first, second)
    assert torch.equal(first, FixedMaps(seed=3).initial("a", 1, 40, 50, like))
    assert float(first.var()) == pytest.approx(1 / 40, rel=0.1)
    assert not rule.change(first, noise(1, 4, 50), noise(1, 4, 40)).any()


TOKENS = torch.tensor([[0, 1, 2, 2], [3, 3, 1, 0]])

FUNCTIONS = {
    "add broadcast": lambda a, b: a + b[0],
    "sub": lambda a, b: 3 - a - 2 * b,
    "mul": lambda a, b: a * b * 0.5,
    "div": lambda a, b: a / (2 + b.square()),
    "relu": lambda a, b: torch.relu(a) + F.relu(b),
    "elementwise": lambda a, b: F.gelu(a, approximate="tanh") + F.leaky_relu(b, 0.2) + F.elu(a) + F.mish(b) + a**3,
    "exp log": lambda a, b: (1 + a.exp()).log() - b.abs().sqrt(),
    "hard": lambda a, b: F.hardswish(a) + F.relu6(b) + F.hardtanh(a) + a.clamp(-0.5, 0.5),
    "matmul": lambda a, b: a @ b.mT @ a,
    "softmax": lambda a, b: (a @ b.transpose(-1, -2)).softmax(-1) @ b,
    "attention": lambda a, b: F.scaled_dot_product_attention(a, b, a * b, is_causal=True),
    "attention mask": lambda a, b: F.scaled_dot_product_attention(a, b, b, attn_mask=torch.eye(4, dtype=torch.bool)),
    "attention bias": lambda a, b: F.scaled_dot_product_attention(a, b, b, attn_mask=(a @ b.mT), scale=0.3),
    "grouped attention": lambda a, b: F.scaled_dot_product_attention(a, b[:1], a[1:], enable_gqa=True),
    "layer norm": lambda a, b: F.layer_norm(a, (4, 6), b[0], a[0], eps=0.1) + F.layer_norm(b, (6,)),
    "batch norm": lambda a, b: F.batch_norm(a, noise(4), noise(4).square(), b[0, 1, :4], a[0, 0, :4]),
    "batch statistics": lambda a, b: F.batch_norm(a, None, None, b[0, 1, :4], a[0, 0, :4], training=True),
    "embedding": lambda a, b: F.embedding(TOKENS, a.flatten(0, 1), padding_idx=-8) + F.embedding(TOKENS, b[0]),
    "gather": lambda a, b: a.gather(1, TOKENS.unsqueeze(-1).expand(2, 4, 6) % 4) * b,
    "pad": lambda a, b: F.pad(a, (1, 2, 0, 1)) * F.pad(b, (3, 0, 1, 0), value=1.0),
    "repeat": lambda a, b: a.repeat(2, 1, 3) + b.repeat(3, 2, 1, 1)[0].repeat(1, 1, 3),
    "pool": lambda a, b: F.adaptive_avg_pool1d(a, 1) * b,
    "masked": lambda a, b: a.masked_fill(torch.eye(4, 6, dtype=torch.bool), 0.3) + torch.where(b > 0, b, a),
    "mean": lambda a, b: a - a.mean(-1, keepdim=True) + b.mean(dim=(0, 1)) + a.sum(1, keepdim=True) + b.mean(),
    "reshape": lambda a, b: a.flatten(1).unflatten(1, (6, 4)).reshape(2, 4, 6) + b.view(8, 6).view(2, 4, 6),
    "permute": lambda a, b: a.permute(2, 0, 1).permute(1, 2, 0) * b.transpose(0, 1).transpose(1, 0).contiguous(),
    "index": lambda a, b: (
        a[:, 1:3].repeat_interleave(1, 0)[..., :6] * 0 + b[:, [0, 0]] if False else b[:, [0, 0]] * a[:, :2]
    ),
    "parts": lambda a, b: torch.cat([*a.split(2, -1), b.chunk(2, -1)[0]], -1) + torch.stack(b.unbind(1), 1)[..., :1],
    "expand": lambda a, b: a[:, :1].expand(2, 4, 6) * b + b.unsqueeze(0).squeeze(0),
    "detach": lambda a, b: a.detach() * b,
}


class Sum(nn.Module):
    """Two parameters through a function, so that a sweep has to pull h back to both."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b = nn.Parameter(noise(2, 4, 6)), nn.Parameter(noise(2, 4, 6, seed=1))
        self.function = function

    def forward(self):
        data = torch.zeros(())  # a product with values of parameters alone belongs into a layer
        return self.function(self.a + data, self.b + data)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_closed_forms_are_autograds(name):
    module = Sum(FUNCTIONS[name])
    h = module()
    u = noise(*h.shape, seed=2)
    expected = torch.autograd.grad(h, (module.a, module.b), u, materialize_grads=True)
    trained = {id(module.a): "a", id(module.b): "b"}
    grads = sweep(record_tape(module, module, trained), u, Relay(), trained).grads
    for found, exact in zip((grads.get("a"), grads["b"]), expected, strict=True):
        torch.testing.assert_close(found if found is not None else torch.zeros_like(exact), exact)


@pytest.mark.parametrize(
    "pool",
    [
        nn.AdaptiveAvgPool2d(1),
        nn.AvgPool2d(2),
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.AvgPool2d(3, 2, 1),
    ],
    ids=str,
)
def test_pooling_is_pulled_back(pool):
    trunk = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), pool, nn.Flatten()).double()
    x = noise(3, 2, 6, 6)
    split = network(trunk, trunk(x).shape[-1])
    y = torch.randint(0, 3, (3,), generator=generator())
    found = errors(split, LearnedFeedback()(split, x, y, generator=generator()), x, y)
    assert max(found.values()) < 1e-10


def test_the_last_layer_is_exact_before_anything_is_learned():
    split, x = network(MLP(5, widths=(8, 8), generator=generator()), 8), noise(16, 5)
    y = torch.randint(0, 3, (16,), generator=generator())
    found = errors(split, LearnedFeedback()(split, x, y, generator=generator()), x, y)
    assert found["trunk.layers.1.weight"] < 1e-12
    assert found["trunk.layers.0.weight"] == pytest.approx(1.0)  # the map is still zero


def test_whole_resnets_are_reached():
    split, x = network(resnet20(generator=generator()), 64), noise(2, 3, 8, 8)
    estimate = LearnedFeedback()(split, x, torch.tensor([0, 1]), generator=generator())
    assert set(estimate.grads) == set(split.trained_params())


class TestControlVariate:
    """As a prediction under activity tangents: unbiased, with less noise the better the maps are."""

    def problem(self):
        split, x = network(MLP(5, widths=(8, 8), generator=generator()), 8), noise(24, 5)
        return split, x, torch.randint(0, 3, (24,), generator=generator())

    def variance(self, estimator, split, x, y, draws):
        exact = Backprop()(split, x, y).grads["trunk.layers.0.weight"]
        found = [estimator(split, x, y, generator=draws).grads["trunk.layers.0.weight"] for _ in range(200)]
        return float((torch.stack(found) - exact).square().mean())

    def test_taught_maps_take_the_noise_away(self):
        split, x, y = self.problem()
        prediction = LearnedFeedback()
        taught(prediction, split, x, y, 40)
        plain = self.variance(splitfg.ActivityFG(K=2), split, x, y, generator())
        better = self.variance(splitfg.ActivityFG(K=2, prediction=prediction), split, x, y, generator())
        assert better < 1e-6 * plain

    def test_half_taught_maps_leave_it_unbiased(self):
        split, x, y = self.problem()
        prediction = LearnedFeedback(route=Relay(Proximal(rate=0.3)))
        taught(prediction, split, x, y, 1)
        estimator, draws = splitfg.ActivityFG(K=1, prediction=prediction), generator(9)
        exact = Backprop()(split, x, y).grads["trunk.layers.0.weight"]
        found = torch.stack(
            [estimator(split, x, y, generator=draws).grads["trunk.layers.0.weight"] for _ in range(600)]
        )
        z = (found.mean(0) - exact) / (found.std(0) / math.sqrt(600))
        assert float(z.abs().max()) < 4.5  # of 40 coordinates
        alone = prediction(split, x, y, generator=generator()).grads["trunk.layers.0.weight"]
        assert float((alone - exact).norm() / exact.norm()) > 0.2  # the prediction by itself is biased


class TestMissing:
    def trunk(self):
        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.shift, self.layer = nn.Parameter(torch.zeros(2, 5)), nn.Linear(5, 4)

            def forward(self, x):
                return self.layer(x).tanh()

        return Recurrent()

    def test_parameters_out_of_reach_are_listed_once(self):
        split, x = network(self.trunk(), 4), noise(8, 5)
        y = torch.zeros(8, dtype=torch.long)
        with pytest.warns(UserWarning, match=r"does not reach trunk\.shift"):
            estimate = LearnedFeedback()(split, x, y, generator=generator())
        assert "trunk.shift" not in estimate.grads
        LearnedFeedback()(split, x, y, generator=generator())  # warnings are errors here

    def test_another_estimator_takes_the_rest(self):
        split, x = network(self.trunk(), 4), noise(8, 5)
        estimate = LearnedFeedback(rest=SplitFG(K=2))(split, x, torch.zeros(8, dtype=torch.long), generator=generator())
        assert "trunk.shift" in estimate.grads
        assert estimate.stats.jvps == 3


class InPlace(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.layer, self.write = nn.Linear(5, 4), write

    def forward(self, x):
        return self.write(self.layer(x)) + 0.0


class TestBadTrunks:
    def refused(self, trunk, match, estimator=LearnedFeedback):
        split, x = network(trunk, 4), noise(6, 5)
        with pytest.raises(SplitError, match=match):
            estimator()(split, x, torch.zeros(6, dtype=torch.long), generator=generator())

    def exact(self, trunk):
        """The layers above the last map are exact, so that trunks with one layer are."""
        split, x, y = network(trunk, 4), noise(6, 5), torch.zeros(6, dtype=torch.long)
        found = LearnedFeedback()(split, x, y, generator=generator())
        for name, g in Backprop()(split, x, y).grads.items():
            torch.testing.assert_close(found.grads[name], g)

    def test_in_place_activations(self):
        self.exact(nn.Sequential(nn.Linear(5, 4), nn.SiLU(inplace=True), nn.Hardtanh(inplace=True)))

    @pytest.mark.parametrize(
        "write", [lambda y: y.__iadd__(y.tanh()), lambda y: y.mul_(2.0), lambda y: y.masked_fill_(y > 0, 0.0)]
    )
    def test_in_place_functions(self, write):
        self.exact(InPlace(lambda y: write(2 * y)))

    @pytest.mark.parametrize(
        "write",
        [
            lambda y: y.mul_(2.0) + y,  # the value from before is read as the one after
            lambda y: (y.view(-1).add_(1.0), y)[1],
            lambda y: (nn.ReLU(inplace=True)(y), y)[1],
            lambda y: (y.detach().zero_(), y)[1],
        ],
    )
    def test_writes_over_values_that_are_read_again(self, write):
        self.refused(InPlace(write), "in place")

    @pytest.mark.parametrize("training", [True, False])
    def test_batch_norm(self, training):
        trunk = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh()).double().train(training)
        nn.init.normal_(trunk[1].weight)
        trunk[1].running_mean.normal_()
        x, u = noise(6, 4), noise(6, 4, seed=2)
        norm = trunk[1]
        with torch.enable_grad():
            given = x.clone().requires_grad_()
            expected = torch.autograd.grad(norm(given), [given, norm.weight, norm.bias], u)
        r, own = pull_back(norm, x, u)
        torch.testing.assert_close((r, own["weight"], own["bias"]), tuple(expected))

    def test_operations_without_a_closed_form(self):
        class Sorted(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(5, 4)

            def forward(self, x):
                return torch.cumsum(self.layer(x), -1)

        self.refused(Sorted(), "cumsum has no closed-form pullback.*register_rule")

    def test_parameters_multiplied_outside_a_layer(self):
        class Raw(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.w = nn.Linear(5, 4), nn.Parameter(torch.ones(4, 4))

            def forward(self, x):
                return self.layer(x) @ self.w

        self.refused(Raw(), "matmul multiplies by a parameter outside a layer.*nn.Linear")

    def test_black_boxes(self):
        trunk = splitfg.BlackBoxTrunk(lambda p, x: x @ p["w"], {"w": torch.ones(5, 4, dtype=DOUBLE)})
        self.refused(trunk, "no layers")

    def test_rows_that_differ_on_a_direct_route(self):
        class Pairs(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.third = nn.Linear(5, 4), nn.Linear(2, 2), nn.Linear(4, 4)

            def forward(self, x):
                halves = self.first(x).reshape(-1, 2)
                return self.third(self.second(halves).reshape(-1, 4))

        self.refused(Pairs(), "rows differ", lambda: LearnedFeedback(route=Direct()))

    def test_settings(self):
        with pytest.raises(SplitError, match="rate must be in"):
            Proximal(rate=1.5)
        with pytest.raises(SplitError, match="route is the class Relay"):
            LearnedFeedback(route=Relay)


def test_a_restored_learner_goes_on_as_before():
    def learner():
        split = network(MLP(5, widths=(8, 8), generator=generator()), 8)
        return splitfg.GradientLearner(split, LearnedFeedback(), torch.optim.Adam(split.model.parameters(), lr=1e-2))

    x, y, draws = noise(32, 5), torch.randint(0, 3, (32,), generator=generator()), generator(2)
    first = learner()
    for _ in range(5):
        first.step(x, y, generator=draws)
    second = learner()
    second.load_state_dict(first.state_dict())
    for one in (first, second):
        one.step(x, y, generator=generator(4))
    for a, b in zip(first.split.model.parameters(), second.split.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_captured_steps_are_the_eager_ones():
    def learner():
        split = network(MLP(5, widths=(8, 8), generator=generator()), 8)
        return splitfg.GradientLearner(split, LearnedFeedback(), torch.optim.Adam(split.model.parameters(), lr=1e-2))

    x, y = noise(32, 5), torch.randint(0, 3, (32,), generator=generator())
    eager, fast = learner(), learner()
    captured = splitfg.CapturedLearner(fast, horizon=4, compile_=lambda f: torch.compile(f, backend="aot_eager"))
    draws = generator(1), generator(1)
    for _ in range(4):
        eager.step(x, y, generator=draws[0])
        captured.step(x, y, generator=draws[1])
    for a, b in zip(eager.split.model.parameters(), fast.split.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


class Positions(nn.Module):
    """A layer reads a table of positions, whose leading dimension is as large as the batch, but is not the batch."""

    def __init__(self):
        super().__init__()
        self.table, self.place, self.layer = nn.Embedding(8, 3), nn.Linear(3, 6), nn.Linear(6, 6)

    def forward(self, x):
        positions = self.place(self.table(torch.arange(8)).tanh())
        return self.layer((x.unsqueeze(1) + positions).relu()).mean(1)


def test_measurements_on_part_of_a_batch_are_right():
    """Layers with many rows are measured on the first samples alone, but for trunks where that cannot be done."""
    torch.manual_seed(0)
    split, x = network(Positions(), 6), noise(8, 6)
    y = torch.randint(0, 3, (8,), generator=generator())
    found = errors(split, taught(LearnedFeedback(), split, x, y, 80), x, y)
    assert max(found.values()) < 1e-4, found


def test_a_loop_that_never_updates_the_maps_is_warned_once():
    split, x, y = example_split()
    forgetful, careful = LearnedFeedback(), LearnedFeedback()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(50):
            forgetful(split, x, y, generator=generator())
    assert ["update_state" in str(w.message) for w in caught] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(50):
            careful.update_state(split, careful(split, x, y, generator=generator()))
