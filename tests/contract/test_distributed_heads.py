"""Heads divided by classes give the estimate of one process, and local heads meet every few steps."""

from __future__ import annotations

import pytest
import torch
from _ranks import MAKERS, close, network, trained

import splitfg
from splitfg.distributed import DistributedEstimator, LocalHeads, Ranks, ShardedHead


def sharded(rank, name):
    split, x, y = network(name, torch.float64)
    torch.manual_seed(0)
    trunk, layer = split.trunk, split.head.layers[0]
    split = splitfg.Split(trunk, ShardedHead(Ranks(), layer, ignore_index=-1))
    estimator = DistributedEstimator(MAKERS[name](), check_every=1, whole_batches=True)
    found, params, _ = trained(estimator, split, x, y)
    return found, params, split.head.predict(split.h(Ranks().own_rows(x, y)[0]))


@pytest.mark.parametrize("name", ["split_fg", "split_fg_orthogonal", "activity_fg", "frozen", "mean_jacobian"])
def test_a_head_divided_by_classes_gives_the_estimate_of_one(crew, name):
    split, x, y = network(name, torch.float64)
    head = splitfg.LinearHead(*split.head.layers, loss=splitfg.CrossEntropy(ignore_index=-1))
    split = splitfg.Split(split.trunk, head)
    expected, params, _ = trained(MAKERS[name](), split, x, y)
    results = crew(sharded, name)
    for found, own, _ in results:
        for (loss, grads, norms, _), (e_loss, e_grads, e_norms, _) in zip(found, expected, strict=True):
            trunk = [n for n in e_grads if not n.startswith("head")]
            close(
                [loss, norms["u"], *(grads[n] for n in trunk)],
                [e_loss, e_norms["u"], *(e_grads[n] for n in trunk)],
                1e-12,
            )
        close(
            [own[n] for n in params if n.startswith("trunk")] or [loss],
            [p for n, p in params.items() if n.startswith("trunk")] or [e_loss],
            1e-12,
        )
    weight = torch.cat([own["head.weight"] for _, own, _ in results])
    close([weight], [params["head.0.weight"]], 1e-12)
    close([torch.cat([outputs for _, _, outputs in results])], [split.predict(x)], 1e-12)


def clipped(rank, apart):
    """Two clipped steps with a divided head."""
    split, x, y = network("split_fg", torch.float64)
    split = splitfg.Split(split.trunk, ShardedHead(Ranks(), split.head.layers[0], ignore_index=-1))
    estimator = DistributedEstimator(splitfg.SplitFG(K=4), check_every=1, whole_batches=True)
    return stepped(split, estimator, x, y, apart)


def stepped(split, estimator, x, y, apart):
    optimizer, generator = torch.optim.SGD(split.model.parameters(), lr=0.1), torch.Generator().manual_seed(0)
    learner = splitfg.GradientLearner(split, estimator, optimizer, max_norm=0.05, clip_apart=apart)
    for _ in range(2):
        learner.step(x, y, generator=generator)
    return {name.replace("head.0.", "head."): p.detach() for name, p in split.model.named_parameters()}


@pytest.mark.parametrize("apart", [False, True])
def test_clipping_counts_all_shards_of_a_head(crew, apart):
    split, x, y = network("split_fg", torch.float64)
    head = splitfg.LinearHead(*split.head.layers, loss=splitfg.CrossEntropy(ignore_index=-1))
    expected = stepped(splitfg.Split(split.trunk, head), splitfg.SplitFG(K=4), x, y, apart)
    found = crew(clipped, apart)
    for own in found:
        close([own[n] for n in own if n[:4] != "head"], [p for n, p in expected.items() if n[:4] != "head"], 1e-12)
    close([torch.cat([own["head.weight"] for own in found])], [expected["head.weight"]], 1e-12)


def clipped_together(rank):
    split, _, _ = network("split_fg", torch.float64)
    estimator = DistributedEstimator(splitfg.SplitFG(K=3), reduce_head=False)
    LocalHeads(splitfg.GradientLearner(split, estimator, torch.optim.SGD(split.model.parameters())), every=2)


def test_local_heads_that_would_scale_the_trunks_are_an_error(crew):
    assert all("clip_apart=True" in message for _, message in crew.errors(clipped_together))


def local_heads(rank, steps, every):
    split, x, y = network("split_fg", torch.float64)
    estimator = DistributedEstimator(splitfg.SplitFG(K=3), whole_batches=True, reduce_head=False, check_every=1)
    inner = splitfg.GradientLearner(split, estimator, torch.optim.SGD(split.model.parameters(), lr=0.1), max_norm=None)
    learner, generator = LocalHeads(inner, every=every, rate=1.0, momentum=0.0), torch.Generator().manual_seed(0)
    heads = []
    for _ in range(steps):
        learner.step(x, y, generator=generator)
        heads.append(split.head.layers[0].weight.detach().clone())
    return heads, {n: p.detach() for n, p in split.trunk.named_parameters()}


def test_local_heads_meet_every_few_steps_and_trunks_never_part(crew):
    found = crew(local_heads, 4, 2)
    for step, together in enumerate((False, True, False, True)):
        heads = [heads[step] for heads, _ in found]
        assert all(torch.equal(heads[0], head) for head in heads) is together
    assert all(torch.equal(found[0][1][n], own[n]) for _, own in found for n in own)
    # with plain SGD and an average after every step, the heads see the mean of the processes' own gradients
    split, x, y = network("split_fg", torch.float64)
    parts = [(x[13 * i // 4 : 13 * (i + 1) // 4], y[13 * i // 4 : 13 * (i + 1) // 4]) for i in range(4)]
    grads = [split.head(split.h(px), py).grads["0.weight"] for px, py in parts]
    expected = split.head.layers[0].weight.detach() - 0.1 * torch.stack(grads).mean(0)
    close([crew(local_heads, 1, 1)[0][0][0]], [expected], 1e-12)
