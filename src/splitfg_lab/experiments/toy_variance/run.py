"""Draw single-tangent estimates and compare their variance with the theory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from splitfg import Backprop, CrossEntropy, ForwardGradient, LinearHead, Split, SplitFG, SquaredError, theory
from splitfg.estimators import Estimator
from splitfg.models import normal_linear, toy_trunk
from splitfg.tangents import Layout
from splitfg.types import Params
from splitfg_lab.experiments.toy_variance import ToyVariance
from splitfg_lab.runs import RunContext, draw


def run(config: ToyVariance, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Measure one head size: ``config.draws`` estimates of Split-FG, then as many of pure forward gradient."""
    generator = torch.Generator(run.device).manual_seed(seed)
    split, x, y = make(config, generator)
    g = Backprop()(split, x, y).grads
    trunk, head = _flat(split.trunk_params(), g), _flat(split.head_params(), g)
    estimators: tuple[Estimator, Estimator] = (SplitFG(K=1), ForwardGradient(K=1))

    def squared_error(k: int) -> Tensor:
        """Return ‖ĝ_trunk - g_trunk‖² of draw k."""
        estimate = estimators[k // config.draws](split, x, y, generator=generator)
        return (_flat(split.trunk_params(), estimate.grads) - trunk).square().sum()

    errors = draw(squared_error, count=2 * config.draws, generator=generator, run=run, jvps=1)
    return summary(errors[: config.draws], errors[config.draws :], trunk, head)


def make(config: ToyVariance, generator: torch.Generator) -> tuple[Split, Tensor, Tensor]:
    """Build the network and its one minibatch: standard normal inputs, random targets."""
    device = generator.device
    trunk = toy_trunk(generator=generator)
    classify = config.loss == "cross_entropy"
    loss = CrossEntropy() if classify else SquaredError()
    head = LinearHead(normal_linear(32, config.classes, generator=generator), loss=loss)
    x = torch.randn(config.batch, 16, generator=generator, device=device)
    if classify:
        y = torch.randint(0, config.classes, (config.batch,), generator=generator, device=device)
    else:
        y = torch.randn(config.batch, config.classes, generator=generator, device=device)
    return Split(trunk, head), x, y


def summary(split: Tensor, pure: Tensor, g_trunk: Tensor, g_head: Tensor) -> dict[str, float]:
    """Compute the variance ratios from the squared errors of all draws over the trunk's coordinates.

    The relative standard error of a ratio of two independent means is the root of the sum of theirs squared.
    """
    measured = (split.mean() / pure.mean()).item()
    energy = theory.energy_ratio(g_trunk, g_head).item()
    spread = sum((e.std() / e.mean()).square().item() / e.numel() for e in (split, pure)) ** 0.5
    return {
        "variance_split": split.mean().item(),
        "variance_pure": pure.mean().item(),
        "measured_ratio": measured,
        "energy_ratio": energy,
        "count_ratio": g_trunk.numel() / (g_trunk.numel() + g_head.numel()),
        "relative_error_percent": 100 * abs(measured / energy - 1),
        "standard_error_percent": 100 * spread,
    }


def _flat(like: Params, grads: Params) -> Tensor:
    return Layout.of(like).flatten(grads)
