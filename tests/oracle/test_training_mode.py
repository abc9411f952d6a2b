"""Batch norm and dropout in training mode, against autograd with the same mask."""

import copy
import warnings

import pytest
import torch
from _refusals import linear_split, refused
from _toolkit import close, flat, generator, seeded, trunk_names
from _training_mode import NO_BLOCKS, RANDOM, TRUNKS, X, Y, by_autograd, cut, step_seed
from torch import nn

from splitfg import (
    ActivityFG,
    Backprop,
    CapturedLearner,
    CentralDifference,
    CheckpointedBackprop,
    DirectPath,
    EvolutionStrategy,
    ForwardGradient,
    ForwardMode,
    FrozenTrunk,
    GradientLearner,
    LearnedFeedback,
    MeanJacobian,
    Orthogonal,
    ResidualPath,
    Role,
    SplitFG,
    diagnose,
)
from splitfg.compiled import CompiledEngine

COMPILED = {
    "split_fg": lambda: SplitFG(3),
    "forward_gradient": lambda: ForwardGradient(3),
    "backprop": Backprop,
    "differences": lambda: SplitFG(2, engine=CentralDifference()),
    "feedback": LearnedFeedback,
}


def traced(function):
    """Compile without generating code, which takes longest."""
    return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")


def steps(estimator, name, compile_=None, eager=False):
    """Take four steps, captured if there is a compiler, and return parameters and buffers."""
    s, draws = cut(name), generator(3)
    learner = GradientLearner(s, estimator, torch.optim.Adam(s.model.parameters(), lr=0.1))
    if compile_ is not None:
        learner = CapturedLearner(learner, horizon=5, compile_=compile_)
    for _ in range(4):
        learner.step(X, Y, generator=draws)
    assert compile_ is None or learner.eager == eager
    return dict(s.model.state_dict())


EXACT = {  # as many orthogonal tangents as parameters give the gradient itself
    "split_fg": lambda s: SplitFG(s.count(Role.TRUNK), law=Orthogonal()),
    "chunk_1": lambda s: SplitFG(s.count(Role.TRUNK), law=Orthogonal(), engine=ForwardMode(chunk=1)),
    "chunks": lambda s: SplitFG(s.count(Role.TRUNK), law=Orthogonal(), engine=ForwardMode(chunk=7), lean=True),
    "central": lambda s: SplitFG(s.count(Role.TRUNK), law=Orthogonal(), engine=CentralDifference()),
    "forward_gradient": lambda s: ForwardGradient(s.count(Role.TRUNK, Role.HEAD), law=Orthogonal()),
    "evolution": lambda s: EvolutionStrategy(s.count(Role.TRUNK, Role.HEAD), sigma=1e-5, law=Orthogonal()),
    "backprop": lambda _: Backprop(),
    "closed": lambda _: Backprop(closed_head=True),
    "checkpointed": lambda _: CheckpointedBackprop(),
}
TOLERANCE = {"central": 1e-6, "evolution": 1e-6}


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("name", TRUNKS)
def test_exact_with_the_same_mask(name, method):
    s = cut(name)
    if method == "checkpointed" and name in NO_BLOCKS:
        pytest.skip("no blocks")
    expected, loss, _ = by_autograd(s)
    before, state = copy.deepcopy(s.model.state_dict()), torch.get_rng_state()
    estimate = EXACT[method](s)(s, X, Y, generator=generator())
    close(estimate.grads, expected, TOLERANCE.get(method, 1e-9))
    torch.testing.assert_close(estimate.loss, loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[n], b) for n, b in s.model.state_dict().items())


@pytest.mark.parametrize("name", TRUNKS)
def test_frozen_trunk(name):
    s = cut(name)
    expected, loss, _ = by_autograd(s)
    estimate = FrozenTrunk()(s, X, Y, generator=generator())
    close(estimate.grads, {n: expected[n] for n in s.head_params()})
    torch.testing.assert_close(estimate.loss, loss)


@pytest.mark.parametrize("name", RANDOM)
def test_masks_change_from_step_to_step(name):
    s, draws = cut(name), generator()
    losses = {float(SplitFG(2)(s, X, Y, generator=draws).loss) for _ in range(4)}
    assert len(losses) == 4


def test_scores_are_those_of_the_masked_network():
    """The estimate of one tangent is d v, so that <d v, g> = d <v, g> = d²."""
    s = cut("dropout")
    g, names = by_autograd(s)[0], trunk_names(s)
    for seed in range(5):
        estimate = SplitFG(1)(s, X, Y, generator=generator(seed))
        g = by_autograd(s, seed=step_seed(seed))[0]
        torch.testing.assert_close(flat(estimate.grads, names) @ flat(g, names), estimate.stats.scores.square().sum())


