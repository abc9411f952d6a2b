"""Cuts that cannot work are refused, with what to do."""

import pytest
import torch
from _cuts import BackwardsOrder, ByValue, Deep, PostProcessed, Skipping, built
from _toolkit import classes, generator, noise
from torch import nn

from splitfg import (
    LinearHead,
    Split,
    SplitError,
    SplitFG,
    split,
)


class TestRefusals:
    def test_unknown_module(self):
        with pytest.raises(SplitError, match=r"no module named 'out\.fcc'; did you mean out\.fc"):
            split(Deep(), "out.fcc")

    def test_no_linear_layer(self):
        with pytest.raises(SplitError, match=r"no nn\.Linear.*at="):
            split(nn.Sequential(nn.Conv1d(2, 2, 1), nn.Flatten()))

    def test_other_values_cross(self):
        with pytest.raises(SplitError, match="what follows middle also reads x"):
            split(Skipping(), "middle")

    def test_control_flow_by_value(self):
        with pytest.raises(SplitError, match=r"cannot be traced.*Split\(trunk, head\)"):
            split(ByValue(), "middle")

    def test_a_module_called_twice(self):
        class TwiceCalled(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.fc = nn.Linear(4, 4), nn.Linear(4, 3)

            def forward(self, x):
                return self.fc(self.body(self.body(x)))

        with pytest.raises(SplitError, match="body is called 2 times"):
            split(TwiceCalled(), "body")

    @pytest.mark.parametrize(
        "after",
        [
            nn.Softmax(dim=-1),
            nn.Tanh(),
            pytest.param(
                type("SoftCap", (nn.Module,), {"forward": lambda self, z: 30 * torch.tanh(z / 30)})(),
            ),
        ],
        ids=lambda m: type(m).__name__,
    )
    def test_outputs_that_are_processed_further(self, after):
        """Softmax, a squashing, or a soft cap that hardly shows on small logits."""
        model, x = built(lambda: PostProcessed(after)), noise(5, 4)
        with pytest.raises(SplitError, match="do not add up to the model"):
            split(model, example=x)
        with pytest.raises(SplitError, match="do not add up to the model"):
            SplitFG(2)(split(model), x, classes(5, count=3), generator=generator())

    def test_outputs_that_are_processed_further_after_a_zeroed_layer(self):
        model = built(lambda: PostProcessed(nn.Tanh()))
        nn.init.zeros_(model.fc.weight)
        nn.init.zeros_(model.fc.bias)
        with pytest.raises(SplitError, match="do not add up to the model"):
            split(model, example=noise(5, 4))

    def test_outputs_that_are_more_than_a_tensor(self):
        model = built(lambda: PostProcessed(type("Pair", (nn.Module,), {"forward": lambda self, z: (z, z)})()))
        with pytest.raises(SplitError, match="returns more than its outputs"):
            split(model, example=noise(5, 4))

    def test_last_registered_is_not_last_called(self):
        with pytest.raises(SplitError, match="do not add up to the model"):
            SplitFG(2)(split(built(BackwardsOrder)), noise(5, 4), classes(5, count=3), generator=generator())

    def test_everything_at_once(self):
        trunk, head = nn.Linear(3, 3), nn.Linear(3, 3)
        head.weight, head.bias = trunk.weight, nn.Parameter(torch.zeros(3, dtype=torch.float64))
        with pytest.raises(SplitError) as caught:
            Split(trunk, LinearHead(head))
        assert len(caught.value.problems) == 2
        assert all(word in str(caught.value) for word in ("share trunk.weight", "mixed dtypes"))

    @pytest.mark.parametrize("policy", ["both", "INCLUDE", True])
    def test_an_unknown_policy_for_tied_parameters(self, policy):
        with pytest.raises(SplitError, match=r"Tied\.EXCLUDE.*Tied\.INCLUDE"):
            split(Deep(), tied=policy)

    def test_nothing_to_train(self):
        with pytest.raises(SplitError, match="no parameter is trained"):
            Split(nn.Linear(3, 3).requires_grad_(False), LinearHead(nn.Linear(3, 2).requires_grad_(False)))
