"""Your own experiment: presets, seeds, resumable runs and a report.

With ``wine = "my_package.wine:EXPERIMENT"`` among the entry points ``splitfg_lab.experiments`` of your package,
``splitfg run wine`` works. This script runs the experiment without being installed:

    python examples/own_experiment.py --runs runs
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from sklearn.datasets import load_wine
from sklearn.preprocessing import scale
from torch import Tensor, nn

import splitfg
from splitfg.recipes import ActivityMethod, Adam, BackpropMethod, MethodRecipe, SplitFGMethod
from splitfg_lab.experiments import Cell, Experiment, Preset, Row, Table
from splitfg_lab.report import print_report
from splitfg_lab.runs import RunContext, RunFolder, execute, fit


@dataclass(frozen=True)
class Config:
    """A ReLU trunk on scikit-learn's wine data; every field can be overridden with ``--set``."""

    method: MethodRecipe
    steps: int = 200
    optimizer: Adam = field(default_factory=lambda: Adam(lr=3e-3))


METHODS = {"split_fg": SplitFGMethod(K=8), "activity_fg": ActivityMethod(K=8), "backprop": BackpropMethod()}
ROWS = tuple(Row(name, (Cell(name, "accuracy"),)) for name in METHODS)

EXPERIMENT = Experiment(
    name="wine",
    title="Wine: three methods",
    source="New here",
    runner="own_experiment:run",
    presets=tuple(Preset(name, name, Config(method), seeds=(0, 1, 2)) for name, method in METHODS.items()),
    tables=(Table("wine", "Held-out accuracy, %", ("Accuracy",), ROWS, better="higher"),),
)


def run(config: Config, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Train on two thirds of the rows; the seed chooses the third that is held out."""
    features, labels = load_wine(return_X_y=True)
    x, y = torch.tensor(scale(features), dtype=torch.float32), torch.tensor(labels)
    held_out = torch.arange(len(x)) % 3 == seed % 3
    torch.manual_seed(seed)
    trunk = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    network = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(64, 3)))
    learner = splitfg.GradientLearner(network, config.method.build(), config.optimizer.build(network))

    def batch(step: int) -> tuple[Tensor, Tensor]:  # a function of the step alone: a resumed run sees the same
        rows = torch.randint(int((~held_out).sum()), (32,), generator=torch.Generator().manual_seed(step))
        return x[~held_out][rows], y[~held_out][rows]

    def evaluate(learner: splitfg.Learner) -> dict[str, float]:
        hits = learner.predict(x[held_out]).argmax(1) == y[held_out]
        return {"accuracy": 100 * hits.float().mean().item()}

    generator = torch.Generator().manual_seed(seed)
    return fit(learner, batch, steps=config.steps, generator=generator, run=run, evaluate=evaluate)


def main(runs: Path, *, smoke: bool) -> None:
    """Run every preset and seed, as ``splitfg run wine`` does, and print the table."""
    for preset in EXPERIMENT.presets:
        config = replace(preset.config, steps=5) if smoke else preset.config
        for seed in preset.seeds[:1] if smoke else preset.seeds:
            folder = RunFolder.of(runs, EXPERIMENT.name, preset.name, seed)
            folder.prepare(EXPERIMENT.name, preset.name, seed, config)
            report = execute(folder, run, config, device="cpu", emit=lambda event: None)
            print(folder.name, report.metrics)
    print_report(runs, runs / "none", experiments=[EXPERIMENT])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of run folders")
    parser.add_argument("--smoke", action="store_true", help="one seed and a few steps")
    arguments = parser.parse_args()
    main(arguments.runs, smoke=arguments.smoke)
