"""Train one network in one engine by one method."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from splitfg import (
    Backprop,
    CentralDifference,
    CosineWithWarmup,
    EvolutionStrategy,
    FrozenTrunk,
    GradientLearner,
    LearnedFeedback,
    LinearHead,
    Split,
    SplitFG,
    parameter_groups,
)
from splitfg.estimators import Estimator
from splitfg.feedback import DeltaRule, LayerDifference, Relay
from splitfg.hardware import ActivityPerturbation, AnalogDevice, DeviceTrunk, Twin, Wiring
from splitfg.onnx import Adapter, LowRank, OnnxTrunk, Rows, ScaleAndBias, fit_head, hidden, predict
from splitfg.training import Epochs
from splitfg.types import Inputs, Learner, StepStats, Target
from splitfg_lab.experiments.engines import GOALS, SCRATCH, Engines
from splitfg_lab.experiments.engines._networks import Problem, load_problem, quantised
from splitfg_lab.runs import RunContext, fit

_EVALUATED = 1000
_CALIBRATED = 64


def run(config: Engines, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Train, and measure on held-out rows."""
    problem = load_problem(config.network, seed)
    run.use_data(problem.digests)
    torch.manual_seed(seed)
    trunk = _trunk(config, problem, seed)
    head = LinearHead(nn.Linear(hidden_width(trunk, problem.train), problem.classes))
    split = Split(trunk, head)
    if config.network not in SCRATCH:
        fit_head(head, hidden(split, problem.train.x), problem.train.y)
    groups = parameter_groups(split, lr=config.lr, rho=config.rho)
    learner = Counted(
        GradientLearner(split, _estimator(config), torch.optim.Adam(groups), schedule=CosineWithWarmup(config.steps)),
        GOALS.get(config.network),
    )
    epochs, generator = Epochs(len(problem.train), batch=config.batch, seed=seed), torch.Generator().manual_seed(seed)

    def batch(step: int) -> tuple[Inputs, Tensor]:
        rows = problem.train.part(epochs.rows(step))
        return rows.x[0], rows.y

    def evaluate(_: Learner) -> dict[str, float]:
        return learner.measured(problem.test, whole=learner.learner.steps == config.steps)

    every = 10 if config.network in SCRATCH else config.steps
    return fit(
        learner, batch, steps=config.steps, generator=generator, run=run, evaluate=evaluate, evaluate_every=every,
        log_every=every,
    )  # fmt: skip


class Counted:
    """A learner that counts inferences and seconds, in all and until an accuracy is reached.

    Args:
        learner: The learner.
        goal: The accuracy in %; ``None`` for none.
    """

    def __init__(self, learner: GradientLearner, goal: float | None) -> None:
        self.learner, self.goal = learner, goal
        self.inferences = self.rows = self.seconds = self.engine_seconds = 0.0
        self.reached: float | None = None

    def step(self, x: Inputs, y: Target, *, generator: torch.Generator) -> StepStats:
        """Learn from one batch."""
        start, engine = time.perf_counter(), self._engine()
        stats = self.learner.step(x, y, generator=generator)
        self.seconds += time.perf_counter() - start
        self.engine_seconds += self._engine() - engine
        self.rows += len(y)
        self.inferences += float(stats.metrics.get("inferences", 0))
        return stats

    def measured(self, test: Rows, *, whole: bool) -> dict[str, float]:
        """Return accuracy and costs; during training on some of the held-out rows."""
        rows = test if whole else test.part(slice(0, _EVALUATED))
        accuracy = 100 * float((predict(self.learner.split, rows.x).argmax(1) == rows.y).double().mean())
        if self.goal is not None and self.reached is None and accuracy >= self.goal and self.inferences:
            self.reached = self.inferences / 1000
        found = {"accuracy": accuracy}
        if self.inferences:
            found |= {"inferences": self.inferences / 1000, "inferences_per_row": self.inferences / self.rows}
            found["engine_share"] = 100 * self.engine_seconds / self.seconds
        return found if self.reached is None else {**found, "inferences_to_goal": self.reached}

    def predict(self, x: Inputs) -> Tensor:
        """Return the head's outputs."""
        return self.learner.predict(x)

    def state_dict(self) -> dict[str, Any]:
        """Return learner and counts."""
        counts = {n: getattr(self, n) for n in ("inferences", "rows", "seconds", "engine_seconds", "reached")}
        return {**self.learner.state_dict(), "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a :meth:`state_dict`."""
        self.learner.load_state_dict(state)
        for name, value in state["counts"].items():
            setattr(self, name, value)

    def _engine(self) -> float:
        trunk = self.learner.split.trunk
        return trunk.counts.seconds if isinstance(trunk, DeviceTrunk) else 0.0


def _trunk(config: Engines, problem: Problem, seed: int) -> nn.Module:
    model = problem.model
    if config.engine == "int8":
        model = quantised(model, problem.train.part(slice(0, _CALIBRATED)))
    adapters = {"none": None, "scale": ScaleAndBias(), "rank": LowRank()}[config.adapters]
    if config.method == "backprop":
        return _reference(model, adapters)
    trunk = OnnxTrunk(model, adapters=adapters, threads=torch.get_num_threads())
    if config.engine != "analog":
        return trunk
    device = AnalogDevice(
        trunk.wiring, noise=config.noise, bits=config.bits or None, drift=config.drift, seed=seed,
        write_error=config.write_error, read_noise=config.read_noise,
        coarse=[trunk.wiring.h] if config.coarse == "h" else None,
    )  # fmt: skip
    return DeviceTrunk(device, trunk.wiring)


def _reference(model: bytes, adapters: Adapter | None) -> Twin:
    """Return the network in PyTorch; with adapters, these alone are trained."""
    # layers that are not trained would hold no values
    twin = reference(OnnxTrunk(model, adapters=adapters, train=None if adapters is None else "*"))
    for name, p in twin.named_parameters():
        p.requires_grad_(adapters is None or name.startswith("adapter."))
    return twin


def reference(trunk: OnnxTrunk) -> Twin:
    """Return the same graph with the same parameters in PyTorch, which can run backward."""
    return Twin(_computed(trunk.wiring), {n: p for n, p in trunk.named_parameters() if n in trunk.loose})


def _computed(wiring: Wiring) -> Wiring:
    """Flatten rows where the graph computes the shape from its input, which torch cannot read from the file."""
    nodes = [
        dataclasses.replace(node, call=_flattened) if node.call is None and node.name == "reshape" else node
        for node in wiring.nodes
    ]
    return Wiring(tuple(nodes), wiring.inputs, wiring.h)


def _flattened(x: Tensor) -> Tensor:
    return x.flatten(1)


def hidden_width(trunk: nn.Module, rows: Rows) -> int:
    """Return the width of h."""
    with torch.no_grad():
        return int(trunk(rows.x[0][:2]).shape[-1])


def _estimator(config: Engines) -> Estimator:
    known: dict[str, Estimator] = {
        "backprop": Backprop(),
        "head": FrozenTrunk(),
        "learned_feedback": LearnedFeedback(),
        "learned_layers": LearnedFeedback(Relay(DeltaRule(1.0)), LayerDifference()),
        "activity": ActivityPerturbation(K=config.K),
        "activity_and_feedback": ActivityPerturbation(K=config.K, prediction=LearnedFeedback()),
        "weights": SplitFG(K=config.K, engine=CentralDifference()),
        "evolution": EvolutionStrategy(K=config.K),
    }
    return known[config.method]
