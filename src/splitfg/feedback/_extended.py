"""Learned maps with further columns beside the noise at a point."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from splitfg.errors import raise_if
from splitfg.feedback._map_rules import rate_problems
from splitfg.feedback._maps import LearnedMaps
from splitfg.numerics import widened
from splitfg.types import Params


class ExtendedMaps(LearnedMaps):
    """Maps of the noise at a point and of C further columns made from it, all of which explain the response together.

    With the columns φ_{i,c} = Φ_{i,c} e_i, linear in the noise of all rows,

        dx ≈ Σ_i (e_i J_i + Σ_c φ_{i,c} G_{i,c}),    δ_i = r J_iᵀ + Σ_c (Φ_{i,c}ᵀ r) G_{i,c}ᵀ.

    Subclasses define Φ and Φᵀ. J_i begins as the identity, or at zero between different numbers of features, G at zero.

    Args:
        rate: How far a step moves the maps, in (0, 1].
        every: Measure at every n-th step only.
    """

    further: ClassVar[str]
    """Names the maps G in the state."""

    def __init__(self, rate: float, *, every: int = 1) -> None:
        raise_if(rate_problems(rate))
        self.rate, self.every = rate, every
        self._maps: Params = {}

    @abstractmethod
    def _columns(self, name: str, e: Tensor) -> Tensor:
        """Return φ ``(..., C d)`` at a point for noise e ``(..., d)``."""

    @abstractmethod
    def _back(self, name: str, r: Tensor) -> Tensor:
        """Return Φᵀ r ``(..., C d)`` at a point for r ``(..., d)``."""

    def _sums(self, name: str, columns: Tensor) -> Params:  # noqa: ARG002
        """Return other sums over rows that :meth:`change` needs; ``columns`` ``(n, (1 + C) d)`` are e and φ."""
        return {}

    def at(self, writer: str, r: Tensor, features: int | None = None) -> Tensor:
        """Return r Jᵀ + Σ_c (Φ_cᵀ r) G_cᵀ."""
        f, top = features or r.shape[-1], r.shape[-1]
        if writer not in self._maps:
            return r if f == top else r.new_zeros(*r.shape[:-1], f)
        shared, own = self._held(writer, r).to(r.dtype), self._held(f"{writer}/{self.further}", r).to(r.dtype)
        return r @ shared.T + self._back(writer, r) @ own.mT.flatten(0, 1)

    def correlate(self, noise: Mapping[str, Sequence[Tensor]], response: Tensor) -> Params:
        """Return the correlations of noise and columns with the rest of the response."""
        rest = widened(response).flatten(0, -2)
        columns: Params = {}
        for name, calls in noise.items():
            raise_if([] if len(calls) == 1 else [f"{name} is called {len(calls)} times: use MeanJacobian()"])
            e = widened(calls[0])
            columns[name] = torch.cat([e, self._columns(name, e)], dim=-1).flatten(0, -2)
            if name in self._maps:
                both = torch.cat([self._held(name, e), self._held(f"{name}/{self.further}", e).flatten(0, 1)])
                rest = rest - columns[name] @ both
            elif e.shape[-1] == rest.shape[-1]:
                rest = rest - e.flatten(0, -2)
        found = Params()
        for name, e in columns.items():
            features = noise[name][0].shape[-1]
            product = e.T @ rest
            found[name] = product[:features]
            found[f"{name}/{self.further}"] = product[features:].reshape(-1, features, product.shape[-1])
            found |= self._sums(name, e)
        return found

    def apply(self, change: Mapping[str, Tensor]) -> None:
        """Add a change in place: captured steps replay on the same memory."""
        for name, step in change.items():
            if name in self._maps:
                self._held(name, step).add_(step)
            elif "/" not in name and step.shape[0] == step.shape[1]:
                self._maps[name] = torch.eye(len(step), dtype=step.dtype, device=step.device) + step
            else:
                self._maps[name] = step.clone()

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything learned, and the number of steps if only some are measured."""
        return {**self._maps, **self._step_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore from :meth:`state_dict`."""
        self._maps = {name: m.clone() for name, m in self._take_steps(state).items()}

    def _held(self, name: str, like: Tensor) -> Tensor:
        if self._maps[name].device != like.device:  # a checkpoint is read to the CPU
            self._maps[name] = self._maps[name].to(like.device)
        return self._maps[name]
