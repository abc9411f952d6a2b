"""From r at the top of the stream to the gradient at a writer."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from splitfg.errors import SplitError
from splitfg.feedback._every_nth import EveryNth
from splitfg.numerics import widened
from splitfg.tangents import row_noise
from splitfg.types import Params

_UPDATES = "updates/count"  # no module's name has a slash


class Feedback(ABC):
    """Predicts dL/dw at every writer from r = dL/dx at the top of the stream, row by row; features are last."""

    @property
    def jvps(self) -> int:
        """Number of Jacobian-vector products per step."""
        return 0

    def drawn(self, generator: torch.Generator | None) -> Feedback:  # noqa: ARG002
        """Return the feedback of one estimate; one that draws takes its random numbers from the generator."""
        return self

    @property
    def reads_stream(self) -> bool:
        """Whether predictions depend on the stream's values, which :meth:`seeing` provides."""
        return False

    def seeing(self, points: Mapping[str, Tensor]) -> Feedback:  # noqa: ARG002
        """Return the feedback of one estimate, given the stream's values.

        Args:
            points: Value at every point that a prediction is needed at, by writer, ``(..., d)`` with the rows of r.
        """
        return self

    @property
    def reads_attention(self) -> bool:
        """Whether predictions depend on attention weights, which :meth:`attending` provides."""
        return False

    def attending(self, weights: Mapping[str, Tensor]) -> Feedback:  # noqa: ARG002
        """Return the feedback of one estimate, given the attention weights of its forward pass.

        Args:
            weights: Weights ``(B, heads, T, T)`` of all attention above every point that a prediction is needed at, by
                writer, in order.
        """
        return self

    @abstractmethod
    def at(self, writer: str, r: Tensor, features: int | None = None) -> Tensor:
        """Return the prediction at a writer.

        Args:
            writer: Its name.
            r: Gradient at the top of the stream, ``(..., d)``.
            features: Features of the writer's output; ``None`` for those of r.
        """


class UnchangedFeedback(Feedback):
    """The direct path: δ = r, unchanged. Exact for a writer whose output no later block reads.

    Example:
        >>> import torch
        >>> from splitfg.feedback import UnchangedFeedback
        >>> UnchangedFeedback().at("block", torch.ones(2))
        tensor([1., 1.])
    """

    def at(self, writer: str, r: Tensor, features: int | None = None) -> Tensor:
        """Return ``r`` unchanged."""
        if features not in (None, r.shape[-1]):
            words = f"{writer} writes {features} features and the top of the stream has {r.shape[-1]}"
            raise SplitError([f"{words}, so r cannot be used unchanged: use MeanJacobian() or RandomMaps()"])
        return r


class RandomMaps(Feedback):
    """A fixed random matrix for every writer: direct feedback alignment, a baseline.

    δ = r Bᵀ with entries of B from N(0, 1 / d), drawn once for each writer by its name.

    Args:
        seed: Of the matrices.

    Example:
        >>> import torch
        >>> from splitfg.feedback import RandomMaps
        >>> RandomMaps(seed=1).at("block", torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._maps: Params = {}

    def at(self, writer: str, r: Tensor, features: int | None = None) -> Tensor:
        """Return r Bᵀ with the writer's matrix."""
        if writer not in self._maps:
            d = r.shape[-1]
            generator = torch.Generator().manual_seed(self.seed + zlib.crc32(writer.encode()))
            self._maps[writer] = (torch.randn(features or d, d, generator=generator) / d**0.5).to(r)
        return r @ self._maps[writer].T


