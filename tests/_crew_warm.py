"""Imports and first calls that every process of a crew needs, made once before the processes are forked."""

import torch

import splitfg
import splitfg.distributed
from splitfg.testing import example_split

torch.set_num_threads(1)
_split, _x, _y = example_split()
for _estimator in (splitfg.SplitFG(K=2), splitfg.ActivityFG(K=2), splitfg.ForwardGradient(K=2)):
    _estimator(_split, _x, _y, generator=torch.Generator())
