"""Estimators against autograd, wherever their answer is not random: full bases and exact methods."""

import pytest
import torch
from _awkward import AWKWARD, awkward_split
from _toolkit import (
    TiedLanguageModel,
    classes,
    close,
    exact,
    generator,
    mlp_split,
    noise,
    seeded,
)
from torch import nn

from splitfg import (
    Backprop,
    CentralDifference,
    CheckpointedBackprop,
    ForwardGradient,
    FrozenTrunk,
    Gaussian,
    OneSidedDifference,
    Orthogonal,
    ProbedHead,
    Projection,
    Rademacher,
    ReverseModeHead,
    Split,
    SplitFG,
    SquaredError,
    Tied,
    split,
)


def tied_model(policy):
    model = seeded(TiedLanguageModel).double()
    return split(model, tied=policy), classes(3, 4, count=5), classes(3, 4, count=5, seed=9)


class TestFullBasis:
    """With K = P orthogonal tangents the estimate *is* the gradient, so nothing statistical is left to hide in."""

    @pytest.mark.parametrize("name", AWKWARD)
    def test_split_fg_is_the_gradient(self, name):
        s, x, y = awkward_split(name)
        P = sum(p.numel() for p in s.trunk_params().values())
        estimate = SplitFG(P, law=Orthogonal())(s, x, y, generator=generator())
        close(estimate.grads, exact(s, x, y))
        assert estimate.stats.jvps == P
        assert estimate.stats.trunk_backward == 0

    @pytest.mark.parametrize("name", AWKWARD)
    def test_forward_gradient_is_the_gradient(self, name):
        s, x, y = awkward_split(name)
        P = sum(p.numel() for p in s.trained_params().values())
        estimate = ForwardGradient(P, law=Orthogonal())(s, x, y, generator=generator())
        close(estimate.grads, exact(s, x, y))

    @pytest.mark.parametrize(
        "combine_law", [Gaussian(), Rademacher(), Orthogonal()], ids=lambda law: type(law).__name__
    )
    def test_projection_onto_everything_is_the_gradient(self, combine_law):
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        P = sum(p.numel() for p in s.trunk_params().values())
        K = P if isinstance(combine_law, Orthogonal) else P + 9
        estimate = SplitFG(K, law=combine_law, combine=Projection())(s, x, y, generator=generator())
        close(estimate.grads, exact(s, x, y), 1e-8)

    @pytest.mark.parametrize("policy", [Tied.INCLUDE, Tied.EXCLUDE])
    def test_tied_table(self, policy):
        """Included: both roles. Excluded: the readout's alone, with the lookup reading the current table."""
        s, x, y = tied_model(policy)
        P = sum(p.numel() for p in s.trunk_params().values())
        expected = exact(s, x, y, readout_only=policy is Tied.EXCLUDE)
        assert not torch.allclose(exact(s, x, y)["table.weight"], exact(s, x, y, readout_only=True)["table.weight"])
        close(SplitFG(P, law=Orthogonal())(s, x, y, generator=generator()).grads, expected)
        total = sum(p.numel() for p in s.trained_params().values())
        close(ForwardGradient(total, law=Orthogonal())(s, x, y, generator=generator()).grads, expected)
        close(Backprop(readout_only=policy is Tied.EXCLUDE)(s, x, y).grads, expected)
        close(Backprop(closed_head=True, readout_only=policy is Tied.EXCLUDE)(s, x, y).grads, expected)

    @pytest.mark.parametrize("engine", [CentralDifference(), OneSidedDifference()], ids=lambda e: type(e).__name__)
    def test_measured_tangents(self, engine):
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        P = sum(p.numel() for p in s.trunk_params().values())
        estimate = SplitFG(P, law=Orthogonal(), engine=engine)(s, x, y, generator=generator())
        close(estimate.grads, exact(s, x, y), 1e-5)

    @pytest.mark.parametrize("make", [ReverseModeHead, ProbedHead])
    def test_nonlinear_heads(self, make):
        body = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))).double()
        s = Split(seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh())).double(), make(body))
        x, y = noise(5, 3), classes(5, count=3)
        estimate = SplitFG(16, law=Orthogonal())(s, x, y, generator=generator())
        close(estimate.grads, exact(s, x, y), 1e-7)

    @pytest.mark.parametrize("size", [0.0, 1.0, 100.0])
    def test_prediction_is_added_back_exactly(self, size):
        """The control variate cancels on a full basis, whatever it predicted."""
        s, x, y = mlp_split(3, 4, 3), noise(5, 3), classes(5, count=3)
        P = sum(p.numel() for p in s.trunk_params().values())
        prediction = {n: size * noise(*p.shape, seed=3) for n, p in s.trunk_params().items()}
        estimate = SplitFG(P, law=Orthogonal())(s, x, y, generator=generator(), prediction=prediction)
        close(estimate.grads, exact(s, x, y), 1e-8 * max(1, size**2))


class TestExactMethods:
    @pytest.mark.parametrize("name", AWKWARD)
    def test_backprop_is_autograd(self, name):
        s, x, y = awkward_split(name)
        for estimator in (Backprop(), Backprop(closed_head=True)):
            estimate = estimator(s, x, y)
            close(estimate.grads, exact(s, x, y))
            assert estimate.stats.trunk_backward == 1

    @pytest.mark.parametrize("blocks", [(), ("0", "2")])
    @pytest.mark.parametrize("closed_head", [False, True])
    def test_checkpointed_backprop_is_autograd(self, blocks, closed_head):
        s, x, y = mlp_split(3, 4, 4, 3), noise(5, 3), classes(5, count=3)
        estimate = CheckpointedBackprop(blocks=blocks, closed_head=closed_head)(s, x, y)
        close(estimate.grads, exact(s, x, y))

    @pytest.mark.parametrize("name", AWKWARD)
    def test_frozen_trunk_trains_the_head_alone(self, name):
        s, x, y = awkward_split(name)
        estimate = FrozenTrunk()(s, x, y)
        close(estimate.grads, {n: g for n, g in exact(s, x, y).items() if n in s.head_params()})
        assert (estimate.stats.jvps, estimate.stats.trunk_backward) == (0, 0)

    def test_squared_error(self):
        s, x, y = mlp_split(3, 4, 2, loss=SquaredError()), noise(5, 3), noise(5, 2, seed=4)

        def criterion(outputs, y):
            return 0.5 * (outputs - y).square().sum() / 5

        expected = exact(s, x, y, criterion=criterion)
        close(Backprop()(s, x, y).grads, expected)
        close(SplitFG(16, law=Orthogonal())(s, x, y, generator=generator()).grads, expected)
