"""The benchmark of engines: what it counts, on a network whose numbers are known by hand."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

cases = importlib.import_module("benchmarks._engine_cases")
engines = importlib.import_module("benchmarks.engines")


@pytest.mark.parametrize(("method", "per_row"), [("learned_feedback", 2.0), ("activity", 17.0), ("weights", 17.0)])
def test_inferences_and_engine_time_are_counted(method, per_row):
    case = cases.Case(*cases.model_and_batch("mlp64", 8), method)
    case.step()
    assert case.inferences_per_row() == per_row
    step, engine = case.timed_step()
    assert 0 < engine < step


def test_multiply_adds_of_learned_feedback_are_those_of_its_formulas():
    case = cases.Case(*cases.model_and_batch("mlp64", 8), "learned_feedback")
    case.step()
    ours, engine = case.multiply_adds()
    layer = 2 * 8 * 64 * 64  # one product of 8 rows with a matrix of 64 x 64
    assert engine == 2 * 3 * layer  # two inferences of three layers
    head = 3 * 2 * 8 * 64 * 8  # logits, u, and the weights' gradient: 8 rows hold classes 0 to 7
    # gradients of three weights; two maps carry u on, and learn from two products each
    assert ours == (3 + 2 + 4) * layer + head


def test_steps_are_timed_for_as_long_as_they_may_take():
    class Slow:
        def timed_step(self):
            return 1.0, 0.5

    assert len(engines._timed(Slow(), repeats=30, seconds=4.0)) == 4
    assert len(engines._timed(Slow(), repeats=3, seconds=99.0)) == 3
    assert set(engines.MEASURED) <= set(cases.NETWORKS)
