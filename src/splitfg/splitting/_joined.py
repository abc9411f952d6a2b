"""Trunk and head as one module, and the validation of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from splitfg.errors import shorten
from splitfg.heads import Head, OutputLoss


class Joined(nn.Module):
    """Trunk and head as one module, so that they can be saved and evaluated together."""

    def __init__(self, trunk: nn.Module, head: Head) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        return self.head.outputs(dict(self.head.named_parameters()), self.trunk(*inputs, **named))


def part_problems(trunk: object, head: object) -> list[str]:
    """List the problems of a trunk and a head that show without running them."""
    found = []
    if not isinstance(trunk, nn.Module):
        found.append(f"the trunk is a {type(trunk).__name__}, not an nn.Module: for a function use BlackBoxTrunk")
    elif isinstance(trunk, torch.jit.ScriptModule):
        found.append("the trunk is scripted and takes no other parameters: pass the module that it was scripted from")
    else:
        found += _scripted_parts(trunk)
    if isinstance(head, nn.Module):
        found += _scripted_parts(head)
    if not isinstance(head, Head):
        found.append(
            f"the head is a {type(head).__name__}: use LinearHead(nn.Linear(...)), or ReverseModeHead(module) for any"
            " other module"
        )
        return found
    loss: object = head.output_loss
    if isinstance(loss, type):
        found.append(f"the loss is the class {loss.__name__}: pass an instance, CrossEntropy() or SquaredError()")
    elif not isinstance(loss, OutputLoss):
        found.append(
            f"the loss is {type(loss).__name__}: use splitfg's CrossEntropy() or SquaredError(), or RowLoss(f) with a"
            " function f(outputs, target) that returns one loss per row"
        )
    return found


def _scripted_parts(part: nn.Module) -> list[str]:
    """List scripted modules with trained parameters: they ignore the parameters of a functional call."""
    names = [
        f"{name} ({type(module).__name__})"
        for name, module in part.named_modules()
        if isinstance(module, torch.jit.ScriptModule) and any(p.requires_grad for p in module.parameters())
    ]
    cure = "use the module that it was scripted or traced from, or freeze its parameters with requires_grad_(False)"
    return [f"{shorten(names[:1])} is scripted and takes no other parameters: {cure}"] if names else []
