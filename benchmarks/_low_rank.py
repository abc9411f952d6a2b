"""GPT-2 with low-rank adapters, without peft: the same mathematics as its LoRA."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

TARGETS = ("c_attn", "c_proj", "c_fc")


class LowRank(nn.Module):
    """A frozen layer with a trained low-rank update: z = layer(x) + (alpha / r) B A x.

    A starts as peft's does, uniform; B at zero. Both stay in float32, and the update is cast to the dtype of z.

    Args:
        layer: The layer.
        sizes: Numbers of its inputs and outputs.
        rank: r.
        alpha: Scale of the update.
    """

    def __init__(self, layer: nn.Module, sizes: tuple[int, int], rank: int, alpha: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, alpha / rank
        self.A, self.B = nn.Linear(sizes[0], rank, bias=False), nn.Linear(rank, sizes[1], bias=False)
        nn.init.kaiming_uniform_(self.A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.B.weight)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layer(x)
        update: Tensor = self.B(self.A(x.to(self.A.weight.dtype))) * self.scale
        return z + update.to(z.dtype)


def adapted(model: nn.Module, rank: int, alpha: float) -> nn.Module:
    """Freeze a GPT-2 of transformers, and put adapters on the projections of all its blocks."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if name in TARGETS:
                inputs, outputs = layer.get_parameter("weight").shape  # Conv1D holds its weight transposed
                setattr(module, name, LowRank(layer, (inputs, outputs), rank, alpha))
    return model


def gpt2(sizes: dict[str, Any], *, rank: int, alpha: float, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a GPT-2 with random weights and adapters, in evaluation mode: without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).to(dtype)
    return adapted(base, rank, alpha).to(device).eval()
