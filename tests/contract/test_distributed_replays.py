"""Steps of several processes can be captured and replayed, and rebuilt from a log of their scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _ranks import MAKERS, network
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import splitfg
from splitfg.distributed import DistributedEstimator, Ranks, ScoreLog, ShardedHead, replay
from splitfg.tangents import RowGenerator


def held_groups(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "tangents"))
    return [type(v).__name__ for ranks in (Ranks(), Ranks(mesh)) for v in vars(ranks).values()]


def test_ranks_hold_no_group_that_would_outlive_its_end(crew):
    for kinds in crew(held_groups):  # gloo's threads abort a process that ends while a group is alive
        assert not [kind for kind in kinds if "Group" in kind or kind in ("list", "tuple", "dict")]


def replay_after_a_change(rank):
    split, x, y = network("split_fg", torch.float32)
    estimator = DistributedEstimator(splitfg.SplitFG(K=2), check_every=2)
    generator = torch.Generator().manual_seed(0)
    estimator(split, x, y, generator=generator)
    if rank == 2:
        with torch.no_grad():
            next(iter(split.trunk_params().values()))[0] += 1
    assert not estimator.capturable  # gloo
    estimator.before_replay(split, generator)  # the second call: not yet due
    estimator.before_replay(split, generator)


def test_replays_of_a_captured_step_compare_parameters_when_due(crew):
    errors = crew.errors(replay_after_a_change)
    assert {kind for kind, _ in errors} == {"SplitError"}
    assert all("between rank 0 and rank 2" in message for _, message in errors)


class NoHost(TorchDispatchMode):
    """Raises an error where a captured step would fail: at numbers that come from the host or go to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.lift_fresh), func
        return func(*args, **(kwargs or {}))


def as_if_captured(rank, name):
    """Two steps, and the third one again, as a graph captures it."""
    split, x, y = network(name, torch.float64)
    if name == "split_fg_orthogonal":
        split = splitfg.Split(split.trunk, ShardedHead(Ranks(), split.head.layers[0], ignore_index=-1))
    estimator, generator = DistributedEstimator(MAKERS[name](), whole_batches=True), torch.Generator().manual_seed(1)
    for _ in range(2):
        estimate = estimator(split, x, y, generator=generator)
        estimator.update_state(split, estimate)
    state = generator.get_state()
    expected = estimator(split, x, y, generator=generator)
    generator.set_state(state)
    with pytest.MonkeyPatch.context() as patched, NoHost():
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patched.delattr(RowGenerator, "__new__")  # none may be made
        found = estimator(split, x, y, generator=generator)
    return all(torch.equal(found.grads[n], g) for n, g in expected.grads.items())


CAPTURED = (
    "split_fg",
    "split_fg_orthogonal",  # with a divided head
    "activity_fg",
    "mean_jacobian",
    "parallel_pull_maps",
    "learned_feedback",
)


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_call_needs_nothing_of_the_host(crew, name):
    assert all(crew(as_if_captured, name))


def logged(rank, folder, clip):
    split, x, y = network("split_fg", torch.float32)
    generator = torch.Generator().manual_seed(3)
    log = ScoreLog(Path(folder) / "scores", split, K=4, generator=generator) if rank == 0 else None
    estimator = DistributedEstimator(splitfg.SplitFG(K=4, engine=splitfg.ForwardMode(chunk=3)), whole_batches=True)
    inner = learner_of(split, estimator, clip, log)
    for _ in range(7):
        inner.step(x, y, generator=generator)
    return {n: p.detach() for n, p in split.trunk_params().items()}


def learner_of(split, estimator, clip, log=None):
    optimizer = torch.optim.Adam(splitfg.parameter_groups(split, lr=1e-2, rho=0.3))
    schedule = splitfg.CosineWithWarmup(7, 2)
    return splitfg.GradientLearner(split, estimator, optimizer, max_norm=clip, schedule=schedule, log=log)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_log_of_scores_rebuilds_the_trunk_bit_for_bit(crew, tmp_path, clip):
    trunks = crew(logged, str(tmp_path), clip)
    split, _, _ = network("split_fg", torch.float32)
    estimator = splitfg.SplitFG(K=4, engine=splitfg.ForwardMode(chunk=3))
    assert replay(learner_of(split, estimator, clip), tmp_path / "scores") == 7
    for own in trunks:
        assert all(torch.equal(own[n], p) for n, p in split.trunk_params().items())
    header = (tmp_path / "scores").read_bytes().split(b"\n")[:2]
    assert (tmp_path / "scores").stat().st_size == sum(len(line) + 1 for line in header) + 7 * 4 * (4 + 2)


def test_a_log_of_another_beginning_is_an_error(tmp_path):
    split, _, _ = network("split_fg", torch.float32)
    ScoreLog(tmp_path / "scores", split, K=4, generator=torch.Generator())
    with torch.no_grad():
        next(iter(split.trunk.parameters())).add_(1.0)
    with pytest.raises(splitfg.SplitError, match="another initial value"):
        replay(learner_of(split, splitfg.SplitFG(K=4), None), tmp_path / "scores")
    with pytest.raises(splitfg.SplitError, match="4 scores a step, the estimator 5"):
        replay(learner_of(split, splitfg.SplitFG(K=5), None), tmp_path / "scores")
