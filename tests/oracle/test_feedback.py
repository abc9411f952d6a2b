"""The direct path against autograd: closed forms of norms and writers, where it is exact, and what its maps learn."""

import copy

import pytest
import torch
from _toolkit import classes, generator, noise, seeded
from torch import nn

from splitfg import Backprop, LinearHead, Split, Tied
from splitfg.estimators import DirectPath, ParallelPull
from splitfg.feedback import MeanJacobian, RandomMaps, UnchangedFeedback
from splitfg.models import GPT, FlatTrunk, GPTConfig
from splitfg.models.resnet import ConvNorm
from splitfg.sites import ResidualPath, has_pull_back, layer_gradients, pull_back, record_run

DOUBLE = torch.float64
TINY = GPTConfig(layers=3, width=16, heads=2, context=8, vocab=30)


def by_autograd(module, x, cotangent):
    """The pullback of x, if it can have one, and of the parameters."""
    x = x.clone().requires_grad_(x.is_floating_point())
    module(x).backward(cotangent)
    return x.grad, {n: p.grad for n, p in module.named_parameters()}


def stir(module):
    """Parameters that no norm begins with."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.add_(noise(*p.shape, seed=i))
    return module


@pytest.mark.parametrize("size", [1, (1, 1)])
@pytest.mark.parametrize("flat", [True, False])
def test_a_mean_over_pixels_is_pulled_back_as_autograd_does(size, flat):
    module, x, u = nn.AdaptiveAvgPool2d(size), noise(4, 3, 5, 2, seed=3), noise(4, 3, 1, 1, seed=4)
    expected, _ = by_autograd(module, x, u)
    r, own = pull_back(module, x, u.flatten(1) if flat else u)
    torch.testing.assert_close(r, expected)
    assert not own
    assert not has_pull_back(nn.AdaptiveAvgPool2d((1, 2)))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.LayerNorm(5), (4, 3, 5)),
        (nn.LayerNorm((3, 5)), (4, 3, 5)),
        (nn.LayerNorm(5, bias=False), (4, 5)),
        (nn.LayerNorm(5, elementwise_affine=False, eps=0.1), (4, 5)),
        (nn.RMSNorm(5), (4, 3, 5)),
        (nn.RMSNorm((3, 5), eps=0.1), (4, 3, 5)),
        (nn.RMSNorm(5, elementwise_affine=False), (4, 5)),
        (nn.GroupNorm(2, 6), (4, 6, 3, 2)),
        (nn.GroupNorm(3, 6, affine=False), (4, 6)),
        (nn.Identity(), (4, 5)),
        (nn.ReLU(), (4, 3, 5)),
    ],
)
def test_norms_are_pulled_back_as_autograd_does(module, shape):
    module = stir(module.double())
    x, u = noise(*shape, seed=3), noise(*shape, seed=4)
    expected, expected_own = by_autograd(module, x, u)
    with torch.no_grad():
        r, own = pull_back(module, x, u)
    torch.testing.assert_close(r, expected)
    assert set(own) == set(expected_own)
    for name, g in expected_own.items():
        torch.testing.assert_close(own[name], g)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("module", [nn.RMSNorm(16), nn.LayerNorm(16), nn.GroupNorm(2, 16)], ids=repr)
@pytest.mark.parametrize("scale", [0.02, 300.0])
def test_narrow_norms_are_as_exact_as_their_dtype(module, dtype, scale):
    x, u = (scale * noise(8, 16, seed=3)).to(dtype), noise(8, 16, seed=4).to(dtype)
    expected, expected_own = by_autograd(copy.deepcopy(module).float(), x.float(), u.float())
    with torch.no_grad():
        r, own = pull_back(copy.deepcopy(module).to(dtype), x, u)
    assert (r.float() - expected).norm() < 0.02 * expected.norm()
    for name, g in expected_own.items():
        assert (own[name].float() - g).norm() < 0.02 * g.norm()


@pytest.mark.parametrize(
    ("module", "a"),
    [
        (nn.Linear(4, 5), noise(3, 2, 4)),
        (nn.Linear(4, 5, bias=False), noise(3, 4)),
        (nn.Embedding(7, 5), classes(3, 4, count=7)),
        (nn.Embedding(7, 5, padding_idx=2), classes(6, 4, count=7)),
        (nn.Conv2d(2, 5, 3, padding=1), noise(3, 2, 6, 6)),
        (nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False), noise(3, 4, 7, 7)),
        (stir(ConvNorm(3, 8, generator=generator())), noise(3, 3, 6, 6)),
        (stir(ConvNorm(3, 8, stride=2, activated=True, generator=generator())), noise(3, 3, 6, 6)),
    ],
)
def test_writers_are_trained_as_autograd_does(module, a):
    module = module.double()
    delta = noise(*module(a).shape, seed=5)
    _, expected = by_autograd(module, a, delta)
    with torch.no_grad():
        found = layer_gradients(module, a, delta)
    assert set(found) == set(expected)
    for name, g in expected.items():
        torch.testing.assert_close(found[name], g)


class Parallel(nn.Module):
    """Writers that read the input and never the stream: the identity path is all there is."""

    def __init__(self, width=6):
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(4, width, bias=False)
        self.place = nn.Parameter(torch.zeros(8, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(self.first(x) + self.place[: x.shape[1]] + self.second(torch.tanh(x)))

    def residual_path(self):
        return ResidualPath(("first", "second"), top="norm", added={"place": "first"})


class Linear(nn.Module):
    """A stream that is read by linear maps alone, x ← x + x A: its Jacobians are the same everywhere."""

    def __init__(self, width=4, depth=3):
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.writers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        x = self.embed(x)
        for writer in self.writers:
            x = x + writer(x)
        return x

    def residual_path(self):
        return ResidualPath(("embed", *(f"writers.{i}" for i in range(len(self.writers)))))


def splits(trunk, width, classes=3):
    return seeded(lambda: Split(stir(trunk().double()), LinearHead(nn.Linear(width, classes, dtype=DOUBLE))))


def assert_same(found, expected, names):
    for n in names:
        torch.testing.assert_close(found[n], expected[n], msg=n)


@pytest.mark.parametrize("lean", [False, True])
def test_exact_where_nothing_reads_the_stream(lean):
    s, x, y = splits(Parallel, 6), noise(5, 3, 4), classes(5, 3, count=3)
    estimate, expected = DirectPath(lean=lean)(s, x, y), Backprop()(s, x, y)
    assert set(estimate.grads) == set(expected.grads)
    assert_same(estimate.grads, expected.grads, expected.grads)
    torch.testing.assert_close(estimate.loss, expected.loss, rtol=1e-14, atol=0)  # summed in another order


class Added(nn.Module):
    """A parameter of any shape beside the only writer."""

    def __init__(self, shape):
        super().__init__()
        self.write, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.place = nn.Parameter(torch.zeros(shape))

    def forward(self, x):
        place = self.place[: x.shape[1]] if self.place.ndim == 2 and len(self.place) > x.shape[1] else self.place
        return self.norm(self.write(x) + place)


@pytest.mark.parametrize("shape", [(3, 6), (7, 6), (1, 6), (6,), (1, 3, 6), (1, 1, 6), (5, 3, 6), (5, 1, 6)])
def test_parameters_that_are_added_are_summed_over_what_they_are_broadcast_along(shape):
    s, x, y = splits(lambda: Added(shape), 6), noise(5, 3, 4), classes(5, 3, count=3)
    found = DirectPath(ResidualPath(("write",), top="norm", added={"place": "write"}))(s, x, y).grads
    assert_same(found, Backprop()(s, x, y).grads, found)


class Sharing(nn.Module):
    """Two writers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(4, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.first(x) + self.second(torch.tanh(x))


def test_writers_that_share_a_weight_add_up():
    s, x, y = splits(Sharing, 6), noise(5, 4), classes(5, count=3)
    found, expected = DirectPath(ResidualPath(("first", "second")))(s, x, y).grads, Backprop()(s, x, y).grads
    assert set(found) == set(expected)
    assert_same(found, expected, expected)


def gpt(tied):
    trunk = GPT(TINY, generator=generator()).double()
    with torch.no_grad():
        for p in trunk.parameters():
            p.add_(0.2 * noise(*p.shape, seed=p.numel()))
    return Split(trunk, LinearHead(trunk.tied_linear()), tied=tied)


def tokens(seed):
    return classes(4, 6, count=30, seed=seed)


def test_exact_at_the_last_writer_and_the_norm_of_a_gpt():
    s, x, y = gpt(Tied.INCLUDE), tokens(1), tokens(2)
    estimate, expected = DirectPath()(s, x, y).grads, Backprop()(s, x, y).grads
    last = ["blocks.2.mlp.out.weight", "blocks.2.mlp.out.bias", "norm.weight", "norm.bias"]
    assert_same(estimate, expected, [f"trunk.{n}" for n in last])
    assert not torch.allclose(estimate["trunk.blocks.0.mlp.out.weight"], expected["trunk.blocks.0.mlp.out.weight"])


@pytest.mark.parametrize("lean", [False, True])
def test_exact_at_the_last_writer_of_a_flat_trunk(lean):
    trunk = stir(FlatTrunk(width=8, generator=generator())).double()
    s = Split(trunk, LinearHead(seeded(lambda: nn.Linear(8 * 4 * 4, 3)).double()))
    x, y = noise(5, 3, 4, 4), classes(5, count=3)
    found, exact = DirectPath(lean=lean)(s, x, y).grads, Backprop()(s, x, y).grads
    assert_same(found, exact, [n for n in exact if "second" in n or "head" in n])
    assert {n.split(".")[1] for n in set(exact) - set(found)} == {"block"}  # its first convolution
    written, block = trunk.stem(x), trunk.block
    alone = torch.relu(written + block.second(block.first(written.detach()))).flatten(1)  # nothing reads the stream
    torch.nn.functional.cross_entropy(s.head.predict(alone), y).backward()
    assert_same(
        found, {f"trunk.stem.{n}": p.grad for n, p in trunk.stem.named_parameters()}, [n for n in found if "stem" in n]
    )


def test_along_the_identity_path_alone():
    """The gradient of every writer if no block were to read what the others wrote: r, by autograd, at every site."""
    s, x, y = gpt(Tied.INCLUDE), tokens(1), tokens(2)
    estimate = DirectPath()(s, x, y).grads
    h = s.h(x)
    u = s.head(h, y).u
    read = {}
    handle = s.trunk.norm.register_forward_hook(lambda module, inputs, output: read.update(top=inputs[0]))
    s.h(x)
    handle.remove()
    r, _ = by_autograd(s.trunk.norm, read["top"].detach(), u)
    position = torch.zeros_like(s.trunk.position)
    position[:6] = r.sum(0)
    torch.testing.assert_close(estimate["trunk.position"], position)
    lookup = torch.zeros(30, 16, dtype=DOUBLE).index_add(0, x.flatten(), r.flatten(0, 1))
    readout = s.head(h, y).grads["0.weight"]
    torch.testing.assert_close(estimate["trunk.token.weight"], readout + lookup)


def test_a_tied_table_is_looked_up_untrained_under_exclude():
    s, x, y = gpt(Tied.EXCLUDE), tokens(1), tokens(2)
    table = DirectPath()(s, x, y).grads["trunk.token.weight"]
    assert torch.equal(table, s.head(s.h(x), y).grads["0.weight"])


class TestMeanJacobian:
    def test_begins_as_the_direct_path(self):
        s, x, y = gpt(Tied.INCLUDE), tokens(1), tokens(2)
        mapped, direct = (
            DirectPath(feedback=f)(s, x, y, generator=generator()) for f in (MeanJacobian(), UnchangedFeedback())
        )
        assert_same(mapped.grads, direct.grads, direct.grads)
        assert (mapped.stats.jvps, direct.stats.jvps) == (1, 0)

    def test_finds_the_jacobians_of_a_linear_stream_and_with_them_the_gradient(self):
        s, y = splits(Linear, 4), classes(64, count=3)
        with torch.no_grad():
            for p in s.trunk.parameters():
                p.mul_(0.3)
        maps = MeanJacobian(rate=0.3)
        estimator, draws = DirectPath(feedback=maps), generator()
        for i in range(150):
            maps.apply(estimator(s, noise(64, 5, seed=i), y, generator=draws).state_update)
        eye = torch.eye(4, dtype=DOUBLE)
        expected = eye
        for i in reversed(range(3)):
            torch.testing.assert_close(maps.at(f"writers.{i}", eye), expected.T, rtol=0, atol=1e-6)
            expected = (eye + s.trunk.writers[i].weight.T) @ expected
        torch.testing.assert_close(maps.at("embed", eye), expected.T, rtol=0, atol=1e-6)
        x = noise(64, 5, seed=999)
        assert_same_closely(estimator(s, x, y, generator=draws).grads, Backprop()(s, x, y).grads)

    def test_comes_nearer_to_the_gradient_of_a_gpt(self):
        s, draws = gpt(Tied.INCLUDE), generator()
        maps = MeanJacobian()
        for i in range(100):
            maps.apply(DirectPath(feedback=maps)(s, tokens(i), tokens(i + 1), generator=draws).state_update)
        x, y = tokens(1000), tokens(1001)
        exact = Backprop()(s, x, y).grads
        far = {}
        for feedback in (maps, UnchangedFeedback(), RandomMaps()):
            grads = DirectPath(feedback=feedback)(s, x, y, generator=draws).grads
            far[type(feedback)] = sum((grads[n] - exact[n]).square().sum() for n in grads)
        assert far[MeanJacobian] < 0.8 * far[UnchangedFeedback]
        assert far[UnchangedFeedback] < far[RandomMaps]

    def test_the_last_writer_is_exact_however_far_the_maps_have_learned(self):
        s, draws, maps = gpt(Tied.INCLUDE), generator(), MeanJacobian(rate=0.5)
        last = s.trunk.residual_path().writers[-1]
        maps.load_state_dict({last: noise(16, 16)})  # from a checkpoint of an earlier version
        for i in range(20):
            change = DirectPath(feedback=maps)(s, tokens(i), tokens(i + 1), generator=draws).state_update
            assert last not in change
            assert change
            maps.apply(change)
        x, y = tokens(1000), tokens(1001)
        exact = Backprop()(s, x, y).grads
        for lean in (False, True):
            grads = DirectPath(feedback=maps, lean=lean)(s, x, y, generator=draws).grads
            assert_same_closely(grads, {n: g for n, g in exact.items() if n.startswith(f"trunk.{last}.")})

    def test_a_stream_that_is_scaled_learns_the_map_of_its_last_writer(self):
        class Doubled(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.writer = nn.Linear(5, 4), nn.Linear(4, 4)

            def forward(self, x):
                x = self.embed(x)
                return 2 * (x + self.writer(x))

        s = Split(seeded(Doubled).double(), LinearHead(seeded(lambda: nn.Linear(4, 3)).double()))
        maps, draws = MeanJacobian(rate=0.3), generator()
        estimator = DirectPath(ResidualPath(("embed", "writer"), strict=False), feedback=maps)
        for i in range(150):
            maps.apply(estimator(s, noise(64, 5, seed=i), classes(64, count=3), generator=draws).state_update)
        eye = torch.eye(4, dtype=DOUBLE)
        torch.testing.assert_close(maps.at("writer", eye), 2 * eye, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("limit", [None, 0.5])
    def test_learns_the_same_from_a_batch_in_parts(self, limit):
        def by_rows(split, x, sites, generator):
            """Noise that a row gets whatever part it is in."""
            return record_run(split.trunk, lambda: split.h(x), sites, lambda _, z: (1e3 * z).sin())

        s, x, y = gpt(Tied.INCLUDE), tokens(1), tokens(2)
        whole, parted = (
            DirectPath(feedback=MeanJacobian(limit=limit), micro_batch=rows, recorder=by_rows)(
                s, x, y, generator=generator()
            )
            for rows in (None, 3)
        )
        assert_same(parted.state_update, whole.state_update, whole.state_update)
        assert_same(parted.grads, whole.grads, whole.grads)

    def test_a_writer_that_writes_twice_learns_the_mean_of_its_jacobians(self):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.writer = nn.Linear(5, 4), nn.Linear(4, 4)

            def forward(self, x):
                x = self.embed(x)
                x = x + self.writer(x)
                return x + self.writer(x)

        s = Split(seeded(Twice).double(), LinearHead(seeded(lambda: nn.Linear(4, 3)).double()))
        maps, draws = MeanJacobian(rate=0.3), generator()
        estimator = DirectPath(ResidualPath(("embed", "writer")), feedback=maps)
        for i in range(400):
            learned = estimator(s, noise(64, 5, seed=i), classes(64, count=3), generator=draws).state_update
            maps.apply({name: step / (1 + i / 50) for name, step in learned.items()})
        eye, later = torch.eye(4, dtype=DOUBLE), s.trunk.writer.weight.detach()
        # the second write passes unchanged, the first through the second too: their mean is I + W / 2
        torch.testing.assert_close(maps.at("writer", eye), eye + later / 2, rtol=0, atol=0.05)

    def test_noise_rides_along_with_the_one_pass(self):
        s, x, y = gpt(Tied.INCLUDE), tokens(1), tokens(2)
        DirectPath(feedback=MeanJacobian())(s, x, y, generator=generator())  # validates the first batch
        calls = []
        s.trunk.register_forward_hook(lambda *_: calls.append(1))
        DirectPath(feedback=MeanJacobian())(s, x, y, generator=generator())
        assert len(calls) == 1

    def test_maps_mix_the_channels_of_images(self):
        class Pixels(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.write, self.top = nn.Conv2d(3, 5, 1), nn.Conv2d(5, 5, 1), nn.Identity()

            def forward(self, x):
                x = self.embed(x)
                return self.top(x + self.write(x)).flatten(1)

        s = Split(seeded(Pixels).double(), LinearHead(seeded(lambda: nn.Linear(5 * 4 * 6, 3)).double()))
        maps, draws = MeanJacobian(rate=0.3), generator()
        estimator = DirectPath(ResidualPath(("embed", "write"), top="top"), feedback=maps)
        for i in range(60):
            x, y = noise(4, 3, 4, 6, seed=i), classes(4, count=3)
            maps.apply(estimator(s, x, y, generator=draws).state_update)
        assert_same_closely(estimator(s, x, y, generator=draws).grads, Backprop()(s, x, y).grads)

    def test_many_rows_of_a_narrow_dtype(self):
        e = noise(40_000, 4).half()
        maps = MeanJacobian(rate=0.3)
        evidence = maps.correlate({"w": [e]}, 2 * e)
        learned = maps.change(evidence, rows=40_000, noises=4)["w"]
        torch.testing.assert_close(learned.double(), 0.3 * torch.eye(4, dtype=DOUBLE), rtol=0, atol=0.02)
        maps.apply({"w": learned})
        assert maps.at("w", e).dtype == torch.float16

    def test_goes_on_from_its_state(self):
        maps, again = MeanJacobian(), MeanJacobian()
        maps.apply({"w": noise(3, 3)})
        again.load_state_dict(maps.state_dict())
        maps.apply({"w": noise(3, 3)})
        again.apply({"w": noise(3, 3)})
        assert torch.equal(again.at("w", noise(2, 3)), maps.at("w", noise(2, 3)))


def assert_same_closely(found, expected):
    for n, g in expected.items():
        torch.testing.assert_close(found[n], g, rtol=1e-4, atol=1e-6, msg=n)


def test_random_maps_are_drawn_once_for_every_writer():
    r = noise(5, 4)
    first, again, other = RandomMaps(), RandomMaps(), RandomMaps(seed=1)
    assert torch.equal(first.at("b", r), first.at("b", r))
    assert not torch.equal(first.at("a", r), first.at("b", r))
    assert torch.equal(again.at("b", r), first.at("b", r))
    assert not torch.equal(other.at("b", r), first.at("b", r))


@pytest.mark.parametrize("method", [DirectPath, ParallelPull])
def test_stats_follow_the_norm_of_the_maps(method):
    trunk = GPT(TINY, generator=generator()).to(DOUBLE)
    s, x = Split(trunk, LinearHead(trunk.tied_linear()), tied=Tied.INCLUDE), classes(2, 8, count=30)
    maps = MeanJacobian()
    estimator = method(feedback=maps)
    first = estimator(s, x, x, generator=generator())
    assert first.stats.norms["maps"] == 0  # none is kept yet
    estimator.update_state(s, first)
    entries = torch.cat([m.flatten() for m in maps.state_dict().values()])
    torch.testing.assert_close(estimator(s, x, x, generator=generator()).stats.norms["maps"], entries.norm())
    assert "maps" not in method()(s, x, x, generator=generator()).stats.norms
