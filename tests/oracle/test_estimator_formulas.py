"""Estimates by formula, where the tangents are known; and micro-batches and chunks, which must not change them."""

from functools import partial

import pytest
import torch
from _awkward import awkward_split
from _toolkit import (
    classes,
    close,
    cross_entropy,
    exact,
    flat,
    generator,
    mlp_split,
    noise,
    trunk_names,
)
from torch import nn

from splitfg import (
    Backprop,
    CentralDifference,
    CheckpointedBackprop,
    CrossEntropy,
    EvolutionStrategy,
    ForwardGradient,
    ForwardMode,
    FrozenTrunk,
    Gaussian,
    LinearHead,
    Orthogonal,
    ProbedHead,
    Projection,
    Rademacher,
    ReverseModeHead,
    Split,
    SplitFG,
)
from splitfg.tangents import Layout, TangentSource


class TestGivenTangents:
    """With the tangents known, an estimate is a formula."""

    K = 5

    def tangents(self, params, law=None, seed=0):
        layout = Layout.of(params)
        return next(iter(TangentSource(law or Gaussian(), layout, self.K, None, generator(seed))))

    @pytest.mark.parametrize("law", [Gaussian(), Rademacher(), Orthogonal()], ids=lambda law: type(law).__name__)
    def test_mean_of_scores_on_tangents(self, law):
        """ĝ = (1/K) Σ <g, v_k> v_k and the scores are <g, v_k>."""
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        g, V = flat(exact(s, x, y), trunk_names(s)), self.tangents(s.trunk_params(), law)
        estimate = SplitFG(self.K, law=law)(s, x, y, generator=generator())
        torch.testing.assert_close(estimate.stats.scores, V @ g)
        torch.testing.assert_close(flat(estimate.grads, trunk_names(s)), (V @ g) @ V / self.K)
        assert not estimate.stats.biased

    def test_forward_gradient(self):
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        g, V = flat(exact(s, x, y)), self.tangents(s.trained_params())
        estimate = ForwardGradient(self.K)(s, x, y, generator=generator())
        torch.testing.assert_close(flat(estimate.grads, exact(s, x, y)), (V @ g) @ V / self.K)

    def test_prediction_is_a_control_variate(self):
        """p + (1/K) Σ <g - p, v_k> v_k; names that are not given count as zero, others are not asked for."""
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        names = trunk_names(s)
        given = {names[0]: noise(4, 3, seed=8), "head.0.bias": noise(3)}
        p = flat({n: given.get(n, torch.zeros_like(t)) for n, t in s.trunk_params().items()})
        g, V = flat(exact(s, x, y), names), self.tangents(s.trunk_params())
        estimate = SplitFG(self.K)(s, x, y, generator=generator(), prediction=given)
        torch.testing.assert_close(flat(estimate.grads, names), p + (V @ (g - p)) @ V / self.K)
        torch.testing.assert_close(estimate.grads["head.0.bias"], exact(s, x, y)["head.0.bias"])

    @pytest.mark.parametrize("chunk", [None, 1, 2])
    @pytest.mark.parametrize("law", [Gaussian(), Orthogonal()], ids=lambda law: type(law).__name__)
    def test_projection_is_least_squares(self, law, chunk):
        """The point of the span nearest to g, found by brute force; chunks drawn again are the same tangents."""
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        g, V = flat(exact(s, x, y), trunk_names(s)), self.tangents(s.trunk_params(), law)
        nearest = V.T @ torch.linalg.lstsq(V.T, g.unsqueeze(1)).solution.squeeze(1)
        estimator = SplitFG(self.K, law=law, engine=ForwardMode(chunk=chunk), combine=Projection())
        estimate = estimator(s, x, y, generator=generator())
        torch.testing.assert_close(flat(estimate.grads, trunk_names(s)), nearest)
        assert estimate.stats.biased

    def test_projection_of_the_whole_forward_gradient(self):
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        g, V = flat(exact(s, x, y)), self.tangents(s.trained_params())
        nearest = V.T @ torch.linalg.lstsq(V.T, g.unsqueeze(1)).solution.squeeze(1)
        estimator = ForwardGradient(self.K, engine=ForwardMode(chunk=2), combine=Projection())
        torch.testing.assert_close(flat(estimator(s, x, y, generator=generator()).grads, exact(s, x, y)), nearest)

    def test_projection_with_a_prediction(self):
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        names = trunk_names(s)
        prediction = {n: noise(*t.shape, seed=8) for n, t in s.trunk_params().items()}
        p, g, V = flat(prediction), flat(exact(s, x, y), names), self.tangents(s.trunk_params())
        nearest = p + V.T @ torch.linalg.lstsq(V.T, (g - p).unsqueeze(1)).solution.squeeze(1)
        estimator = SplitFG(self.K, engine=ForwardMode(chunk=2), combine=Projection())
        actual = estimator(s, x, y, generator=generator(), prediction=prediction).grads
        torch.testing.assert_close(flat(actual, names), nearest)

    def test_evolution_strategy_is_its_formula(self):
        """(L(θ + σv) - L(θ - σv)) / 2σ by hand, at a σ that is far from infinitesimal."""
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        V, sigma = self.tangents(s.trained_params()), 0.3
        layout, theta = Layout.of(s.trained_params()), flat(s.trained_params())

        def loss(point):
            return cross_entropy(torch.func.functional_call(s.model, layout.unflatten(point), (x,)), y)

        scores = torch.stack([(loss(theta + sigma * v) - loss(theta - sigma * v)) / (2 * sigma) for v in V]).detach()
        estimate = EvolutionStrategy(self.K, sigma=sigma)(s, x, y, generator=generator())
        torch.testing.assert_close(flat(estimate.grads, s.trained_params()), scores @ V / self.K)

    def test_evolution_strategy_is_biased_by_the_square_of_sigma(self):
        """On the same tangents, a fourth of the distance to the forward gradient at half the sigma."""
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        limit = flat(ForwardGradient(self.K)(s, x, y, generator=generator()).grads)
        coarse, fine = (
            (flat(EvolutionStrategy(self.K, sigma=sigma)(s, x, y, generator=generator()).grads) - limit).norm()
            for sigma in (2e-2, 1e-2)
        )
        assert (coarse / fine).item() == pytest.approx(4, rel=0.1)

    def test_finite_differences_say_that_they_are_biased(self):
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        assert EvolutionStrategy(self.K)(s, x, y, generator=generator()).stats.biased


