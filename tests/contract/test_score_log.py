"""A log of scores repeats the training that wrote it, or raises an error."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from _ranks import network

import splitfg
from splitfg.distributed import DistributedEstimator, ScoreLog, replay

STEPS = 7


def learner_of(split, *, K=4, lr=1e-2, rho=0.3, law=None, log=None, **options):
    law = splitfg.Gaussian() if law is None else law
    optimizer = torch.optim.Adam(splitfg.parameter_groups(split, lr=lr, rho=rho))
    return splitfg.GradientLearner(split, splitfg.SplitFG(K=K, law=law), optimizer, log=log, **options)


def train(path, steps=STEPS, after=None):
    """Train with a log, and return the trunk and the checkpoint after some of the steps."""
    split, x, y = network("split_fg", torch.float32)
    generator = torch.Generator().manual_seed(3)
    learner = learner_of(split, log=ScoreLog(path, split, K=4, generator=generator, check_every=4))
    for step in range(steps):
        if step == after:
            saved = copy.deepcopy(learner.state_dict()), generator.get_state()
        learner.step(x, y, generator=generator)
    trunk = {name: p.clone() for name, p in split.trunk_params().items()}
    return trunk if after is None else (trunk, saved)


def resume(path, saved, *, truncated=None, cut=0, draws=0):
    """Go on from a checkpoint, in a new process as it were."""
    split, x, y = network("split_fg", torch.float32)
    generator = torch.Generator()
    generator.set_state(saved[1])
    torch.rand(draws, generator=generator)
    log = ScoreLog(path, split, K=4, generator=generator)
    if cut:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - cut)
    if truncated is not None:
        log.truncate(truncated)
    learner = learner_of(split, log=log)
    learner.load_state_dict(saved[0])
    while learner.steps < STEPS:
        learner.step(x, y, generator=generator)


def replayed(path, **options):
    split, _, _ = network("split_fg", torch.float32)
    steps = {name: options.pop(name) for name in ("steps", "exact") if name in options}
    count = replay(learner_of(split, **options), path, **steps)
    return count, {name: p.clone() for name, p in split.trunk_params().items()}


def same(one, other):
    return all(torch.equal(p, other[name]) for name, p in one.items())


@pytest.mark.parametrize(("after", "cut"), [(4, 0), (3, 0), (4, 5), (0, 0)])
def test_a_killed_and_resumed_training_replays(tmp_path, after, cut):
    trunk, saved = train(tmp_path / "scores", after=after)
    resume(tmp_path / "scores", saved, truncated=after, cut=cut)
    count, found = replayed(tmp_path / "scores")
    assert count == STEPS
    assert same(trunk, found)


def test_an_incomplete_last_step_is_ignored_by_replays(tmp_path):
    train(tmp_path / "scores")
    content = (tmp_path / "scores").read_bytes()
    (tmp_path / "scores").write_bytes(content[:-3])
    count, found = replayed(tmp_path / "scores")
    assert count == STEPS - 1
    assert same(train(tmp_path / "other", steps=STEPS - 1), found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "generator is not in the state after 7 steps"),
        ({"truncated": 4}, "generator is not in the state after 4 steps"),
        ({"cut": 3}, "the last step .* is incomplete"),
        ({"truncated": 9}, "fewer than 9 steps"),
        ({"truncated": 3, "draws": 1}, "generator is not in the state after 3 steps"),
    ],
    ids=["not truncated", "other step", "incomplete", "too many", "drawn"],
)
def test_steps_that_do_not_follow_the_log_raise(tmp_path, options, words):
    _, saved = train(tmp_path / "scores", after=3)
    with pytest.raises(splitfg.SplitError, match=words):
        resume(tmp_path / "scores", saved, **options)


def test_a_replay_finds_numbers_drawn_after_a_checksum_of_the_trunk(tmp_path):
    _, saved = train(tmp_path / "scores", after=5)
    resume(tmp_path / "scores", saved, truncated=5, draws=1)
    with pytest.raises(splitfg.SplitError, match=r"step 5 .* something else drew from the generator"):
        replayed(tmp_path / "scores")


def test_two_writers_are_an_error(tmp_path):
    split, x, y = network("split_fg", torch.float32)
    generator = torch.Generator().manual_seed(3)
    logs = [ScoreLog(tmp_path / "scores", split, K=4, generator=generator) for _ in range(2)]
    estimate = splitfg.SplitFG(K=4)(split, x, y, generator=generator)
    logs[0](estimate)
    logs[0]._steps = 0
    with pytest.raises(splitfg.SplitError, match="another program writes"):
        logs[0](estimate)


def edited(content, how):
    *header, records = content.split(b"\n", 2)
    size = 4 * (4 + 2)
    if how == "bit":
        records = records[: 3 * size] + bytes([records[3 * size] ^ 1]) + records[3 * size + 1 :]
    if how == "missing":
        records = records[:size] + records[2 * size :]
    if how == "swapped":
        records = records[size : 2 * size] + records[:size] + records[2 * size :]
    if how == "state":
        known = json.loads(header[1])
        header[1] = json.dumps(
            known | {"state": torch.Generator().manual_seed(9).get_state().numpy().tobytes().hex()}
        ).encode()
    return b"\n".join([*header, records])


@pytest.mark.parametrize(("how", "step"), [("bit", 3), ("missing", 1), ("swapped", 0), ("state", 0)])
def test_an_edited_log_is_an_error_at_its_step(tmp_path, how, step):
    train(tmp_path / "scores")
    (tmp_path / "scores").write_bytes(edited((tmp_path / "scores").read_bytes(), how))
    with pytest.raises(splitfg.SplitError, match=f"step {step} .* changed or damaged"):
        replayed(tmp_path / "scores")


@pytest.mark.parametrize(
    "options",
    [{"lr": 2e-2}, {"law": splitfg.Rademacher()}, {"max_norm": 0.01}, {"schedule": splitfg.CosineWithWarmup(7, 2)}],
    ids=str,
)
def test_another_training_than_the_logged_one_is_an_error(tmp_path, options):
    train(tmp_path / "scores")
    with pytest.raises(splitfg.SplitError, match="does not follow"):
        replayed(tmp_path / "scores", **options)


def test_inexact_replays_accept_another_trunk(tmp_path):
    trunk = train(tmp_path / "scores")
    count, found = replayed(tmp_path / "scores", lr=2e-2, exact=False)
    assert count == STEPS
    assert not same(trunk, found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 8}, "has 7 steps, not 8"),
        ({"line_search": splitfg.LineSearch(), "rho": 1.0}, "a line search .* needs the data"),
    ],
)
def test_replays_that_cannot_be_raise(tmp_path, options, words):
    train(tmp_path / "scores")
    with pytest.raises(splitfg.SplitError, match=words):
        replayed(tmp_path / "scores", **options)


def parts(rank, path, steps):
    """Continue a log by processes that share the batches."""
    split, x, y = network("split_fg", torch.float32)
    generator = torch.Generator().manual_seed(3)
    log = ScoreLog(path, split, K=4, generator=generator) if rank == 0 else None
    learner = learner_of(split, log=log)
    learner = splitfg.GradientLearner(
        split,
        DistributedEstimator(splitfg.SplitFG(K=4), whole_batches=True),
        learner.update.optimizer.optimizer,
        log=log,
    )
    for _ in range(steps):
        learner.step(x, y, generator=generator)
    return {name: p.detach() for name, p in split.trunk_params().items()}, learner.state_dict(), generator.get_state()


def test_a_log_of_four_processes_goes_on_with_one(crew, tmp_path):
    found = crew(parts, tmp_path / "scores", 3)
    resume(tmp_path / "scores", found[0][1:], truncated=3)
    count, trunk = replayed(tmp_path / "scores")
    split, x, y = network("split_fg", torch.float32)
    expected = learner_of(split)
    expected.load_state_dict(found[0][1])
    generator = torch.Generator()
    generator.set_state(found[0][2])
    for _ in range(STEPS - 3):
        expected.step(x, y, generator=generator)
    assert count == STEPS
    assert same({name: p.detach() for name, p in split.trunk_params().items()}, trunk)
