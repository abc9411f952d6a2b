"""What every estimator keeps to: pure, reproducible, indifferent to parameter order, and the same when compiled."""

import pytest
import torch
from _awkward import awkward
from _toolkit import TiedLanguageModel, classes, generator, mlp_split, noise, seeded
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from splitfg import (
    Backprop,
    CentralDifference,
    CheckpointedBackprop,
    Conditioned,
    Estimator,
    EvolutionStrategy,
    ForwardGradient,
    ForwardMode,
    FrozenTrunk,
    LinearHead,
    NonFiniteError,
    OneSidedDifference,
    Orthogonal,
    ProbedHead,
    Projection,
    Rademacher,
    ReverseModeHead,
    RunningMagnitude,
    Split,
    SplitError,
    SplitFG,
    SquaredError,
    Tied,
    split,
)

ESTIMATORS = {
    "split_fg": lambda: SplitFG(3),
    "split_fg_chunk_1": lambda: SplitFG(3, engine=ForwardMode(chunk=1)),
    "split_fg_rademacher": lambda: SplitFG(3, law=Rademacher()),
    "split_fg_orthogonal": lambda: SplitFG(3, law=Orthogonal()),
    "split_fg_conditioned": lambda: SplitFG(3, law=Conditioned(RunningMagnitude())),
    "split_fg_projection": lambda: SplitFG(3, engine=ForwardMode(chunk=2), combine=Projection()),
    "split_fg_central": lambda: SplitFG(3, engine=CentralDifference()),
    "split_fg_one_sided": lambda: SplitFG(3, engine=OneSidedDifference()),
    "split_fg_parts": lambda: SplitFG(3, micro_batch=2),
    "split_fg_lean": lambda: SplitFG(3, engine=ForwardMode(chunk=1), lean=True),
    "forward_gradient": lambda: ForwardGradient(3),
    "evolution": lambda: EvolutionStrategy(3),
    "frozen": lambda: FrozenTrunk(),
    "backprop": lambda: Backprop(),
    "backprop_closed": lambda: Backprop(closed_head=True),
    "checkpointed": lambda: CheckpointedBackprop(),
}
RANDOM = [n for n in ESTIMATORS if n.startswith(("split_fg", "forward", "evolution"))]
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def problem(rows=5):
    return mlp_split(3, 4, 3), noise(rows, 3), classes(rows, count=3)


def same(first, second, **tolerance):
    assert list(first.grads) == list(second.grads)
    for n, g in first.grads.items():
        torch.testing.assert_close(second.grads[n], g, **tolerance)
    torch.testing.assert_close(second.loss, first.loss, **tolerance)


def photograph(split, *tensors):
    """Everything an estimate could touch: values, versions, ``.grad``, flags, hooks, and the global generator."""
    modules = [split.model, split.trunk, split.head]
    kept = [*split.model.parameters(), *split.model.buffers(), *tensors]
    return {
        "values": [t.detach().clone() for t in kept],
        "versions": [t._version for t in kept],
        "identity": [id(p) for m in modules for p in m.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in split.model.parameters()],
        "requires_grad": [t.requires_grad for t in kept],
        "training": [m.training for m in split.model.modules()],
        "hooks": [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in split.model.modules()],
        "attributes": [sorted(vars(m)) for m in split.model.modules()],
        "global generator": torch.get_rng_state(),
    }


