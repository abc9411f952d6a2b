"""The first batch compares J·v with a finite difference: trunks where forward mode and backprop disagree raise."""

import warnings

import pytest
import torch
from _refusals import linear_split, refused
from _toolkit import classes, close, exact, generator, noise, seeded
from test_no_backward import Memory
from torch import nn

from splitfg import (
    ActivityFG,
    Backprop,
    CapturedLearner,
    CentralDifference,
    DirectPath,
    ForwardGradient,
    ForwardMode,
    GradientLearner,
    LinearHead,
    MeanJacobian,
    ResidualPath,
    Split,
    SplitError,
    SplitFG,
    split,
)
from splitfg.splitting import tangent_problems


class Gate(nn.Module):
    """Scales its input by a function of it, computed in one of several ways."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(3, 4), how
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        h = self.layer(x)
        if self.how == "detach":
            return h * torch.sigmoid(h).detach()
        with torch.no_grad():
            gate = torch.sigmoid(h if self.how == "no_grad" else torch.ones_like(h))
            if self.how == "statistics":
                self.mean.lerp_(h.mean(0), 0.1)
        return h * gate


def gated(how):
    return linear_split(seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Gate(how))))


X, Y = noise(5, 3), classes(5, count=3)


@pytest.mark.parametrize("estimator", [SplitFG(2), SplitFG(2, engine=ForwardMode(chunk=1)), ForwardGradient(2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_grad_raises_with_the_module(estimator, dtype):
    s = gated("no_grad")
    s.model.to(dtype)
    (problem,) = refused(estimator, s, X.to(dtype), Y)
    assert "2 (Gate)" in problem
    assert ".detach()" in problem


@pytest.mark.parametrize("how", ["detach", "constant", "statistics"])
def test_blocks_that_stop_no_tangent_are_fine(how):
    s = gated(how)
    s.model.double()
    estimate = SplitFG(2)(s, X, Y, generator=generator())
    close(Backprop()(s, X, Y).grads, exact(s, X, Y))
    assert estimate.grads


def test_methods_without_forward_mode_ignore_it():
    s = gated("no_grad")
    s.model.double()
    assert SplitFG(2, engine=CentralDifference())(s, X, Y, generator=generator()).grads


@torch.library.custom_op("splitfg_tests::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


@torch.library.custom_op("splitfg_tests::sign", mutates_args=())
def sign(x: torch.Tensor) -> torch.Tensor:
    """Has no derivative for backprop either."""
    return x.sign()


square.register_autograd(
    lambda ctx, g: 2 * g * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Squares(nn.Module):
    def __init__(self, residual):
        super().__init__()
        self.layer, self.residual = nn.Linear(3, 4), residual

    def forward(self, x):
        h = self.layer(x)
        return h + square(h) if self.residual else square(h)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("estimator", [SplitFG(2), ForwardGradient(2)])
def test_an_operator_with_a_backward_rule_alone_raises(estimator, residual):
    s = linear_split(nn.Sequential(nn.Linear(3, 3), Squares(residual)))
    (problem,) = refused(estimator, s, X.float(), Y)
    assert "1 (Squares)" in problem
    assert "splitfg_tests.square" in problem
    assert "CentralDifference" in problem


def test_the_advice_works():
    s = linear_split(nn.Sequential(nn.Linear(3, 3), Squares(True)))
    assert SplitFG(2, engine=CentralDifference())(s, X.float(), Y, generator=generator()).grads


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x):
        h = self.layer(x)
        return h + h.detach().tanh() + torch.zeros_like(h) + h.data + sign(h.detach())


def test_constants_are_fine():
    assert SplitFG(2)(linear_split(Detached()), X.float(), Y, generator=generator()).grads


def wrong(factor):
    """A square whose jvp is off by a factor; its backward is right."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

        @staticmethod
        def jvp(ctx, t):
            return factor * 2 * t * ctx.saved_tensors[0]

        @staticmethod
        def vmap(info, dims, x):
            return Square.apply(x), dims[0]

    return Square


class Straight(torch.autograd.Function):
    """Rounds, with the derivative of the identity in both modes."""

    @staticmethod
    def forward(x):
        return (8 * x).round() / 8

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    def jvp(ctx, t):
        return t.clone()

    @staticmethod
    def vmap(info, dims, x):
        return Straight.apply(x), dims[0]