def test_noise_that_cannot_be_batched_over_tangents():
    """Torch has no rule for several tangents at once; one at a time works."""
    s = seeded(lambda: linear_split(nn.Sequential(nn.Linear(3, 4), nn.RReLU(), nn.Linear(4, 4)), width=4))
    s.model.double()
    (problem,) = refused(SplitFG(2), s, X, Y)
    assert "aten::rrelu_with_noise" in problem
    assert "ForwardMode(chunk=1)" in problem
    close(EXACT["chunk_1"](s)(s, X, Y, generator=generator()).grads, by_autograd(s)[0])


@pytest.mark.parametrize("method", [SplitFG(36, law=Orthogonal(), micro_batch=2), Backprop(micro_batch=2)])
def test_micro_batches_have_masks_of_their_own(method):
    """Part i draws from the step's seed plus i; all tangents of a step share the masks."""
    s, seed = cut("dropout"), step_seed()
    parts = [by_autograd(s, X[i : i + 2], Y[i : i + 2], seed + i // 2)[0] for i in (0, 2, 4)]
    expected = {n: sum(part[n] for part in parts) / 3 for n in parts[0]}
    close(method(s, X, Y, generator=generator()).grads, expected)


@pytest.mark.parametrize("name", ["dropout", "functional"])
def test_activity_tangents_with_dropout(name):
    """Unbiased given the mask: the mean over tangents at a fixed mask is the masked network's gradient."""
    s = cut(name)
    bound = s.for_step(X, generator())
    names = list(s.trained_params())
    expected = flat(by_autograd(s)[0], names)
    mean = torch.stack([flat(ActivityFG(400)(bound, X, Y, generator=generator(i)).grads, names) for i in range(4)])
    error = (mean.mean(0) - expected).norm() / expected.norm()
    assert error < 0.2  # 1,600 tangents of 6 * 8 entries in all


def test_activity_tangents_name_the_mixing_of_batch_norm():
    assert "rows of a batch mix" in refused(ActivityFG(2), cut("batch_norm"), X, Y)[0]


@pytest.mark.parametrize("name", TRUNKS)
def test_learned_feedback_converges_to_the_gradient(name):
    s, estimator = cut(name), LearnedFeedback()
    bound = s.for_step(X, generator())
    expected = by_autograd(s)[0]
    for i in range(60):
        estimate = estimator(bound, X, Y, generator=generator(i))
        estimator.update_state(bound, estimate)
    close(estimate.grads, expected, 1e-5)


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.second, self.top = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        x = self.first(x)
        return self.top(x + self.second(self.drop(self.norm(x))))


@pytest.mark.parametrize("method", ["plain", "lean", "learned"])
def test_direct_path_is_exact_for_the_last_writer(method):
    s = linear_split(seeded(Stream))
    s.model.double()
    path = ResidualPath(writers=("first", "second"), top="top")
    settings = {"plain": {}, "lean": {"lean": True}, "learned": {"feedback": MeanJacobian()}}[method]
    found, expected = DirectPath(path, **settings)(s, X, Y, generator=generator()).grads, by_autograd(s)[0]
    for n in ("trunk.second.weight", "trunk.second.bias", "trunk.top.weight", "trunk.top.bias", *s.head_params()):
        torch.testing.assert_close(found[n], expected[n])


class TestCompiled:
    """Compiled code draws the masks of eager code, or is not used."""

    @pytest.mark.parametrize(
        ("method", "name", "eager"),
        [
            *[(method, "both", False) for method in ("split_fg", "forward_gradient", "backprop")],
            *[("differences", "both", True), ("feedback", "both", True), ("feedback", "batch_norm", False)],
        ],
    )
    def test_compiled_and_eager_steps_draw_the_same_masks(self, method, name, eager):
        """Traced by the compiler, so that one mask serves the primal and all tangents there too."""
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            close(steps(COMPILED[method](), name, traced, eager), steps(COMPILED[method](), name), 1e-6)
        expected = ["the network draws random numbers, as dropout does: steps run in eager code"] if eager else []
        assert [str(w.message) for w in shown if "random numbers" in str(w.message)] == expected

    def test_generated_code_draws_the_same_masks(self):
        s, engine = cut("both"), CompiledEngine(ForwardMode())
        expected = SplitFG(3)(s, X, Y, generator=generator())
        close(SplitFG(3, engine=engine)(s, X, Y, generator=generator()).grads, expected.grads, 1e-9)

    def test_code_that_draws_other_numbers_is_not_used(self):
        def other(function):
            compiled = traced(function)

            def run(*given):
                torch.rand(1)
                return compiled(*given)

            return run

        with pytest.warns(UserWarning, match="compiled code draws others .* eager code"):
            found = steps(SplitFG(3), "dropout", other, eager=True)
        close(found, steps(SplitFG(3), "dropout"), 1e-6)


@pytest.mark.parametrize("name", ["batch_norm", "dropout"])
def test_diagnose_in_training_mode(name):
    """One mask for all methods: the exact gradient they are compared with has it too."""
    s = cut(name)
    found = diagnose(s, X, Y, generator=generator(), draws=30, K=s.count(Role.TRUNK))
    assert found.methods[0].cosine > 0.6
    feedback = next(m for m in found.methods if m.method.startswith("LearnedFeedback"))
    assert feedback.cosine > 0.99
