"""Networks whose feedback maps learn, and their distance from backpropagation."""

import torch
from _toolkit import generator
from torch import nn

from splitfg import Backprop, CapturedLearner, GradientLearner, LinearHead, Split


def network(trunk, width, classes=3, **settings):
    torch.manual_seed(1)
    return Split(trunk.double(), LinearHead(nn.Linear(width, classes).double()), **settings)


def taught(estimator, split, x, y, steps):
    """Let the maps learn on a fixed network; returns the last estimate."""
    draws = generator(7)
    for _ in range(steps):
        estimate = estimator(split, x, y, generator=draws)
        estimator.update_state(split, estimate)
    return estimator(split, x, y, generator=draws)


def errors(split, estimate, x, y):
    exact = Backprop()(split, x, y).grads
    return {n: float((estimate.grads[n] - g).norm() / g.norm().clamp_min(1e-12)) for n, g in exact.items()}


def assert_captured_and_resumed(build, steps):
    """Captured steps, and eager ones that resume from a saved state after two, end in the same parameters.

    ``build`` returns a split, an estimator, inputs and targets. Returns the metrics of the captured steps.
    """

    def learner():
        split, estimator, x, y = build()
        return GradientLearner(split, estimator, torch.optim.SGD(split.model.parameters(), lr=0.1)), x, y

    (eager, x, y), (fast, *_), (again, *_) = learner(), learner(), learner()
    captured, draws = CapturedLearner(fast, horizon=steps, compile_=lambda f: f), generator(1)
    metrics = [captured.step(x, y, generator=draws).metrics for _ in range(steps)]
    draws = generator(1)
    for step in range(steps):
        if step == 2:
            again.load_state_dict(eager.state_dict())
            eager = again
        eager.step(x, y, generator=draws)
    for a, b in zip(eager.split.model.parameters(), fast.split.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    return metrics
