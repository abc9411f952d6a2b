"""What the direct path keeps to: pure, forward only, the same in parts and when lean, clear about what cannot work."""

import re

import pytest
import torch
from _toolkit import classes, generator, noise, seeded
from test_estimator_contract import assert_untouched, photograph, same
from test_no_backward import Memory
from torch import nn

from splitfg import (
    Backprop,
    CosineWithWarmup,
    DirectPath,
    Estimator,
    FrozenTrunk,
    GradientLearner,
    LinearHead,
    MeanJacobian,
    NonFiniteError,
    ResidualPath,
    Role,
    Split,
    SplitError,
    Tied,
    split,
)
from splitfg.feedback import RandomMaps
from splitfg.models import GPT, GPTConfig
from splitfg.recipes import Adam

TINY = GPTConfig(layers=2, width=8, heads=2, context=6, vocab=20)
ESTIMATORS = {
    "direct": DirectPath,
    "lean": lambda: DirectPath(lean=True),
    "random": lambda: DirectPath(feedback=RandomMaps()),
    "maps": lambda: DirectPath(feedback=MeanJacobian()),
    "less for tied tables": lambda: DirectPath(tied_share=0.3),
    "lean maps in parts": lambda: DirectPath(feedback=MeanJacobian(), lean=True, micro_batch=1),
}
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def problem(tied=Tied.INCLUDE, dtype=torch.float64):
    trunk = GPT(TINY, generator=generator()).to(dtype)
    s = Split(trunk, LinearHead(trunk.tied_linear()), tied=tied)
    return s, classes(3, 6, count=20, seed=1), classes(3, 6, count=20, seed=2)


class Residual(nn.Module):
    """Somebody else's model: it knows nothing of paths."""

    def __init__(self, width=6, depth=2, norm=nn.LayerNorm):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.inner = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(depth))
        self.outer = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.norm = norm(width)
        self.readout = nn.Linear(width, 3)

    def forward(self, x):
        x = self.embed(x)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = x + outer(torch.tanh(inner(x)))
        return self.readout(self.norm(x))


PATH = ResidualPath(("embed", "outer.0", "outer.1"), top="norm")


@every_estimator
def test_keeps_to_the_protocol(name):
    s, x, y = problem()
    estimator = ESTIMATORS[name]()
    assert isinstance(estimator, Estimator)
    estimate = estimator(s, x, y, generator=generator())
    written = {n for n in s.trained_params() if not re.search(r"qkv|fc|norm[12]", n)}
    assert set(estimate.grads) == written
    assert all(g.shape == s.trained_params()[n].shape for n, g in estimate.grads.items())
    assert estimate.stats.biased
    assert estimate.stats.trunk_backward == 0
    assert estimate.stats.jvps == ("maps" in name)
    assert all(v.shape == () and v.isfinite() for v in estimate.stats.norms.values())


@every_estimator
def test_is_pure(name):
    s, x, y = problem()
    estimator = ESTIMATORS[name]()
    before = photograph(s, x, y)
    first = estimator(s, x, y, generator=generator())
    assert_untouched(before, photograph(s, x, y))
    same(first, estimator(s, x, y, generator=generator()), rtol=0, atol=0)


@every_estimator
def test_nothing_is_saved_for_backward(name):
    def refuse(t):
        raise AssertionError(f"saved a tensor of shape {tuple(t.shape)}")

    s, x, y = problem()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t):
        estimate = ESTIMATORS[name]()(s, x, y, generator=generator())
    assert not any(g.requires_grad for g in estimate.grads.values())


@pytest.mark.parametrize("changes", [{"lean": True}, {"micro_batch": 2}, {"lean": True, "micro_batch": 1}])
def test_is_the_same_in_parts_and_when_lean(changes):
    s, x, y = problem()
    same(DirectPath()(s, x, y), DirectPath(**changes)(s, x, y))


