"""Batch norm and dropout in training mode, against autograd with the same mask, and the state of forward passes."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from _awkward import CountsInPlace
from _refusals import ESTIMATORS, linear_split, refused
from _toolkit import classes, close, cross_entropy, flat, generator, noise, seeded, trunk_names
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
    LinearHead,
    LineSearch,
    MeanJacobian,
    OneSidedDifference,
    Orthogonal,
    ResidualPath,
    Role,
    Split,
    SplitError,
    SplitFG,
    diagnose,
    split,
    write_grads,
)
from splitfg.compiled import CompiledEngine
from splitfg.feedback import Difference
from splitfg.splitting.checks import check_batch

X, Y = noise(6, 3), classes(6, count=3)


class Dropped(nn.Module):
    """Dropout by a function that reads the training flag."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x):
        return torch.tanh(F.dropout(self.layer(x), 0.4, training=self.training))


class Attending(nn.Module):
    """Dropout inside attention; every number of a row is a token."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 4)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True)

    def forward(self, x):
        tokens = self.embed(x.unsqueeze(-1))
        return self.attention(tokens, tokens, tokens, need_weights=True)[0].mean(1)


class Layered(nn.Module):
    """A layer of nn.TransformerEncoder: attention gives dropout an input that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Linear(1, 4), nn.TransformerEncoderLayer(4, 2, 4, dropout=0.4, batch_first=True)

    def forward(self, x):
        return self.layer(self.embed(x.unsqueeze(-1))).mean(1)


class Transposed(nn.Module):
    """Dropout of transposed tensors, by functions and in place, and of images in channels-last."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Conv2d(2, 4, 1)

    def forward(self, x):
        a = F.dropout((self.first(x) * 1.5).T, 0.4, self.training, inplace=True)
        b = torch.dropout(a.unflatten(0, (2, 2)).transpose(1, 2), 0.3, self.training)
        images = self.second(b.permute(1, 2, 0).unsqueeze(-2).contiguous().permute(0, 3, 1, 2)).tanh()
        images = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return F.dropout(images, 0.4, self.training).mean((2, 3))


TRUNKS = {
    "batch_norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)),
    "images": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 1, 3)), nn.Conv2d(1, 4, (1, 2)), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4)
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.3)),
    "functional": Dropped,
    "attention": Attending,
    "transformer": Layered,
    "transposed": Transposed,
    "both": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Tanh(), nn.Linear(4, 4)),
}
NO_BLOCKS = ("functional", "attention", "transformer", "transposed")
RANDOM = [name for name in TRUNKS if name not in ("batch_norm", "images")]

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


def cut(name):
    s = seeded(lambda: linear_split(TRUNKS[name](), width=4))
    s.model.double().train()
    return s


def step_seed(seed=0):
    """The first number that an estimate draws from its generator."""
    return int(torch.randint(2**62, (), generator=generator(seed)))


def by_autograd(s, x=X, y=Y, seed=None):
    """Gradient, loss and new state by plain autograd through copies of trunk and head, with torch's own dropout."""
    trunk, head = copy.deepcopy(s.trunk), copy.deepcopy(s.head)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(step_seed() if seed is None else seed)
        h = trunk(x)
    loss = cross_entropy(head.outputs(dict(head.named_parameters()), h), y)
    loss.backward()
    names = {f"trunk.{n}": p for n, p in trunk.named_parameters()} | {
        f"head.{n}": p for n, p in head.named_parameters()
    }
    return {n: p.grad for n, p in names.items()}, loss.detach(), trunk.state_dict()


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


