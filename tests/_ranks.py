"""A small network, estimators and comparisons for the tests of estimates on several processes."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import splitfg
from splitfg.distributed import DistributedEstimator, Ranks
from splitfg.estimators import AnchoredFeedback
from splitfg.feedback import NoiseControl, Pace, Relay
from splitfg.models import MLP


class Residual(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(5, width), nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.first(x)
        x = x + self.block(x.tanh())
        return self.norm(x + self.last(x.tanh()))


PATH = splitfg.ResidualPath(writers=("first", "block", "last"), top="norm")


MAKERS = {
    "split_fg": lambda: splitfg.SplitFG(K=6),
    "split_fg_chunks": lambda: splitfg.SplitFG(K=5, engine=splitfg.ForwardMode(chunk=2)),
    "split_fg_projection": lambda: splitfg.SplitFG(K=4, combine=splitfg.Projection()),
    "split_fg_orthogonal": lambda: splitfg.SplitFG(K=4, law=splitfg.Orthogonal(), lean=True),
    "activity_fg": lambda: splitfg.ActivityFG(K=4, engine=splitfg.ForwardMode(chunk=3)),
    "activity_fg_predicted": lambda: splitfg.ActivityFG(K=4, prediction=splitfg.LearnedFeedback()),
    "forward_gradient": lambda: splitfg.ForwardGradient(K=4, engine=splitfg.ForwardMode(chunk=3)),
    "evolution": lambda: splitfg.EvolutionStrategy(K=4, sigma=1e-2),
    "frozen": lambda: splitfg.FrozenTrunk(),
    "direct_path": lambda: splitfg.DirectPath(PATH),
    "mean_jacobian": lambda: splitfg.DirectPath(PATH, feedback=splitfg.MeanJacobian()),
    "direct_path_noise": lambda: splitfg.DirectPath(PATH, feedback=NoiseControl()),
    "parallel_pull": lambda: splitfg.ParallelPull(pulls=2),
    "parallel_pull_maps": lambda: splitfg.ParallelPull(feedback=splitfg.MeanJacobian()),
    "parallel_pull_noise": lambda: splitfg.ParallelPull(feedback=NoiseControl()),
    "learned_feedback": lambda: splitfg.LearnedFeedback(),
    "learned_feedback_seldom": lambda: splitfg.LearnedFeedback(Relay(every=2)),
    "anchored_feedback": lambda: AnchoredFeedback(anchors=Pace(2)),
    "predictive_coding": lambda: splitfg.PredictiveCoding(),
    "backprop": lambda: splitfg.Backprop(),
}


DIVIDE_TANGENTS = (
    "split_fg",
    "split_fg_chunks",
    "activity_fg",
    "activity_fg_predicted",
    "forward_gradient",
    "evolution",
)


def network(name, dtype, ignore=True):
    """A network, and a batch of 13 rows of which three are ignored where the loss allows it."""
    torch.manual_seed(0)
    trunk = MLP(5, widths=(6, 6), generator=torch.Generator().manual_seed(0))
    if name in ("direct_path", "mean_jacobian", "direct_path_noise"):
        trunk = Residual()
    loss = splitfg.CrossEntropy(ignore_index=-1, label_smoothing=0.1)
    split = splitfg.Split(trunk.to(dtype), splitfg.LinearHead(nn.Linear(6, 5, dtype=dtype), loss=loss))
    x, y = torch.randn(13, 5, dtype=dtype), torch.randint(0, 5, (13,))
    if ignore and name != "predictive_coding":  # its energy counts rows, ignored or not
        y[[0, 1, 12]] = -1
    return split, x, y


def trained(estimator, split, x, y, steps=2):
    """Two steps of plain SGD: the second rests on what estimators learned in the first."""
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        estimate = estimator(split, x, y, generator=generator)
        if isinstance(estimator, splitfg.estimators.LearningEstimator):
            estimator.update_state(split, estimate)
        found.append((estimate.loss, dict(estimate.grads), dict(estimate.stats.norms), estimate.stats.scores))
        with torch.no_grad():
            for name, p in split.model.named_parameters():
                p -= 0.1 * estimate.grads.get(name, torch.zeros_like(p))
    return found, {name: p.detach() for name, p in split.model.named_parameters()}, generator.get_state()


def ranks_of(shape):
    if shape is None:
        return Ranks()
    return Ranks(init_device_mesh("cpu", shape, mesh_dim_names=("rows", "tangents")))


def estimates(rank, name, dtype, shape, ignored=()):
    split, x, y = network(name, dtype)
    y[list(ignored)] = -1
    estimator = DistributedEstimator(MAKERS[name](), ranks_of(shape), check_every=1, whole_batches=True)
    return trained(estimator, split, x, y)


def close(found, expected, tolerance):
    """Whether the joint relative error is within the tolerance."""
    one, other = (torch.cat([t.detach().double().flatten() for t in group]) for group in (found, expected))
    assert (one - other).norm() <= tolerance * other.norm()
