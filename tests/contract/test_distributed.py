"""Estimates of several gloo processes are those of one process on the whole batch; bad input is an error on all."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import splitfg
from splitfg.distributed import (
    DistributedEstimator,
    LocalHeads,
    Ranks,
    ScoreLog,
    ShardedHead,
    check_replicas,
    connect,
    replay,
)
from splitfg.feedback import NoiseControl, Relay
from splitfg.models import MLP
from splitfg.tangents import RowGenerator


class Residual(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(5, width), nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.first(x)
        x = x + self.block(x.tanh())
        return self.norm(x + self.last(x.tanh()))


PATH = splitfg.ResidualPath(writers=("first", "block", "last"), top="norm")
MAKERS = {
    "split_fg": lambda: splitfg.SplitFG(K=6),
    "split_fg_chunks": lambda: splitfg.SplitFG(K=5, engine=splitfg.ForwardMode(chunk=2)),
    "split_fg_projection": lambda: splitfg.SplitFG(K=4, combine=splitfg.Projection()),
    "split_fg_orthogonal": lambda: splitfg.SplitFG(K=4, law=splitfg.Orthogonal(), lean=True),
    "activity_fg": lambda: splitfg.ActivityFG(K=4, engine=splitfg.ForwardMode(chunk=3)),
    "activity_fg_predicted": lambda: splitfg.ActivityFG(K=4, prediction=splitfg.LearnedFeedback()),
    "forward_gradient": lambda: splitfg.ForwardGradient(K=4, engine=splitfg.ForwardMode(chunk=3)),
    "evolution": lambda: splitfg.EvolutionStrategy(K=4, sigma=1e-2),
    "frozen": lambda: splitfg.FrozenTrunk(),
    "direct_path": lambda: splitfg.DirectPath(PATH),
    "mean_jacobian": lambda: splitfg.DirectPath(PATH, feedback=splitfg.MeanJacobian()),
    "parallel_pull": lambda: splitfg.ParallelPull(pulls=2),
    "parallel_pull_maps": lambda: splitfg.ParallelPull(feedback=splitfg.MeanJacobian()),
    "parallel_pull_noise": lambda: splitfg.ParallelPull(feedback=NoiseControl()),
    "learned_feedback": lambda: splitfg.LearnedFeedback(),
    "learned_feedback_seldom": lambda: splitfg.LearnedFeedback(Relay(every=2)),
    "predictive_coding": lambda: splitfg.PredictiveCoding(),
    "backprop": lambda: splitfg.Backprop(),
}
DIVIDE_TANGENTS = (
    "split_fg",
    "split_fg_chunks",
    "activity_fg",
    "activity_fg_predicted",
    "forward_gradient",
    "evolution",
)


def network(name, dtype, ignore=True):
    """A network, and a batch of 13 rows of which three are ignored where the loss allows it."""
    torch.manual_seed(0)
    trunk = MLP(5, widths=(6, 6), generator=torch.Generator().manual_seed(0))
    if name in ("direct_path", "mean_jacobian"):
        trunk = Residual()
    loss = splitfg.CrossEntropy(ignore_index=-1, label_smoothing=0.1)
    split = splitfg.Split(trunk.to(dtype), splitfg.LinearHead(nn.Linear(6, 5, dtype=dtype), loss=loss))
    x, y = torch.randn(13, 5, dtype=dtype), torch.randint(0, 5, (13,))
    if ignore and name != "predictive_coding":  # its energy counts rows, ignored or not
        y[[0, 1, 12]] = -1
    return split, x, y


def trained(estimator, split, x, y, steps=2):
    """Two steps of plain SGD: the second rests on what estimators learned in the first."""
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        estimate = estimator(split, x, y, generator=generator)
        if isinstance(estimator, splitfg.estimators.LearningEstimator):
            estimator.update_state(split, estimate)
        found.append((estimate.loss, dict(estimate.grads), dict(estimate.stats.norms), estimate.stats.scores))
        with torch.no_grad():
            for name, p in split.model.named_parameters():
                p -= 0.1 * estimate.grads.get(name, torch.zeros_like(p))
    return found, {name: p.detach() for name, p in split.model.named_parameters()}, generator.get_state()


def ranks_of(shape):
    if shape is None:
        return Ranks()
    return Ranks(init_device_mesh("cpu", shape, mesh_dim_names=("rows", "tangents")))


def estimates(rank, name, dtype, shape, ignored=()):
    split, x, y = network(name, dtype)
    y[list(ignored)] = -1
    estimator = DistributedEstimator(MAKERS[name](), ranks_of(shape), check_every=1, whole_batches=True)
    return trained(estimator, split, x, y)


def close(found, expected, tolerance):
    """Whether the joint relative error is within the tolerance."""
    one, other = (torch.cat([t.detach().double().flatten() for t in group]) for group in (found, expected))
    assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("name", MAKERS)
def test_rows_of_all_processes_give_the_estimate_of_one(crew, name):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        if name == "evolution" and dtype == torch.float32:
            tolerance = 1e-4  # differences of losses cancel
        compare(crew, name, dtype, None, tolerance)


@pytest.mark.parametrize("name", DIVIDE_TANGENTS)
@pytest.mark.parametrize("shape", [(1, 4), (2, 2)], ids=str)
def test_divided_tangents_give_the_estimate_of_one(crew, name, shape):
    compare(crew, name, torch.float64, shape, 1e-12 if name != "evolution" else 1e-10)


SCORED = ("split_fg", "activity_fg_predicted", "evolution", "mean_jacobian", "parallel_pull_maps", "learned_feedback")


@pytest.mark.parametrize("name", SCORED)
def test_a_process_that_ignores_all_of_its_targets_counts_nothing(crew, name):
    tolerance = 1e-10 if name == "evolution" else 1e-12
    compare(crew, name, torch.float64, None, tolerance, range(3))  # all rows of the first process


class Sent(TorchDispatchMode):
    """Counts the bytes that a process hands to its group, by operation."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            kind = func.overloadpacket.__name__
            sent = args[1] if "allgather" in kind else args[0]
            size = sum(t.numel() * t.element_size() for t in tree_leaves(sent) if isinstance(t, torch.Tensor))
            self.bytes[kind] = self.bytes.get(kind, 0) + size
        return func(*args, **(kwargs or {}))