class TestState:
    """Running statistics, counters and attributes change once a step, as by one forward pass of ordinary training."""

    @pytest.mark.parametrize("method", [*ESTIMATORS, "one_sided", "learned_feedback"])
    def test_running_statistics(self, method):
        estimator = {**ESTIMATORS, "one_sided": SplitFG(2, engine=OneSidedDifference())}.get(method, LearnedFeedback())
        s = cut("batch_norm")
        for step in range(1, 4):
            before = copy.deepcopy(s.model.state_dict())
            estimate = estimator(s, X + step, Y, generator=generator())
            expected = by_autograd(s, X + step)[2]
            close(dict(s.model.state_dict()), before)
            write_grads(s.model, estimate)
            close(dict(s.trunk.state_dict()), expected)
            assert s.trunk[1].num_batches_tracked == step

    @pytest.mark.parametrize("method", ["split_fg", "backprop", "evolution"])
    def test_statistics_of_a_layer_that_some_passes_skip(self, method):
        class Skipping(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.norm, self.passes = nn.Linear(3, 4), nn.BatchNorm1d(4), 0

            def forward(self, x):
                self.passes += 1
                z = self.layer(x)
                return z if self.passes % 2 else self.norm(z)

        model = seeded(lambda: nn.Sequential(Skipping(), nn.Tanh(), nn.Linear(4, 3))).double()
        plain, s = copy.deepcopy(model), split(model)
        for step in range(1, 5):
            write_grads(model, ESTIMATORS[method](s, X + step, Y, generator=generator()))
            plain(X + step)
            close(dict(model.state_dict()), dict(plain.state_dict()))

    @pytest.mark.parametrize("in_place", [True, False])
    @pytest.mark.parametrize("method", ["backprop", "evolution", "frozen"])
    def test_a_mean_that_every_third_pass_updates(self, method, in_place):
        class Averaging(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.passes = nn.Linear(3, 4), 0
                self.register_buffer("mean", torch.zeros(4))

            def forward(self, x):
                self.passes += 1
                z = self.layer(x)
                if self.passes % 3 == 0:
                    new = self.mean.lerp(z.detach().mean(0), 0.1)
                    self.mean = self.mean.copy_(new) if in_place else new
                return z

        model = seeded(lambda: nn.Sequential(Averaging(), nn.Tanh(), nn.Linear(4, 3))).double()
        plain, s = copy.deepcopy(model), split(model)
        for step in range(1, 7):
            if in_place and step == 3:
                with pytest.raises(SplitError, match=r"to the buffer 0\.mean, .* assign a new tensor"):
                    ESTIMATORS[method](s, X + step, Y, generator=generator())
                break
            write_grads(model, ESTIMATORS[method](s, X + step, Y, generator=generator()))
            plain(X + step)
            close(dict(model.state_dict()), dict(plain.state_dict()))

    @pytest.mark.filterwarnings("ignore:the network draws random numbers")
    @pytest.mark.parametrize("captured", [True, False])
    def test_learners(self, captured):
        s, draws = cut("both"), generator()
        learner = GradientLearner(s, SplitFG(3), torch.optim.SGD(s.model.parameters(), lr=0.1))
        if captured:
            learner = CapturedLearner(learner, horizon=5, compile_=lambda function: function)
        for step in range(1, 4):
            learner.step(X, Y, generator=draws)
            assert s.trunk[1].num_batches_tracked == step

    @pytest.mark.filterwarnings("ignore:the network draws random numbers")
    def test_a_line_search_leaves_the_global_generator_alone(self):
        s, state = cut("both"), torch.get_rng_state()
        optimizer = torch.optim.SGD(s.model.parameters(), lr=0.1)
        learner = GradientLearner(s, SplitFG(3), optimizer, line_search=LineSearch())
        for step in range(1, 4):
            learner.step(X, Y, generator=generator(step))
            assert s.trunk[1].num_batches_tracked == step
        assert torch.equal(torch.get_rng_state(), state)

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

    def test_split_models(self):
        model = seeded(lambda: nn.Sequential(*TRUNKS["both"](), nn.Linear(4, 3))).double()
        other = copy.deepcopy(model)
        s = split(model)
        estimate = SplitFG(2)(s, X, Y, generator=generator())
        write_grads(model, estimate)
        torch.manual_seed(step_seed())
        other(X)
        assert all(torch.equal(b, other.state_dict()[n]) for n, b in model.state_dict().items())

    def test_counters_and_attributes(self):
        class Counts(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.calls, self.history = nn.Linear(3, 4), 0, []
                self.register_buffer("mean", torch.zeros(4))
                self.register_buffer("passes", torch.zeros(()))

            def forward(self, x):
                h = self.layer(x)
                self.calls += 1
                self.history.append(len(self.history))
                self.mean = 0.9 * self.mean + 0.1 * h.mean(0)
                self.passes += 1
                return h

        s = linear_split(seeded(Counts))
        s.model.double()
        mean = s.trunk.mean
        for step in (1, 2):
            write_grads(s.model, SplitFG(3)(s, X, Y, generator=generator()))
            assert (s.trunk.calls, s.trunk.history, s.trunk.passes) == (step, list(range(step)), step)
        assert s.trunk.mean is mean  # changed in place, for captured steps
        torch.testing.assert_close(s.trunk.mean, 0.19 * s.trunk.layer(X).detach().mean(0))

    def test_estimators_of_other_packages(self):
        """A learner updates the state for estimators that do not."""

        class Own:
            def __call__(self, split, x, y, *, generator):
                check_batch(split, x, y, generator)
                return replace(SplitFG(1)(split, x, y, generator=generator), forward_state=None)

        s = seeded(lambda: linear_split(nn.Sequential(CountsInPlace()), width=2))
        s.model.double()
        learner = GradientLearner(s, Own(), torch.optim.SGD(s.model.parameters(), lr=0.1))
        for step in (1, 2):
            learner.step(X, Y, generator=generator())
            assert s.trunk[0].calls == step

    def test_evaluation_mode_changes_nothing_and_draws_nothing(self):
        s, draws = cut("both"), generator()
        s.model.eval()
        estimate = FrozenTrunk()(s, X, Y, generator=draws)
        assert estimate.forward_state is None
        assert torch.equal(draws.get_state(), generator().get_state())

    @pytest.mark.parametrize("estimator", [EvolutionStrategy(2), LearnedFeedback(probe=Difference())])
    def test_statistics_that_the_same_batch_leaves_as_they_were(self, estimator):
        """The cumulative mean of a batch that the model has seen before, at parameters that move later."""
        trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4))
        s = Split(trunk.double(), LinearHead(nn.Linear(4, 3).double()))
        trunk(X)
        before = copy.deepcopy(trunk.state_dict())
        estimator(s, X, Y, generator=generator())
        torch.testing.assert_close(trunk.state_dict(), before, rtol=0.0, atol=0.0)

    def test_moving_the_model_keeps_track_of_its_buffers(self):
        s = cut("batch_norm")
        SplitFG(2)(s, X, Y, generator=generator())
        s.model.float()  # new tensors
        before = copy.deepcopy(s.trunk.state_dict())
        write_grads(s.model, SplitFG(2)(s, X.float(), Y, generator=generator()))
        assert s.trunk[1].num_batches_tracked == 1
        assert not torch.equal(s.trunk[1].running_mean, before["1.running_mean"])

    def test_a_step_keeps_the_modes_it_began_with(self):
        network = split(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 3)))
        step = network.at_present(X)
        network.model.eval()
        assert step.training_flags() == step.at_present(X).training_flags() != network.training_flags()
        assert network.at_present(X).training_flags() == network.training_flags()

    def test_a_copy_of_a_split_works(self):
        s = cut("both")
        SplitFG(2)(s, X, Y, generator=generator())
        twin = copy.deepcopy(s)
        write_grads(twin.model, SplitFG(2)(twin, X, Y, generator=generator()))
        assert (s.trunk[1].num_batches_tracked, twin.trunk[1].num_batches_tracked) == (0, 1)


@pytest.mark.parametrize("name", ["batch_norm", "dropout"])
def test_diagnose_in_training_mode(name):
    """One mask for all methods: the exact gradient they are compared with has it too."""
    s = cut(name)
    found = diagnose(s, X, Y, generator=generator(), draws=30, K=s.count(Role.TRUNK))
    assert found.methods[0].cosine > 0.6
    feedback = next(m for m in found.methods if m.method.startswith("LearnedFeedback"))
    assert feedback.cosine > 0.99
