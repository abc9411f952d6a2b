"""The networks that are measured, with one batch each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitfg import LinearHead, Split, Tied
from splitfg.models import GPT, MLP, PRESETS, TabM, linear, toy_trunk


@dataclass(frozen=True)
class Case:
    """A split and a batch."""

    name: str
    split: Split
    x: Tensor
    y: Tensor


def toy(device: str) -> Case:
    """The paper's toy at C = 500, batch 64."""
    g = torch.Generator(device).manual_seed(0)
    split = Split(toy_trunk(generator=g), LinearHead(linear(32, 500, generator=g)))
    x = torch.randn(64, 16, generator=g, device=device)
    return Case("toy, 1,600 trunk parameters", split, x, torch.randint(0, 500, (64,), generator=g, device=device))


def tabm(device: str) -> Case:
    """The TabM-style model on a table of Otto's shape, batch 256."""
    g = torch.Generator(device).manual_seed(0)
    split = Split(TabM(93, generator=g), LinearHead(linear(128, 9, generator=g)))
    x = torch.randn(256, 93, generator=g, device=device)
    return Case("TabM, 8 members", split, x, torch.randint(0, 9, (256,), generator=g, device=device))


def mlp(device: str) -> Case:
    """A plain MLP, 93-128-128, on a table of Otto's shape, batch 256."""
    g = torch.Generator(device).manual_seed(0)
    split = Split(MLP(93, widths=(128, 128), generator=g), LinearHead(linear(128, 9, generator=g)))
    x = torch.randn(256, 93, generator=g, device=device)
    return Case("MLP, 93-128-128", split, x, torch.randint(0, 9, (256,), generator=g, device=device))


def gpt(device: str) -> Case:
    """GPT small8 with its tied table, B = 4, T = 128."""
    g = torch.Generator(device).manual_seed(0)
    trunk = GPT(PRESETS["small8"], generator=g)
    split = Split(trunk, LinearHead(trunk.tied_linear()), tied=Tied.EXCLUDE)
    tokens = torch.randint(0, 50257, (4, 129), generator=g, device=device)
    return Case("GPT small8, B=4, T=128", split, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def flat_head(device: str) -> Case:
    """A plain linear layer over the whole vocabulary, on 512 rows of width 256."""
    g = torch.Generator(device).manual_seed(0)
    split = Split(nn.Identity(), LinearHead(linear(256, 50257, generator=g)))
    x = torch.randn(512, 256, generator=g, device=device)
    return Case("head", split, x, torch.randint(0, 50257, (512,), generator=g, device=device))
