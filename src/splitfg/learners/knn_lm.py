"""A nearest-neighbour language model over a frozen trunk's features.

Khandelwal et al., "Generalization through memorization: nearest neighbor language models" (2020), with the
unigram instead of the trained model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError, raise_if
from splitfg.learners._memory import Memory, fingerprint, mixed
from splitfg.learners._retrieval import Scaling, nearest
from splitfg.types import Inputs, StepStats, Target


@dataclass(frozen=True)
class Retrieval:
    """Settings that turn neighbours into a next-token distribution.

    Attributes:
        k: Neighbours per position.
        beta: Inverse temperature β of their softmax.
        smoothing: Weight λ of the unigram, in (0, 1].
        scaling: Scaling of features before a comparison.

    Raises:
        SplitError: If a setting is out of range.
    """

    k: int = 256
    beta: float = 16.0
    smoothing: float = 0.3
    scaling: Scaling = field(default_factory=Scaling)

    def __post_init__(self) -> None:
        """Validate the settings."""
        found = []
        if self.k < 1:
            found.append(f"k must be at least 1, got {self.k}")
        if not self.beta > 0:
            found.append(f"beta must be positive, got {self.beta}")
        if not 0 < self.smoothing <= 1:
            found.append(
                f"smoothing must be in (0, 1], got {self.smoothing}: zero would give unseen tokens no probability"
            )
        raise_if(found)


GRID = tuple(
    Retrieval(k=k, beta=beta, smoothing=smoothing, scaling=Scaling(standardise=standardise, unit=True))
    for standardise, k, beta, smoothing in product(
        (False, True), (64, 256, 1024, 4096), (1.0, 4.0, 16.0, 64.0), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    )
)
"""Default settings for tuning."""


class KnnLM:
    """p(w | q) = (1 - λ) Σ_{i in kNN(q)} softmax(β q·k_i) 1[v_i = w] + λ p_unigram(w), without trained parameters.

    The store pairs the frozen trunk's feature at each position with the next token. The search runs in blocks of
    queries and keys, and merges the best k so far with those of each block.

    Args:
        trunk: Any function from token ids ``(B, T)`` to h ``(B, T, d)``; stays unchanged.
        unigram: p_unigram, shape ``(V,)``, positive.
        capacity: Largest number of stored positions: a uniform sample of those of the distinct windows passed to
            :meth:`step`. The default is 4,096 windows of 128.
        retrieval: k, β, λ and the feature scaling.

    Raises:
        SplitError: If the unigram is not one positive probability per token.

    Example:
        >>> import torch
        >>> from splitfg.learners.knn_lm import KnnLM
        >>> from splitfg.models import GPT, GPTConfig
        >>> config = GPTConfig(layers=1, width=8, heads=2, context=16, vocab=50)
        >>> generator = torch.Generator().manual_seed(0)
        >>> learner = KnnLM(GPT(config, generator=generator), torch.full((50,), 1 / 50))
        >>> windows = torch.randint(0, 50, (4, 17))
        >>> stats = learner.step(windows[:, :-1], windows[:, 1:], generator=generator)
        >>> learner.predict(windows[:, :-1]).shape
        torch.Size([4, 16, 50])
    """

    def __init__(
        self,
        trunk: Callable[[Inputs], Tensor],
        unigram: Tensor,
        *,
        capacity: int = 4096 * 128,
        retrieval: Retrieval | None = None,
    ) -> None:
        if unigram.ndim != 1 or not bool((unigram > 0).all()):
            raise SplitError(["the unigram must be one positive probability per token, shape (V,): smooth its counts"])
        self.trunk, self.unigram = trunk, unigram
        self.retrieval = retrieval if retrieval is not None else Retrieval()
        self._memory = Memory(capacity)

    @property
    def stored(self) -> int:
        """Number of stored positions."""
        return self._memory.count

    @torch.no_grad()
    def step(self, x: Inputs, y: Target, *, generator: torch.Generator) -> StepStats:  # noqa: ARG002
        """Store new windows: ids ``(B, T)`` and next tokens ``(B, T)``; does not use the generator.

        The returned loss is the unigram's, which needs no search.
        """
        assert isinstance(x, Tensor)
        h, y = self._checked(x, y)
        self._memory.add(h, y, _position_marks(x))
        loss = -self.unigram.to(h)[y].log().mean()
        return StepStats(loss, {"stored": float(self.stored), "jvps": 0, "trunk_backward": 0})

    @torch.no_grad()
    def predict(self, x: Inputs) -> Tensor:
        """Return the log-probability of every token at every position, ``(B, T, V)``."""
        h, setting = self._features(x), self.retrieval
        unigram = self.unigram.to(h)
        rows = []
        for scores, tokens in self._neighbours(h, setting.scaling, setting.k):
            weights = (setting.beta * scores).softmax(dim=1)
            found = torch.zeros(len(scores), len(unigram), dtype=h.dtype, device=h.device)
            found.scatter_add_(1, tokens, weights)
            rows.append(((1 - setting.smoothing) * found + setting.smoothing * unigram).log())
        assert isinstance(x, Tensor)
        return torch.cat(rows).view(*x.shape, -1)

    @torch.no_grad()
    def nll(self, x: Inputs, y: Target) -> Tensor:
        """Compute -log p of the given next tokens, shaped like y, without a tensor of vocabulary size."""
        return self._nlls(*self._checked(x, y), [self.retrieval])[0].view_as(y)

    @torch.no_grad()
    def tune(self, x: Inputs, y: Target, *, grid: Sequence[Retrieval] = GRID) -> dict[Retrieval, float]:
        """Set ``retrieval`` to the best on training windows that are not in the store.

        Returns:
            The mean negative log-likelihood of every setting.
        """
        losses: dict[Retrieval, float] = {}
        h, y = self._checked(x, y)
        for scaling in dict.fromkeys(setting.scaling for setting in grid):
            group = [setting for setting in grid if setting.scaling == scaling]
            losses |= dict(zip(group, self._nlls(h, y, group).mean(dim=1).tolist(), strict=True))
        self.retrieval = min(losses, key=losses.__getitem__)
        return losses

    def state_dict(self) -> dict[str, Any]:
        """Return the store, the settings, the unigram, and the parameters of a trunk that is a module."""
        return {
            "memory": self._memory.state_dict(),
            "trunk": self.trunk.state_dict() if isinstance(self.trunk, nn.Module) else {},
            "unigram": self.unigram,
            "retrieval": asdict(self.retrieval),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a :meth:`state_dict`."""
        self._memory.load_state_dict(state["memory"])
        if isinstance(self.trunk, nn.Module):
            self.trunk.load_state_dict(state["trunk"])
        self.unigram = state["unigram"]
        settings = dict(state["retrieval"])
        self.retrieval = Retrieval(**{**settings, "scaling": Scaling(**settings["scaling"])})

    def _nlls(self, h: Tensor, y: Tensor, group: Sequence[Retrieval]) -> Tensor:
        """Compute -log p(y) for every setting of a group with one scaling, shape ``(len(group), B)``."""
        unigram, done, start = self.unigram.to(h)[y], [], 0
        for scores, tokens in self._neighbours(h, group[0].scaling, max(s.k for s in group)):
            rows = slice(start, start + len(scores))
            hits = tokens == y[rows].unsqueeze(1)
            done.append(torch.stack([_nll(s, scores, hits, unigram[rows]) for s in group]))
            start += len(scores)
        return torch.cat(done, dim=1)

    def _neighbours(self, h: Tensor, scaling: Scaling, k: int) -> Iterator[tuple[Tensor, Tensor]]:
        if self.stored == 0:
            raise SplitError(["the store is empty: call step() with data first"])
        return nearest(h, self._memory, scaling.fit(self._memory.keys), k)

    def _features(self, x: Inputs) -> Tensor:
        """Compute h, one row per position, and move the store to its device."""
        h = self.trunk(x).flatten(0, -2)
        self._memory.to(h.device)
        return h

    def _checked(self, x: Inputs, y: Target) -> tuple[Tensor, Tensor]:
        """Return features and validated next tokens, one row per position."""
        h, y = self._features(x), y.reshape(-1)
        raise_if(self._target_problems(h, y))
        return h, y

    def _target_problems(self, h: Tensor, y: Tensor) -> list[str]:
        if y.shape[0] != h.shape[0]:
            return [f"{y.shape[0]} next tokens for {h.shape[0]} positions: pass one per position"]
        if int(y.min()) < 0 or int(y.max()) >= len(self.unigram):
            return [
                f"tokens span {int(y.min())}..{int(y.max())}, but the unigram has {len(self.unigram)}: use the"
                " vocabulary of the data for the unigram"
            ]
        return []


def _position_marks(x: Tensor) -> Tensor:
    """Compute a fingerprint for every position of every window, ``(B, T)`` to ``(B T,)``."""
    places = torch.arange(x.shape[1], device=x.device)
    return mixed(fingerprint(x).unsqueeze(1) + places).flatten()


def _nll(setting: Retrieval, scores: Tensor, hits: Tensor, unigram: Tensor) -> Tensor:
    """Compute -log((1 - λ) Σ_i softmax(β s)_i hit_i + λ p_unigram) over the first k neighbours."""
    weights = (setting.beta * scores[:, : setting.k]).softmax(dim=1)
    found = (weights * hits[:, : setting.k]).sum(dim=1)
    return -((1 - setting.smoothing) * found + setting.smoothing * unigram).log()
