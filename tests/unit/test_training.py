"""The step around an estimate: clipping, ``.grad``, groups with rho, optimizers, schedules, and going on later."""

import math

import pytest
import torch
from _toolkit import DOUBLE, TiedLanguageModel, classes, generator, mlp_split, noise, seeded
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from splitfg import (
    Backprop,
    Conditioned,
    CosineWithWarmup,
    Estimate,
    FrozenTrunk,
    GradientLearner,
    Learner,
    LinearHead,
    RunningMagnitude,
    Split,
    SplitError,
    SplitFG,
    Stats,
    Tied,
    clip,
    parameter_groups,
    split,
    write_grads,
)
from splitfg.recipes import SGD, Adam, AdamW, LaggedRMS, Muon
from splitfg.training import Constant, LaggedRMSOptimizer, momentum

RECIPES = {
    "adam": Adam(lr=0.1),
    "adamw": AdamW(lr=0.1, weight_decay=0.3),
    "sgd": SGD(lr=0.1),
    "sgd_momentum": SGD(lr=0.1, momentum=0.9),
    "lagged": LaggedRMS(lr=0.1),
    "muon": Muon(lr=0.1),
    "muon_original": Muon(lr=0.1, adjust="original"),
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def estimate_of(grads):
    return Estimate(torch.zeros(()), grads, Stats())


def made_up(split, seed=0):
    """Gradients from nowhere, for everything that is trained."""
    return estimate_of({n: noise(*p.shape, seed=seed + i) for i, (n, p) in enumerate(split.trained_params().items())})


def values(split):
    return {n: p.detach().clone() for n, p in split.model.named_parameters()}


def updates(recipe, rho, steps=1):
    """What each of the first steps adds to every parameter, for gradients that do not depend on the parameters."""
    s = mlp_split(3, 4, 4, 3)
    optimizer = recipe.build(s, rho=rho)
    moved = []
    for step in range(steps):
        before = values(s)
        write_grads(s.model, made_up(s, seed=10 * step))
        optimizer.step()
        moved.append({n: p - before[n] for n, p in values(s).items()})
    return moved


class TestRho:
    @every_recipe
    @pytest.mark.parametrize("rho", [0.5, 0.03])
    def test_scales_the_update_and_nothing_else(self, name, rho):
        """Exactly, whatever the optimizer makes of the gradient; the head goes at its own rate."""
        (full,), (scaled,) = updates(RECIPES[name], 1.0), updates(RECIPES[name], rho)
        assert all(u.abs().max() > 1e-6 for u in full.values())
        for n, u in full.items():
            expected = rho * u if n.startswith("trunk") else u
            torch.testing.assert_close(scaled[n], expected, rtol=1e-7, atol=1e-12)

    @pytest.mark.parametrize("name", [n for n in RECIPES if n != "adamw"])  # decay follows the parameters
    def test_later_steps_too(self, name):
        for full, scaled in zip(updates(RECIPES[name], 1.0, 3), updates(RECIPES[name], 0.1, 3), strict=True):
            for n, u in full.items():
                torch.testing.assert_close(scaled[n], (0.1 if n.startswith("trunk") else 1) * u, rtol=1e-6, atol=1e-12)

    def test_groups(self):
        s = mlp_split(3, 4, 3)
        head, trunk = parameter_groups(s, lr=0.2, rho=0.25)
        assert (head["name"], head["lr"], head["rho"]) == ("head", 0.2, 1.0)
        assert (trunk["name"], trunk["lr"], trunk["rho"]) == ("trunk", 0.05, 0.25)
        assert [id(p) for p in head["params"]] == [id(p) for p in s.head.parameters()]
        assert [id(p) for p in trunk["params"]] == [id(p) for p in s.trunk.parameters()]

    @pytest.mark.parametrize("policy", list(Tied))
    def test_tied_parameters_go_with_the_head(self, policy):
        model = seeded(TiedLanguageModel)
        head, trunk = parameter_groups(split(model, tied=policy), lr=0.2, rho=0.1)
        assert any(p is model.table.weight for p in head["params"])
        assert not any(p is model.table.weight for p in trunk["params"])

    def test_frozen_parameters_are_in_no_group(self):
        s = mlp_split(3, 4, 3)
        s.trunk.requires_grad_(False)
        (head,) = parameter_groups(s, lr=0.2, rho=0.1)
        assert head["name"] == "head"


class TestClip:
    @given(st.integers(0, 1000), st.floats(1e-3, 100), st.floats(1e-3, 10))
    def test_is_torchs(self, seed, scale, bound):
        s = mlp_split(3, 4, 3)
        before = estimate_of({n: scale * g for n, g in made_up(s, seed).grads.items()})
        kept = {n: g.clone() for n, g in before.grads.items()}
        clipped = clip(before, bound)
        write_grads(s.model, estimate_of({n: g.clone() for n, g in kept.items()}))
        total = torch.nn.utils.clip_grad_norm_(s.model.parameters(), bound)
        for n, p in s.model.named_parameters():
            torch.testing.assert_close(clipped.grads[n], p.grad)
            assert torch.equal(before.grads[n], kept[n])
        torch.testing.assert_close(clipped.stats.norms["before_clip"], total)

    def test_joint_over_trunk_and_head(self):
        """One factor for all, from the norm of all."""
        clipped = clip(estimate_of({"trunk.w": torch.tensor([3.0]), "head.w": torch.tensor([4.0])}), 1.0)
        assert clipped.grads["trunk.w"].item() == pytest.approx(0.6, rel=1e-5)
        assert clipped.grads["head.w"].item() == pytest.approx(0.8, rel=1e-5)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_narrow_gradients(self, dtype):
        """The norm is summed in float32, the gradients keep their dtype."""
        clipped = clip(estimate_of({"a": torch.full((5000,), 2.0, dtype=dtype), "b": torch.ones(3, dtype=dtype)}), 1.0)
        assert clipped.stats.norms["before_clip"].item() == pytest.approx(math.sqrt(20003), rel=1e-5)
        assert {g.dtype for g in clipped.grads.values()} == {dtype}
        total = sum(g.double().square().sum() for g in clipped.grads.values()).sqrt().item()
        assert total == pytest.approx(1.0, rel=2 * torch.finfo(dtype).eps)

    def test_keeps_loss_and_statistics(self):
        stats = Stats(jvps=3, biased=True, scores=torch.ones(3), norms={"u": torch.tensor(2.0)})
        clipped = clip(Estimate(torch.tensor(1.5), {"w": torch.ones(2)}, stats), 1.0)
        assert (clipped.loss, clipped.stats.jvps, clipped.stats.biased) == (1.5, 3, True)
        assert set(clipped.stats.norms) == {"u", "before_clip"}

    @pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
    def test_bound_must_be_positive(self, bound):
        with pytest.raises(SplitError, match="max_norm must be positive"):
            clip(estimate_of({"w": torch.ones(2)}), bound)


class TestWriteGrads:
    def test_every_parameter_gets_its_own(self):
        s = mlp_split(3, 4, 3)
        estimate = made_up(s)
        write_grads(s.model, estimate)
        assert all(torch.equal(p.grad, estimate.grads[n]) for n, p in s.model.named_parameters())

    def test_what_has_no_entry_is_cleared(self):
        """So that an optimizer leaves it alone, momentum and all."""
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        write_grads(s.model, made_up(s))
        write_grads(s.model, FrozenTrunk()(s, x, y))
        assert all(p.grad is None for p in s.trunk.parameters())
        before = values(s)
        torch.optim.AdamW(s.model.parameters(), weight_decay=0.1).step()
        assert all(torch.equal(before[n], p) for n, p in values(s).items() if n.startswith("trunk"))

    def test_casts_to_the_parameters_dtype(self):
        layer = nn.Linear(2, 2).bfloat16()
        write_grads(layer, estimate_of({"weight": noise(2, 2), "bias": noise(2)}))
        assert layer.weight.grad.dtype == torch.bfloat16

    def test_unknown_names_are_refused(self):
        with pytest.raises(SplitError, match=r"no parameter named nose, tail: pass split\.model"):
            write_grads(nn.Linear(2, 2), estimate_of({"tail": noise(2), "nose": noise(2), "weight": noise(2, 2)}))

    def test_own_loop_with_any_optimizer(self):
        """Estimator and ``write_grads`` are all that is needed: backprop this way is backprop."""
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        other = mlp_split(3, 4, 3)
        ours, theirs = (torch.optim.RMSprop(m.model.parameters(), lr=0.01) for m in (s, other))
        for _ in range(5):
            write_grads(s.model, Backprop()(s, x, y))
            ours.step()
            ours.zero_grad(set_to_none=False)
            theirs.zero_grad()
            outputs = other.head.layers[0](other.trunk(x))
            nn.functional.cross_entropy(outputs, y).backward()
            theirs.step()
        for n, p in values(s).items():
            torch.testing.assert_close(p, values(other)[n])


class TestSchedules:
    def test_cosine_with_warmup(self):
        """Rises over the warmup to one, falls by half a cosine, and would reach zero one step after the last."""
        schedule = CosineWithWarmup(total=14, warmup=4)
        assert [schedule(t) for t in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
        for t in range(4, 14):
            assert schedule(t) == pytest.approx(math.cos(math.pi / 2 * (t - 4) / 10) ** 2)
        assert schedule(9) == pytest.approx(0.5)
        assert schedule(14) == pytest.approx(0, abs=1e-15)
        assert schedule(1000) == pytest.approx(0, abs=1e-15)

    def test_without_warmup(self):
        assert CosineWithWarmup(total=10)(0) == 1.0

    def test_constant(self):
        assert [Constant()(t) for t in (0, 5, 10**6)] == [1.0, 1.0, 1.0]

    @pytest.mark.parametrize(("total", "warmup"), [(0, 0), (5, 5), (5, -1), (-3, 0)])
    def test_impossible_budgets_are_refused(self, total, warmup):
        with pytest.raises(ValueError, match="warmup must be in"):
            CosineWithWarmup(total, warmup)


class Mixed(nn.Module):
    """A table, positions, a convolution, a norm, matrices with and without bias, and a matrix by another name."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.positions = nn.Parameter(torch.zeros(3, 4))
        self.conv = nn.Conv1d(4, 4, 1)
        self.norm = nn.LayerNorm(4)
        self.blocks = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 4, bias=False)])
        self.fc = nn.Linear(4, 5)

    def forward(self, tokens):
        h = self.table(tokens) + self.positions
        h = self.norm(self.conv(h.mT).mT)
        return self.fc(self.blocks[1](torch.relu(self.blocks[0](h))))


class TestMuon:
    def test_block_weights_alone(self):
        """2-D weights of the trunk's blocks go to Muon; tables, head and everything else to Adam; no decay."""
        model = seeded(Mixed)
        optimizer = Muon(lr=0.1, adjust="original").build(split(model), rho=0.5)
        names = {id(p): n for n, p in model.named_parameters()}
        muon, *rest = optimizer.param_groups
        assert {names[id(p)] for p in muon["params"]} == {"blocks.0.weight", "blocks.1.weight"}
        assert (muon["lr"], muon["rho"], muon["weight_decay"], muon["adjust_lr_fn"]) == (0.05, 0.5, 0.0, "original")
        others = {names[id(p)]: g for g in rest for p in g["params"]}
        assert set(others) == set(names.values()) - {"blocks.0.weight", "blocks.1.weight"}
        assert {g["weight_decay"] for g in rest} == {0}
        assert {n: g["lr"] for n, g in others.items() if n in ("fc.weight", "table.weight")} == {
            "fc.weight": 0.1,
            "table.weight": 0.05,
        }

    def test_muon_is_torchs(self):
        """And the rest is torch's Adam."""
        s = mlp_split(3, 4, 3)
        optimizer = Muon(lr=0.1).build(s)
        twin = mlp_split(3, 4, 3)
        weight = twin.trunk[0].weight
        rest = [p for p in twin.model.parameters() if p is not weight]
        muon = torch.optim.Muon([weight], lr=0.1, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        adam = torch.optim.Adam(rest, lr=0.1)
        for step in range(3):
            for m in (s, twin):
                write_grads(m.model, made_up(m, seed=step))
            for o in (optimizer, muon, adam):
                o.step()
        for n, p in values(s).items():
            torch.testing.assert_close(p, values(twin)[n])

    def test_without_matrices_it_is_adam(self):
        trunk = nn.Sequential(nn.Conv1d(1, 1, 1), nn.Flatten())
        assert isinstance(Muon().build(Split(trunk, LinearHead(nn.Linear(4, 2)))), torch.optim.Adam)


class TestLaggedRMS:
    def optimizer(self, p, **settings):
        return LaggedRMSOptimizer([p], lr=0.5, beta=0.9, eps=1e-3, **settings)

    def test_is_its_formula(self):
        """a_t = clamp(1 / (sqrt(m_{t-1} / (1 - β^{t-1})) + eps)) with m over past gradients only."""
        p, seen = nn.Parameter(noise(4)), []
        optimizer, expected = self.optimizer(p, a_min=0.2, a_max=1.5), p.detach().clone()
        for t in range(5):
            g = noise(4, seed=t)
            if seen:
                weights = torch.tensor([0.1 * 0.9 ** (t - 1 - k) for k in range(t)], dtype=DOUBLE)
                mean_square = (weights @ torch.stack(seen).square()) / (1 - 0.9**t)
                a = (1 / (mean_square.sqrt() + 1e-3)).clamp(0.2, 1.5)
            else:
                a = torch.full((4,), 0.2, dtype=DOUBLE)
            expected = expected - 0.5 * a * g
            p.grad = g
            optimizer.step()
            torch.testing.assert_close(p.detach(), expected)
            seen.append(g)

    def test_is_predictable(self):
        """What this step's gradient is does not change what it is multiplied by."""
        factors = []
        for last in (1.0, 100.0):
            p = nn.Parameter(noise(4))
            optimizer = self.optimizer(p)
            for g in (noise(4, seed=1), noise(4, seed=2)):
                p.grad = g
                optimizer.step()
            before = p.detach().clone()
            p.grad = torch.full((4,), last, dtype=DOUBLE)
            optimizer.step()
            factors.append((before - p.detach()) / (0.5 * last))
        torch.testing.assert_close(*factors)

    @pytest.mark.parametrize("size", [0.0, 1e-12, 1e12])
    def test_is_bounded(self, size):
        p = nn.Parameter(noise(4))
        optimizer = self.optimizer(p, a_min=0.5, a_max=2.0)
        for _ in range(3):
            p.grad = torch.full((4,), size, dtype=DOUBLE)
            optimizer.step()
        a = optimizer.preconditioner(p, optimizer.param_groups[0])
        assert (a >= 0.5).all()
        assert (a <= 2.0).all()

    def test_closure_and_missing_gradients(self):
        p, q = nn.Parameter(noise(2)), nn.Parameter(noise(2))
        optimizer = LaggedRMSOptimizer([p, q])
        p.grad = noise(2)
        assert optimizer.step(lambda: 7.0) == 7.0
        assert torch.equal(q.detach(), noise(2))

    def test_bounds_must_be_in_order(self):
        with pytest.raises(ValueError, match="a_min <= a_max"):
            LaggedRMSOptimizer([nn.Parameter(noise(2))], a_min=2.0, a_max=1.0)


class TestMomentum:
    """The optimizer's running mean as a prediction: of a constant gradient it must become that gradient."""

    def predicted(self, recipe, steps=300):
        s = mlp_split(3, 4, 3)
        optimizer, g = recipe.build(s), made_up(s)
        for _ in range(steps):
            write_grads(s.model, g)
            optimizer.step()
        return momentum(s, optimizer), g.grads

    @pytest.mark.parametrize(
        "recipe",
        [
            Adam(),
            AdamW(),
            pytest.param(
                SGD(momentum=0.9),
                marks=pytest.mark.xfail(
                    strict=True, reason="torch's SGD buffer is a sum, 1/(1 - momentum) times the mean"
                ),
            ),
            pytest.param(
                Muon(),
                marks=pytest.mark.xfail(strict=True, reason="the pair of optimizers keeps its state in its parts"),
            ),
        ],
        ids=lambda r: type(r).__name__,
    )
    def test_becomes_a_constant_gradient(self, recipe):
        found, grads = self.predicted(recipe)
        assert set(found) == set(grads)
        for n, g in grads.items():
            torch.testing.assert_close(found[n], g, rtol=1e-3, atol=1e-6)

    def test_nothing_before_the_first_step(self):
        s = mlp_split(3, 4, 3)
        assert momentum(s, Adam().build(s)) == {}


def learner(recipe, *, conditioned=False, predicted=False, seed=0):
    """A learner with everything on: clipping, a schedule, running magnitudes, a prediction from momentum."""
    s = mlp_split(3, 4, 4, 3)
    magnitude = RunningMagnitude() if conditioned else None
    estimator = SplitFG(3, law=Conditioned(magnitude)) if conditioned else SplitFG(3)
    optimizer = recipe.build(s, rho=0.3)
    return GradientLearner(
        s,
        estimator,
        optimizer,
        schedule=CosineWithWarmup(total=10, warmup=2),
        prediction=(lambda: momentum(s, optimizer)) if predicted else None,
        magnitude=magnitude,
    )


def plain(state):
    """Whether a state holds tensors, numbers and strings only, nested in dicts and lists."""
    if isinstance(state, dict):
        return all(isinstance(k, str | int) and plain(v) for k, v in state.items())
    if isinstance(state, list | tuple):
        return all(plain(v) for v in state)
    return state is None or isinstance(state, torch.Tensor | int | float | str | bool)


class TestGradientLearner:
    x, y = noise(5, 3), classes(5, count=3)

    def test_is_a_learner(self):
        assert isinstance(learner(Adam()), Learner)

    def test_a_step_is_estimate_clip_write_step(self):
        """By hand, with torch's own clipping and optimizer, over several steps of the schedule."""
        ours, s = learner(Adam(lr=0.1)), mlp_split(3, 4, 4, 3)
        head, trunk = list(s.head.parameters()), list(s.trunk.parameters())
        adam = torch.optim.Adam([{"params": head}, {"params": trunk}])
        first, second = generator(), generator()
        for factor in (0.5, 1.0, 1.0, math.cos(math.pi / 16) ** 2):
            estimate = SplitFG(3)(s, self.x, self.y, generator=second)
            stats = ours.step(self.x, self.y, generator=first)
            torch.testing.assert_close(stats.loss, estimate.loss)
            write_grads(s.model, estimate)
            total = torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
            torch.testing.assert_close(stats.metrics["norm/before_clip"], total)
            adam.param_groups[0]["lr"], adam.param_groups[1]["lr"] = 0.1 * factor, 0.03 * factor
            adam.step()
            for n, p in values(ours.split).items():
                torch.testing.assert_close(p, values(s)[n])
        assert (stats.metrics["jvps"], stats.metrics["trunk_backward"]) == (3, 0)

    def test_clipping_can_be_left_out(self):
        s = mlp_split(3, 4, 3)
        ours = GradientLearner(s, Backprop(), SGD(lr=1.0).build(s), max_norm=None)
        before, grads = values(s), Backprop()(s, self.x, self.y).grads
        ours.step(self.x, self.y, generator=generator())
        for n, p in values(s).items():
            torch.testing.assert_close(p, before[n] - grads[n])

    def test_prediction_comes_from_momentum(self):
        """The second step's estimate has the first's momentum as control variate."""
        ours = learner(Adam(lr=0.1), predicted=True)
        s, g = ours.split, generator()
        ours.step(self.x, self.y, generator=g)
        prediction = {n: m.clone() for n, m in momentum(s, ours.optimizer).items()}
        assert prediction
        expected = SplitFG(3)(s, self.x, self.y, generator=_copy(g), prediction=prediction)
        without = SplitFG(3)(s, self.x, self.y, generator=_copy(g))
        stats = ours.step(self.x, self.y, generator=g)
        torch.testing.assert_close(stats.metrics["norm/trunk"], expected.stats.norms["trunk"])
        assert not torch.allclose(expected.stats.norms["trunk"], without.stats.norms["trunk"])

    def test_magnitude_follows_the_estimates_before_clipping(self):
        ours = learner(SGD(lr=0.01), conditioned=True)
        twin = mlp_split(3, 4, 4, 3)
        estimate = SplitFG(3)(twin, self.x, self.y, generator=generator())
        ours.step(self.x, self.y, generator=generator())
        seen = ours.magnitude.state_dict()["mean_square"]
        assert set(seen) == set(twin.trunk_params())
        for n, m in seen.items():
            torch.testing.assert_close(m, 0.01 * estimate.grads[n].square())

    def test_predict_changes_nothing(self):
        ours = learner(Adam())
        before = values(ours.split)
        outputs = ours.predict(self.x)
        assert outputs.shape == (5, 3)
        assert not outputs.requires_grad
        assert all(torch.equal(p, before[n]) for n, p in values(ours.split).items())

    @pytest.mark.parametrize(("conditioned", "predicted"), [(False, False), (True, False), (False, True)])
    @every_recipe
    def test_goes_on_as_if_never_stopped(self, name, conditioned, predicted):
        """Three steps, saved, loaded into a fresh learner, three more: bit by bit the six of an unbroken run."""
        settings = {"conditioned": conditioned, "predicted": predicted}
        unbroken, stopped, resumed = (learner(RECIPES[name], **settings) for _ in range(3))
        first, second = generator(), generator()
        for _ in range(6):
            unbroken.step(self.x, self.y, generator=first)
        for _ in range(3):
            stopped.step(self.x, self.y, generator=second)
        state = stopped.state_dict()
        assert plain(state)
        with torch.no_grad():
            for p in resumed.split.model.parameters():
                p.zero_()
        resumed.load_state_dict(state)
        for _ in range(3):
            resumed.step(self.x, self.y, generator=second)
        for n, p in values(resumed.split).items():
            assert torch.equal(p, values(unbroken.split)[n])

    def test_it_learns(self):
        ours = learner(Adam(lr=0.1))
        g = generator()
        losses = [ours.step(self.x, self.y, generator=g).loss.item() for _ in range(10)]
        assert losses[-1] < 0.8 * losses[0]


def _copy(g):
    twin = torch.Generator()
    twin.set_state(g.get_state())
    return twin