def assert_untouched(before, after):
    for what, old in before.items():
        new = after[what]
        if isinstance(old, torch.Tensor):
            old, new = [old], [new]
        for a, b in zip(old, new, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, f"{what} changed"


@every_estimator
def test_keeps_to_the_protocol(name):
    s, x, y = problem()
    estimator = ESTIMATORS[name]()
    assert isinstance(estimator, Estimator)
    estimate = estimator(s, x, y, generator=generator())
    assert estimate.loss.shape == ()
    expected = s.head_params() if name == "frozen" else s.trained_params()
    assert set(estimate.grads) == set(expected)
    assert {n: g.shape for n, g in estimate.grads.items()} == {n: p.shape for n, p in expected.items()}
    assert {g.dtype for g in estimate.grads.values()} == {torch.float64}
    assert estimate.stats.jvps == estimate.stats.scores.numel() == (3 if name in RANDOM else 0)
    assert all(v.shape == () and v.isfinite() for v in estimate.stats.norms.values())


@every_estimator
def test_is_pure(name):
    s, x, y = problem()
    for i, p in enumerate(s.model.parameters()):
        p.grad = noise(*p.shape, seed=i) if i % 2 else None
    s.trunk[1].eval()
    before = photograph(s, x, y)
    ESTIMATORS[name]()(s, x, y, generator=generator())
    assert_untouched(before, photograph(s, x, y))


@pytest.mark.parametrize("name", ["split_fg", "forward_gradient", "backprop", "frozen", "evolution"])
@pytest.mark.parametrize("case", ["batch_norm_eval", "in_place", "attention"])
def test_is_pure_with_buffers_and_in_place_operators(name, case):
    a = awkward(case)
    s = Split(a.module, LinearHead(nn.Linear(a.width, 3, dtype=torch.float64)))
    y = classes(*a.module(*a.args).shape[:-1], count=3)
    before = photograph(s, *a.args, y)
    ESTIMATORS[name]()(s, a.inputs, y, generator=generator())
    assert_untouched(before, photograph(s, *a.args, y))


@every_estimator
def test_same_generator_same_estimate(name):
    s, x, y = problem()
    first, second = (ESTIMATORS[name]()(s, x, y, generator=generator(4)) for _ in range(2))
    for n, g in first.grads.items():
        assert torch.equal(second.grads[n], g)


@pytest.mark.parametrize("name", RANDOM)
def test_generator_goes_on(name):
    """The next estimate draws new tangents, and the global generator has no say."""
    s, x, y = problem()
    g = generator()
    first, second = (ESTIMATORS[name]()(s, x, y, generator=g) for _ in range(2))
    assert not torch.allclose(first.stats.scores, second.stats.scores)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(123)
        same(ESTIMATORS[name]()(s, x, y, generator=generator()), first, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["frozen", "backprop", "backprop_closed", "checkpointed"])
def test_exact_methods_draw_nothing(name):
    s, x, y = problem()
    g = generator()
    ESTIMATORS[name]()(s, x, y, generator=g)
    assert torch.equal(g.get_state(), generator().get_state())


@pytest.mark.parametrize("name", RANDOM)
def test_tangents_of_one_estimate_differ(name):
    s, x, y = problem()
    scores = ESTIMATORS[name]()(s, x, y, generator=generator()).stats.scores
    assert len(set(scores.tolist())) == len(scores)


@every_estimator
def test_batch_of_one(name):
    s, x, y = problem(rows=1)
    estimate = ESTIMATORS[name]()(s, x, y, generator=generator())
    assert all(g.isfinite().all() for g in estimate.grads.values())


class Ordered(nn.Module):
    """The same function of the same parameters, registered in either order."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(noise(3, 3, seed=ord(name))))

    def forward(self, x):
        return torch.tanh(torch.tanh(x @ self.a) @ self.b) @ self.c


@pytest.mark.parametrize("names", ["abc", "cab", "bca"])
def test_any_parameter_order(names):
    """Gradients are keyed by name; on a full basis they do not depend on the order at all."""
    x, y = noise(4, 3), classes(4, count=3)
    head = seeded(lambda: LinearHead(nn.Linear(3, 3))).double()
    estimates = [
        SplitFG(27, law=Orthogonal())(Split(Ordered(order), head), x, y, generator=generator())
        for order in ("abc", names)
    ]
    for n, g in estimates[0].grads.items():
        torch.testing.assert_close(estimates[1].grads[n], g)


def test_prediction_in_any_order():
    s, x, y = problem()
    prediction = {n: noise(*p.shape, seed=3) for n, p in s.trunk_params().items()}
    backwards = dict(reversed(prediction.items()))
    first, second = (SplitFG(3)(s, x, y, generator=generator(), prediction=p) for p in (prediction, backwards))
    same(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_narrow_dtypes(name, dtype):
    """Gradients come in the parameters' dtype, and the loss near float64's."""
    s, x, y = problem()
    exact = Backprop()(s, x, y)
    s.model.to(dtype)
    estimate = ESTIMATORS[name]()(s, x.to(dtype), y, generator=generator())
    assert {g.dtype for g in estimate.grads.values()} == {dtype}
    precision = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(estimate.loss.double(), exact.loss, rtol=precision, atol=precision)


HEADLESS = {
    "black box": lambda: ProbedHead(lambda params, h: h @ h.new_ones(4, 3).cumsum(0)),
    "frozen head": lambda: LinearHead(nn.Linear(4, 3, dtype=torch.float64).requires_grad_(False)),
}


@pytest.mark.parametrize("head", HEADLESS)
def test_a_head_without_trained_parameters(head):
    s = Split(nn.Linear(3, 4, dtype=torch.float64), HEADLESS[head]())
    estimate = SplitFG(3)(s, noise(5, 3), classes(5, count=3), generator=generator())
    assert set(estimate.grads) == {"trunk.weight", "trunk.bias"}


class Halved(nn.Module):
    """Gives h for every second sample only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4).double()

    def forward(self, x):
        return torch.tanh(self.layer(x))[::2]


