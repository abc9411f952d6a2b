"""Recipes of optimizers with a trunk step scale."""

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
        """Return the optimizer, with the trunk's group at ``rho`` times the learning rate.

        Raises:
            SplitError: If ``rho`` is outside (0, 1].
        """


@dataclass(frozen=True)
class Adam(OptimizerRecipe):
    """Adam without weight decay.

    Attributes:
        lr: Learning rate of the head; the trunk's is rho times this.
        betas: Decay rates of the running means of gradient and squared gradient.
        eps: Added to the denominator.

    Example:
        >>> from torch import nn
        >>> import splitfg
        >>> from splitfg.recipes import Adam
        >>> network = splitfg.split(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
        >>> [group["lr"] for group in Adam(lr=1e-3).build(network, rho=0.1).param_groups]
        [0.001, 0.0001]
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        raise_if(below(0, self, "lr", "eps") + not_fractions(self, "betas"))

    def build(self, split: Split, *, rho: float = 1.0) -> torch.optim.Optimizer:
        """Return :class:`torch.optim.Adam`."""
        import torch

        from splitfg.training import parameter_groups

        groups = parameter_groups(split, lr=self.lr, rho=rho)
        return torch.optim.Adam(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=_fused(split))


@dataclass(frozen=True)
class _DecayedAdam(OptimizerRecipe):
    """Settings that both variants of Adam with weight decay share.

    Attributes:
        lr: Learning rate of the head; the trunk's is rho times this.
        weight_decay: Weight decay.
        betas: Decay rates of the running means of gradient and squared gradient.
        eps: Added to the denominator.
    """

    lr: float = 1e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        raise_if(below(0, self, "lr", "weight_decay", "eps") + not_fractions(self, "betas"))

    def build(self, split: Split, *, rho: float = 1.0) -> torch.optim.Optimizer:
        """Return the torch optimizer over the split's groups."""
        from splitfg.training import parameter_groups

        groups = parameter_groups(split, lr=self.lr, rho=rho)
        fused = _fused(split)
        return self._class()(
            groups, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=fused
        )

    @abstractmethod
    def _class(self) -> type[torch.optim.Adam]:
        """Return torch's class, which decides how the decay enters."""


@dataclass(frozen=True)
class AdamL2(_DecayedAdam):
    """Adam with L2 regularisation: the decay enters the gradient, g + weight_decay θ, and so both moments.

    Example:
        >>> from splitfg.recipes import AdamL2
        >>> AdamL2(weight_decay=0.1)
        AdamL2(lr=0.001, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-08)
    """

    def _class(self) -> type[torch.optim.Adam]:
        import torch

        return torch.optim.Adam


@dataclass(frozen=True)
class AdamW(_DecayedAdam):
    """Adam with decoupled weight decay; the learning rate of a group, and so rho, scales its decay.

    Example:
        >>> from splitfg.recipes import AdamW
        >>> AdamW(weight_decay=0.1)
        AdamW(lr=0.001, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-08)
    """

    def _class(self) -> type[torch.optim.Adam]:
        import torch

        return torch.optim.AdamW


@dataclass(frozen=True)
class SGD(OptimizerRecipe):
    """Stochastic gradient descent with optional momentum.

    Attributes:
        lr: Learning rate of the head; the trunk's is rho times this.
        momentum: Momentum; 0 for none.

    Example:
        >>> from torch import nn
        >>> import splitfg
        >>> from splitfg.recipes import SGD
        >>> network = splitfg.split(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
        >>> optimizer = SGD(lr=0.1, momentum=0.9).build(network, rho=0.3)
    """

    lr: float = 1e-2
    momentum: float = 0.0

    def __post_init__(self) -> None:
        raise_if(below(0, self, "lr", "momentum"))

    def build(self, split: Split, *, rho: float = 1.0) -> torch.optim.Optimizer:
        """Return :class:`torch.optim.SGD`."""
        import torch

        from splitfg.training import parameter_groups

        groups = parameter_groups(split, lr=self.lr, rho=rho)
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum)


@dataclass(frozen=True)
class LaggedRMS(OptimizerRecipe):
    """The predictable inverse-RMS preconditioner of the convergence theorem.

    Attributes:
        lr: Learning rate of the head; the trunk's is rho times this.
        beta: Decay rate of the running mean of the squared gradient.
        eps: Added to the denominator.
        a_min: Lower bound of the preconditioner.
        a_max: Upper bound of the preconditioner.

    Example:
        >>> from splitfg.recipes import LaggedRMS
        >>> LaggedRMS(a_max=100.0)
        LaggedRMS(lr=0.001, beta=0.999, eps=1e-08, a_min=0.01, a_max=100.0)
    """

    lr: float = 1e-3
    beta: float = 0.999
    eps: float = 1e-8
    a_min: float = 1e-2
    a_max: float = 1e4

    def __post_init__(self) -> None:
        raise_if(below(0, self, "lr", "eps") + not_fractions(self, "beta"))

    def build(self, split: Split, *, rho: float = 1.0) -> torch.optim.Optimizer:
        """Return :class:`~splitfg.training.LaggedRMSOptimizer`."""
        from splitfg.training import LaggedRMSOptimizer, parameter_groups

        groups = parameter_groups(split, lr=self.lr, rho=rho)
        return LaggedRMSOptimizer(groups, lr=self.lr, beta=self.beta, eps=self.eps, a_min=self.a_min, a_max=self.a_max)


@dataclass(frozen=True)
class Muon(OptimizerRecipe):
    """Muon for the trunk's 2-D block weights, Adam for tables and everything else; no weight decay.

    Args:
        lr: Learning rate of both.
        momentum: Nesterov momentum of Muon.
        adjust: Muon's scaling of the learning rate by the matrix's shape: ``match_rms_adamw`` gives updates the size
            of Adam's, so that both can use one rate; ``original`` is Keller Jordan's rule.
        betas: Decay rates of Adam.
        eps: Adam's eps.

    Example:
        >>> from torch import nn
        >>> import splitfg
        >>> from splitfg.recipes import Muon
        >>> network = splitfg.split(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
        >>> [type(part).__name__ for part in Muon().build(network).parts]
        ['Muon', 'Adam']
    """

    lr: float = 1e-3
    momentum: float = 0.95
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        raise_if(below(0, self, "lr", "momentum", "eps") + not_fractions(self, "betas"))

    def build(self, split: Split, *, rho: float = 1.0) -> torch.optim.Optimizer:
        """Return both optimizers behind one interface."""
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
            group = {"name": "trunk", "params": matrices, "lr": rho * self.lr, "step_scale": rho}
            parts.append(
                torch.optim.Muon(
                    [group], lr=self.lr, momentum=self.momentum, weight_decay=0.0, adjust_lr_fn=self.adjust
                )
            )
        if rest:
            parts.append(torch.optim.Adam(rest, lr=self.lr, betas=self.betas, eps=self.eps, fused=_fused(split)))
        return parts[0] if len(parts) == 1 else OptimizerPair(*parts)


def _fused(split: Split) -> bool | None:
    """Choose the fused kernel on a GPU, which needs no temporary memory; elsewhere leave the choice to torch."""
    return True if next(split.model.parameters()).is_cuda else None
