"""Maps that learn the mean Jacobian of a stream from its response to noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from splitfg.feedback._maps import LearnedMaps
from splitfg.numerics import widened
from splitfg.types import Params

_UPDATES = "updates/count"  # no module's name has a slash


class MeanJacobian(LearnedMaps):
    """Learned maps: the mean Jacobian J_i = E[dx_L / dw_i] of the stream, measured with one JVP a step.

    Unit noise e_i at all writers at once moves the top of the stream by dx ≈ Σ_i e_i J_i, row by row. The delta rule on
    the part of dx that the maps do not predict,

        J_i ← J_i + rate / (n + D) · Σ over n rows of e_iᵀ (dx - Σ_j e_j J_j),    D noises a row,

    converges to it in the mean, for any rate up to one, and δ_i = r J_iᵀ. At a constant rate the maps keep fluctuating
    around the mean. Maps begin as the identity, which is the direct path; those between different numbers of features
    begin at zero.

    With ``steps``, the rate falls as a cosine schedule's learning rate does: maps follow while the trunk moves fast,
    and average over more steps later,

        rate_t = rate (last + (1 - last) (1 + cos(π t / steps)) / 2).

    The derivative of a norm grows to 1/√eps as its input becomes constant, so that the response of a single row can
    outweigh all others, and the maps then carry its noise for about 1 / rate steps. With ``limit``, the rest of a row
    is shortened to at most

        ‖rest‖ ≤ limit √(D + ‖Σ_j e_j J_j‖²),    rest = dx - Σ_j e_j J_j,

    and the maps converge to a mean over rows in which such rows weigh less.

    Args:
        rate: Rate of the delta rule, at first.
        steps: Number of measurements over which the rate falls; ``None`` for a constant rate.
        last: Rate at the end, as a share of ``rate``.
        every: Measure at every n-th step only, with one JVP; between measurements the maps stay as they are.
        limit: Largest unexplained response of a row, relative to the noise and the explained response; ``None`` for no
            limit. 1 to 4 leave most rows as they are.

    Example:
        >>> import torch
        >>> from splitfg import MeanJacobian
        >>> maps = MeanJacobian(rate=0.5)
        >>> noise, jacobian = {"block": [torch.randn(64, 4)]}, torch.randn(4, 4)
        >>> correlations = maps.correlate(noise, noise["block"][0] @ jacobian)
        >>> maps.apply(maps.change(correlations, rows=64, noises=4))
        >>> maps.at("block", torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        rate: float = 0.15,
        *,
        steps: int | None = None,
        last: float = 0.1,
        every: int = 1,
        limit: float | None = None,
    ) -> None:
        found = [f"{name} must be in (0, 1], got {v}" for name, v in (("rate", rate), ("last", last)) if not 0 < v <= 1]
        if steps is not None and steps < 1:
            found.append(f"steps must be at least 1, got {steps}")
        if limit is not None and not limit > 0:
            found.append(f"limit must be positive, got {limit}: use None for no limit")
        if found:
            raise ValueError("; ".join(found))
        self.rate, self.steps, self.last, self.every, self.limit = rate, steps, last, every, limit
        self._maps: Params = {}
        self._updates: Tensor | None = None

    def at(self, writer: str, r: Tensor, features: int | None = None) -> Tensor:
        """Return r J_iᵀ with the writer's map; ``r`` unchanged where the map is the identity, as it begins."""
        if writer not in self._maps and features in (None, r.shape[-1]):
            return r
        return r @ self._map(writer, r, features or r.shape[-1], r.shape[-1]).to(r.dtype).T

    def correlate(self, noise: Mapping[str, Sequence[Tensor]], response: Tensor) -> Params:
        """Return Σ over rows of e_iᵀ rest."""
        noises = sum(e.shape[-1] for calls in noise.values() for e in calls)
        return self.products(noise, self.rest(response, self.explained(noise, response), noises))

    def products(self, noise: Mapping[str, Sequence[Tensor]], rest: Tensor) -> Params:
        """Return Σ over rows of e_iᵀ rest, by writer, for a rest from :meth:`rest`."""
        rows, found = widened(rest).flatten(0, -2), Params()
        for name, calls in noise.items():
            for e in calls:
                own = widened(e).flatten(0, -2).T @ rows
                found[name] = found[name] + own if name in found else own
        return found

    def rest(self, response: Tensor, explained: Tensor, noises: int) -> Tensor:
        """Return the part of a response that the maps do not explain, with long rows shortened if there is a limit.

        Args:
            response: dx ``(..., d)``.
            explained: Σ_j e_j J_j over all writers, likewise.
            noises: Noises a row D.
        """
        rest = response - explained
        if self.limit is None:
            return rest
        rest = widened(rest)
        longest = self.limit * (noises + widened(explained).square().sum(-1, keepdim=True)).sqrt()
        length = rest.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny)
        shortened: Tensor = rest * (longest / length).clamp(max=1)
        return shortened

    def explained(self, noise: Mapping[str, Sequence[Tensor]], response: Tensor) -> Tensor:
        """Return Σ_j e_j J_j, the response that the maps expect of this noise; shaped as the response."""
        total = torch.zeros_like(response)
        for name, calls in noise.items():
            for e in calls:
                total = total + e @ self._map(name, e, e.shape[-1], response.shape[-1]).to(e.dtype)
        return total

    def change(self, correlations: Params, *, rows: int, noises: int) -> Params:
        """Scale the correlations by rate / (n + D)."""
        return {name: found * (self.rate / (rows + noises)) for name, found in correlations.items()}

    def apply(self, change: Mapping[str, Tensor]) -> None:
        """Add a change in place: captured steps replay on the same memory."""
        factor = self._factor(change)
        for name, step in change.items():
            moved = self._maps.setdefault(name, self._map(name, step, *step.shape))
            moved.add_(step if factor is None else factor.to(step.dtype) * step)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the maps, the number of updates if the rate falls, and that of steps if only some are measured."""
        updates = {} if self._updates is None else {_UPDATES: self._updates}
        return {**self._maps, **updates, **self._step_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the maps from :meth:`state_dict`."""
        state = self._take_steps(state)
        self._maps = {name: m.clone() for name, m in state.items() if name != _UPDATES}
        self._updates = state[_UPDATES].clone() if _UPDATES in state else None

    def _factor(self, change: Mapping[str, Tensor]) -> Tensor | None:
        """Return the rate's present share, and count the update, on the device; ``None`` for a constant rate."""
        if self.steps is None or not change:
            return None
        device = next(iter(change.values())).device
        if self._updates is None:
            self._updates = torch.zeros((), device=device)
        elif self._updates.device != device:
            self._updates = self._updates.to(device)
        passed = (self._updates / self.steps).clamp(max=1)
        self._updates.add_(1)
        return self.last + (1 - self.last) * (1 + torch.cos(math.pi * passed)) / 2

    def _map(self, writer: str, like: Tensor, features: int, top: int) -> Tensor:
        if writer not in self._maps:
            begin = torch.eye if features == top else torch.zeros
            return begin(features, top, dtype=like.dtype, device=like.device)
        if self._maps[writer].device != like.device:  # a checkpoint is read to the CPU
            self._maps[writer] = self._maps[writer].to(like.device)
        return self._maps[writer]
