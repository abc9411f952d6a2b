"""Models that torch itself takes: estimates are right or raise with a cure, and leave the model as it was."""

from dataclasses import dataclass

import pytest
import torch
from _refusals import refused, rows
from _state import state_of
from _toolkit import classes, generator
from torch import nn
from torch.nn import functional as F

from splitfg import (
    ActivityFG,
    Backprop,
    DirectPath,
    FrozenTrunk,
    LearnedFeedback,
    Orthogonal,
    ParallelPull,
    ResidualPath,
    ReverseModeHead,
    SplitError,
    SplitFG,
    diagnose,
    split,
)

X, Y = rows(4), classes(4, count=3)


class Two(nn.Module):
    """Two linear layers around a function."""

    def __init__(self, function=torch.tanh):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(3, 3), nn.Linear(3, 3), function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


@dataclass
class Counter:
    passes: int = 0


class Counts(Two):
    """Holds state in a dataclass."""

    def __init__(self):
        super().__init__()
        self.counter = Counter()

    def forward(self, x):
        self.counter.passes += 1
        return super().forward(x) / self.counter.passes


class Teacher(Two):
    """Follows a layer by an exponential average in a frozen one, which it writes to in place."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                p.lerp_(q, 0.1)
        return self.last(self.first(x).tanh() + self.teacher(x))


class Neighbours(Two):
    """Mixes the rows of a batch by a sparse matrix, so that batches have one size."""

    def __init__(self):
        super().__init__()
        self.register_buffer("links", torch.eye(4).roll(1, 0).to_sparse())

    def forward(self, x):
        return self.last(torch.sparse.mm(self.links, self.first(x)).tanh())


def test_state_in_a_dataclass():
    model = Counts()
    s = split(model, head=ReverseModeHead)
    before = state_of(model)
    found = Backprop()(s, X, Y).grads
    assert SplitFG(2)(s, X, Y, generator=generator()).grads
    assert state_of(model) == before
    F.cross_entropy(model(X), Y).backward()
    torch.testing.assert_close(found, {name: p.grad for name, p in model.named_parameters()})


def test_a_trace_that_writes_to_parameters():
    model = Teacher()
    before = state_of(model)
    with pytest.raises(SplitError, match=r"writes to its parameters teacher.weight, teacher.bias in place"):
        Backprop()(split(model), X, Y)
    assert state_of(model) == before


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_buffers():
    model = Neighbours()
    before = state_of(model)
    found = Backprop()(split(model), X, Y).grads
    assert "_sparse_addmm has no forward-mode rule" in refused(SplitFG(2), split(model), X, Y)[0]
    (problem,) = refused(SplitFG(2, micro_batch=2), split(model), X, Y)
    assert "runs on the whole batch and not on 2 of its rows" in problem
    assert "micro_batch=None" in problem
    assert state_of(model) == before
    F.cross_entropy(model(X), Y).backward()
    torch.testing.assert_close(found, {name: p.grad for name, p in model.named_parameters()})


class Reordered(Two):
    """Defines a layer after the one that it calls last, and may be impossible to trace."""

    def __init__(self, traceable):
        super().__init__()
        self.traceable, self.middle = traceable, nn.Linear(3, 3)

    def forward(self, x):
        z = self.middle(self.first(x)).tanh()
        return self.last(z if self.traceable or z.sum() >= 0 else -z)


def test_the_advice_for_a_model_that_cannot_be_traced():
    assert SplitFG(2)(split(Reordered(True)), X, Y, generator=generator()).grads
    model = Reordered(False)
    (problem,) = refused(SplitFG(2), split(model), X, Y)
    assert "outputs come from last, not from middle: cut there with at='last'" in problem
    assert SplitFG(2)(split(model, at="last"), X, Y, generator=generator()).grads


def test_a_compiled_layer_defined_last():
    model = Reordered(True)
    model.middle = torch.compile(model.middle, backend="eager")
    for at in (None, "last"):
        assert set(split(model, at).head_params()) == {"last.weight", "last.bias"}
        assert SplitFG(2)(split(model, at), X, Y, generator=generator()).grads


def test_a_compiled_function():
    model = Two(torch.compile(lambda z: z.sin() * z, backend="eager"))
    assert SplitFG(2)(split(model), X, Y, generator=generator()).grads


def test_an_operator_without_a_backward_rule():
    model = Two(lambda z: torch.special.gammainc(z.abs() + 0.5, z.abs() + 0.3))
    assert "no backward rule" in refused(Backprop(), split(model), X, Y)[0]


def test_a_parameter_without_entries():
    class Model(Two):
        def __init__(self):
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0, 3))

        def forward(self, x):
            return self.last(torch.cat([self.first(x), self.nothing]).tanh())

    assert diagnose(split(Model()), X, Y, generator=generator(), draws=2)


def test_buffers_of_inference_mode():
    model = Two()
    with torch.inference_mode():
        model.register_buffer("scale", torch.ones(3))
    with pytest.raises(SplitError, match=r"made under torch.inference_mode\(\)"):
        split(model)


def test_one_problem_for_one_tensor():
    class Model(Two):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(3)

        def forward(self, x):
            self.scale.add_(0.1)
            return super().forward(x) * self.scale

    assert len(refused(FrozenTrunk(), split(Model()), X, Y)) == 1


def test_messages_name_functions():
    class Cosine(Two):
        def forward(self, x):
            return F.linear(F.normalize(self.first(x)), F.normalize(self.last.weight))

    with pytest.raises(SplitError, match="also reads normalize, not h alone"):
        split(Cosine(), head=ReverseModeHead)


def test_inputs_from_inference_mode():
    with torch.inference_mode():
        x = X * 1
    s = split(Two())
    assert SplitFG(2)(s, x, Y, generator=generator()).grads
    assert "use .clone() on them" in refused(Backprop(), s, x, Y)[0]
    torch.testing.assert_close(Backprop()(s, x.clone(), Y).grads, Backprop()(s, X, Y).grads)


@pytest.mark.parametrize("estimator", [Backprop(), ParallelPull()])
def test_reverse_mode_under_inference_mode(estimator):
    s = split(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    with torch.inference_mode():
        assert "does not work under torch.inference_mode()" in refused(estimator, s, X, Y)[0]


FORWARD = {
    "split_fg": SplitFG(2),
    "activity": ActivityFG(2),
    "learned": LearnedFeedback(),
    "direct": DirectPath(ResidualPath(writers=("first",), strict=False)),
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("inputs", ["made inside", "made outside"])
def test_inference_mode_changes_nothing(name, inputs):
    model = Two()
    expected = FORWARD[name](split(model), X, Y, generator=generator()).grads
    with torch.inference_mode():
        x = X.clone() if inputs == "made inside" else X
        torch.testing.assert_close(FORWARD[name](split(model), x, Y, generator=generator()).grads, expected)


def without_gradients(z):
    with torch.no_grad():
        return 2 * z


@pytest.mark.parametrize("estimator", [SplitFG(2), ActivityFG(2), LearnedFeedback()])
def test_the_first_batch_is_validated_under_inference_mode(estimator):
    s = split(Two(without_gradients))
    with torch.inference_mode():
        assert "torch.no_grad()" in refused(estimator, s, X, Y)[0]


class Optional(Two):
    """Calls its function on batches with a second argument alone."""

    def forward(self, x, scale=None):
        h = self.first(x).tanh()
        return self.last(h if scale is None else self.function(h) * scale)


@pytest.mark.parametrize("later", [(X, torch.ones(4, 3)), {"x": X, "scale": torch.ones(4, 3)}])
@pytest.mark.parametrize("estimator", [SplitFG(2), ActivityFG(2), LearnedFeedback()])
def test_other_arguments_are_validated(estimator, later):
    s = split(Optional(without_gradients))
    assert estimator(s, X, Y, generator=generator()).grads
    assert "torch.no_grad()" in refused(estimator, s, later, Y)[0]


def test_other_arguments_may_draw_random_numbers():
    s = split(Optional(nn.Dropout(0.5)))
    estimator = SplitFG(12, law=Orthogonal())
    estimator(s, X, Y, generator=generator())
    before = torch.get_rng_state()
    later, drawn = (X, torch.ones(4, 3)), [generator(), generator()]
    found = [method(s, later, Y, generator=g).grads for method, g in zip((estimator, Backprop()), drawn, strict=True)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(*found)  # with one mask


class Outside(Two):
    """Uses a name that splitfg's own trunks give a meaning."""

    def __init__(self):
        super().__init__()
        self.outside = nn.Linear(3, 3)

    def forward(self, x):
        return super().forward(self.outside(x))


def test_a_layer_may_have_any_name():
    estimate = SplitFG(2)(split(Outside()), X, Y, generator=generator())
    assert "outside.weight" in estimate.grads


def test_a_linear_layer_that_returns_a_tuple():
    """As the router of a mixture of experts does."""

    class Router(nn.Linear):
        def forward(self, x):
            z = super().forward(x)
            return z.softmax(-1), z

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.last = Router(3, 4), nn.Linear(4, 3)

        def forward(self, x):
            weights, z = self.router(x)
            return self.last(weights * z)

    model, x, y = Routed(), torch.randn(5, 3), torch.arange(5) % 3
    found = Backprop()(split(model), x, y).grads
    nn.functional.cross_entropy(model(x), y).backward()
    assert all(torch.allclose(found[n], p.grad, atol=1e-6) for n, p in model.named_parameters())
