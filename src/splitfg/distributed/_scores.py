"""A trunk's gradient from a seed and scores, and its whole training from a log of them."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from splitfg.distributed._estimator import DistributedEstimator
from splitfg.distributed._score_log import LogFile, Record, digests, shapes
from splitfg.errors import SplitError, raise_if
from splitfg.estimators import EvolutionStrategy, ForwardGradient, SplitFG
from splitfg.learners import GradientLearner
from splitfg.splitting import Split
from splitfg.training import write_grads
from splitfg.types import Estimate, Params, Stats

Scoring: TypeAlias = SplitFG | ForwardGradient | EvolutionStrategy


def gradient_from_scores(
    estimator: SplitFG | ForwardGradient | EvolutionStrategy,
    split: Split,
    scores: Tensor,
    *,
    generator: torch.Generator,
) -> Params:
    """Return the gradient of an estimate from its scores and seed: Σ_k d_k v_k / K, or as its combination asks.

    Anybody with the same parameters and seed can do so; a parameter server or federated clients need to exchange no
    more than the K scores. Sum scores of several clients, weighted by their numbers of targets, before this.

    Args:
        estimator: The estimator of the scores.
        split: The network, at the parameters of the estimate.
        scores: The K scores, ``estimate.stats.scores``.
        generator: In the state from which the estimate was drawn; advanced by K tangents.

    Returns:
        Gradients of the trunk's parameters, for ``ForwardGradient`` and ``EvolutionStrategy`` of all parameters: bit
        for bit those of the estimate.

    Example:
        >>> import torch
        >>> import splitfg
        >>> from splitfg.distributed import gradient_from_scores
        >>> from splitfg.testing import example_split
        >>> estimator, (split, x, y) = splitfg.SplitFG(K=4), example_split()
        >>> estimate = estimator(split, x, y, generator=torch.Generator().manual_seed(5))
        >>> grads = gradient_from_scores(
        ...     estimator, split, estimate.stats.scores, generator=torch.Generator().manual_seed(5)
        ... )
        >>> all(torch.equal(estimate.grads[name], grad) for name, grad in grads.items())
        True
    """
    return estimator.from_scores(split, scores, generator=generator)


def replay(learner: GradientLearner, path: Path, *, steps: int | None = None, exact: bool = True) -> int:
    """Repeat the trunk's training from its log of scores, without data and without a forward pass.

    Draws the tangents of every step again, combines them with the logged scores, clips as the logged norm asks, and
    steps the optimizer: bit for bit the same trunk, on the same kind of device and version of torch. The parameters of
    the head, if the estimator computes them exactly, stay at their initial values. An incomplete last step, as a killed
    process may leave it, is ignored.

    Args:
        learner: A learner like the trained one, with the same initial trunk, estimator, optimizer, schedule and
            clipping.
        path: The log.
        steps: Replay only so many steps.
        exact: Raise an error if the trunk differs from that of the training. ``False`` accepts differences, such as
            the rounding of another device or version of torch.

    Returns:
        The number of replayed steps.

    Raises:
        SplitError: If the log belongs to another network or estimator, the trunk has other initial values, the log has
            fewer steps, its content has changed since it was written, or the learner trains differently.
    """
    file, estimator = LogFile.read(path), _scoring(learner)
    available, _ = file.steps()
    raise_if(_replay_problems(learner, file, estimator.K, available if steps is None else steps, available))
    generator = torch.Generator(file.header["device"])
    generator.set_state(torch.tensor(list(bytes.fromhex(file.header["state"])), dtype=torch.uint8))
    done, before = 0, file.begins
    for record in file.records():
        if steps is not None and done == steps:
            break
        scores, norm = file.values(record)
        grads = estimator.from_scores(learner.split, scores, generator=generator)
        if exact or not file.checks_trunk(done):
            _compare(file, record, before, generator, done, learner.split)
        estimate = Estimate(torch.zeros(()), grads, Stats(scores=scores))
        estimator.update_state(learner.split, estimate)
        _step(learner, estimate, norm)
        done, before = done + 1, record.checksum
    return done


def _scoring(learner: GradientLearner) -> Scoring:
    """Return the estimator whose scores are logged."""
    estimator = learner.estimator
    if isinstance(estimator, DistributedEstimator):
        estimator = estimator.estimator
    if not isinstance(estimator, SplitFG | ForwardGradient | EvolutionStrategy):
        raise SplitError([f"{type(estimator).__name__} has no scores to replay: use SplitFG, ForwardGradient or ES"])
    return estimator


def _compare(file: LogFile, record: Record, before: int, generator: torch.Generator, step: int, split: Split) -> None:
    """Raise an error if a step is not the one that was logged."""
    if file.checksum(before, record.data, generator, step, split) == record.checksum:
        return
    causes = ["the file has been changed or damaged", "something else drew from the generator of the training"]
    if file.checks_trunk(step) and step:
        causes.insert(0, "the training had another estimator, optimizer, schedule or clipping than this learner")
        causes.append("it ran on another device or version of torch (pass exact=False)")
    raise SplitError([f"step {step} of {file.path} does not follow from the steps before it: {'; or '.join(causes)}"])


def _step(learner: GradientLearner, estimate: Estimate, before_clip: Tensor) -> None:
    update = learner.update
    if update.max_norm is None or update.apart:  # the trunk's own norm decides, if any does
        update(estimate)
        return
    values = list(estimate.grads.values())
    torch._foreach_mul_(values, (update.max_norm / (before_clip + 1e-6)).clamp(max=1.0))
    write_grads(learner.split.model, estimate)
    update.optimizer.step()


def _replay_problems(learner: GradientLearner, file: LogFile, K: int, steps: int, available: int) -> list[str]:
    split, header, path, found = learner.split, file.header, file.path, []
    if header["parameters"] != shapes(split):
        found.append(f"{path} is of a network with other parameters: build the one that was trained")
    if header["K"] != K:
        found.append(f"{path} has {header['K']} scores a step, the estimator {K}: use the estimator of the training")
    if learner.line_search is not None or learner.prediction is not None:
        found.append("a line search or a prediction needs the data: train without them to replay scores")
    if steps > available:
        found.append(f"{path} has {available} steps, not {steps}: ask for fewer")
    if not found:
        other = [name for name, value in digests(split).items() if header["start"].get(name) != value]
        found += [f"{name} has another initial value than in {path}: load the initial parameters" for name in other[:1]]
    return found
