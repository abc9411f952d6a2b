"""Parameter groups: the head at the base learning rate, the noisy trunk at rho times that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError
from splitfg.splitting import Role, Split, require_split
from splitfg.training._pair import OptimizerPair
from splitfg.types import Params


def parameter_groups(split: Split, *, lr: float, rho: float = 1.0) -> list[dict[str, Any]]:
    """Return groups for any ``torch.optim`` optimizer: ``head`` at ``lr``, ``trunk`` at ``rho * lr``.

    The trunk step scale rho multiplies the optimizer's *update*, not the gradient: an adaptive optimizer would
    cancel a scale on the gradient. Tied parameters belong to the head's group, since the head's exact gradient trains
    them; under ``Tied.INCLUDE`` the trunk's noisy share of their gradient has the head's learning rate too.

    Args:
        split: The network.
        lr: Base learning rate.
        rho: Trunk step scale, in (0, 1].

    Returns:
        One dict per group that has parameters, with ``name``, ``params``, ``lr`` and ``step_scale``, which is rho:
        some optimizers, such as Adadelta, have an option ``rho`` of their own.

    Raises:
        SplitError: If ``split`` is not a split, or ``rho`` is outside (0, 1].

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import splitfg
        >>> network = splitfg.split(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
        >>> optimizer = torch.optim.Adam(splitfg.parameter_groups(network, lr=1e-3, rho=0.1))
        >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
        [('head', 0.001), ('trunk', 0.0001)]
    """
    require_split(split)
    check_rho(rho)
    roles, params = split.roles, dict(split.model.named_parameters())
    head = [params[n] for n, role in roles.items() if role in (Role.HEAD, Role.TIED)]
    trunk = [params[n] for n, role in roles.items() if role is Role.TRUNK]
    groups = [
        {"name": "head", "params": head, "lr": lr, "step_scale": 1.0},
        {"name": "trunk", "params": trunk, "lr": rho * lr, "step_scale": rho},
    ]
    return [g for g in groups if g["params"]]


def block_weights(split: Split) -> list[nn.Parameter]:
    """Return the trunk's 2-D weight matrices, including attention and recurrent ones: no tables, norms or biases."""
    roles = split.roles
    owners = dict(split.model.named_modules())
    found = []
    for name, p in split.model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        is_table = isinstance(owners[owner], nn.Embedding | nn.EmbeddingBag)
        is_matrix = "weight" in leaf and p.ndim == 2 and not is_table
        if roles[name] is Role.TRUNK and is_matrix:
            found.append(p)
    return found


def momentum(split: Split, optimizer: torch.optim.Optimizer) -> Params:
    """Return the optimizer's running mean of gradients, keyed by name: a prediction for a control variate.

    This is Adam's bias-corrected first moment, SGD's momentum buffer times 1 - μ (the buffer is a sum, not a mean), or
    Muon's momentum buffer. Parameters without such a state are omitted.
    """
    parts = optimizer.parts if isinstance(optimizer, OptimizerPair) else (optimizer,)
    names = {id(p): name for name, p in split.model.named_parameters()}
    means = {}
    for part in parts:
        for group in part.param_groups:
            means.update({names[id(p)]: _mean(part.state[p], group) for p in group["params"] if part.state.get(p)})
    return {name: mean for name, mean in means.items() if mean is not None}


def _mean(state: dict[str, Any], group: dict[str, Any]) -> Tensor | None:
    if "exp_avg" in state:
        corrected: Tensor = state["exp_avg"] / (1 - group["betas"][0] ** state["step"])
        return corrected
    buffer: Tensor | None = state.get("momentum_buffer")
    if buffer is None or "dampening" not in group:
        return buffer
    return buffer * float((1 - group["momentum"]) / (1 - group["dampening"]))


def check_rho(rho: float) -> None:
    """Raise :class:`SplitError` if the trunk step scale is outside (0, 1]."""
    if not 0.0 < rho <= 1.0:
        raise SplitError([f"rho must be in (0, 1], got {rho}: for an untrained trunk use FrozenTrunk()"])