def sequences(length):
    """Thirteen sequences of five numbers a position."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()).double()
    split = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(6, 5).double()))
    return split, torch.randn(13, length, 5, dtype=torch.float64), torch.randint(0, 5, (13, length))


def measured_on_sequences(rank, length):
    split, x, y = sequences(length)
    estimator = DistributedEstimator(splitfg.LearnedFeedback(), whole_batches=True, check_every=None)
    trained(estimator, split, x, y, steps=1)
    with Sent() as sent:
        found = trained(estimator, split, x, y)
    return found[0], found[1], sent.bytes


@pytest.mark.parametrize(("length", "samples"), [(8, 3), (6, 4)])
def test_learned_feedback_sends_the_inputs_that_it_measures_on(crew, length, samples):
    assert math.ceil(4 * 6 / length) == samples  # four rows for every input of the only map
    split, x, y = sequences(length)
    estimator = splitfg.LearnedFeedback()
    trained(estimator, split, x, y, steps=1)
    expected, params, _ = trained(estimator, split, x, y)
    for found, own, sent in crew(measured_on_sequences, length):
        for (loss, grads, *_), (e_loss, e_grads, *_) in zip(found, expected, strict=True):
            close([loss, *(grads[n] for n in e_grads)], [e_loss, *e_grads.values()], 1e-12)
        close([own[n] for n in params], list(params.values()), 1e-12)
        two_steps, sample, counts = 2, length * 5 * 8, 2 * 8
        if samples == 3:  # those of the first process
            assert sent["broadcast_"] == two_steps * samples * sample
            assert sent["allgather_"] == two_steps * counts
        else:  # of two processes, each padded to three
            assert "broadcast_" not in sent
            assert sent["allgather_"] == two_steps * (3 * sample + counts)


def nothing_counts(rank):
    split, x, y = network("split_fg", torch.float64)
    estimator = DistributedEstimator(splitfg.SplitFG(K=2), whole_batches=True)
    estimator(split, x, torch.full_like(y, -1), generator=torch.Generator())


def test_targets_that_all_processes_ignore_are_an_error(crew):
    assert all("no process has a target that counts" in message for _, message in crew.errors(nothing_counts))


def compare(crew, name, dtype, shape, tolerance, ignored=()):
    split, x, y = network(name, dtype)
    y[list(ignored)] = -1
    expected, params, state = trained(MAKERS[name](), split, x, y)
    for found, own, own_state in crew(estimates, name, dtype, shape, tuple(ignored)):
        for (loss, grads, norms, scores), (e_loss, e_grads, e_norms, e_scores) in zip(found, expected, strict=True):
            assert grads.keys() == e_grads.keys()
            assert norms.keys() == e_norms.keys()
            close([loss, *grads.values()], [e_loss, *e_grads.values()], tolerance)
            close([norms[n].double() for n in e_norms], [n.double() for n in e_norms.values()], 10 * tolerance)
            close([scores], [e_scores], tolerance) if len(e_scores) else None
        close(own.values(), params.values(), tolerance)
        assert torch.equal(own_state, state)


def trouble(rank, kind):
    """Call an estimator with something wrong in process 1."""
    split, x, y = network("split_fg", torch.float64)
    wrong = rank == 1
    K = 5 if wrong and kind == "K" else 4
    if wrong and kind == "width":
        split = splitfg.Split(MLP(5, widths=(7, 6), generator=torch.Generator()).double(), split.head)
    if wrong and kind == "dtype":
        split, x = network("split_fg", torch.float32)[0], x.float()
    if wrong and kind == "values":
        with torch.no_grad():
            list(split.trunk.parameters())[2][0, 0] += 1e-9
    x, y = Ranks().own_rows(x, y)
    if wrong and kind == "rows":
        x, y = x[:0], y[:0]
    if wrong and kind == "nan":
        x = torch.full_like(x, torch.nan)
    estimator = splitfg.ActivityFG(K=K) if kind == "rows by noise" else splitfg.SplitFG(K=K)
    if wrong and kind == "rows by noise":
        x, y = x[:0], y[:0]
    generator = torch.Generator().manual_seed(1 if wrong and kind == "seed" else 0)
    DistributedEstimator(estimator)(split, x, y, generator=generator)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("K", "estimator differs: .*K=4.* on rank 0, .*K=5.* on rank 1"),
        ("width", r"parameters differ: .*\(6, 5\).* on rank 0, .*\(7, 5\).* on rank 1"),
        ("dtype", "parameters differ: .*float64.* on rank 0, .*float32.* on rank 1"),
        ("seed", "generator differs: state .* on rank 0, state .* on rank 1"),
        ("values", r"trunk\..*weight differs between rank 0 and rank 1: start all processes from the same"),
        ("rows", "rank 1: the batch is empty"),
        ("rows by noise", "rank 1: the batch is empty"),
        ("nan", "rank 1: h is not finite"),
    ],
)
def test_trouble_in_one_process_is_one_clear_error_in_all(crew, kind, words):
    found = crew.errors(trouble, kind)
    assert len(set(found)) == 1
    error, message = found[0]
    assert error == ("NonFiniteError" if kind == "nan" else "SplitError")
    assert re.search(words, message), message
    crew(estimates, "frozen", torch.float64, None)  # the group still works


def too_few(rank, K, shape):
    DistributedEstimator(MAKERS["frozen"]() if K == 0 else splitfg.SplitFG(K=K), ranks_of(shape))


def test_tangents_that_cannot_be_divided_are_an_error(crew):
    assert {message for _, message in crew.errors(too_few, 3, (1, 4))} == {
        "K is 3 and 4 processes divide the tangents: raise K, or use fewer processes along 'tangents'"
    }
    assert {m.split(":")[0] for _, m in crew.errors(too_few, 0, (2, 2))} == {"FrozenTrunk has no tangents to divide"}


def test_without_a_process_group_the_error_names_the_cure():
    with pytest.raises(splitfg.SplitError, match="torchrun"):
        Ranks()


def lookup(rank, values):
    """One bit of difference in one of many numbers, far behind the first chunk of the hash."""
    params = {"same": torch.arange(10.0), "large": torch.zeros(2**20 + 3)}
    if rank == 2:
        params["large"][-1] = values
    check_replicas(Ranks(), params)


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


@pytest.mark.parametrize(("gpus", "words"), [(0, "no GPU"), (2, "start one for every GPU")])
def test_more_processes_than_gpus_is_an_error_before_the_rendezvous(monkeypatch, gpus, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    place = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(splitfg.SplitError, match=words):
        connect(device="cuda")


def test_replicas_that_differ_in_one_bit_are_found(crew):
    crew(lookup, 0.0)
    assert {m.split(":")[0] for _, m in crew.errors(lookup, -0.0)} == {"large differs between rank 0 and rank 2"}


def sharded(rank, name):
    split, x, y = network(name, torch.float64)
    torch.manual_seed(0)
    trunk, layer = split.trunk, split.head.layers[0]
    split = splitfg.Split(trunk, ShardedHead(Ranks(), layer, ignore_index=-1))
    estimator = DistributedEstimator(MAKERS[name](), check_every=1, whole_batches=True)
    found, params, _ = trained(estimator, split, x, y)
    return found, params, split.head.predict(split.h(Ranks().own_rows(x, y)[0]))


@pytest.mark.parametrize("name", ["split_fg", "split_fg_orthogonal", "activity_fg", "frozen", "mean_jacobian"])
def test_a_head_divided_by_classes_gives_the_estimate_of_one(crew, name):
    split, x, y = network(name, torch.float64)
    head = splitfg.LinearHead(*split.head.layers, loss=splitfg.CrossEntropy(ignore_index=-1))
    split = splitfg.Split(split.trunk, head)
    expected, params, _ = trained(MAKERS[name](), split, x, y)
    results = crew(sharded, name)
    for found, own, _ in results:
        for (loss, grads, norms, _), (e_loss, e_grads, e_norms, _) in zip(found, expected, strict=True):
            trunk = [n for n in e_grads if not n.startswith("head")]
            close(
                [loss, norms["u"], *(grads[n] for n in trunk)],
                [e_loss, e_norms["u"], *(e_grads[n] for n in trunk)],
                1e-12,
            )
        close(
            [own[n] for n in params if n.startswith("trunk")] or [loss],
            [p for n, p in params.items() if n.startswith("trunk")] or [e_loss],
            1e-12,
        )
    weight = torch.cat([own["head.weight"] for _, own, _ in results])
    close([weight], [params["head.0.weight"]], 1e-12)
    close([torch.cat([outputs for _, _, outputs in results])], [split.predict(x)], 1e-12)


def clipped(rank, apart):
    """Two clipped steps with a divided head."""
    split, x, y = network("split_fg", torch.float64)
    split = splitfg.Split(split.trunk, ShardedHead(Ranks(), split.head.layers[0], ignore_index=-1))
    estimator = DistributedEstimator(splitfg.SplitFG(K=4), check_every=1, whole_batches=True)
    return stepped(split, estimator, x, y, apart)


def stepped(split, estimator, x, y, apart):
    optimizer, generator = torch.optim.SGD(split.model.parameters(), lr=0.1), torch.Generator().manual_seed(0)
    learner = splitfg.GradientLearner(split, estimator, optimizer, max_norm=0.05, clip_apart=apart)
    for _ in range(2):
        learner.step(x, y, generator=generator)
    return {name.replace("head.0.", "head."): p.detach() for name, p in split.model.named_parameters()}


@pytest.mark.parametrize("apart", [False, True])
def test_clipping_counts_all_shards_of_a_head(crew, apart):
    split, x, y = network("split_fg", torch.float64)
    head = splitfg.LinearHead(*split.head.layers, loss=splitfg.CrossEntropy(ignore_index=-1))
    expected = stepped(splitfg.Split(split.trunk, head), splitfg.SplitFG(K=4), x, y, apart)
    found = crew(clipped, apart)
    for own in found:
        close([own[n] for n in own if n[:4] != "head"], [p for n, p in expected.items() if n[:4] != "head"], 1e-12)
    close([torch.cat([own["head.weight"] for own in found])], [expected["head.weight"]], 1e-12)


def clipped_together(rank):
    split, _, _ = network("split_fg", torch.float64)
    estimator = DistributedEstimator(splitfg.SplitFG(K=3), reduce_head=False)
    LocalHeads(splitfg.GradientLearner(split, estimator, torch.optim.SGD(split.model.parameters())), every=2)


def test_local_heads_that_would_scale_the_trunks_are_an_error(crew):
    assert all("clip_apart=True" in message for _, message in crew.errors(clipped_together))


def local_heads(rank, steps, every):
    split, x, y = network("split_fg", torch.float64)
    estimator = DistributedEstimator(splitfg.SplitFG(K=3), whole_batches=True, reduce_head=False, check_every=1)
    inner = splitfg.GradientLearner(split, estimator, torch.optim.SGD(split.model.parameters(), lr=0.1), max_norm=None)
    learner, generator = LocalHeads(inner, every=every, rate=1.0, momentum=0.0), torch.Generator().manual_seed(0)
    heads = []
    for _ in range(steps):
        learner.step(x, y, generator=generator)
        heads.append(split.head.layers[0].weight.detach().clone())
    return heads, {n: p.detach() for n, p in split.trunk.named_parameters()}


def test_local_heads_meet_every_few_steps_and_trunks_never_part(crew):
    found = crew(local_heads, 4, 2)
    for step, together in enumerate((False, True, False, True)):
        heads = [heads[step] for heads, _ in found]
        assert all(torch.equal(heads[0], head) for head in heads) is together
    assert all(torch.equal(found[0][1][n], own[n]) for _, own in found for n in own)
    # with plain SGD and an average after every step, the heads see the mean of the processes' own gradients
    split, x, y = network("split_fg", torch.float64)
    parts = [(x[13 * i // 4 : 13 * (i + 1) // 4], y[13 * i // 4 : 13 * (i + 1) // 4]) for i in range(4)]
    grads = [split.head(split.h(px), py).grads["0.weight"] for px, py in parts]
    expected = split.head.layers[0].weight.detach() - 0.1 * torch.stack(grads).mean(0)
    close([crew(local_heads, 1, 1)[0][0][0]], [expected], 1e-12)


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
    assert (tmp_path / "scores").stat().st_size == sum(len(line) + 1 for line in header) + 7 * 4 * (4 + 1)


def test_a_log_of_another_beginning_is_an_error(tmp_path):
    split, _, _ = network("split_fg", torch.float32)
    ScoreLog(tmp_path / "scores", split, K=4, generator=torch.Generator())
    with torch.no_grad():
        next(iter(split.trunk.parameters())).add_(1.0)
    with pytest.raises(splitfg.SplitError, match="another initial value"):
        replay(learner_of(split, splitfg.SplitFG(K=4), None), tmp_path / "scores")
    with pytest.raises(splitfg.SplitError, match="4 scores a step, the estimator 5"):
        replay(learner_of(split, splitfg.SplitFG(K=5), None), tmp_path / "scores")
