"""Maps that are measured at every n-th step: the steps of ordinary maps, with some updates left out."""

import copy

import pytest
import torch
from _toolkit import classes, generator, noise, seeded

import splitfg
from splitfg import DirectPath, LearnedFeedback, LinearHead, MeanJacobian, ParallelPull, Split, SplitError, Tied
from splitfg.feedback import Direct, Relay
from splitfg.learners import captured
from splitfg.models import GPT, MLP, GPTConfig
from splitfg.recipes import EveryNthFeedback, IdentityFeedback

TINY = GPTConfig(layers=2, width=8, heads=2, context=6, vocab=20)
CASES = {
    "relay": lambda n: LearnedFeedback(Relay(every=n)),
    "direct": lambda n: LearnedFeedback(Direct(every=n)),
    "prediction": lambda n: splitfg.ActivityFG(K=2, prediction=LearnedFeedback(Relay(every=n))),
    "direct path": lambda n: DirectPath(feedback=MeanJacobian(every=n)),
    "lean direct path": lambda n: DirectPath(feedback=MeanJacobian(every=n), lean=True),
    "falling rate": lambda n: DirectPath(feedback=MeanJacobian(steps=4, every=n)),
    "pull": lambda n: ParallelPull(feedback=MeanJacobian(every=n)),
}


def problem(name):
    """A GPT for paths along its stream, an MLP for the others; a batch for every step."""
    if name in ("relay", "direct", "prediction"):
        split = seeded(
            lambda: Split(
                MLP(5, widths=(8, 8), generator=generator()).double(), LinearHead(torch.nn.Linear(8, 3).double())
            )
        )
        return split, [(noise(16, 5, seed=i), classes(16, count=3, seed=i)) for i in range(6)]
    trunk = GPT(TINY, generator=generator()).double()
    tokens = [classes(3, 7, count=20, seed=i) for i in range(6)]
    return Split(trunk, LinearHead(trunk.tied_linear()), tied=Tied.INCLUDE), [(t[:, :-1], t[:, 1:]) for t in tokens]


@pytest.mark.parametrize("name", CASES)
def test_steps_without_a_measurement_use_the_maps_as_they_are(name):
    """At every third step an ordinary estimator learns; at the others it estimates and forgets what it measured."""
    split, batches = problem(name)
    seldom, always = CASES[name](3), CASES[name](1)
    for i, (x, y) in enumerate(batches):
        draws = generator(i)
        found, expected = seldom(split, x, y, generator=draws), always(split, x, y, generator=generator(i))
        if name != "prediction":  # its tangents are drawn before or after the noise of the maps
            for parameter, g in expected.grads.items():
                torch.testing.assert_close(found.grads[parameter], g, msg=f"{name}, step {i}: {parameter}")
        measured = i % 3 == 0
        assert bool(found.state_update) == measured
        assert set(found.state_update) == (set(expected.state_update) if measured else set())
        if name != "prediction":
            assert (found.stats.jvps, expected.stats.jvps) == (int(measured), 1)
            assert torch.equal(draws.get_state(), generator(i).get_state()) != measured
        seldom.update_state(split, found)
        if measured:
            always.update_state(split, expected)


@pytest.mark.parametrize("name", ["relay", "direct path", "falling rate"])
def test_a_restored_learner_measures_at_the_same_steps(name):
    def learner():
        split, batches = problem(name)
        optimizer = torch.optim.Adam(split.model.parameters(), lr=1e-2)
        return splitfg.GradientLearner(split, CASES[name](3), optimizer), batches

    whole, batches = learner()
    for i, (x, y) in enumerate(batches):
        if i == 4:  # between two measurements
            halfway = copy.deepcopy(whole.state_dict())
        whole.step(x, y, generator=generator(i))
    resumed, _ = learner()
    resumed.load_state_dict(halfway)
    jvps = []
    for i in (4, 5):
        jvps.append(resumed.step(*batches[i], generator=generator(i)).metrics["jvps"])
    assert jvps == [0, 0]
    for a, b in zip(whole.split.model.parameters(), resumed.split.model.parameters(), strict=True):
        assert torch.equal(a, b)


class HostFreeReplay:
    """Stands for a CUDA graph: its first call runs the function, the others run nothing on the host."""

    captured = True

    def __init__(self, function, **_):
        self.function, self.made, self.calls = function, None, 0

    def __call__(self):
        self.calls += 1
        self.made = self.function() if self.made is None else self.made
        return self.made


def test_a_captured_learner_replays_a_graph_for_each_kind_of_step(monkeypatch):
    monkeypatch.setattr(captured, "Replay", HostFreeReplay)
    split, batches = problem("relay")
    eager = splitfg.GradientLearner(
        split, LearnedFeedback(Relay(every=3)), torch.optim.Adam(split.model.parameters(), lr=1e-2)
    )
    fast, draws = splitfg.CapturedLearner(eager, horizon=9, compile_=None), generator()
    jvps = [fast.step(*batches[0], generator=draws).metrics["jvps"] for _ in range(9)]
    assert jvps == [1, 0, 0] * 3
    assert [replay.calls for replay in fast._replays.values()] == [3, 6]
    assert fast.state_dict()["maps"]["measured/steps"] == 9


def test_wrong_settings():
    for make in (Relay, Direct, MeanJacobian):
        with pytest.raises(SplitError, match="every must be"):
            make(every=0)
    with pytest.raises(SplitError, match="MeanJacobianFeedback"):
        EveryNthFeedback(2, IdentityFeedback()).build()
