"""Models of timm with random weights; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from splitfg_lab.compatibility._case import Built, Case

CLASSES, ROWS, SIDE = 3, 4, 64

_TOKENS: Mapping[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
_WINDOWS = {
    "img_size": 32,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 8,
    "depths": (2, 2),
    "num_heads": (2, 2),
}
_STAGES = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}

MODELS: dict[str, Mapping[str, Any]] = {
    "vit_tiny_patch16_224": _TOKENS,
    "deit_tiny_patch16_224": _TOKENS,
    "beit_base_patch16_224": _TOKENS,
    "cait_xxs24_224": _TOKENS,
    "swin_tiny_patch4_window7_224": _WINDOWS,
    "MlpMixer": {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 24},
    "maxvit_pico_rw_256": {"img_size": 64, "embed_dim": (32, 32, 32, 32), "depths": (1, 1, 1, 1)},
    "resnet18": {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)},
    "regnetx_002": {},
    "densenet121": {"growth_rate": 4, "block_config": (2, 2, 2, 2)},
    "efficientnet_b0": {},
    "mobilenetv3_small_050": {},
    "convnext_atto": _STAGES,
    "convnextv2_atto": _STAGES,
    "test_nfnet": {},
    "edgenext_xx_small": {},
    "mobilevit_xxs": {},
}
"""Models by name, or classes of ``timm.models``, with settings that make them smaller."""

TRAINING = ("resnet18", "mobilenetv3_small_050")
"""Models with batch norm that are also measured in training mode."""


def timm_cases() -> list[Case]:
    """Return models of timm, with fewer and narrower blocks where the library has an argument for it."""
    found = [Case("timm", name, partial(_built, name)) for name in MODELS]
    return found + [Case("timm", f"{name}, training", partial(_built, name), train=True) for name in TRAINING]


def _built(name: str) -> Built:
    import timm

    settings = MODELS[name]
    make = getattr(timm.models, name) if name[0].isupper() else partial(timm.create_model, name, pretrained=False)
    model: nn.Module = make(num_classes=CLASSES, **settings)
    for parameter in model.parameters():
        if not parameter.any():  # some layers start at zero, and those before them without a gradient
            nn.init.normal_(parameter, std=0.1)
    side = settings.get("img_size", SIDE)
    return model, (torch.randn(ROWS, 3, side, side), torch.randint(0, CLASSES, (ROWS,)))
