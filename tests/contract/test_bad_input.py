"""What cannot work is refused early, all of it in one error, with what to do."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from _refusals import ESTIMATORS, every_estimator, linear_split, refused, rows
from _toolkit import classes, generator, mlp_split, noise
from torch import nn

from splitfg import (
    Backprop,
    CentralDifference,
    CheckpointedBackprop,
    CrossEntropy,
    Estimate,
    EvolutionStrategy,
    ForwardGradient,
    FrozenTrunk,
    GradientLearner,
    LinearHead,
    NonFiniteError,
    Orthogonal,
    Projection,
    Rademacher,
    ReverseModeHead,
    RunningMagnitude,
    Split,
    SplitError,
    SplitFG,
    SquaredError,
    Stats,
    diagnose,
    parameter_groups,
    split,
    write_grads,
)
from splitfg.recipes import Adam
from splitfg.tangents import Gaussian, Layout


class TestBatches:
    @every_estimator
    def test_empty(self, name):
        problems = refused(ESTIMATORS[name], linear_split(), rows(0), classes(0, count=3))
        assert any("batch is empty" in p for p in problems)

    @every_estimator
    def test_rows_that_do_not_match(self, name):
        problems = refused(ESTIMATORS[name], linear_split(), rows(5), classes(4, count=3))
        assert any("different numbers of rows (5, 4)" in p for p in problems)

    def test_inputs_that_are_not_per_row(self):
        """The edges of a graph beside its nodes."""
        (problem,) = refused(SplitFG(2), linear_split(), (rows(5), torch.zeros(2, 9)), classes(5, count=3))
        assert "rows (5, 2, 5)" in problem
        assert "in the trunk, as buffers or in a closure" in problem

    def test_inputs_that_are_no_tensors(self):
        (problem,) = refused(SplitFG(2), linear_split(), rows().numpy(), classes(5, count=3))
        assert "torch.as_tensor(x)" in problem

    @every_estimator
    def test_generators_that_are_none(self, name):
        with pytest.raises(SplitError, match=r"the generator is 0: use torch\.Generator\('cpu'\)\.manual_seed\(0\)"):
            ESTIMATORS[name](linear_split(), rows(), classes(5, count=3), generator=0)

    @pytest.mark.parametrize("name", ["split_fg", "forward_gradient", "evolution"])
    def test_a_generator_is_needed_to_draw(self, name):
        with pytest.raises(SplitError, match=r"generator=torch\.Generator\(\)"):
            ESTIMATORS[name](linear_split(), rows(), classes(5, count=3), generator=None)

    @every_estimator
    def test_dtypes(self, name):
        (problem,) = refused(ESTIMATORS[name], linear_split(), rows().double(), classes(5, count=3))
        assert "inputs are torch.float64, the parameters torch.float32" in problem

    @every_estimator
    def test_devices(self, name):
        problems = refused(ESTIMATORS[name], linear_split(), rows().to("meta"), classes(5, count=3))
        assert any("the batch is on meta, the parameters on cpu" in p for p in problems)

    @every_estimator
    @pytest.mark.parametrize(("label", "words"), [(3, "span 0..3"), (-1, "span -1..2")])
    def test_targets_out_of_range(self, name, label, words):
        (problem,) = refused(ESTIMATORS[name], linear_split(), rows(), torch.tensor([0, 1, 2, 1, label]))
        assert words in problem
        assert "classes are 0..2" in problem

    @every_estimator
    def test_targets_out_of_range_in_a_later_part(self, name):
        estimator = replace(ESTIMATORS[name], micro_batch=2)
        (problem,) = refused(estimator, linear_split(), rows(), torch.tensor([0, 1, 2, 1, 9]))
        assert "9" in problem

    @every_estimator
    def test_targets_of_the_wrong_type(self, name):
        (problem,) = refused(ESTIMATORS[name], linear_split(), rows(), torch.rand(5))
        assert "torch.float32" in problem
        assert "SquaredError()" in problem
        s = linear_split(loss=SquaredError())
        (problem,) = refused(ESTIMATORS[name], s, rows(), torch.ones(5, 3, dtype=torch.long))
        assert "torch.int64" in problem
        assert "CrossEntropy()" in problem

    @every_estimator
    def test_targets_that_are_no_tensor(self, name):
        assert "target" in refused(ESTIMATORS[name], linear_split(), rows(), [0, 1, 2, 1, 0])[0]

    @every_estimator
    def test_targets_of_the_wrong_shape(self, name):
        (problem,) = refused(ESTIMATORS[name], linear_split(), rows(), classes(5, 2, count=3))
        assert "targets have shape (5, 2): pass shape (5,)" in problem
        s = linear_split(loss=SquaredError())
        (problem,) = refused(ESTIMATORS[name], s, rows(), torch.ones(5))
        assert "targets have shape (5,): pass shape (5, 3)" in problem

    @every_estimator
    def test_values_that_are_not_finite(self, name):
        s, y = linear_split(loss=SquaredError()), torch.ones(5, 3)
        y[2, 1] = float("nan")
        assert "NaN" in refused(ESTIMATORS[name], s, rows(), y)[0]

    @every_estimator
    def test_every_row_ignored(self, name):
        (problem,) = refused(ESTIMATORS[name], linear_split(), rows(), torch.full((5,), -100))
        assert "every target is ignore_index" in problem

    def test_class_weights_that_do_not_fit(self):
        s = linear_split(loss=CrossEntropy(class_weights=torch.ones(4)))
        (problem,) = refused(SplitFG(2), s, rows(), classes(5, count=3))
        assert "class_weights has shape (4,), but the head has 3 outputs" in problem

    @pytest.mark.parametrize(
        ("weights", "words"),
        [
            ([1.0, -1.0, 1.0], "negative, NaN or infinite"),
            ([1.0, float("nan"), 1.0], "negative, NaN or infinite"),
            ([0.0, 1.0, 1.0], "0 for the class of every target"),
        ],
    )
    def test_class_weights_without_a_loss(self, weights, words):
        s = linear_split(loss=CrossEntropy(class_weights=torch.tensor(weights)))
        (problem,) = refused(SplitFG(2), s, rows(), torch.zeros(5, dtype=torch.long))
        assert words in problem


class TestFit:
    @every_estimator
    def test_h_that_does_not_fit_the_head(self, name):
        s = Split(nn.Sequential(nn.Linear(3, 4)), LinearHead(nn.Linear(6, 3)))
        (problem,) = refused(ESTIMATORS[name], s, rows(), classes(5, count=3))
        assert "h of shape (5, 4)" in problem
        assert "(..., 6)" in problem

    def test_h_that_does_not_fit_a_nonlinear_head(self):
        s = Split(nn.Sequential(nn.Linear(3, 4)), ReverseModeHead(nn.Linear(6, 3)))
        refused(SplitFG(2), s, rows(), classes(5, count=3))

    @every_estimator
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_h_that_is_not_finite(self, name, value):
        x = rows()
        x[1, 1] = value
        with pytest.raises(NonFiniteError, match=r"h is not finite.*rho"):
            ESTIMATORS[name](linear_split(), x, classes(5, count=3), generator=generator())

    @every_estimator
    def test_a_loss_that_is_not_finite(self, name):
        s = linear_split()
        s.head.layers[0].bias.data[0] = float("nan")
        with pytest.raises(NonFiniteError, match="the loss is not finite"):
            ESTIMATORS[name](s, rows(), classes(5, count=3), generator=generator())

    def test_h_that_is_no_tensor(self):
        class Pair(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 4)

            def forward(self, x):
                return self.layer(x), None

        assert "tuple" in refused(SplitFG(2), linear_split(Pair()), rows(), classes(5, count=3))[0]

    def test_derivatives_that_are_not_finite(self):
        """The root of a zero: h is fine, J·v is not, and the gradient would be written without a word."""

        class Root(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 4)

            def forward(self, x):
                return torch.relu(self.layer(x)).sqrt()

        with pytest.raises(NonFiniteError):
            SplitFG(2)(linear_split(Root()), rows(), classes(5, count=3), generator=generator())

    @pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), torch.nn.functional.cross_entropy])
    def test_losses_that_are_not_ours(self, loss):
        with pytest.raises(SplitError, match=r"the loss is \w+: use splitfg's CrossEntropy\(\) or SquaredError\(\)"):
            split(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), loss=loss)

    def test_classes_in_place_of_objects(self):
        network = mlp_split(3, 4, 3)
        with pytest.raises(SplitError, match=r"the loss is the class CrossEntropy: pass an instance"):
            split(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), loss=CrossEntropy)
        with pytest.raises(SplitError, match=r"the estimator is the class SplitFG: pass an instance, SplitFG\(\)"):
            GradientLearner(network, SplitFG, Adam().build(network))

    def test_a_split_in_place_of_its_model(self):
        network = mlp_split(3, 4, 3)
        estimate = Estimate(torch.tensor(1.0), {}, Stats())
        with pytest.raises(SplitError, match=r"module must be an nn\.Module, got Split: pass split\.model"):
            write_grads(network, estimate)

    def test_heads_of_other_things(self):
        with pytest.raises(SplitError, match=r"module must be an nn\.Module, got function: use ProbedHead"):
            ReverseModeHead(lambda h: h)

    @pytest.mark.parametrize(
        ("trunk", "head"), [(nn.Linear(3, 4), nn.Linear(4, 3)), (torch.tanh, LinearHead(nn.Linear(4, 3)))]
    )
    def test_parts_of_the_wrong_kind(self, trunk, head):
        with pytest.raises(SplitError, match=r"the head is a Linear: use LinearHead|the trunk is a .*BlackBoxTrunk"):
            Split(trunk, head)

    @pytest.mark.parametrize("layers", [(4, 3), (nn.Sequential(nn.Linear(4, 3)),)])
    def test_linear_heads_of_other_things(self, layers):
        with pytest.raises(SplitError, match=r"layer 0 is a (int|Sequential), not a plain nn\.Linear.*ReverseModeHead"):
            LinearHead(*layers)

    @pytest.mark.parametrize(
        "use",
        [
            pytest.param(lambda model: parameter_groups(model, lr=0.1), id="groups"),
            pytest.param(
                lambda model: diagnose(model, rows(), classes(5, count=3), generator=generator()), id="diagnose"
            ),
            pytest.param(
                lambda model: GradientLearner(model, Backprop(), torch.optim.SGD(model.parameters())), id="learner"
            ),
            *(
                pytest.param(lambda model, e=e: e(model, rows(), classes(5, count=3), generator=generator()), id=name)
                for name, e in ESTIMATORS.items()
            ),
        ],
    )
    def test_a_model_where_a_split_is_wanted(self, use):
        with pytest.raises(
            SplitError, match=r"split must be a Split, got Linear: make one with splitfg\.split\(model\)"
        ):
            use(nn.Linear(3, 3))

    def test_a_cut_that_is_no_name(self):
        with pytest.raises(SplitError, match=r"at is 2: .*at='2'"):
            split(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), at=2)
        with pytest.raises(SplitError, match=r"the model is a .*BlackBoxTrunk"):
            split(torch.tanh)

    def test_parameters_on_several_devices(self):
        with pytest.raises(SplitError, match=r"mixed devices \(cpu, meta\)"):
            Split(nn.Linear(3, 4), LinearHead(nn.Linear(4, 3, device="meta")))

    def test_a_trunk_without_parameters(self):
        s = Split(nn.Tanh(), LinearHead(nn.Linear(3, 3)))
        assert "FrozenTrunk()" in refused(SplitFG(2), s, rows(), classes(5, count=3))[0]


class TestEverythingAtOnce:
    def test_one_error_lists_all(self):
        body = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 3))
        s = Split(nn.Linear(3, 4), ReverseModeHead(body))
        problems = refused(SplitFG(2), s, rows().double(), torch.tensor([0.0, 1.0, 2.0, 9.0]))
        wanted = ["batch statistics", "random in training mode", "rows (5, 4)", "torch.float64"]
        assert [any(w in p for p in problems) for w in wanted] == [True] * len(wanted)

    def test_what_h_shows_is_listed_too(self):
        """The batch's own problems do not hide that the head does not fit."""
        trunk = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Flatten())
        s = Split(trunk, LinearHead(nn.Linear(6, 3)))
        problems = refused(SplitFG(2), s, classes(5, 3, count=9), classes(5, count=3))
        assert [w in "".join(problems) for w in ("max_norm", "(..., 6)")] == [True, True]

    def test_nothing_is_listed_that_is_not_wrong(self):
        s = linear_split(loss=SquaredError())
        problems = refused(SplitFG(2), s, rows().double(), torch.ones(5, 3))
        assert len(problems) == 1

    def test_the_message_is_a_list(self):
        error = SplitError(["one", "two"])
        assert str(error) == "- one\n- two"
        assert error.problems == ("one", "two")
        assert str(SplitError(["one"])) == "one"
        assert isinstance(error, ValueError)