WEIGHTS = torch.tensor([0.5, 1.0, 2.0])


LOSSES = {
    "plain": (lambda: CrossEntropy(), {}),
    "ignoring": (lambda: CrossEntropy(ignore_index=-1), {"ignore_index": -1}),
    "weighted": (lambda: CrossEntropy(class_weights=WEIGHTS), {"weight": WEIGHTS.double()}),
    "everything": (
        lambda: CrossEntropy(ignore_index=-1, class_weights=WEIGHTS, label_smoothing=0.2),
        {"ignore_index": -1, "weight": WEIGHTS.double(), "label_smoothing": 0.2},
    ),
}


ESTIMATORS = {
    "split_fg": lambda **s: SplitFG(3, **s),
    "split_fg_chunk_1": lambda **s: SplitFG(3, engine=ForwardMode(chunk=1), **s),
    "split_fg_projection": lambda **s: SplitFG(3, engine=ForwardMode(chunk=2), combine=Projection(), **s),
    "split_fg_measured": lambda **s: SplitFG(3, engine=CentralDifference(step=1e-4), **s),
    "forward_gradient": lambda **s: ForwardGradient(3, **s),
    "evolution": lambda **s: EvolutionStrategy(3, **s),
    "frozen": lambda **s: FrozenTrunk(**s),
    "backprop": lambda **s: Backprop(**s),
    "backprop_closed": lambda **s: Backprop(closed_head=True, **s),
    "checkpointed": lambda **s: CheckpointedBackprop(**s),
}


HEADS = {
    "linear": lambda: LinearHead(nn.Linear(4, 3)),
    "factored": lambda: LinearHead(nn.Linear(4, 2), nn.Linear(2, 3, bias=False), block=4),
    "reverse": lambda: ReverseModeHead(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))),
    "probed": lambda: ProbedHead(nn.Linear(4, 3)),
}


