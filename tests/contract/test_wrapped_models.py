"""Models that are wrapped for parallel training raise an error that names the inner module as the cure."""

import pytest
import torch
import torch.distributed as dist
from _toolkit import classes, generator, noise
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from splitfg import LinearHead, Split, SplitError, SplitFG, split


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def problems_of(build):
    with pytest.raises(SplitError) as caught:
        build()
    return caught.value.problems


@pytest.mark.parametrize("wrap", [DistributedDataParallel, nn.DataParallel])
def test_replicated_models_raise(group, wrap):
    wrapped = wrap(model())
    (problem,) = problems_of(lambda: split(wrapped))
    assert wrap.__name__ in problem
    assert "wrapped.module" in problem
    assert "splitfg.distributed" in problem


def test_the_cure_works(group):
    s = split(DistributedDataParallel(model()).module)
    assert SplitFG(2)(s, noise(4, 3).float(), classes(4, count=2), generator=generator()).grads


def test_a_wrapped_trunk_raises(group):
    trunk = nn.Sequential(nn.Linear(3, 3), DistributedDataParallel(nn.Linear(3, 4)))
    (problem,) = problems_of(lambda: Split(trunk, LinearHead(nn.Linear(4, 2))))
    assert "module '1' is wrapped in DistributedDataParallel" in problem


def test_a_fully_sharded_model_raises(group):
    sharded = model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
    (problem,) = problems_of(lambda: split(sharded))
    assert "the model is wrapped in FSDPModule" in problem
    assert "splitfg.distributed" in problem


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FullyShardedDataParallel needs an accelerator")
def test_an_fsdp_model_raises(group):
    (problem,) = problems_of(lambda: split(FullyShardedDataParallel(model().cuda())))
    assert "FullyShardedDataParallel" in problem
