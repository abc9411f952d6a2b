"""Reasons why a CUDA graph cannot hold a learner's steps."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from _toolkit import mlp_split

from splitfg import Backprop, ForwardGradient, ForwardMode, GradientLearner, Orthogonal, Projection, SplitFG
from splitfg.learners._capturable import capture_problems


@dataclass
class Messages:
    """The part of an estimator that sends messages."""

    estimator: Any
    capturable: bool = True

    def __call__(self, split, x, y, *, generator):
        raise NotImplementedError

    def before_replay(self, split, generator):
        pass


def problems(estimator, **options):
    s = mlp_split(3, 4, 2)
    return capture_problems(GradientLearner(s, estimator, torch.optim.SGD(s.model.parameters()), **options))


ONE_BY_ONE = ForwardMode(chunk=1)


@pytest.mark.parametrize(
    "estimator",
    [
        Backprop(),
        SplitFG(4, engine=ONE_BY_ONE),
        Messages(SplitFG(4)),
        Messages(SplitFG(4, engine=ForwardMode(chunk=4))),
        Messages(SplitFG(4, law=Orthogonal(), engine=ONE_BY_ONE)),
        Messages(Backprop()),
    ],
    ids=repr,
)
def test_steps_that_a_graph_can_hold(estimator):
    assert problems(estimator) == []


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (SplitFG(4, combine=Projection()), "Projection solves for its weights on the host"),
        (ForwardGradient(4, combine=Projection(), engine=ONE_BY_ONE), "Projection"),
        (Messages(SplitFG(4, engine=ONE_BY_ONE)), "cannot set a generator back"),
        (Messages(SplitFG(4), capturable=False), "messages of gloo cannot be captured"),
    ],
    ids=repr,
)
def test_steps_that_run_without_a_graph(estimator, words):
    (problem,) = problems(estimator)
    assert words in problem


def test_all_reasons_are_listed():
    found = problems(Messages(SplitFG(4, combine=Projection()), capturable=False), log=lambda _: None)
    assert [word in problem for word, problem in zip(("log", "gloo", "Projection"), found, strict=True)] == [True] * 3
