"""Cuts that cannot work are refused, with what to do."""

import copy
import pickle

import pytest
import torch
from _cuts import ByValue, Deep, PostProcessed, Skipping, built
from _toolkit import classes, generator, noise
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from splitfg import (
    LinearHead,
    ReverseModeHead,
    Split,
    SplitError,
    SplitFG,
    SquaredError,
    split,
)


class TestRefusals:
    def test_unknown_module(self):
        with pytest.raises(SplitError, match=r"no module named 'out\.fcc'; did you mean out\.fc"):
            split(Deep(), "out.fcc")

    def test_models_that_have_no_shape_yet_or_no_parts_any_more(self):
        with pytest.raises(SplitError, match="run one batch through it first"):
            split(nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 3)))
        with pytest.raises(SplitError, match="the model is scripted"):
            split(torch.jit.ScriptModule())

    def test_no_linear_layer(self):
        with pytest.raises(SplitError, match=r"no nn\.Linear.*at="):
            split(nn.Sequential(nn.Conv1d(2, 2, 1), nn.Flatten()))

    def test_other_values_cross(self):
        with pytest.raises(SplitError, match="the part after middle also reads x"):
            split(Skipping(), "middle")

    def test_control_flow_by_value(self):
        with pytest.raises(SplitError, match=r"torch\.fx cannot trace the model.*Split\(trunk, head\)"):
            split(ByValue(), "middle", check=False)
        with pytest.raises(SplitError, match=r"not from middle.*Split\(trunk, head\)"):
            split(ByValue(), "middle", example=noise(4, 4).float())

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
        with pytest.raises(
            SplitError, match=r"cut at fc, do not compute the model's outputs.*logits.*head=ReverseModeHead"
        ):
            split(model, example=x)
        with pytest.raises(SplitError, match="do not compute the model's outputs"):
            SplitFG(2)(split(model, at="fc"), x, classes(5, count=3), generator=generator())

    def test_outputs_that_are_processed_further_after_a_zeroed_layer(self):
        model = built(lambda: PostProcessed(nn.Tanh()))
        nn.init.zeros_(model.fc.weight)
        nn.init.zeros_(model.fc.bias)
        with pytest.raises(SplitError, match="do not compute the model's outputs"):
            split(model, example=noise(5, 4))

    @pytest.mark.parametrize(
        ("forward", "words"),
        [
            (lambda _, z: (z, z), r"returns a tuple.*output=lambda.*returned\[0\]"),
            (lambda _, z: {"logits": z}, "returns a dict.*output=lambda.*logits"),
        ],
        ids=["tuple", "dict"],
    )
    def test_outputs_that_are_more_than_a_tensor(self, forward, words):
        model = built(lambda: PostProcessed(type("More", (nn.Module,), {"forward": forward})()))
        with pytest.raises(SplitError, match=words):
            split(model, example=noise(5, 4))
        with pytest.raises(SplitError, match="output=lambda"):
            SplitFG(2)(split(model), noise(5, 4), classes(5, count=3), generator=generator())

    @pytest.mark.parametrize("head", [None, ReverseModeHead])
    def test_outputs_without_a_last_dimension(self, head):
        class Squeezed(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.fc = nn.Linear(4, 4), nn.Linear(4, 1)

            def forward(self, x):
                return self.fc(torch.tanh(self.body(x))).squeeze(-1)

        s = split(built(Squeezed), loss=SquaredError(), head=head)
        with pytest.raises(SplitError, match=r"shape \(5,\).*return \(5, 1\), without squeeze"):
            SplitFG(2)(s, noise(5, 4), noise(5), generator=generator())

    @pytest.mark.parametrize("width", [4, 6])
    def test_last_registered_is_not_last_called_in_a_model_that_cannot_be_traced(self, width):
        class ByValueBackwards(nn.Module):
            def __init__(self):
                super().__init__()
                self.readout, self.body = nn.Linear(width, 3), nn.Linear(4, width)

            def forward(self, x):
                return self.readout(torch.tanh(self.body(x if x.sum() > 0 else -x)))

        model = built(ByValueBackwards)
        with pytest.raises(SplitError, match=r"outputs come from readout, not from body.*at='readout'"):
            SplitFG(2)(split(model), noise(5, 4), classes(5, count=3), generator=generator())

    @pytest.mark.parametrize("parametrized", [False, True])
    def test_a_last_layer_without_a_closed_form(self, parametrized):
        class Doubled(nn.Linear):
            def forward(self, x):
                return 2 * super().forward(x)

        last = weight_norm(nn.Linear(4, 3)) if parametrized else Doubled(4, 3)
        with pytest.raises(SplitError, match=r"the last linear layer, 2 .*at='2'.*reverse mode"):
            split(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), last))
        with pytest.raises(SplitError, match=r"not a plain nn\.Linear.*ReverseModeHead"):
            LinearHead(last)

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
        with pytest.raises(SplitError, match="no parameter requires a gradient"):
            Split(nn.Linear(3, 3).requires_grad_(False), LinearHead(nn.Linear(3, 2).requires_grad_(False)))


class TestUsesAsAModule:
    def test_a_method_of_modules_names_that_of_the_model(self):
        network = split(Deep())
        for name in ("parameters", "named_parameters", "train", "eval", "to", "state_dict", "training", "zero_grad"):
            with pytest.raises(AttributeError, match=rf"not a module and has no '{name}': use split\.model\.{name}"):
                getattr(network, name)
        with pytest.raises(AttributeError, match=r"parameter_groups\(split, lr=\.\.\.\)"):
            torch.optim.Adam(network.parameters())
        with pytest.raises(AttributeError, match=r"use split\.predict\(x\)"):
            network.forward(noise(4, 4))

    def test_a_call_names_predict(self):
        with pytest.raises(TypeError, match=r"use split\.predict\(x\)"):
            split(Deep())(noise(4, 4))

    def test_other_names_and_errors_of_properties_are_pythons(self):
        class Broken(Split):
            @property
            def broken(self):
                raise AttributeError("inside")

        network = Broken(nn.Linear(2, 3), LinearHead(nn.Linear(3, 2)))
        with pytest.raises(AttributeError, match="inside"):
            _ = network.broken
        with pytest.raises(AttributeError, match=r"^'Broken' object has no attribute 'modle'") as raised:
            _ = network.modle
        assert (raised.value.name, raised.value.obj) == ("modle", network)  # for Python's suggestion, .model

    def test_splits_are_no_modules_to_functions_that_ask(self):
        network = split(Deep())
        assert not any(hasattr(network, name) for name in ("parameters", "train", "forward", "__deepcopy__"))

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
    def test_copies_predict_the_same(self, copied):
        network, x = Split(nn.Linear(4, 3), LinearHead(nn.Linear(3, 2))), noise(5, 4).float()
        torch.testing.assert_close(copied(network).predict(x), network.predict(x))
