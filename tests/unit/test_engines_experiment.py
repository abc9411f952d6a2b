"""The experiment on engines: its presets, its counts, and the networks that need no download."""

import importlib.util
import io

import pytest
import torch
from torch import nn

import splitfg
from splitfg.onnx import OnnxTrunk, Rows
from splitfg_lab.experiments import Cell
from splitfg_lab.experiments.engines import EXPERIMENT, METHODS, PRETRAINED, Engines
from splitfg_lab.experiments.engines._networks import load_problem, quantised
from splitfg_lab.experiments.engines._pretrained import WAVES, Crepe, crepe, waves
from splitfg_lab.experiments.engines.run import Counted


def test_every_preset_is_a_cell_and_every_cell_a_preset():
    cells = {c.preset for t in EXPERIMENT.tables for r in t.rows for c in r.cells if isinstance(c, Cell)}
    assert cells == {p.name for p in EXPERIMENT.presets}


def test_unknown_names_raise():
    with pytest.raises(splitfg.SplitError, match="method must be one of backprop"):
        Engines("digits", "magic")


def test_pretrained_networks_ask_for_their_file(monkeypatch):
    monkeypatch.delenv("SPLITFG_NETWORKS", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for network in PRETRAINED:
        with pytest.raises(splitfg.DataError, match=f"SPLITFG_NETWORKS/{network}"):
            load_problem(network, 0)


def test_the_pitch_network_is_exported_and_its_task_balanced():
    written = io.BytesIO()
    torch.manual_seed(0)
    torch.save(Crepe().state_dict(), written)
    trunk = OnnxTrunk(crepe(written.getvalue()), threads=1)
    x, y = waves(300, seed=0)
    assert trunk(x[:3]).shape == (3, 256)
    assert trunk.problems((x[:3],), tolerance=1e-4) == []
    torch.testing.assert_close(x.mean(1), torch.zeros(300), rtol=0, atol=1e-5)
    assert min(torch.bincount(y, minlength=WAVES)) > 30


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
    assert len(METHODS) == 8
