"""The step around an estimate: clipping, ``.grad``, groups with rho, and schedules."""

import math

import pytest
import torch
from _steps import RECIPES, estimate_of, every_recipe, made_up, values
from _toolkit import TiedLanguageModel, classes, generator, mlp_split, noise, seeded
from hypothesis import example, given, strategies as st
from torch import nn

from splitfg import (
    Backprop,
    CosineWithWarmup,
    DirectPath,
    Estimate,
    FrozenTrunk,
    GradientLearner,
    LearnedFeedback,
    LinearHead,
    LineSearch,
    ResidualPath,
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
from splitfg.training import Constant, clip_

_PATH = ResidualPath(writers=("out",), added={"p": "out", "q": "out"}, strict=False)


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

    # decay follows the parameters
    @pytest.mark.parametrize("name", [n for n in RECIPES if n not in ("adam_l2", "adamw")])
    def test_later_steps_too(self, name):
        for full, scaled in zip(updates(RECIPES[name], 1.0, 3), updates(RECIPES[name], 0.1, 3), strict=True):
            for n, u in full.items():
                torch.testing.assert_close(scaled[n], (0.1 if n.startswith("trunk") else 1) * u, rtol=1e-6, atol=1e-12)

    def test_groups(self):
        s = mlp_split(3, 4, 3)
        head, trunk = parameter_groups(s, lr=0.2, rho=0.25)
        assert (head["name"], head["lr"], head["step_scale"]) == ("head", 0.2, 1.0)
        assert (trunk["name"], trunk["lr"], trunk["step_scale"]) == ("trunk", 0.05, 0.25)
        assert [id(p) for p in head["params"]] == [id(p) for p in s.head.parameters()]
        assert [id(p) for p in trunk["params"]] == [id(p) for p in s.trunk.parameters()]

    def test_adadelta_keeps_its_own_rho(self):
        """Its option of the same name is the decay of the mean square; a line search must not take it for a scale."""
        s = mlp_split(3, 4, 3)
        adadelta = torch.optim.Adadelta(parameter_groups(s, lr=0.2, rho=0.25), rho=0.8)
        assert [(g["rho"], g["lr"]) for g in adadelta.param_groups] == [(0.8, 0.2), (0.8, 0.05)]
        plain = torch.optim.Adadelta(s.model.parameters())
        GradientLearner(s, SplitFG(1), plain, line_search=LineSearch())

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
    @example(0, 1e-3, 10.0)  # a gradient within the bound
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

    def test_apart_leaves_the_head_to_itself(self):
        """A trunk of norm 300 against a head of 0.4, and the other way round."""
        for trunk, head in ((300.0, 0.4), (0.3, 40.0)):
            before = estimate_of({"trunk.w": torch.tensor([trunk]), "head.w": torch.tensor([head])})
            clipped = clip(before, 1.0, apart=("trunk.w",))
            assert clipped.grads["trunk.w"].item() == pytest.approx(min(1.0, trunk), rel=1e-5)
            assert clipped.grads["head.w"].item() == pytest.approx(min(1.0, head), rel=1e-5)
            assert clipped.stats.norms["before_clip"].item() == pytest.approx(math.hypot(trunk, head), rel=1e-5)

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

    def test_gradients_that_autograd_hands_on_twice_or_expands(self):
        """The two terms of a sum get one tensor from autograd, what is summed over an expanded one."""

        class Sums(nn.Module):
            def __init__(self):
                super().__init__()
                self.base, self.delta = nn.Parameter(noise(4, 3)), nn.Parameter(noise(4, 3, seed=1))
                self.scale = nn.Parameter(noise(5, seed=2))

            def forward(self, x):
                return nn.functional.linear(x, self.base + self.delta) * self.scale.sum()

        s = Split(Sums(), LinearHead(nn.Linear(4, 3).double()))
        x, y = 10 * noise(6, 3), classes(6, count=3)
        expected = clip(Backprop()(s, x, y), 0.1).grads
        found = clip_(Backprop()(s, x, y), 0.1).grads
        for name, g in expected.items():
            torch.testing.assert_close(found[name], g, msg=name)

    def test_an_infinite_bound_changes_nothing(self):
        """Even where the norm overflows."""
        grad = torch.full((4,), 1e25, dtype=torch.float32)
        assert torch.equal(clip(estimate_of({"w": grad}), math.inf).grads["w"], grad)

    @pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
    def test_bound_must_be_positive(self, bound):
        with pytest.raises(SplitError, match="max_norm must be positive"):
            clip(estimate_of({"w": torch.ones(2)}), bound)

    @pytest.mark.parametrize("estimator", [LearnedFeedback(), DirectPath(_PATH), Backprop()])
    def test_in_place_with_parameters_of_one_gradient(self, estimator):
        """Two parameters of the stream's shape that are added have the very same gradient."""

        class Added(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.out = nn.Linear(3, 4, bias=False), nn.Linear(4, 4)
                self.p, self.q = (nn.Parameter(torch.randn(1, 2, 4)) for _ in range(2))

            def forward(self, x):
                return self.out(self.first(x)) + (self.p + self.q)

        s = seeded(lambda: Split(Added().double(), LinearHead(nn.Linear(4, 3).double())))
        x, y = noise(1, 2, 3), classes(1, 2, count=3)
        grads = estimator(s, x, y, generator=generator()).grads
        clipped = clip_(estimator(s, x, y, generator=generator()), 1e-3).grads
        ratio = 1e-3 / math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        for name, g in grads.items():
            torch.testing.assert_close(clipped[name], ratio * g, rtol=1e-2, atol=0.0)


class TestWriteGrads:
    def test_shapes_and_names_are_checked_together(self):
        s = mlp_split(3, 4, 3)
        wrong = {**made_up(s).grads, "trunk.0.weight": torch.ones(3), "nowhere": torch.ones(3)}
        with pytest.raises(SplitError) as error:
            write_grads(s.model, estimate_of(wrong))
        assert len(error.value.problems) == 2
        assert "trunk.0.weight has shape (3,): return the parameter's shape, (4, 3)" in str(error.value)

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
