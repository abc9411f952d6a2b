"""A nearest-neighbour language model over a frozen trunk: which tokens followed features like these?

Khandelwal et al., "Generalization through memorization: nearest neighbor language models" (2020), with the
unigram in the place of the trained model.
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
    """How neighbours become a next-token distribution.

    Attributes:
        k: Neighbours per position.
        beta: Inverse temperature of their softmax.
        smoothing: λ, the unigram's share.
        scaling: How features are scaled before they are compared.
    """

    k: int = 256
    beta: float = 16.0
    smoothing: float = 0.3
    scaling: Scaling = field(default_factory=Scaling)

    def __post_init__(self) -> None:
        """Refuse settings that give no distribution."""
        found = []
        if self.k < 1:
            found.append(f"k must be at least 1, got {self.k}")
        if not self.beta > 0:
            found.append(f"beta must be positive, got {self.beta}")
        if not 0 < self.smoothing <= 1:
            found.append(f"smoothing must be in (0, 1], got {self.smoothing}: without it unseen tokens are impossible")
        raise_if(found)


GRID = tuple(
    Retrieval(k=k, beta=beta, smoothing=smoothing, scaling=Scaling(standardise=standardise, unit=True))
    for standardise, k, beta, smoothing in product(
        (False, True), (64, 256, 1024, 4096), (1.0, 4.0, 16.0, 64.0), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    )
)
"""The settings tried by default."""


class KnnLM:
    """p(w | q) = (1 - λ) Σ_{i in kNN(q)} softmax(β q·k_i) 1[v_i = w] + λ p_unigram(w). Nothing is trained.

    The store pairs the frozen trunk's feature at each position with the token that followed. Neighbours are
    found in blocks of queries and keys, the best k so far merged with each block's.

    Args:
        trunk: Any function from token ids ``(B, T)`` to h ``(B, T, d)``; it is never changed.
        unigram: p_unigram, shape ``(V,)``, positive.
        capacity: The most positions to store: a uniform sample of those of the distinct windows :meth:`step`
            was given. The default is 4,096 windows of 128.
        retrieval: k, β, λ and the feature scaling.
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
        """Positions in the store."""
        return self._memory.count

    @torch.no_grad()
    def step(self, x: Inputs, y: Target, *, generator: torch.Generator) -> StepStats:  # noqa: ARG002
        """Store windows that are new: ids ``(B, T)`` and the tokens that follow, ``(B, T)``; draws nothing.

        The loss is the unigram's, which needs no search.
        """
        assert isinstance(x, Tensor)
        h, y = self._checked(x, y)
        self._memory.add(h, y, _position_marks(x))
        loss = -self.unigram.to(h)[y].log().mean()
        return StepStats(loss, {"stored": float(self.stored), "jvps": 0, "trunk_backward": 0})

    @torch.no_grad()
    def predict(self, x: Inputs) -> Tensor:
        """The log-probability of every token at every position, ``(B, T, V)``."""
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
        """-log p of the given next tokens, shaped like y; no array of vocabulary size is made."""
        return self._nlls(*self._checked(x, y), [self.retrieval])[0].view_as(y)

    @torch.no_grad()
    def tune(self, x: Inputs, y: Target, *, grid: Sequence[Retrieval] = GRID) -> dict[Retrieval, float]:
        """Choose the settings on training windows that are not in the store.

        Returns:
            The mean negative log-likelihood of every setting; the best is now in use.
        """
        losses: dict[Retrieval, float] = {}
        h, y = self._checked(x, y)
        for scaling in dict.fromkeys(setting.scaling for setting in grid):
            group = [setting for setting in grid if setting.scaling == scaling]
            losses |= dict(zip(group, self._nlls(h, y, group).mean(dim=1).tolist(), strict=True))
        self.retrieval = min(losses, key=losses.__getitem__)
        return losses

    def state_dict(self) -> dict[str, Any]:
        """The store, the settings, the unigram, and the frozen trunk's parameters where it is a module."""
        return {
            "memory": self._memory.state_dict(),
            "trunk": self.trunk.state_dict() if isinstance(self.trunk, nn.Module) else {},
            "unigram": self.unigram,
            "retrieval": asdict(self.retrieval),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self._memory.load_state_dict(state["memory"])
        if isinstance(self.trunk, nn.Module):
            self.trunk.load_state_dict(state["trunk"])
        self.unigram = state["unigram"]
        settings = dict(state["retrieval"])
        self.retrieval = Retrieval(**{**settings, "scaling": Scaling(**settings["scaling"])})

    def _nlls(self, h: Tensor, y: Tensor, group: Sequence[Retrieval]) -> Tensor:
        """-log p(y) for every setting of a group with one scaling, shape ``(len(group), B)``."""
        unigram, done, start = self.unigram.to(h)[y], [], 0
        for scores, tokens in self._neighbours(h, group[0].scaling, max(s.k for s in group)):
            rows = slice(start, start + len(scores))
            hits = tokens == y[rows].unsqueeze(1)
            done.append(torch.stack([_nll(s, scores, hits, unigram[rows]) for s in group]))
            start += len(scores)
        return torch.cat(done, dim=1)

    def _neighbours(self, h: Tensor, scaling: Scaling, k: int) -> Iterator[tuple[Tensor, Tensor]]:
        if self.stored == 0:
            raise SplitError(["nothing is stored yet: give step() at least one batch first"])
        return nearest(h, self._memory, scaling.fit(self._memory.keys), k)

    def _features(self, x: Inputs) -> Tensor:
        """The frozen trunk's h, one row per position; the store follows it to its device."""
        h = self.trunk(x).flatten(0, -2)
        self._memory.to(h.device)
        return h

    def _checked(self, x: Inputs, y: Target) -> tuple[Tensor, Tensor]:
        """Features and next tokens, one row per position."""
        h, y = self._features(x), y.reshape(-1)
        raise_if(self._target_problems(h, y))
        return h, y

    def _target_problems(self, h: Tensor, y: Tensor) -> list[str]:
        if y.shape[0] != h.shape[0]:
            return [f"{y.shape[0]} next tokens for {h.shape[0]} positions: give one for each"]
        if int(y.min()) < 0 or int(y.max()) >= len(self.unigram):
            return [f"tokens span {int(y.min())}..{int(y.max())}, but the unigram has {len(self.unigram)}"]
        return []


def _position_marks(x: Tensor) -> Tensor:
    """A fingerprint for every position of every window, ``(B, T)`` to ``(B T,)``."""
    places = torch.arange(x.shape[1], device=x.device)
    return mixed(fingerprint(x).unsqueeze(1) + places).flatten()


def _nll(setting: Retrieval, scores: Tensor, hits: Tensor, unigram: Tensor) -> Tensor:
    """-log((1 - λ) Σ_i softmax(β s)_i hit_i + λ p_unigram) over the first k neighbours."""
    weights = (setting.beta * scores[:, : setting.k]).softmax(dim=1)
    found = (weights * hits[:, : setting.k]).sum(dim=1)
    return -((1 - setting.smoothing) * found + setting.smoothing * unigram).log()
