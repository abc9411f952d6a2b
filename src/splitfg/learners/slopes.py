"""Descent and curvature of a loss along directions of the trunk's parameters, by Jacobian-vector products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfg.engines import ForwardMode
from splitfg.estimators.push import check_engine, check_tangents, push
from splitfg.heads import head_slopes
from splitfg.numerics import inner_products
from splitfg.splitting import Split
from splitfg.types import Engine, Inputs, Params, Target


@dataclass(frozen=True)
class Slope:
    """The loss along a direction D of the trunk's parameters, L(θ + s D) ≈ L - descent s + curvature s² / 2.

    Attributes:
        descent: -<u, J D>; one number for every direction where there are several.
        curvature: d²/ds² of the loss of the head at h + s J D. For a head with linear outputs this is the Gauss-Newton
            curvature Dᵀ Jᵀ H J D.
    """

    descent: Tensor
    curvature: Tensor


def slope_along(split: Split, x: Inputs, y: Target, direction: Params, *, engine: Engine | None = None) -> Slope:
    """Measure descent and curvature of a batch's loss along a direction, with one Jacobian-vector product.

    Args:
        split: The network.
        x: Inputs.
        y: Target.
        direction: D, by parameter name.
        engine: Computes J D; forward mode by default.

    Example:
        >>> import torch
        >>> from splitfg.learners import slope_along
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> direction = {name: torch.ones_like(p) for name, p in split.trunk_params().items()}
        >>> bool(slope_along(split, x, y, direction).curvature >= 0)
        True
    """
    slopes = slopes_along(split, x, y, [direction], engine=engine)
    return Slope(slopes.descent[0], slopes.curvature[0, 0])


def slopes_along(
    split: Split, x: Inputs, y: Target, directions: Sequence[Params], *, engine: Engine | None = None
) -> Slope:
    """Measure descents and curvatures of a batch's loss along G directions, with G Jacobian-vector products.

    L(θ + Σ_g s_g D_g) ≈ L - Σ_g d_g s_g + Σ_gh s_g C_gh s_h / 2. The head is differentiated G (G + 1) / 2 times.

    Args:
        split: The network.
        x: Inputs.
        y: Target.
        directions: D_g by parameter name; parameters that a direction does not name stay.
        engine: Computes J D; forward mode by default.

    Returns:
        Descents d, shape ``(G,)``, and curvatures C, shape ``(G, G)``.

    Raises:
        SplitError: The engine cannot push tangents through this trunk; the error has the cure.

    Example:
        >>> import torch
        >>> from splitfg.learners import slopes_along
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> parts = [{name: torch.ones_like(p)} for name, p in split.trunk_params().items()]
        >>> slopes_along(split, x, y, parts).curvature.shape
        torch.Size([4, 4])
    """
    h, moves = _moved(split, x, directions, engine)
    first, second = head_slopes(split.head, h, y, moves)
    return Slope(-first, second)


def descents_along(
    split: Split, x: Inputs, y: Target, directions: Sequence[Params], *, engine: Engine | None = None
) -> Tensor:
    """Measure descents of a batch's loss along G directions, -<u, J D_g>, with G Jacobian-vector products.

    Takes u from the head, and no second derivatives: cheaper than :func:`slopes_along`, and for every kind of head.

    Args:
        split: The network.
        x: Inputs.
        y: Target.
        directions: D_g by parameter name; parameters that a direction does not name stay.
        engine: Computes J D; forward mode by default.

    Returns:
        Shape ``(G,)``.

    Raises:
        SplitError: The engine cannot push tangents through this trunk; the error has the cure.

    Example:
        >>> import torch
        >>> from splitfg.learners import descents_along
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> parts = [{name: torch.ones_like(p)} for name, p in split.trunk_params().items()]
        >>> descents_along(split, x, y, parts).shape
        torch.Size([4])
    """
    h, moves = _moved(split, x, directions, engine)
    _, u = split.head.loss_and_u(h, y)
    return -inner_products(moves, u)


def _moved(split: Split, x: Inputs, directions: Sequence[Params], engine: Engine | None) -> tuple[Tensor, Tensor]:
    """Return h and J D of every direction, shape ``(G, *h.shape)``."""
    engine = engine or ForwardMode()
    check_engine(engine, split)
    check_tangents(engine, split, x)
    with torch.no_grad():
        own = split.trunk_params()
        names = list(dict.fromkeys(name for direction in directions for name in direction))
        tangents = {n: _stacked([d.get(n) for d in directions], own[n]) for n in names}
        f, params = split.trunk_function(x), {n: own[n] for n in names}
        return push(engine, f, params, tangents, split=split, x=x)


def _stacked(parts: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Stack the parts of directions, zero where one has none; a single one is not copied."""
    if len(parts) == 1 and parts[0] is not None:
        return parts[0].unsqueeze(0)
    return torch.stack([torch.zeros_like(like) if part is None else part for part in parts])
