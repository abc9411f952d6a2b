"""A log of scores as a checkpoint of the trunk: seeds and scores replay its training."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from splitfg.distributed._estimator import DistributedEstimator
from splitfg.distributed._replicas import digest
from splitfg.errors import SplitError, raise_if
from splitfg.estimators import EvolutionStrategy, ForwardGradient, SplitFG
from splitfg.learners import GradientLearner
from splitfg.splitting import Split
from splitfg.training import write_grads
from splitfg.types import Estimate, Params, Stats

_MAGIC: Final = b"splitfg scores 1\n"
_FORMATS: Final = {torch.float32: "f", torch.float64: "d"}


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


class ScoreLog:
    """A file of scores: a header with the generator's state, then K scores and a norm for every step.

    With the initial parameters it is a checkpoint of the trunk: :func:`replay` draws the tangents again and repeats
    every update. A step takes 4 (K + 1) bytes in float32, whatever the trunk's size.

    Pass it as ``log`` to a :class:`~splitfg.GradientLearner`; it appends every step. Among several processes, one
    writes the file.

    Args:
        path: The file; created, or continued if it exists.
        split: The network at the beginning of training.
        K: Scores a step.
        generator: The generator of the steps, in the state of the first one; nothing else may draw from it.

    Raises:
        SplitError: If the file belongs to another network, K or dtype.

    Example:
        >>> import copy, tempfile, torch
        >>> from pathlib import Path
        >>> import splitfg
        >>> from splitfg.distributed import ScoreLog, replay
        >>> from splitfg.testing import example_split
        >>> def learner(log=None):
        ...     split, x, y = example_split()
        ...     optimizer = torch.optim.Adam(split.model.parameters())
        ...     return splitfg.GradientLearner(split, splitfg.SplitFG(K=4), optimizer, log=log), x, y
        >>> path = Path(tempfile.mkdtemp()) / "scores"
        >>> generator = torch.Generator().manual_seed(0)
        >>> log = ScoreLog(path, learner()[0].split, K=4, generator=generator)
        >>> trained, x, y = learner(log)
        >>> for _ in range(3):
        ...     stats = trained.step(x, y, generator=generator)
        >>> again, _, _ = learner()
        >>> replay(again, path)
        3
        >>> name = "trunk.layers.0.weight"
        >>> torch.equal(*(dict(one.split.model.named_parameters())[name] for one in (trained, again)))
        True
    """

    def __init__(self, path: Path, split: Split, *, K: int, generator: torch.Generator) -> None:
        self.path = path
        state = generator.get_state()
        dtype = torch.promote_types(next(iter(split.trained_params().values())).dtype, torch.float32)
        own = {"K": K, "dtype": str(dtype), "device": generator.device.type, "parameters": _shapes(split)}
        if path.exists():
            header, _ = _header(path)
            raise_if([f"{path} has another {k}: start a new log" for k, v in own.items() if header.get(k) != v])
        else:
            first = own | {"state": bytes(state.tolist()).hex(), "start": _digests(split)}
            path.write_bytes(_MAGIC + json.dumps(first).encode() + b"\n")
        self._format = f"<{K + 1}{_FORMATS[dtype]}"

    def __call__(self, estimate: Estimate) -> None:
        """Append the scores of a step, and the norm by which it was clipped."""
        clipped = estimate.stats.norms.get("before_clip", torch.zeros(()))
        values = torch.cat([estimate.stats.scores.double().cpu(), clipped.double().reshape(1).cpu()])
        with self.path.open("ab") as file:
            file.write(struct.pack(self._format, *values.tolist()))

    def truncate(self, steps: int) -> None:
        """Drop everything after the first ``steps`` steps, on resuming from a checkpoint."""
        _, start = _header(self.path)
        size = start + steps * struct.calcsize(self._format)
        raise_if([] if self.path.stat().st_size >= size else [f"{self.path} has fewer than {steps} steps"])
        with self.path.open("r+b") as file:
            file.truncate(size)


def replay(learner: GradientLearner, path: Path, *, steps: int | None = None) -> int:
    """Repeat the trunk's training from its log of scores, without data and without a forward pass.

    Draws the tangents of every step again, combines them with the logged scores, clips as the logged norm asks, and
    steps the optimizer: bit for bit the same trunk, on the same kind of device and version of torch. The parameters of
    the head, if the estimator computes them exactly, stay at their initial values.

    Args:
        learner: A learner like the trained one, with the same initial trunk, estimator, optimizer and clipping.
        path: The log.
        steps: Replay only so many steps.

    Returns:
        The number of replayed steps.

    Raises:
        SplitError: If the log belongs to another network or estimator, or the trunk has other initial values.
    """
    header, start = _header(path)
    estimator = learner.estimator
    if isinstance(estimator, DistributedEstimator):
        estimator = estimator.estimator
    if not isinstance(estimator, SplitFG | ForwardGradient | EvolutionStrategy):
        raise SplitError([f"{type(estimator).__name__} has no scores to replay: use SplitFG, ForwardGradient or ES"])
    raise_if(_replay_problems(learner.split, header, estimator.K, path))
    generator = torch.Generator(header["device"])
    generator.set_state(torch.tensor(list(bytes.fromhex(header["state"])), dtype=torch.uint8))
    done = 0
    for scores, norm in _records(path, start, header):
        if steps is not None and done == steps:
            break
        grads = estimator.from_scores(learner.split, scores, generator=generator)
        estimate = Estimate(torch.zeros(()), grads, Stats(scores=scores))
        estimator.update_state(learner.split, estimate)
        _step(learner, estimate, norm)
        done += 1
    return done


def _step(learner: GradientLearner, estimate: Estimate, before_clip: Tensor) -> None:
    update = learner.update
    if update.max_norm is None or update.apart:  # the trunk's own norm decides, if any does
        update(estimate)
        return
    values = list(estimate.grads.values())
    torch._foreach_mul_(values, (update.max_norm / (before_clip + 1e-6)).clamp(max=1.0))
    write_grads(learner.split.model, estimate)
    update.optimizer.step()


def _records(path: Path, start: int, header: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    dtype = {str(known): known for known in _FORMATS}[header["dtype"]]
    form = f"<{header['K'] + 1}{_FORMATS[dtype]}"
    with path.open("rb") as file:
        file.seek(start)
        while len(data := file.read(struct.calcsize(form))) == struct.calcsize(form):
            values = torch.tensor(struct.unpack(form, data), dtype=dtype, device=header["device"])
            yield values[:-1], values[-1]


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the position of the first step."""
    with path.open("rb") as file:
        magic, line = file.readline(), file.readline()
        if magic != _MAGIC or not line.endswith(b"\n"):
            raise SplitError([f"{path} is no log of scores"])
        found: dict[str, Any] = json.loads(line)
        return found, file.tell()


def _shapes(split: Split) -> dict[str, list[int]]:
    return {name: list(p.shape) for name, p in split.trained_params().items()}


def _digests(split: Split) -> dict[str, int]:
    return {name: int(digest(p)) for name, p in split.trunk_params().items()}


def _replay_problems(split: Split, header: dict[str, Any], K: int, path: Path) -> list[str]:
    found = []
    if header["parameters"] != _shapes(split):
        found.append(f"{path} is of a network with other parameters: build the one that was trained")
    if header["K"] != K:
        found.append(f"{path} has {header['K']} scores a step, the estimator {K}: use the estimator of the training")
    if not found:
        other = [name for name, value in _digests(split).items() if header["start"].get(name) != value]
        found += [f"{name} has another initial value than in {path}: load the initial parameters" for name in other[:1]]
    return found
