"""Blocks on four processes give the estimate of one: against the parallel pull, autograd and torch's pipelines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import splitfg
from splitfg import LinearHead, ParallelPull, Split, Tied
from splitfg.distributed import StagedPull
from splitfg.feedback import GatedMaps, RandomMaps
from splitfg.models import GPT, MLP, GPTConfig, ResNet

DOUBLE = torch.float64


def generator():
    return torch.Generator().manual_seed(0)


def gpt(tied=Tied.INCLUDE):
    trunk = GPT(GPTConfig(layers=3, width=8, heads=2, context=6, vocab=20), generator=generator()).to(DOUBLE)
    with torch.no_grad():  # large enough for blocks to matter
        for p in trunk.parameters():
            p.add_(0.3 * torch.randn(p.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(p.numel())))
    tokens = torch.randint(0, 20, (5, 7), generator=generator())
    return Split(trunk, LinearHead(trunk.tied_linear()), tied=tied), tokens[:, :-1], tokens[:, 1:]


def chain():
    trunk = MLP(5, widths=(6, 7, 8, 6, 6), generator=generator()).to(DOUBLE)
    head = LinearHead(splitfg.models.linear(6, 3, generator=generator()).to(DOUBLE))
    x = torch.randn(7, 5, dtype=DOUBLE, generator=generator())
    return Split(trunk, head), x, torch.arange(7) % 3


def images():
    trunk = ResNet(widths=(8, 16), blocks=(1, 2), generator=generator()).to(DOUBLE)
    head = LinearHead(splitfg.models.linear(16, 3, generator=generator()).to(DOUBLE))
    x = torch.randn(4, 3, 8, 8, dtype=DOUBLE, generator=generator())
    return Split(trunk, head), x, torch.arange(4) % 3


class Positions(nn.Module):
    """Its position table writes to the stream once for all samples."""

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(4))

    def forward(self, x):
        x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = x + block(x)
        return x

    def block_path(self):
        blocks = tuple(splitfg.PathBlock((f"blocks.{i}",), writer=f"blocks.{i}.2") for i in range(4))
        return splitfg.BlockPath(blocks, residual=True, writers=("token", "position"))


def positions():
    torch.manual_seed(0)
    split = Split(Positions().to(DOUBLE), LinearHead(nn.Linear(4, 7).to(DOUBLE)))
    tokens = torch.randint(0, 7, (4, 6), generator=generator())
    return split, tokens[:, :-1], tokens[:, 1:]


NETWORKS = {
    "gpt": gpt,
    "gpt_excluded": lambda: gpt(Tied.EXCLUDE),
    "chain": chain,
    "images": images,
    "positions": positions,
}
PULLS = {
    "one": lambda: ParallelPull(feedback=RandomMaps()),
    "two": lambda: ParallelPull(feedback=RandomMaps(), pulls=2),
    "own_block": lambda: ParallelPull(feedback=RandomMaps(), own_block=True),
    "all": lambda: ParallelPull(feedback=RandomMaps(), pulls=9),
}


def exact(split, x, y):
    """The gradient by autograd through the whole model."""
    params = {n: p for n, p in split.model.named_parameters() if n in split.trained_params()}
    loss = nn.functional.cross_entropy(split.model(x).flatten(0, -2), y.flatten())
    return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))


def staged(rank, network, pull, micro_batches, cuts=None, recompute=False):
    split, x, y = NETWORKS[network]()
    estimator = StagedPull(PULLS[pull](), micro_batches=micro_batches, cuts=cuts, recompute=recompute)
    estimate = estimator(split, x, y, generator=generator())
    stats = estimate.stats
    norms = {name: float(value) for name, value in stats.norms.items()}
    return float(estimate.loss), estimate.grads, estimator.owned(split), stats.block_backward, stats.biased, norms


def joined(found):
    """The gradients of all stages, which must not overlap but for shared parameters."""
    grads = {}
    for _, own, _, *_ in found:
        for name, g in own.items():
            assert name not in grads or torch.equal(grads[name], g)
            grads[name] = g
    return grads


def far(grads, expected):
    assert set(grads) == set(expected)
    return max(((grads[n] - g).norm() / g.norm().clamp_min(1e-30)).item() for n, g in expected.items())


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "again"])
def test_stages_give_the_estimate_of_one_process(crew, network, pull, recompute):
    split, x, y = NETWORKS[network]()
    expected = PULLS[pull]()(split, x, y, generator=generator())
    found = crew(staged, network, pull, 2, None, recompute)
    assert far(joined(found), expected.grads) < 1e-12
    for loss, _, _, backward, biased, norms in found:
        assert loss == pytest.approx(expected.loss.item(), rel=1e-12)
        assert (backward, biased) == (expected.stats.block_backward, expected.stats.biased)
        assert norms == pytest.approx({n: v.item() for n, v in expected.stats.norms.items()}, rel=1e-12)


@pytest.mark.parametrize("network", ["gpt", "chain", "images", "positions"])
def test_as_many_pulls_as_blocks_are_backprop(crew, network):
    split, x, y = NETWORKS[network]()
    assert far(joined(crew(staged, network, "all", 3)), exact(split, x, y)) < 1e-12


def test_every_parameter_has_one_owner_and_cuts_move_it(crew):
    split, _, _ = gpt()
    for cuts in (None, (3, 4, 5)):
        found = crew(staged, "gpt", "one", 1, cuts)
        names = [name for _, _, owned, *_ in found for name in owned]
        assert sorted(names) == sorted(split.trained_params())
        first = [name for name in found[0][2] if ".blocks." in name]
        assert max(name.split(".")[2] for name in first) == ("1" if cuts else "0")


def sequential():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())]
    trunk, head = nn.Sequential(*layers).to(DOUBLE), nn.Linear(6, 3).to(DOUBLE)
    return trunk, head, torch.randn(8, 6, dtype=DOUBLE), torch.arange(8) % 3


def pipelined(rank, schedule):
    """The gradients of torch's pipeline: two layers a stage, the last with the head."""
    from torch.distributed import pipelining

    trunk, head, x, y = sequential()
    stage = nn.Sequential(*trunk[2 * rank : 2 * rank + 2], *([head] if rank == 3 else []))
    made = pipelining.PipelineStage(stage, rank, 4, torch.device("cpu"))
    kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[schedule]
    run = kind(made, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
    if rank == 0:
        run.step(x)
    else:
        run.step(target=y) if rank == 3 else run.step()
    return [p.grad for p in stage.parameters()]


def stages_beside_it(rank):
    trunk, head, x, y = sequential()
    split = Split(trunk, LinearHead(head))
    estimator = StagedPull(ParallelPull(feedback=RandomMaps(), pulls=4), micro_batches=4)
    estimate = estimator(split, x, y, generator=generator())
    return [estimate.grads[name] for name in estimator.owned(split)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_all_pulls_equal_the_pipelines_of_torch(crew, schedule):
    for ours, theirs in zip(crew(stages_beside_it), crew(pipelined, schedule), strict=True):
        assert len(ours) == len(theirs) in (2, 4)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def learning(split, x, y, estimator):
    """Three steps of SGD with maps that learn; returns the gradients of each, and the maps."""
    drawn, found = generator(), []
    for _ in range(3):
        estimate = estimator(split, x, y, generator=drawn)
        estimator.update_state(split, estimate)
        found.append(dict(estimate.grads))
        with torch.no_grad():
            for name, g in estimate.grads.items():
                split.model.get_parameter(name).sub_(0.1 * g)
    return found, estimate.stats.jvps, drawn.get_state()


def learning_stages(rank, network, settings, micro_batches, recompute):
    split, x, y = NETWORKS[network]()
    estimator = StagedPull(jacobians(settings), micro_batches=micro_batches, recompute=recompute)
    found = learning(split, x, y, estimator)
    estimator.collect(split)
    return *found, estimator.learned_state()["maps"].state_dict()


def jacobians(settings):
    return ParallelPull(feedback=splitfg.MeanJacobian(0.5, **settings), pulls=1 + ("steps" in settings))


SELDOM = {"every": 2, "steps": 4}
LIMITED = {"limit": 0.5}


@pytest.mark.parametrize(("network", "settings"), [("gpt", LIMITED), ("chain", SELDOM), ("images", {})])
def test_maps_that_stages_learn_are_those_of_one_process(crew, network, settings):
    split, x, y = NETWORKS[network]()
    one = jacobians(settings)
    expected, jvps, state = learning(split, x, y, one)
    results = crew(learning_stages, network, settings, 2, "steps" in settings)
    for step, grads in enumerate(expected):
        together = {name: g for found, *_ in results for name, g in found[step].items()}
        assert far(together, grads) < 1e-11, step
    for _, own_jvps, own_state, maps in results:
        assert own_jvps == jvps
        assert torch.equal(own_state, state)
        assert maps.keys() == one.feedback.state_dict().keys()
        for name, m in one.feedback.state_dict().items():
            torch.testing.assert_close(maps[name], m, rtol=1e-11, atol=1e-13)


def training(rank):
    split, x, y = gpt()
    estimator = StagedPull(ParallelPull(pulls=2), micro_batches=2)
    optimizer = torch.optim.SGD([split.model.get_parameter(n) for n in split.trained_params()], lr=0.1)
    learner = splitfg.GradientLearner(split, estimator, optimizer, max_norm=0.5, clip_apart=True)
    losses = [learner.step(x, y, generator=generator()).loss.item() for _ in range(3)]
    estimator.collect(split)
    return losses, {name: p.detach() for name, p in split.model.named_parameters()}


def test_clipped_training_in_stages_is_that_of_one_process(crew):
    split, x, y = gpt()
    optimizer = torch.optim.SGD(split.model.parameters(), lr=0.1)
    learner = splitfg.GradientLearner(split, ParallelPull(pulls=2), optimizer, max_norm=0.5, clip_apart=True)
    expected = [learner.step(x, y, generator=generator()).loss.item() for _ in range(3)]
    for losses, params in crew(training):
        assert losses == pytest.approx(expected, rel=1e-12)
        for name, p in split.model.named_parameters():
            torch.testing.assert_close(params[name], p.detach(), rtol=1e-11, atol=1e-13)


class NoForwardRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, delta):
        return delta


class Cloned(nn.Linear):
    def forward(self, x):
        return NoForwardRule.apply(super().forward(x))


class Masked(nn.Module):
    """Its blocks multiply by a mask that depends on the rows."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, x):
        mask = (x > 0).double()
        for block in self.blocks:
            x = block(x, mask)
        return x

    def block_path(self):
        return splitfg.BlockPath(tuple(splitfg.PathBlock((f"blocks.{i}",)) for i in range(4)))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, mask):
        return self.layer(x) * mask


def trouble(rank, kind):
    trunk, head, x, y = sequential()
    options = {"micro_batches": 2}
    if kind == "blocks":
        trunk = trunk[:4]
    elif kind == "parts":
        options["micro_batches"] = 9
    elif kind == "cuts":
        options["cuts"] = (1, 1, 3)
    elif kind == "mask":
        torch.manual_seed(0)
        trunk = Masked().to(DOUBLE)
    elif kind == "forward mode":
        trunk[4] = Cloned(6, 6).to(DOUBLE)  # of the third stage
        torch.manual_seed(0)
    elif kind == "settings":
        options["micro_batches"] = 1 + (rank == 2)
    elif kind == "rows":
        x, y = (x[:0], y[:0]) if rank == 1 else (x, y)
    elif kind == "loss":
        y = torch.where(torch.arange(8) == 1, -100, y) if rank < 3 else torch.full((8,), -100)
    maps = splitfg.MeanJacobian() if kind == "forward mode" else RandomMaps()
    StagedPull(ParallelPull(feedback=maps), **options)(Split(trunk, LinearHead(head)), x, y, generator=generator())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("blocks", "2 blocks cannot be divided between 4 processes"),
        ("parts", "8 rows has no 9 parts"),
        ("cuts", "3 rising numbers"),
        ("mask", "depends on the rows of the batch"),
        ("forward mode", "forward"),
        ("settings", "micro_batches=2"),
        ("loss", "rank 3"),
        ("rows", "rank 1: the batch is empty"),
    ],
)
def test_trouble_is_one_clear_error_in_all(crew, kind, words):
    errors = crew.errors(trouble, kind)
    assert all(words in message for _, message in errors), errors
    assert len({name for name, _ in errors}) == 1


def gated_maps(rank):
    StagedPull(ParallelPull(feedback=GatedMaps()), micro_batches=0)


def test_feedback_that_stages_cannot_share_is_an_error(crew):
    for _, message in crew.errors(gated_maps):
        assert "GatedMaps draws or learns: use MeanJacobian()" in message
        assert "micro_batches must be at least 1" in message
