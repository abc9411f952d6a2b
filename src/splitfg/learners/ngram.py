"""Count-based baselines for language: a unigram and an interpolated bigram over one token stream.

Both are evaluated on floor((n - 1) / T) non-overlapping windows of T targets each, as a language model is; the bigram
always conditions on the token before its target. Uses numpy only. Stores sorted counts of the pairs that occur;
counting 119 million tokens takes about 2 GiB.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.integer]


@dataclass(frozen=True)
class Unigram:
    """The unigram p(w) = (c(w) + α) / (n + α V) with additive smoothing.

    Attributes:
        probabilities: p(w), shape ``(V,)``, float64.

    Example:
        >>> import numpy as np
        >>> from splitfg.learners.ngram import Unigram
        >>> Unigram.fit(np.array([0, 0, 1, 2]), vocab=4, alpha=1.0).probabilities
        array([0.375, 0.25 , 0.25 , 0.125])
    """

    probabilities: NDArray[np.float64]

    @classmethod
    def fit(cls, tokens: Tokens, *, vocab: int, alpha: float = 1.0) -> Unigram:
        """Count a stream of ids below ``vocab``.

        Raises:
            ValueError: If tokens are not integer ids below ``vocab``, or too few.
        """
        _check(tokens, vocab, at_least=1)
        counts = np.bincount(tokens, minlength=vocab) + alpha
        return cls(counts / counts.sum())

    def nll(self, tokens: Tokens, *, window: int) -> float:
        """Compute the mean negative log-likelihood per target, in nats; perplexity is its exponential."""
        _, targets = windowed_pairs(tokens, window=window, vocab=len(self.probabilities))
        return float(-np.log(self.probabilities[targets]).mean())


@dataclass(frozen=True)
class InterpolatedBigram:
    """The bigram p(w | v) = λ c(v, w) / c(v) + (1 - λ) p(w): Jelinek-Mercer with one weight, p the smoothed unigram.

    c(v) counts v as the first of a pair; p(w | v) = p(w) if c(v) = 0.

    Attributes:
        unigram: p(w).
        weight: λ.

    Example:
        >>> import numpy as np
        >>> from splitfg.learners.ngram import InterpolatedBigram
        >>> tokens = np.array([0, 1, 2, 0, 1, 2, 0, 1])
        >>> bigram = InterpolatedBigram.fit(tokens, vocab=3, weight=0.9)
        >>> bool(bigram.nll(tokens, window=2) < bigram.unigram.nll(tokens, window=2))
        True
    """

    unigram: Unigram
    weight: float
    _counts: _PairCounts

    @classmethod
    def fit(
        cls, tokens: Tokens, *, vocab: int, alpha: float = 1.0, weight: float | None = None, held_out: float = 0.01
    ) -> InterpolatedBigram:
        """Count a stream; without a ``weight``, choose it on the end of the stream.

        λ maximises the likelihood of the last ``held_out`` share of the stream under counts of the rest. The result
        counts the whole stream.

        Args:
            tokens: Ids, shape ``(n,)``.
            vocab: V.
            alpha: Additive smoothing of the unigram.
            weight: A fixed λ.
            held_out: Share of the stream to choose λ on.

        Raises:
            ValueError: If tokens are not integer ids below ``vocab``, or too few.
        """
        _check(tokens, vocab, at_least=4)
        if weight is None:
            cut = len(tokens) - max(2, int(held_out * len(tokens)))
            weight = cls._counted(tokens[:cut], vocab, alpha, 0.5)._best_weight(tokens[cut:])
        return cls._counted(tokens, vocab, alpha, weight)

    def nll(self, tokens: Tokens, *, window: int) -> float:
        """Compute the mean negative log-likelihood per target, in nats; perplexity is its exponential."""
        first, second = windowed_pairs(tokens, window=window, vocab=len(self.unigram.probabilities))
        return float(-np.log(self._mixed(*self._parts(first, second), self.weight)).mean())

    @classmethod
    def _counted(cls, tokens: Tokens, vocab: int, alpha: float, weight: float) -> InterpolatedBigram:
        unigram = Unigram.fit(tokens, vocab=vocab, alpha=alpha)
        return cls(unigram, weight, _PairCounts.of(tokens, vocab))

    def _parts(self, first: Tokens, second: Tokens) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return c(v, w) / c(v), NaN if c(v) = 0, and p(w)."""
        return self._counts.conditional(first, second), self.unigram.probabilities[second]

    @staticmethod
    def _mixed(conditional: NDArray[np.float64], marginal: NDArray[np.float64], weight: float) -> NDArray[np.float64]:
        return np.where(np.isnan(conditional), marginal, weight * conditional + (1 - weight) * marginal)

    def _best_weight(self, tokens: Tokens) -> float:
        """Compute λ by expectation-maximisation; the likelihood is concave in λ, so the fixed point is the maximum."""
        conditional, marginal = self._parts(tokens[:-1], tokens[1:])
        known = ~np.isnan(conditional)
        conditional, marginal, weight = conditional[known], marginal[known], self.weight
        for _ in range(50):
            mixed = weight * conditional + (1 - weight) * marginal
            weight = float(np.mean(weight * conditional / mixed)) if len(mixed) else weight
        return weight