class TestSettings:
    @pytest.mark.parametrize("make", [SplitFG, ForwardGradient, EvolutionStrategy])
    @pytest.mark.parametrize("K", [0, -1])
    def test_tangents_are_needed(self, make, K):
        with pytest.raises(SplitError, match=f"K must be at least 1 tangent, got {K}.*FrozenTrunk"):
            make(K)

    @pytest.mark.parametrize("make", [SplitFG, ForwardGradient, EvolutionStrategy])
    @pytest.mark.parametrize("K", [8.0, "8", None, True, np.True_, torch.tensor(8), torch.tensor(8.0), np.array([8])])
    def test_tangents_are_counted(self, make, K):
        with pytest.raises(SplitError, match="K must be a whole number"):
            make(K)

    @pytest.mark.parametrize("make", [SplitFG, ForwardGradient, EvolutionStrategy])
    def test_whole_numbers_of_numpy_count(self, make):
        assert make(np.int64(8), micro_batch=np.int32(2)).K == 8

    @pytest.mark.parametrize(
        ("setting", "words"),
        [
            ({"law": Rademacher}, r"law is the class Rademacher: give an object, law=Rademacher\(\)"),
            ({"engine": CentralDifference}, r"engine=CentralDifference\(\)"),
            ({"engine": "central"}, "engine must be of type Engine, got 'central'"),
            ({"combine": Projection}, r"combine=Projection\(\)"),
        ],
    )
    def test_classes_in_place_of_objects(self, setting, words):
        with pytest.raises(SplitError, match=words):
            SplitFG(2, **setting)

    def test_all_settings_in_one_error(self):
        with pytest.raises(SplitError) as caught:
            EvolutionStrategy(0, sigma=0.0, micro_batch=0)
        assert len(caught.value.problems) == 3
        assert all(w in str(caught.value) for w in ("K must", "sigma must", "micro_batch must"))

    @pytest.mark.parametrize("make", [FrozenTrunk, Backprop, CheckpointedBackprop])
    @pytest.mark.parametrize("rows", [0, 2.5, True, torch.tensor(2), torch.tensor(2.0)])
    def test_micro_batch(self, make, rows):
        with pytest.raises(SplitError, match="micro_batch must be at least 1 row"):
            make(micro_batch=rows)

    @pytest.mark.parametrize("rho", [0.0, -0.1, 1.0001, float("nan"), float("inf")])
    def test_rho(self, rho):
        with pytest.raises(SplitError, match=r"rho must be in \(0, 1\]"):
            parameter_groups(mlp_split(3, 4, 3), lr=0.1, rho=rho)

    def test_more_orthogonal_tangents_than_dimensions(self):
        s = mlp_split(3, 4, 3)
        with pytest.raises(ValueError, match=r"17 orthogonal tangents.*16 parameters: lower K"):
            SplitFG(17, law=Orthogonal())(s, noise(5, 3), classes(5, count=3), generator=generator())

    def test_prediction_for_a_method_that_takes_none(self):
        s = mlp_split(3, 4, 3)
        optimizer = torch.optim.SGD(s.model.parameters(), lr=0.1)
        with pytest.raises(SplitError, match="Backprop takes no prediction"):
            GradientLearner(s, Backprop(), optimizer, prediction=dict)

    @pytest.mark.parametrize("beta", [-0.1, 1.0])
    def test_running_magnitude(self, beta):
        with pytest.raises(ValueError, match="beta"):
            RunningMagnitude(beta)

    def test_checkpointing_without_blocks(self):
        s = Split(nn.Linear(3, 4), LinearHead(nn.Linear(4, 3)))
        assert "name the blocks" in refused(CheckpointedBackprop(), s, rows(), classes(5, count=3))[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors():
    rows_of_two_lengths = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    (problem,) = refused(SplitFG(2), linear_split(), rows_of_two_lengths, classes(2, count=3))
    assert "to_padded_tensor" in problem


def test_classes_in_the_second_dimension():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    x, y = torch.randn(2, 3, 5, 5), classes(2, 5, 5, count=2)
    (problem,) = refused(SplitFG(2), split(model, at="2"), x, y)
    assert "output=lambda z: z.movedim(1, -1)" in problem
    found = Backprop()(split(model, at="2", output=lambda z: z.movedim(1, -1)), x, y).grads
    nn.functional.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(found, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_complex_parameters():
    model = nn.Sequential(nn.Linear(3, 3).to(torch.complex64), nn.Linear(3, 2))
    with pytest.raises(SplitError, match=r"0.weight, 0.bias are complex.*torch.complex"):
        split(model)


class Filter(nn.Module):
    """Multiplies spectra by complex numbers, which a real parameter holds."""

    def __init__(self, read):
        super().__init__()
        self.scale, self.last, self.read = nn.Parameter(torch.randn(2, 2)), nn.Linear(3, 3, bias=False), read

    def forward(self, x):
        return self.last(torch.fft.irfft(torch.fft.rfft(x) * self.read(self.scale), n=3))


def test_the_advice_for_complex_parameters():
    x, y = rows(), classes(5, count=3)
    model = Filter(lambda p: torch.complex(p[..., 0], p[..., 1]))
    s = split(model)
    found = ForwardGradient(2)(s, x, y, generator=generator()).stats.scores
    nn.functional.cross_entropy(model(x), y).backward()
    g = {name: p.grad for name, p in model.named_parameters()}
    v = Gaussian().draw(Layout.of(s.trained_params()), 2, generator())
    torch.testing.assert_close(found, v @ Layout.of(g).flatten(g))
    with pytest.raises(SplitError, match=r"torch.complex\(p\[..., 0\], p\[..., 1\]\)"):
        ForwardGradient(2)(split(Filter(torch.view_as_complex)), x, y, generator=generator())


def test_expanded_parameters():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].weight = nn.Parameter(torch.ones(1, 3).expand(3, 3))
    with pytest.raises(SplitError, match=r"entries of 0.weight share memory.*clone\(\)"):
        split(model)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    assert SplitFG(2)(split(model), rows(), classes(5, count=2), generator=generator()).grads


def test_a_model_that_returns_a_dict():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            h = self.first(x).tanh()
            return {"scores": {"all": [self.last(h)]}, "norm": h.norm()}

    with pytest.raises(SplitError, match=r"returned\['scores'\] or returned\['norm'\]"):
        SplitFG(1)(split(Named()), rows(), classes(5, count=2), generator=generator())
    s = split(Named(), output=lambda returned: returned["scores"]["all"][0])
    assert SplitFG(1)(s, rows(), classes(5, count=2), generator=generator()).grads


def test_scores_under_autocast_are_summed_in_float32():
    """Autocast is for the network: products of tangents keep their precision."""
    s, x, y = linear_split(), rows(), classes(5, count=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = SplitFG(2)(s, x, y, generator=generator())
    v = Gaussian().draw(Layout.of(s.trunk_params()), 2, generator())
    assert found.stats.scores.dtype == torch.float32
    g = Layout.of(s.trunk_params()).flatten({n: found.grads[n] for n in s.trunk_params()})
    torch.testing.assert_close(g, found.stats.scores @ v / 2)
