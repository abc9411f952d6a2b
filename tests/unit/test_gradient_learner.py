"""The learner that ties estimate, clipping, schedule and optimizer together, and goes on where it stopped."""

import copy
import math

import pytest
import torch
from _steps import RECIPES, every_recipe, values
from _toolkit import classes, generator, mlp_split, noise

from splitfg import (
    Backprop,
    Conditioned,
    CosineWithWarmup,
    ForwardGradient,
    GradientLearner,
    Learner,
    RunningMagnitude,
    SplitError,
    SplitFG,
    write_grads,
)
from splitfg.recipes import SGD, Adam
from splitfg.training import momentum


def learner(recipe, *, conditioned=False, predicted=False, seed=0):
    """A learner with everything on: clipping, a schedule, running magnitudes, a prediction from momentum."""
    s = mlp_split(3, 4, 4, 3)
    estimator = SplitFG(3, law=Conditioned(RunningMagnitude())) if conditioned else SplitFG(3)
    optimizer = recipe.build(s, rho=0.3)
    return GradientLearner(
        s,
        estimator,
        optimizer,
        schedule=CosineWithWarmup(total=10, warmup=2),
        prediction=(lambda: momentum(s, optimizer)) if predicted else None,
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

    @pytest.mark.parametrize("frozen_first", [False, True])
    @pytest.mark.parametrize("bound", [0.05, 0.2, 1e3])
    def test_apart_trunk_and_head_are_clipped_each_by_itself(self, bound, frozen_first):
        """Also where the trunk thaws after the learner was made."""
        s = mlp_split(3, 4, 3)
        before, grads = values(s), Backprop()(s, self.x, self.y).grads
        optimizer = SGD(lr=1.0).build(s)
        s.trunk[0].requires_grad_(not frozen_first)
        ours = GradientLearner(s, Backprop(), optimizer, max_norm=bound, clip_apart=True)
        s.trunk[0].requires_grad_(True)
        ours.step(self.x, self.y, generator=generator())
        trunk = set(s.trunk_params())
        for names in (trunk, set(grads) - trunk):
            size = torch.cat([grads[n].flatten() for n in names]).norm().item()
            for n in names:
                torch.testing.assert_close(values(s)[n], before[n] - grads[n] * min(1, bound / size), rtol=1e-4, atol=0)

    def test_prediction_comes_from_momentum(self):
        """The second step's estimate has the first's momentum as control variate."""
        ours = learner(Adam(lr=0.1), predicted=True)
        s, g = ours.split, generator()
        ours.step(self.x, self.y, generator=g)
        prediction = {n: m.clone() for n, m in momentum(s, ours.update.optimizer.optimizer).items()}
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
        seen = ours.learned["magnitude"].state_dict()["mean_square"]
        assert set(seen) == set(twin.trunk_params())
        for n, m in seen.items():
            torch.testing.assert_close(m, 0.01 * estimate.grads[n].square())

    def test_a_state_can_be_loaded_again(self):
        """torch's optimizers go on in the tensors they are given."""
        ours = learner(Adam(lr=0.1))
        ours.step(self.x, self.y, generator=generator())
        state = copy.deepcopy(ours.state_dict())
        ends = []
        for _ in range(2):
            ours.load_state_dict(state)
            ends.append([float(ours.step(self.x, self.y, generator=generator()).loss) for _ in range(3)])
        assert ends[0] == ends[1]

    def test_a_checkpoint_of_another_estimator_is_refused_before_anything_changes(self):
        other, ours = learner(Adam()), learner(Adam(), conditioned=True)
        before = copy.deepcopy(ours.state_dict()["model"])
        other.step(self.x, self.y, generator=generator())
        with pytest.raises(SplitError, match="the checkpoint has no magnitude"):
            ours.load_state_dict(other.state_dict())
        assert all(torch.equal(p, before[n]) for n, p in ours.state_dict()["model"].items())

    def test_an_estimator_of_the_users_that_learns(self):
        class Counting:
            def __init__(self, name):
                self.name, self.count = name, 0

            def __call__(self, split, x, y, *, generator):
                return SplitFG(1)(split, x, y, generator=generator)

            def learned_state(self):
                return {self.name: self}

            def update_state(self, split, estimate):
                self.count += 1

            def state_dict(self):
                return {"count": self.count}

            def load_state_dict(self, state):
                self.count = state["count"]

        s, counting = mlp_split(3, 4, 3), Counting("counter")
        ours = GradientLearner(s, counting, Adam().build(s))
        ours.step(self.x, self.y, generator=generator())
        again = GradientLearner(s, Counting("counter"), Adam().build(s))
        again.load_state_dict(ours.state_dict())
        assert again.estimator.count == 1
        with pytest.raises(SplitError, match="uses the name 'model', which is reserved"):
            GradientLearner(s, Counting("model"), Adam().build(s))

    def test_optimizers_that_would_move_nothing(self):
        s, other = mlp_split(3, 4, 3), mlp_split(3, 4, 3)
        with pytest.raises(SplitError, match=r"not parameters of split\.model"):
            GradientLearner(s, SplitFG(1), torch.optim.Adam(other.model.parameters()))
        with pytest.raises(SplitError, match=r"Adam\(\.\.\.\)\.build\(split\)"):
            GradientLearner(s, SplitFG(1), Adam())

    def test_optimizers_that_written_gradients_cannot_feed(self):
        """Before the first step, and together with other problems; a scheduler changes nothing."""
        s, other = mlp_split(3, 4, 3), mlp_split(3, 4, 3)
        with pytest.raises(SplitError, match=r"LBFGS .* needs a closure(.|\n)*not parameters of split\.model"):
            GradientLearner(s, SplitFG(1), torch.optim.LBFGS([*s.model.parameters(), *other.model.parameters()]))
        with pytest.raises(SplitError, match=r"SparseAdam .* dense gradients"):
            GradientLearner(s, SplitFG(1), torch.optim.SparseAdam(s.model.parameters()))
        adam = torch.optim.Adam(s.model.parameters())
        torch.optim.lr_scheduler.StepLR(adam, 1)
        GradientLearner(s, SplitFG(1), adam).step(self.x, self.y, generator=generator())

    def test_an_optimizer_in_an_object_that_passes_its_attributes_on(self):
        class Wrapper:
            def __init__(self, inner):
                self.inner = inner

            def __getattr__(self, name):
                return getattr(self.inner, name)

        found = []
        for wrap in (lambda optimizer: optimizer, Wrapper):
            s = mlp_split(3, 4, 3)
            ours = GradientLearner(s, SplitFG(1), wrap(torch.optim.SGD(s.model.parameters(), lr=0.1)))
            ours.step(self.x, self.y, generator=generator())
            found.append(torch.cat([p.detach().flatten() for p in s.model.parameters()]))
        assert torch.equal(*found)

    def test_magnitude_covers_the_head_where_tangents_do(self):
        s = mlp_split(3, 4, 3)
        law = Conditioned(RunningMagnitude())
        ours = GradientLearner(s, ForwardGradient(3, law=law), Adam().build(s))
        for _ in range(2):
            ours.step(self.x, self.y, generator=generator())
        assert set(law.magnitude.state_dict()["mean_square"]) == set(s.trained_params())

    def test_without_a_schedule_rates_are_whoever_sets_them(self):
        s = mlp_split(3, 4, 3)
        ours = GradientLearner(s, SplitFG(3), torch.optim.SGD(s.model.parameters(), lr=0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(ours.update.optimizer.optimizer, 1, gamma=0.0)
        ours.step(self.x, self.y, generator=generator())
        scheduler.step()
        before = values(s)
        ours.step(self.x, self.y, generator=generator())
        assert all(torch.equal(p, before[n]) for n, p in values(s).items())

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