@dataclass(frozen=True)
class _PairCounts:
    """Counts of the pairs (v, w) that occur: sorted codes v V + w, their counts, and c(v)."""

    codes: Tokens
    counts: NDArray[np.int64]
    firsts: NDArray[np.int64]

    @classmethod
    def of(cls, tokens: Tokens, vocab: int) -> _PairCounts:
        codes = _codes(tokens[:-1], tokens[1:], vocab)
        codes.sort()
        starts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
        counts = np.diff(np.append(starts, len(codes)))
        return cls(codes[starts], counts, np.bincount(tokens[:-1], minlength=vocab))

    def conditional(self, first: Tokens, second: Tokens) -> NDArray[np.float64]:
        """Return c(v, w) / c(v) for each pair; NaN if c(v) = 0."""
        wanted = _codes(first, second, len(self.firsts))
        at = np.minimum(np.searchsorted(self.codes, wanted), len(self.codes) - 1)
        joint = np.where(self.codes[at] == wanted, self.counts[at], 0)
        totals = self.firsts[first]
        shares = np.full(len(joint), np.nan)
        np.divide(joint, totals, out=shares, where=totals > 0)
        return shares


def windowed_pairs(tokens: Tokens, *, window: int, vocab: int) -> tuple[Tokens, Tokens]:
    """Return the (previous token, target) pairs of the floor((n - 1) / window) complete windows of a stream."""
    _check(tokens, vocab, at_least=window + 1)
    covered = (len(tokens) - 1) // window * window
    return tokens[:covered], tokens[1 : covered + 1]


def _codes(first: Tokens, second: Tokens, vocab: int) -> Tokens:
    """Encode pairs as v V + w, in the narrowest type that holds V²; the ids must be below V."""
    kind = np.dtype(np.uint32 if vocab**2 <= 2**32 else np.uint64)
    codes: Tokens = np.multiply(first, vocab, dtype=kind, casting="unsafe")
    return np.add(codes, second, out=codes, dtype=kind, casting="unsafe")


def _check(tokens: Tokens, vocab: int, *, at_least: int) -> None:
    problems = []
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        problems.append(f"tokens must be a 1-D integer array, got {tokens.dtype} of shape {tokens.shape}")
    elif len(tokens) < at_least:
        problems.append(f"the stream must have at least {at_least} tokens, got {len(tokens)}")
    elif int(tokens.max()) >= vocab or int(tokens.min()) < 0:
        problems.append(
            f"token ids span {tokens.min()}..{tokens.max()}, but the vocabulary is 0..{vocab - 1}: pass the"
            " vocabulary size of the tokenizer"
        )
    if problems:
        raise ValueError("; ".join(problems))
