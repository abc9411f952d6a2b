"""Trunks: every model here returns the representation h; put a head on top of it.

All are pure functions of their parameters, without batch statistics, in-place writes or fused attention, so that
they run under ``torch.func.jvp``, ``torch.func.vmap`` and ``torch.compile``. All draw their initial parameters from an
explicit ``torch.Generator``, on its device.
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