@pytest.mark.parametrize("changes", [{}, {"lean": True}, {"micro_batch": 1}])
@pytest.mark.parametrize("tied_share", [0, 0.3])
def test_a_tied_table_gets_a_part_of_the_trunks_share(tied_share, changes):
    s, x, y = problem()
    whole, part = (DirectPath(tied_share=share, **changes)(s, x, y) for share in (1, tied_share))
    exact = FrozenTrunk()(s, x, y).grads
    (table,) = [name for name, role in s.roles.items() if role is Role.TIED]
    assert (whole.grads[table] - exact[table]).norm() > 0.1 * exact[table].norm()
    torch.testing.assert_close(part.grads[table] - exact[table], tied_share * (whole.grads[table] - exact[table]))
    for name in whole.grads.keys() - {table}:
        torch.testing.assert_close(part.grads[name], whole.grads[name])


def test_compiled_equals_eager():
    s, x, y = problem()
    eager = DirectPath()(s, x, y)
    same(eager, torch.compile(DirectPath(), backend="aot_eager")(s, x, y))
    torch.compiler.reset()


def test_a_model_that_was_written_without_us_in_mind():
    model = seeded(Residual).double()
    s = split(model)
    x, y = noise(5, 4), classes(5, count=3)
    grads = DirectPath(PATH)(s, x, y).grads
    assert set(grads) == {n for n, _ in model.named_parameters() if not n.startswith("inner")}
    torch.nn.functional.cross_entropy(model(x), y).backward()
    for name in ("outer.1.weight", "outer.1.bias", "norm.weight", "norm.bias", "readout.weight"):
        torch.testing.assert_close(grads[name], model.get_parameter(name).grad)


def test_lean_is_flat_in_depth():
    """Sixteen more blocks cost their parameters, and not one more activation."""

    def peak(depth, **settings):
        path = ResidualPath(("embed", *(f"outer.{i}" for i in range(depth))), top="norm")
        s, x, y = (
            split(seeded(lambda: Residual(depth=depth))),
            noise(512, 4, dtype=torch.float32),
            classes(512, count=3),
        )
        DirectPath(path, **settings)(s, x, y)
        with Memory() as memory:
            DirectPath(path, **settings)(s, x, y)
        return memory.peak

    activation = 4 * 512 * 6
    assert peak(20, lean=True) - peak(4, lean=True) < activation
    assert peak(20) - peak(4) > 16 * activation


def test_a_bent_stream_is_followed_when_asked():
    class Bent(Residual):
        def forward(self, x):
            x = self.embed(x)
            for inner, outer in zip(self.inner, self.outer, strict=True):
                x = torch.relu(x + outer(torch.tanh(inner(x))))
            return self.readout(self.norm(x))

    s, x, y = split(seeded(Bent).double()), noise(5, 4), classes(5, count=3)
    path = ResidualPath(["embed", "outer.0", "outer.1"], top="norm", strict=False)
    found, exact = DirectPath(path)(s, x, y).grads, Backprop()(s, x, y).grads
    torch.testing.assert_close(found["norm.weight"], exact["norm.weight"])


def test_inputs_by_name():
    class Named(Residual):
        def forward(self, x):
            return self.readout(self.norm(self.embed(input=x)))

    s, x, y = split(seeded(Named).double()), noise(5, 4), classes(5, count=3)
    found = DirectPath(ResidualPath(("embed",), top="norm"))(s, x, y).grads
    torch.testing.assert_close(found["embed.weight"], Backprop()(s, x, y).grads["embed.weight"])


