"""Several processes on a CUDA device: NCCL's messages inside the captured step, and gloo's around it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _captured import Setting, made_up_windows
from _crew import free_port
from torch.utils import _pytree as pytree

from splitfg import GradientLearner, LinearHead, SplitError
from splitfg.compiled import whole
from splitfg.distributed import DistributedEstimator, Ranks, connect
from splitfg.learners import CapturedLearner
from splitfg.models import GPTConfig
from splitfg.recipes import (
    BackpropMethod,
    DirectPathMethod,
    LearnedFeedbackMethod,
    MeanJacobianFeedback,
    ParallelPullMethod,
    SplitFGMethod,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]

STEPS = 10
TIMEOUT = timedelta(seconds=100)
LIMIT_S = 420  # compiling four methods in a new process takes minutes
CONFIG = GPTConfig(layers=2, width=64, heads=2, context=32, vocab=500)
METHODS = (
    SplitFGMethod(K=3),
    DirectPathMethod(MeanJacobianFeedback()),
    ParallelPullMethod(MeanJacobianFeedback(), pulls=2),
    LearnedFeedbackMethod(),
    BackpropMethod(),
)


def setting():
    return Setting(
        CONFIG,
        head=lambda layer: LinearHead(layer, block=2**12),
        windows=made_up_windows(CONFIG, 3000),
        batch=4,
        steps=STEPS,
        lr=1e-3,
        device=torch.device("cuda"),
    )


def trained(learner, made):
    """Losses and parameters after all steps, on the host."""
    losses = made.take(learner, made.generator())
    return losses, {name: p.cpu() for name, p in learner.state_dict()["model"].items()}


def spread(method, made, *, captured, compile_=None, **options):
    eager = made.eager(method)
    estimator = DistributedEstimator(eager.estimator, Ranks(), whole_batches=True, **options)
    learner = GradientLearner(eager.split, estimator, eager.update.optimizer.optimizer)
    learner.update = eager.update  # with its schedule
    return CapturedLearner(learner, horizon=STEPS, compile_=compile_) if captured else learner


def apart(first, second, start):
    gap = sum((first[n] - second[n]).double().square().sum().item() for n in first)
    return (gap / sum((second[n] - start[n]).double().square().sum().item() for n in first)) ** 0.5


def start_of(made):
    return {name: p.cpu() for name, p in made.eager(METHODS[0]).state_dict()["model"].items()}


def _work(function, rank, size, port, backend, pipe, args):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        if backend == "gloo":
            dist.init_process_group("gloo", timeout=TIMEOUT)
        elif backend == "nccl":
            connect(timeout=TIMEOUT, arrival=TIMEOUT)
        # arrays: tensors in shared memory are gone with the process
        pipe.send((True, pytree.tree_map_only(torch.Tensor, lambda t: t.cpu().numpy(), function(*args))))
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    gc.collect()  # NCCL waits for the graphs that captured its messages; learners hold theirs in cycles
    if dist.is_initialized():
        dist.destroy_process_group()


def in_processes(size, backend, function, *args):
    """Call a function in so many processes of one group on one GPU, and return the results."""
    context = multiprocessing.get_context("spawn")
    pairs, port = [context.Pipe() for _ in range(size)], free_port()
    processes = [
        context.Process(target=_work, args=(function, rank, size, port, backend, theirs, args), daemon=True)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    deadline = time.monotonic() + LIMIT_S
    for process, (_, theirs) in zip(processes, pairs, strict=True):
        process.start()
        theirs.close()  # a process that dies then ends its pipe
    try:
        for ours, _ in pairs:
            assert ours.poll(max(0.0, deadline - time.monotonic())), "a process does not answer"
        found = [ours.recv() for ours, _ in pairs]
    finally:
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
    assert all(fine for fine, _ in found), [text for fine, text in found if not fine]
    return [pytree.tree_map_only(np.ndarray, torch.from_numpy, result) for _, result in found]


def _captured_with_nccl(compiled):
    """For every method: losses and parameters of one process alone, and of a captured group of NCCL."""
    made, found = setting(), []
    for method in METHODS:
        learner = spread(method, made, captured=True, compile_=whole if compiled else None)
        alone, group = trained(made.eager(method), made), trained(learner, made)
        found.append((repr(method), alone, group, learner.captured, learner._fast.estimator.capturable))
    return found, start_of(made)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_a_graph_captures_the_messages_of_nccl(compiled):
    ((found, start),) = in_processes(1, "nccl", _captured_with_nccl, compiled)
    for name, alone, group, captured, capturable in found:
        assert captured, name
        assert capturable, name
        assert group[0] == pytest.approx(alone[0], rel=1e-3), name
        assert apart(group[1], alone[1], start) < 0.05, name


def _changed_during_replays():
    made = setting()
    learner = spread(SplitFGMethod(K=2), made, captured=True, check_every=3)
    calls = []
    estimator = learner._fast.estimator
    compare = estimator._compare
    estimator._compare = lambda *args: calls.append(learner.captured) or compare(*args)
    made.take(learner, made.generator())
    return learner.captured, calls, estimator._calls


def test_replayed_steps_compare_parameters_too():
    ((captured, calls, counted),) = in_processes(1, "nccl", _changed_during_replays)
    assert captured
    assert True in calls  # before a replay, on the host
    assert counted == STEPS - 1  # the call that captures compares nothing


def _around_gloo():
    made = setting()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        learner = spread(SplitFGMethod(K=3), made, captured=True)
    words = [str(w.message) for w in told]
    results = {"captured": trained(learner, made), "captures": learner.captured, "words": words}
    results["eager"] = trained(spread(BackpropMethod(), made, captured=False), made)
    return results


def test_two_processes_on_one_gpu_with_gloo_take_the_steps_of_one():
    made = setting()
    start = start_of(made)
    alone = {kind: trained(made.eager(m), made) for kind, m in (("captured", METHODS[0]), ("eager", METHODS[-1]))}
    first, second = in_processes(2, "gloo", _around_gloo)
    assert any("gloo cannot be captured" in text for text in first["words"])
    assert not first["captures"]
    for kind, (losses, params) in alone.items():
        assert first[kind][0] == pytest.approx(losses, rel=1e-3)
        assert apart(first[kind][1], params, start) < 0.02
        assert all(torch.equal(p, second[kind][1][name]) for name, p in first[kind][1].items())


def test_more_processes_than_gpus_are_an_error_before_the_rendezvous(monkeypatch):
    here = str(torch.cuda.device_count() + 1)
    wanted = {"RANK": "0", "WORLD_SIZE": here, "LOCAL_WORLD_SIZE": here, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (wanted | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SplitError, match="one for every GPU"):
        connect(device="cuda")