class TestParts:
    """A batch in micro-batches is the same batch."""

    @pytest.mark.parametrize("rows", [1, 3, 7])
    @pytest.mark.parametrize("loss", LOSSES)
    @pytest.mark.parametrize("name", ESTIMATORS)
    def test_micro_batches_are_the_whole(self, name, loss, rows):
        """Uneven parts, ignored rows spread unevenly over them, and class weights."""
        s = mlp_split(3, 4, 3, loss=LOSSES[loss][0]())
        x, y = noise(7, 3), torch.tensor([0, 2, 1, 1, 2, 0, 2])
        if "ignore_index" in LOSSES[loss][1] and rows > 1:
            y[[1, 2, 5]] = -1
        whole = ESTIMATORS[name]()(s, x, y, generator=generator())
        parts = ESTIMATORS[name](micro_batch=rows)(s, x, y, generator=generator())
        torch.testing.assert_close(parts.loss, whole.loss)
        torch.testing.assert_close(parts.stats.scores, whole.stats.scores)
        close(parts.grads, whole.grads, 1e-8)

    @pytest.mark.parametrize("loss", LOSSES)
    def test_the_whole_is_autograd(self, loss):
        """So that the test above compares with the right thing."""
        s, settings = mlp_split(3, 4, 3, loss=LOSSES[loss][0]()), LOSSES[loss][1]
        x, y = noise(7, 3), torch.tensor([0, 2, 1, 1, 2, 0, 2])
        if "ignore_index" in settings:
            y[[1, 2, 5]] = -1
        estimate = SplitFG(16, law=Orthogonal(), micro_batch=2)(s, x, y, generator=generator())
        close(estimate.grads, exact(s, x, y, criterion=partial(cross_entropy, **settings)))

    @pytest.mark.parametrize("name", ["split_fg", "forward_gradient", "frozen", "backprop"])
    def test_a_part_may_be_all_padding(self, name):
        s = mlp_split(3, 4, 3, loss=CrossEntropy(ignore_index=-1))
        x, y = noise(4, 3), torch.tensor([-1, -1, 1, 2])
        whole = ESTIMATORS[name]()(s, x, y, generator=generator())
        close(ESTIMATORS[name](micro_batch=2)(s, x, y, generator=generator()).grads, whole.grads)

    @pytest.mark.parametrize("rows", [None, 3])
    @pytest.mark.parametrize("head", HEADS)
    def test_lean_is_the_same(self, head, rows):
        """u before the tangents, the head's gradient after them: the very same numbers."""
        s = Split(nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double(), HEADS[head]().double())
        x, y = noise(7, 3), torch.tensor([0, 2, 1, 1, 2, 0, 2])
        plain, lean = (
            SplitFG(3, engine=ForwardMode(1), micro_batch=rows, lean=lean)(s, x, y, generator=generator())
            for lean in (False, True)
        )
        assert torch.equal(plain.loss, lean.loss)
        assert torch.equal(plain.stats.scores, lean.stats.scores)
        assert plain.grads.keys() == lean.grads.keys()
        assert all(torch.equal(g, lean.grads[name]) for name, g in plain.grads.items())

    def test_several_inputs(self):
        s, x, y = awkward_split("several_inputs")
        whole = SplitFG(3)(s, x, y, generator=generator())
        close(SplitFG(3, micro_batch=3)(s, x, y, generator=generator()).grads, whole.grads)


class TestChunks:
    """How many tangents ride together changes the cost, never the numbers."""

    @pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
    @pytest.mark.parametrize("estimator", [SplitFG, ForwardGradient])
    @pytest.mark.parametrize("law", [Gaussian(), Rademacher(), Orthogonal()], ids=lambda law: type(law).__name__)
    def test_same_estimate(self, estimator, law, chunk):
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        first, second = generator(), generator()
        whole = estimator(7, law=law)(s, x, y, generator=first)
        parts = estimator(7, law=law, engine=ForwardMode(chunk=chunk))(s, x, y, generator=second)
        torch.testing.assert_close(parts.stats.scores, whole.stats.scores)
        close(parts.grads, whole.grads)
        assert torch.equal(first.get_state(), second.get_state())

    @pytest.mark.parametrize("block", [1, 4, 9])
    def test_same_estimate_whatever_the_head_takes_at_once(self, block):
        x, y = noise(5, 3), classes(5, count=3)
        whole = SplitFG(3)(mlp_split(3, 4, 3), x, y, generator=generator())
        close(SplitFG(3)(mlp_split(3, 4, 3, block=block), x, y, generator=generator()).grads, whole.grads)