class Applied(nn.Module):
    """A function on a branch beside its input, or alone."""

    def __init__(self, function, *, residual=False):
        super().__init__()
        self.function, self.residual = function, residual

    def forward(self, x):
        return x + self.function(x) if self.residual else self.function(x)


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})[0]


def around(module):
    return linear_split(
        seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), module), nn.Linear(4, 4)))
    )


FAULTS = {
    "custom_op": (lambda: square, "splitfg_tests.square"),
    "wrong_jvp": (lambda: wrong(0.5).apply, "jvp of Square"),
    "no_jvp_but_zeros": (lambda: wrong(0.0).apply, "jvp of Square"),
    "quantised": (quantised, "neither a forward-mode rule nor a backward rule"),
}
TANGENTS = {
    "split_fg": SplitFG(2),
    "chunk_1": SplitFG(2, engine=ForwardMode(chunk=1)),
    "forward_gradient": ForwardGradient(2),
    "activity_fg": ActivityFG(2),
}


@pytest.mark.filterwarnings("ignore:.*quantization:DeprecationWarning")
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("estimator", TANGENTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_lost_and_wrong_tangents_raise_with_the_module(fault, estimator, residual):
    build, words = FAULTS[fault]
    s = around(Applied(seeded(build), residual=residual))
    (problem,) = refused(TANGENTS[estimator], s, X.float(), Y)
    assert problem.startswith("1.1" if fault != "quantised" else "1.1.function (")
    assert words in problem
    assert "CentralDifference()" in problem


def test_one_problem_for_one_cause():
    s = linear_split(
        seeded(lambda: nn.Sequential(nn.Linear(3, 4), *[Applied(square, residual=True) for _ in range(3)]))
    )
    (problem,) = refused(SplitFG(2), s, X.float(), Y)
    assert problem.startswith("1 (Applied), 2 (Applied), 3 (Applied): ")


def test_learned_maps_check_tangents():
    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.second = nn.Linear(3, 4), Applied(wrong(0.5).apply), nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            return x + self.second(self.inner(x))

    path = ResidualPath(writers=("first", "second"))
    (problem,) = refused(DirectPath(path, feedback=MeanJacobian()), linear_split(Stream()), X.float(), Y)
    assert problem.startswith("inner (Applied)")
    assert DirectPath(path)(linear_split(Stream()), X.float(), Y).grads  # uses no tangents


def rounded(x):
    return x + (x.round() - x).detach()


RIGHT = {
    "relu": nn.ReLU,
    "max": lambda: Applied(lambda x: x.unflatten(1, (2, 2)).amax(1).repeat(1, 2)),
    "straight": lambda: Applied(Straight.apply),
    "straight_by_detach": lambda: Applied(rounded),
    "rounded": lambda: Applied(lambda x: (4 * x).round() / 4, residual=True),
    "right_jvp": lambda: Applied(wrong(1.0).apply),
    "clamp": lambda: nn.Hardtanh(-0.1, 0.1),
    "jump": lambda: Applied(lambda x: x * (x > 0.1)),
    "top": lambda: Applied(lambda x: x * torch.zeros_like(x).scatter(1, x.topk(2, 1).indices, 1.0)),
    "sorted": lambda: Applied(lambda x: x.sort(1).values),
    "large": lambda: Applied(lambda x: 1e4 * x),
    "steep": lambda: Applied(lambda x: torch.sin(20 * x)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("depth", [1, 6])
def test_kinks_jumps_and_deliberate_rules_pass(name, depth, dtype):
    """Several draws of a network each: a check that cries wolf would be switched off."""
    for seed in range(5):
        blocks = seeded(lambda: [m for _ in range(depth) for m in (nn.Linear(4, 4), RIGHT[name]())], seed)
        trunk = nn.Sequential(*blocks, nn.Linear(4, 4)).to(dtype)
        s = seeded(lambda trunk=trunk: Split(trunk, LinearHead(nn.Linear(4, 3, dtype=dtype))))
        x = noise(16, 4, seed=seed).to(dtype)
        assert tangent_problems(s, x, ForwardMode()) == []


def test_zeros_in_the_parameters_hide_nothing():
    """As in adapters, whose second factor starts at zero."""
    s = around(Applied(wrong(0.5).apply))
    nn.init.zeros_(s.trunk[0].weight)
    assert tangent_problems(s, X.float(), ForwardMode())


class TestSwitch:
    """``check=False``."""

    @pytest.mark.parametrize("estimator", TANGENTS)
    def test_it_skips_the_comparison(self, estimator):
        model = nn.Sequential(*around(Applied(wrong(0.5).apply)).trunk, nn.Linear(4, 3))
        assert TANGENTS[estimator](split(model, check=False), X.float(), Y, generator=generator()).grads
        refused(TANGENTS[estimator], split(model), X.float(), Y)

    def test_it_makes_one_pass_more_on_the_first_batch_alone(self):
        """One pass shows whether the network is random or stateful."""
        passes = []
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        model[0].register_forward_hook(lambda *_: passes.append(1))
        s, counts = split(model, check=False), []
        for _ in range(2):
            passes.clear()
            SplitFG(2)(s, X.float(), Y, generator=generator())
            counts.append(len(passes))
        assert counts == [2, 1]

    def test_once_for_every_mode(self):
        s = around(Applied(wrong(1.0).apply))
        SplitFG(2)(s, X.float(), Y, generator=generator())
        s.trunk[1][1].function = wrong(0.5).apply
        SplitFG(2)(s, X.float(), Y, generator=generator())  # has been checked in this mode
        s.model.eval()
        refused(SplitFG(2), s, X.float(), Y)


@pytest.mark.parametrize("captured", [True, False])
def test_learners_check_before_the_first_step(captured):
    s = around(Applied(wrong(0.5).apply))
    learner = GradientLearner(s, SplitFG(2), torch.optim.SGD(s.model.parameters(), lr=0.1))
    if captured:
        learner = CapturedLearner(learner, horizon=3, compile_=lambda function: function)
    before = [p.clone() for p in s.model.parameters()]
    with pytest.raises(SplitError, match="jvp of Square"):
        learner.step(X.float(), Y, generator=generator())
    assert all(map(torch.equal, before, s.model.parameters()))


@pytest.mark.parametrize("joined", [True, False])
def test_the_first_batch_needs_no_more_memory_for_a_deeper_trunk(joined):
    rows, width = 256, 16

    def peak(depth):
        layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.Tanh())]
        s = (
            linear_split(nn.Sequential(*layers), width=width)
            if joined
            else split(nn.Sequential(*layers, nn.Linear(16, 3)))
        )
        parameters = 4 * sum(p.numel() for p in s.model.parameters())
        with Memory() as memory:
            SplitFG(1)(s, noise(rows, width, dtype=torch.float32), classes(rows, count=3), generator=generator())
        return memory.peak - 8 * parameters  # tangents, moved parameters and gradients

    assert peak(24) <= peak(4) + 2 * rows * width * 4


def test_dropout_is_not_blamed_for_another_module():
    """Runs of a single module draw the mask of the pass, so that only the wrong function is named."""
    torch.manual_seed(0)
    centred = Applied(lambda z: z - z.detach())  # small values with large tangents: a flipped mask is no visible jump
    layers = [nn.Linear(4, 64), centred, nn.Dropout(0.1), nn.Linear(64, 4), Applied(wrong(0.5).apply)]
    problems = refused(SplitFG(2), around(nn.Sequential(*layers)), X.float(), Y)
    assert len(problems) == 1
    assert "jvp of Square" in problems[0]
    assert "Dropout" not in problems[0]


def test_the_first_batch_of_activities_needs_no_more_memory_than_the_next():
    layers = [m for _ in range(12) for m in (nn.Linear(16, 16), nn.Tanh())]
    s, peaks = linear_split(nn.Sequential(*layers), width=16), []
    for _ in range(2):
        with Memory() as memory:
            ActivityFG(1)(s, noise(256, 16, dtype=torch.float32), classes(256, count=3), generator=generator())
        peaks.append(memory.peak)
    assert peaks[0] <= 1.02 * peaks[1]


@pytest.mark.parametrize("mixes", [True, False])
def test_activities_of_a_trunk_for_batches_of_one_size(mixes):
    """The first batch is validated on a few of its rows where the trunk runs on fewer, and else on all."""
    reads = Applied(lambda z: z.reshape(12, 4) + (z.mean(0) if mixes else 0.0))
    s, x, y = (
        linear_split(nn.Sequential(nn.Linear(3, 4), reads)),
        noise(12, 3, dtype=torch.float32),
        classes(12, count=3),
    )
    if mixes:
        assert "rows of a batch mix" in refused(ActivityFG(2), s, x, y)[0]
    else:
        assert ActivityFG(2)(s, x, y, generator=generator()).grads
