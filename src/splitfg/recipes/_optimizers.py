"""Optimizers as recipes: settings that can be recorded, and built for a split with a trunk step scale."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from splitfg.errors import raise_if
from splitfg.recipes._registry import Recipe
from splitfg.recipes.checks import below, not_fractions

if TYPE_CHECKING:
    import torch

    from splitfg.splitting import Split


class OptimizerRecipe(Recipe):
    """Settings of an optimizer; :meth:`build` makes it for the parameters of a split."""

    @abstractmethod
    def build(self, split: Split, *, rho: float = 1.0) -> torch.optim.Optimizer:
        """The optimizer, with the trunk's group at ``rho`` times the learning rate."""


@dataclass(frozen=True)
class Adam(OptimizerRecipe):
    """Adam without weight decay."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        raise_if(below(0, self, "lr", "eps") + not_fractions(self, "betas"))

    def build(self, split: Split, *, rho: float = 1.0) -> torch.optim.Optimizer:
        """:class:`torch.optim.Adam`."""
        import torch

        from splitfg.training import parameter_groups

        groups = parameter_groups(split, lr=self.lr, rho=rho)
        return torch.optim.Adam(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=_fused(split))


@dataclass(frozen=True)
class _DecayedAdam(OptimizerRecipe):
    """What the two Adams with weight decay share."""

    lr: float = 1e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        raise_if(below(0, self, "lr", "weight_decay", "eps") + not_fractions(self, "betas"))

    def build(self, split: Split, *, rho: float = 1.0) -> torch.optim.Optimizer:
        """Torch's own, over the split's groups."""
        from splitfg.training import parameter_groups

        groups = parameter_groups(split, lr=self.lr, rho=rho)
        fused = _fused(split)
        return self._class()(
            groups, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=fused
        )

    @abstractmethod
    def _class(self) -> type[torch.optim.Adam]:
        """Torch's class, which says where the decay goes."""


@dataclass(frozen=True)
class AdamL2(_DecayedAdam):
    """Adam whose weight decay is part of the gradient, g + weight_decay θ, and so divided by its running size too."""

    def _class(self) -> type[torch.optim.Adam]:
        import torch

        return torch.optim.Adam


@dataclass(frozen=True)
class AdamW(_DecayedAdam):
    """Adam with decoupled weight decay, which each group's learning rate scales: the trunk's by rho too."""

    def _class(self) -> type[torch.optim.Adam]:
        import torch

        return torch.optim.AdamW


@dataclass(frozen=True)
class SGD(OptimizerRecipe):
    """Stochastic gradient descent, with momentum if wanted."""

    lr: float = 1e-2
    momentum: float = 0.0

    def __post_init__(self) -> None:
        raise_if(below(0, self, "lr", "momentum"))

    def build(self, split: Split, *, rho: float = 1.0) -> torch.optim.Optimizer:
        """:class:`torch.optim.SGD`."""
        import torch

        from splitfg.training import parameter_groups

        groups = parameter_groups(split, lr=self.lr, rho=rho)
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum)


@dataclass(frozen=True)
class LaggedRMS(OptimizerRecipe):
    """The predictable inverse-RMS preconditioner of the convergence theorem."""

    lr: float = 1e-3
    beta: float = 0.999
    eps: float = 1e-8
    a_min: float = 1e-2
    a_max: float = 1e4

    def __post_init__(self) -> None:
        raise_if(below(0, self, "lr", "eps") + not_fractions(self, "beta"))

    def build(self, split: Split, *, rho: float = 1.0) -> torch.optim.Optimizer:
        """:class:`~splitfg.training.LaggedRMSOptimizer`."""
        from splitfg.training import LaggedRMSOptimizer, parameter_groups

        groups = parameter_groups(split, lr=self.lr, rho=rho)
        return LaggedRMSOptimizer(groups, lr=self.lr, beta=self.beta, eps=self.eps, a_min=self.a_min, a_max=self.a_max)


@dataclass(frozen=True)
class Muon(OptimizerRecipe):
    """Muon for the trunk's 2-D block weights, Adam for tables and everything else; no weight decay.

    Args:
        lr: Learning rate of both.
        momentum: Muon's Nesterov momentum.
        adjust: How Muon scales its rate by the matrix's shape: ``match_rms_adamw`` gives updates the size of
            Adam's, so that one rate serves both; ``original`` is Keller Jordan's rule.
        betas: Adam's.
        eps: Adam's.
    """

    lr: float = 1e-3
    momentum: float = 0.95
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        raise_if(below(0, self, "lr", "momentum", "eps") + not_fractions(self, "betas"))

    def build(self, split: Split, *, rho: float = 1.0) -> torch.optim.Optimizer:
        """Both optimizers behind one interface."""
        import torch

        from splitfg.training import OptimizerPair, block_weights, parameter_groups

        matrices = block_weights(split)
        chosen = {id(p) for p in matrices}
        rest = parameter_groups(split, lr=self.lr, rho=rho)
        for group in rest:
            group["params"] = [p for p in group["params"] if id(p) not in chosen]
        rest = [group for group in rest if group["params"]]
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            group = {"name": "trunk", "params": matrices, "lr": rho * self.lr, "rho": rho}
            parts.append(
                torch.optim.Muon(
                    [group], lr=self.lr, momentum=self.momentum, weight_decay=0.0, adjust_lr_fn=self.adjust
                )
            )
        if rest:
            parts.append(torch.optim.Adam(rest, lr=self.lr, betas=self.betas, eps=self.eps, fused=_fused(split)))
        return parts[0] if len(parts) == 1 else OptimizerPair(*parts)


def _fused(split: Split) -> bool | None:
    """On a GPU one kernel, which needs no memory beside the moments; elsewhere torch's own choice."""
    return True if next(split.model.parameters()).is_cuda else None
