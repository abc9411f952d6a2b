"""From r at the top of the stream to the gradient at a writer."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from splitfg.errors import SplitError
from splitfg.feedback._every_nth import EveryNth
from splitfg.numerics import norm
from splitfg.tangents import row_noise
from splitfg.types import Params


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

    def norms(self, like: Tensor) -> dict[str, Tensor]:
        """Return the norm of all learned matrices in use together as ``maps``, for ``stats.norms``.

        Args:
            like: Tensor on the device of the network. Maps of a checkpoint stay on the CPU until they are used.
        """
        used = {n: m for n, m in self.state_dict().items() if m.ndim > 1 and m.device == like.device}
        return {"maps": norm(used, like=like)}

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return the learned maps."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the maps from :meth:`state_dict`."""