class TestTraining:
    @pytest.mark.parametrize("name", ["direct", "maps"])
    def test_learns_what_a_frozen_trunk_cannot(self, name):
        def last_loss(estimator):
            s, x, y = problem(dtype=torch.float32)
            learner = GradientLearner(s, estimator, Adam(lr=1e-2).build(s), schedule=CosineWithWarmup(60, 3))
            draws = generator()
            return [float(learner.step(x, y, generator=draws).loss) for _ in range(60)][-1]

        assert last_loss(ESTIMATORS[name]()) < 0.7 * last_loss(FrozenTrunk())

    def test_goes_on_where_it_was(self):
        def learner():
            s, *batch = problem()
            return GradientLearner(s, DirectPath(feedback=MeanJacobian()), Adam(lr=1e-2).build(s)), batch

        (through, batch), (first, _), (second, _) = learner(), learner(), learner()
        draws, again = generator(), generator()
        for _ in range(6):
            through.step(*batch, generator=draws)
        for _ in range(3):
            first.step(*batch, generator=again)
        second.load_state_dict(first.state_dict())
        for _ in range(3):
            second.step(*batch, generator=again)
        for name, p in through.state_dict()["model"].items():
            assert torch.equal(second.state_dict()["model"][name], p)
        assert set(through.state_dict()["maps"]) == set(
            through.split.trunk.residual_path().writers[:-1]
        )  # the last is exact


