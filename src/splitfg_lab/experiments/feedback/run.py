"""Train a plain network of some depth on one fold of a table."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from splitfg import CosineWithWarmup, GradientLearner, LinearHead, Split
from splitfg.models import MLP, linear
from splitfg.training import Epochs
from splitfg.types import Learner
from splitfg_lab.data import data_digest
from splitfg_lab.experiments.feedback import Feedback
from splitfg_lab.experiments.tabular.run import load_fold, measure
from splitfg_lab.runs import RunContext, fit

_FOLDS = 5


def run(config: Feedback, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Train, and measure on the held-out fold."""
    run.use_data({config.dataset: data_digest(config.dataset)})
    fold = load_fold(config.dataset, 0, _FOLDS, run.device)
    generator = torch.Generator(run.device).manual_seed(seed)
    trunk = MLP(fold.x.shape[1], widths=(config.width,) * config.layers, generator=generator, layer=_he)
    split = Split(
        trunk, LinearHead(linear(config.width, fold.shape.outputs, generator=generator), loss=fold.shape.loss())
    )
    learner = GradientLearner(
        split,
        run.spread(config.method.build()),
        config.optimizer.build(split, rho=config.rho),
        schedule=CosineWithWarmup(config.steps),
    )
    epochs = Epochs(len(fold.x), batch=config.batch, seed=seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        rows = epochs.rows(step).to(run.device)
        return fold.x[rows], fold.y[rows]

    def evaluate(learner: Learner) -> dict[str, float]:
        return measure(learner, fold)

    return fit(learner, batch, steps=config.steps, generator=generator, run=run, evaluate=evaluate, log_every=20)


def _he(in_features: int, out_features: int, *, generator: torch.Generator) -> nn.Linear:
    """A linear layer with W ~ N(0, 2 / in_features) and b = 0, for deep ReLU networks."""
    layer = linear(in_features, out_features, generator=generator)
    nn.init.normal_(layer.weight, std=math.sqrt(2 / in_features), generator=generator)
    nn.init.zeros_(layer.bias)
    return layer