@every_estimator
def test_every_sample_needs_its_row_of_h(name):
    """Else the first rows of the target would be taken for the others, without a word."""
    s = Split(nn.Sequential(Halved()), LinearHead(nn.Linear(4, 3).double()))
    with pytest.raises(SplitError, match=r"h with \d rows for \d samples"):
        ESTIMATORS[name]()(s, noise(4, 3), classes(4, count=3), generator=generator())


def test_scores_beyond_the_parameters_dtype():
    """Half precision ends at 65,504: scores may lie above it, a gradient may not."""
    s, largest = mlp_split(3, 4, 1, dtype=torch.float16, loss=SquaredError()), torch.finfo(torch.float16).max
    x, y = noise(1, 3, dtype=torch.float16).repeat(8, 1), torch.full((8, 1), 60_000.0, dtype=torch.float16)
    estimate = SplitFG(16)(s, x, y, generator=generator())
    assert estimate.stats.scores.abs().max() > largest
    assert all(g.isfinite().all() for g in estimate.grads.values())
    with torch.no_grad():
        s.head.layers[0].weight.mul_(8)
    with pytest.raises(NonFiniteError, match="bfloat16"):
        SplitFG(16)(s, x, y, generator=generator())


class TestCompiled:
    """Under ``torch.compile`` an estimate is the eager one, on graphs that were really compiled."""

    CASES = ("split_fg", "split_fg_projection", "forward_gradient", "evolution", "frozen", "backprop", "checkpointed")

    @pytest.mark.parametrize("name", CASES)
    def test_equals_eager(self, name):
        torch._dynamo.reset()
        s, x, y = problem()
        backend = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(ESTIMATORS[name](), backend=backend)
        graphs = []
        for seed in (1, 2):  # the second call runs what the first compiled
            eager = ESTIMATORS[name]()(s, x, y, generator=generator(seed))
            same(eager, compiled(s, x, y, generator=generator(seed)), rtol=1e-10, atol=1e-10)
            graphs.append(backend.frame_count)
        assert graphs[0] == graphs[1], "compiled again for another generator"
        linear = [n for g in backend.graphs for n in g.graph.nodes if "linear" in str(n.target)]
        assert linear, "the trunk was left out of the compiled graphs"

    @pytest.mark.slow
    def test_split_fg_through_inductor(self):
        """A tied table, with code really generated."""
        torch._dynamo.reset()
        s = split(seeded(TiedLanguageModel), tied=Tied.INCLUDE)
        x, y = classes(4, 3, count=5), classes(4, 3, count=5, seed=9)
        eager = SplitFG(2)(s, x, y, generator=generator())
        same(eager, torch.compile(SplitFG(2))(s, x, y, generator=generator()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", [ReverseModeHead, ProbedHead])
def test_batch_statistics_in_the_head_are_refused(head):
    body = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    s = Split(nn.Linear(3, 4, dtype=torch.float64), head(body))
    with pytest.raises(ValueError, match="batch statistics"):
        SplitFG(2)(s, noise(5, 3), classes(5, count=3), generator=generator())