class TestRefusals:
    def refused(self, estimator, model=None):
        s = split(seeded(model or Residual).double())
        with pytest.raises(SplitError) as caught:
            estimator(s, noise(5, 4), classes(5, count=3))
        return caught.value.problems

    def test_a_trunk_that_does_not_say_where_it_writes(self):
        (problem,) = self.refused(DirectPath())
        assert "path=ResidualPath.find(split, batch)" in problem

    def test_everything_that_is_wrong_with_a_path(self):
        path = ResidualPath(
            ("embed", "nowhere", "inner"), top="inner.0", added={"lost": "embed", "norm.bias": "outer.0"}
        )
        problems = self.refused(DirectPath(path))
        wanted = (
            "'nowhere', which is no module",
            "'lost', which is no parameter",
            "norm.bias is added beside 'outer.0'",
        )
        for words in (*wanted, "inner (ModuleList) cannot be trained by what it writes", "no closed form for inner.0"):
            assert any(words in p for p in problems), words
        assert len(problems) == 5

    def test_a_path_without_writers(self):
        assert self.refused(DirectPath(ResidualPath((), top="norm"))) == ("the path has no writer",)

    @pytest.mark.parametrize("lean", [False, True])
    def test_a_module_that_does_not_write_to_the_stream(self, lean):
        (problem,) = self.refused(DirectPath(ResidualPath(("embed", "inner.0"), top="norm"), lean=lean))
        assert "inner.0 writes (5, 12), and the stream is (5, 6)" in problem

    @pytest.mark.parametrize("geometry", [{"padding": 1, "padding_mode": mode} for mode in ("reflect", "circular")])
    def test_a_convolution_that_pads_otherwise(self, geometry):
        s = Split(
            seeded(lambda: nn.Sequential(nn.Conv2d(1, 2, 3, **geometry), nn.Flatten())), LinearHead(nn.Linear(32, 3))
        )
        with pytest.raises(SplitError, match=r"0 \(Conv2d\) cannot be trained by what it writes"):
            DirectPath(ResidualPath(("0",)))(s, noise(5, 1, 4, 4, dtype=torch.float32), classes(5, count=3))

    def test_a_norm_that_computes_something_else(self):
        class Other(nn.LayerNorm):
            def forward(self, x):
                return super().forward(x).tanh()

        (problem,) = self.refused(DirectPath(PATH), lambda: Residual(norm=Other))
        assert "no closed form for norm (Other)" in problem

    def test_a_top_that_does_not_give_h(self):
        class Scaled(Residual):
            def forward(self, x):
                return self.readout(2 * self.norm(self.embed(x)))

        (problem,) = self.refused(DirectPath(ResidualPath(("embed",), top="norm")), Scaled)
        assert "h is not what norm gives" in problem

    def test_a_top_that_is_not_called(self):
        class Bare(Residual):
            def forward(self, x):
                return self.readout(self.embed(x))

        (problem,) = self.refused(DirectPath(ResidualPath(("embed",), top="norm")), Bare)
        assert "norm is not called" in problem

    def test_a_top_that_is_called_twice(self):
        class Twice(Residual):
            def forward(self, x):
                return self.readout(self.norm(self.norm(self.embed(x))))

        (problem,) = self.refused(DirectPath(ResidualPath(("embed",), top="norm")), Twice)
        assert "norm is called 2 times" in problem

    def test_a_top_that_is_left_out(self):
        (problem,) = self.refused(DirectPath(ResidualPath(PATH.writers)))
        assert "does not add up to the top" in problem

    def test_writes_that_do_not_add_up(self):
        (problem,) = self.refused(DirectPath(ResidualPath(("embed", "outer.1"), top="norm")))
        assert "does not add up to the top" in problem
        assert "strict=False" in problem

    def test_a_writer_that_is_not_called(self):
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.attention = nn.Linear(4, 6), nn.MultiheadAttention(6, 2)
                self.readout = nn.Linear(6, 3)

            def forward(self, x):
                x = self.embed(x)
                return self.readout(x + self.attention(x, x, x, need_weights=False)[0])

        path = ResidualPath(("embed", "attention.out_proj"))
        (problem,) = self.refused(DirectPath(path), Attention)
        assert "and no subclass" in problem

    @pytest.mark.parametrize("names", [("embed", "outer.0", "outer.1", "outer.1"), (*PATH.writers, "norm")])
    def test_names_that_come_twice(self, names):
        (problem,) = self.refused(DirectPath(ResidualPath(names, top="norm")))
        assert "twice" in problem

    def test_a_parameter_that_does_not_fit_the_stream(self):
        (problem,) = self.refused(DirectPath(ResidualPath(PATH.writers, top="norm", added={"embed.weight": "embed"})))
        assert "embed.weight cannot be added" in problem

    def test_a_string_for_a_tuple(self):
        with pytest.raises(SplitError, match=r"\('embed',\)"):
            ResidualPath("embed")

    def test_something_else_for_a_path(self):
        with pytest.raises(SplitError, match="path must be of type ResidualPath, got"):
            DirectPath(["embed"])

    def test_what_is_read_and_written_over(self):
        class Late(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.write, self.readout = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

            def forward(self, x):
                x = self.embed(x)
                x += self.write(x)
                return self.readout(x)

        (problem,) = self.refused(DirectPath(ResidualPath(("embed", "write"))), Late)
        assert "what write reads is written over" in problem

    def test_a_top_that_writes_over_what_it_reads(self):
        s = Split(
            seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True))).double(),
            LinearHead(nn.Linear(6, 3).double()),
        )
        with pytest.raises(SplitError, match="what 1 reads is written over"):
            DirectPath(ResidualPath(("0",), top="1"))(s, noise(5, 4), classes(5, count=3))

    def test_numbers_that_are_none(self):
        s = split(seeded(Residual).double())
        with pytest.raises(NonFiniteError):
            DirectPath(PATH)(s, noise(5, 4) * torch.nan, classes(5, count=3))

    @pytest.mark.parametrize("tied_share", [-0.1, 1.5, float("nan"), True, "0.3"])
    def test_a_share_that_is_none(self, tied_share):
        with pytest.raises(SplitError, match="tied_share must be a number from 0 to 1"):
            DirectPath(tied_share=tied_share)

    def test_maps_without_a_generator(self):
        (problem,) = self.refused(DirectPath(PATH, feedback=MeanJacobian()))
        assert "pass generator=" in problem

    def test_a_class_for_an_object(self):
        with pytest.raises(SplitError, match=r"feedback=MeanJacobian\(\)"):
            DirectPath(feedback=MeanJacobian)

    def test_a_rate_no_map_can_follow(self):
        with pytest.raises(ValueError, match="rate must be in"):
            MeanJacobian(rate=2)
