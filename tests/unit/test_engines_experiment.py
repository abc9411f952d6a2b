"""The experiment on engines: its presets, its counts, and the networks that need no download."""

import pytest
import torch
from torch import nn

import splitfg
from splitfg.onnx import OnnxTrunk, Rows
from splitfg_lab.experiments import Cell
from splitfg_lab.experiments.engines import EXPERIMENT, METHODS, Engines
from splitfg_lab.experiments.engines._networks import load_problem, quantised
from splitfg_lab.experiments.engines.run import Counted


def test_every_preset_is_a_cell_and_every_cell_a_preset():
    cells = {c.preset for t in EXPERIMENT.tables for r in t.rows for c in r.cells if isinstance(c, Cell)}
    assert cells == {p.name for p in EXPERIMENT.presets}


def test_unknown_names_raise():
    with pytest.raises(splitfg.SplitError, match="method must be one of backprop"):
        Engines("digits", "magic")


def test_pretrained_networks_ask_for_their_file(monkeypatch):
    monkeypatch.delenv("SPLITFG_NETWORKS", raising=False)
    with pytest.raises(splitfg.DataError, match="SPLITFG_NETWORKS/rapidocr"):
        load_problem("rapidocr", 0)


def test_inferences_are_counted_until_the_goal():
    problem = load_problem("digits", 0)
    split = splitfg.Split(OnnxTrunk(problem.model, threads=1), splitfg.LinearHead(nn.Linear(128, 10)))
    optimizer = torch.optim.Adam(splitfg.parameter_groups(split, lr=1e-3))
    learner = Counted(splitfg.GradientLearner(split, splitfg.LearnedFeedback(), optimizer), goal=0.0)
    rows, generator = problem.train.part(slice(0, 16)), torch.Generator().manual_seed(0)
    test = Rows((problem.test.x[0][:50],), problem.test.y[:50])
    for _ in range(2):
        learner.step(rows.x[0], rows.y, generator=generator)
        found = learner.measured(test, whole=True)
    assert found["inferences_per_row"] == 2.0
    assert found["inferences"] == pytest.approx(0.064)
    assert found["inferences_to_goal"] == pytest.approx(0.032)  # reached at the first evaluation
    again = Counted(splitfg.GradientLearner(split, splitfg.LearnedFeedback(), optimizer), goal=0.0)
    again.load_state_dict(learner.state_dict())
    assert (again.inferences, again.reached) == (learner.inferences, learner.reached)


def test_the_quantised_network_is_near_the_float_one():
    problem = load_problem("digits", 0)
    plain = OnnxTrunk(problem.model, threads=1)
    small = OnnxTrunk(quantised(problem.model, problem.train.part(slice(0, 64))), cut=None, threads=1)
    x = problem.test.x[0][:20]
    assert (plain(x) - small(x)).norm() < 0.1 * plain(x).norm()
    assert len(METHODS) == 7
