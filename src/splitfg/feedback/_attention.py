"""Learned maps that carry gradients back along attention weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from splitfg.errors import SplitError
from splitfg.feedback._extended import ExtendedMaps
from splitfg.types import Params


class AttentionMaps(ExtendedMaps):
    """Mean Jacobians that also reach the tokens that later ones attend to.

    Attention moves values between tokens: with weights A_c ``(T, T)`` of head c of a later layer, noise e_i at a point
    of the stream reaches the token t of the top by Σ_s A_c[t, s] e_i[s], too. So the delta rule learns, beside the map
    J_i of :class:`MeanJacobian`, one map for every later head,

        rest = dx - Σ_i (e_i J_i + Σ_c A_c e_i N_{i,c}),
        J_i     ← J_i     + scale · e_iᵀ rest,
        N_{i,c} ← N_{i,c} + scale · (A_c e_i)ᵀ rest,    scale = rate / (n + mean square of all columns of a row),

    over n rows, and the prediction carries r back to the tokens that were attended to:

        δ_i = r J_iᵀ + Σ_c (A_cᵀ r) N_{i,c}ᵀ.

    Forward-only: the weights are those of the forward pass. Exact for linear layers and weights that depend on no
    parameter, with one attention layer above the point; biased by the share of the gradient through the weights
    themselves, by paths through several attention layers, and by what varies between rows.

    Takes the weights from :class:`~splitfg.DirectPath` or :class:`~splitfg.ParallelPull`, for trunks whose attention
    layers have ``attention_weights``; see :class:`~splitfg.sites.AttentionLayer`.

    Args:
        rate: How far a step moves the maps.
        every: Measure at every n-th step only.

    Example:
        >>> import torch
        >>> import splitfg
        >>> from splitfg.feedback import AttentionMaps
        >>> from splitfg.models import GPT, GPTConfig
        >>> config = GPTConfig(layers=1, width=8, heads=2, context=4, vocab=10)
        >>> trunk = GPT(config, generator=torch.Generator().manual_seed(0))
        >>> network = splitfg.Split(trunk, splitfg.LinearHead(trunk.tied_linear()), tied="include")
        >>> direct, tokens = splitfg.DirectPath(feedback=AttentionMaps()), torch.randint(0, 10, (2, 5))
        >>> estimate = direct(network, tokens[:, :-1], tokens[:, 1:], generator=torch.Generator().manual_seed(0))
        >>> direct.update_state(network, estimate)
    """

    further: ClassVar[str] = "heads"

    def __init__(self, rate: float = 0.15, *, every: int = 1) -> None:
        super().__init__(rate, every=every)
        self._weights: Mapping[str, Tensor] = {}

    @property
    def reads_attention(self) -> bool:
        """Return ``True``."""
        return True

    def attending(self, weights: Mapping[str, Tensor]) -> AttentionMaps:
        """Return these maps with the attention weights of one pass."""
        seen = copy.copy(self)  # shares the maps
        seen._weights = weights
        return seen

    def change(self, correlations: Params, *, rows: int, noises: int) -> Params:  # noqa: ARG002
        """Scale the correlations by rate / (n + mean square of all columns of a row)."""
        squares = [found for name, found in correlations.items() if name.endswith("/squares")]
        scale = self.rate / (rows + torch.stack(squares).sum() / rows) if squares else self.rate
        return {name: scale * found for name, found in correlations.items() if not name.endswith("/squares")}

    def _columns(self, name: str, e: Tensor) -> Tensor:
        return torch.einsum("bcts,bsd->btcd", self._at(name, e), e).flatten(-2)

    def _back(self, name: str, r: Tensor) -> Tensor:
        return torch.einsum("bcts,btd->bscd", self._at(name, r), r).flatten(-2)

    def _sums(self, name: str, columns: Tensor) -> Params:
        return {f"{name}/squares": columns.square().sum()}

    def _at(self, name: str, rows: Tensor) -> Tensor:
        """Return the weights ``(B, C, T, T)`` of all heads that read a point."""
        if name not in self._weights:
            raise SplitError([f"AttentionMaps need the attention weights above {name}: use DirectPath or ParallelPull"])
        weights = self._weights[name].to(rows.dtype)
        expected = (weights.shape[0], weights.shape[2])
        if rows.ndim != 3 or (rows.shape[0], rows.shape[1]) != expected:
            words = f"the stream at {name} is {tuple(rows.shape)} and the attention weights {tuple(weights.shape)}"
            raise SplitError([f"{words}: AttentionMaps need (B, T, d) and (B, heads, T, T)"])
        return weights
