"""Trunks: every model here ends at the representation h; heads are made on top of it.

All are pure functions of their parameters (no batch statistics, no in-place writes, no fused attention), so
they run under ``torch.func.jvp``, ``torch.func.vmap`` and ``torch.compile``, and all draw their initial
parameters from an explicit ``torch.Generator``.
"""

from splitfg.models._init import linear, normal_linear
from splitfg.models.gpt import GPT, PRESETS, GPTConfig
from splitfg.models.mlp import MLP
from splitfg.models.resnet import FlatTrunk, ResNet, resnet18, resnet20
from splitfg.models.tabm import TabM
from splitfg.models.toy import toy_trunk

__all__ = [
    "GPT",
    "MLP",
    "PRESETS",
    "FlatTrunk",
    "GPTConfig",
    "ResNet",
    "TabM",
    "linear",
    "normal_linear",
    "resnet18",
    "resnet20",
    "toy_trunk",
]