class NoiseControl(Feedback):
    """New noise at every writer and step, with the size of r in every row: a control without any signal.

    δ = e ‖r‖ / ‖e‖, row by row, e from N(0, I).

    Example:
        >>> import torch
        >>> from splitfg.feedback import NoiseControl
        >>> feedback = NoiseControl().drawn(torch.Generator().manual_seed(0))
        >>> feedback.at("block", torch.ones(2, 4)).norm(dim=-1)
        tensor([2., 2.])
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator

    def drawn(self, generator: torch.Generator | None) -> Feedback:
        """Return feedback that draws from the generator."""
        if generator is None:
            raise SplitError(["noise is drawn from a generator: pass generator=torch.Generator().manual_seed(0)"])
        return NoiseControl(generator)

    def at(self, writer: str, r: Tensor, features: int | None = None) -> Tensor:  # noqa: ARG002
        """Return noise with the norm of r in every row."""
        shape = (*r.shape[:-1], features or r.shape[-1])
        e = row_noise(r.new_empty(()).expand(shape), self._generator)
        noise: Tensor = e * (r.norm(dim=-1, keepdim=True) / e.norm(dim=-1, keepdim=True))
        return noise


class LearnedMaps(EveryNth, Feedback):
    """Feedback that learns from the response of the top of the stream to noise at every writer."""

    @property
    def jvps(self) -> int:
        """Return 1 for a step with a measurement, 0 for others."""
        return int(self.due)

    @abstractmethod
    def correlate(self, noise: Mapping[str, Sequence[Tensor]], response: Tensor) -> Params:
        """Correlate noise with the unexplained response, by writer; results for the parts of a batch add up.

        Args:
            noise: e_i ``(..., d)``, one for every call of a writer.
            response: dx ``(..., d)`` at the top.
        """

    @abstractmethod
    def change(self, correlations: Params, *, rows: int, noises: int) -> Params:
        """Compute the change of the maps, by writer.

        Args:
            correlations: Of the whole batch.
            rows: Rows n of the whole batch.
            noises: Noises a row D.
        """

    @abstractmethod
    def apply(self, change: Mapping[str, Tensor]) -> None:
        """Add a change in place: captured steps replay on the same memory."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return the learned maps."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the maps from :meth:`state_dict`."""


class MeanJacobian(LearnedMaps):
    """Learned maps: the mean Jacobian J_i = E[dx_L / dw_i] of the stream, found forward with one JVP a step.

    Unit noise e_i at all writers at once moves the top of the stream by dx ≈ Σ_i e_i J_i, row by row. With what the
    maps already predict taken off, the delta rule

        J_i ← J_i + rate / (n + D) · Σ over n rows of e_iᵀ (dx - Σ_j e_j J_j),    D noises a row,

    converges to it in the mean, for any rate up to one, and δ_i = r J_iᵀ. At a constant rate the maps keep fluctuating
    around the mean. Maps begin as the identity, which is the direct path; those between different numbers of features
    begin at zero.

    With ``steps``, the rate falls as a cosine schedule's learning rate does: maps follow while the trunk moves fast,
    and average over more steps later,

        rate_t = rate (last + (1 - last) (1 + cos(π t / steps)) / 2).

    Args:
        rate: How far a step moves the maps, at first.
        steps: Number of measurements over which the rate falls; ``None`` for a constant rate.
        last: Where it ends, as a share of ``rate``.
        every: Measure at every n-th step only, with one JVP; between measurements the maps stay as they are.

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

    def __init__(self, rate: float = 0.15, *, steps: int | None = None, last: float = 0.1, every: int = 1) -> None:
        found = [f"{name} must be in (0, 1], got {v}" for name, v in (("rate", rate), ("last", last)) if not 0 < v <= 1]
        if steps is not None and steps < 1:
            found.append(f"steps must be at least 1, got {steps}")
        if found:
            raise ValueError("; ".join(found))
        self.rate, self.steps, self.last, self.every = rate, steps, last, every
        self._maps: Params = {}
        self._updates: Tensor | None = None

    def at(self, writer: str, r: Tensor, features: int | None = None) -> Tensor:
        """Return r J_iᵀ with the writer's map; ``r`` unchanged where the map is the identity, as it begins."""
        if writer not in self._maps and features in (None, r.shape[-1]):
            return r
        return r @ self._map(writer, r, features or r.shape[-1], r.shape[-1]).to(r.dtype).T

    def correlate(self, noise: Mapping[str, Sequence[Tensor]], response: Tensor) -> Params:
        """Return Σ over rows of e_iᵀ (dx - Σ_j e_j J_j)."""
        rest = response - self.explained(noise, response)
        rows, found = widened(rest).flatten(0, -2), Params()
        for name, calls in noise.items():
            for e in calls:
                own = widened(e).flatten(0, -2).T @ rows
                found[name] = found[name] + own if name in found else own
        return found

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
