"""N-gram references against counting with dictionaries."""

import lzma
import math
import os
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from splitfg.learners.ngram import InterpolatedBigram, Unigram, windowed_pairs
from splitfg_lab.data import load_tokens

VOCAB = 7
streams = st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=60).map(lambda t: np.array(t, dtype=np.uint16))


def by_hand(train, test, *, window, alpha, weight):
    """Unigram and bigram NLL with dictionaries, window by window."""
    ones, pairs, firsts = Counter(train), Counter(pairwise(train)), Counter(train[:-1])
    uni, bi = [], []
    for w in range((len(test) - 1) // window):
        inputs, targets = test[w * window : (w + 1) * window], test[w * window + 1 : (w + 1) * window + 1]
        for v, target in zip(inputs, targets, strict=True):
            p = (ones[target] + alpha) / (len(train) + alpha * VOCAB)
            mixed = weight * pairs[v, target] / firsts[v] + (1 - weight) * p if firsts[v] else p
            uni.append(-math.log(p))
            bi.append(-math.log(mixed))
    return np.mean(uni), np.mean(bi)


@given(train=streams, test=streams, window=st.integers(1, 3), weight=st.floats(0, 0.99))
def test_both_references_match_counting_by_hand(train, test, window, weight):
    expected = by_hand(train.tolist(), test.tolist(), window=window, alpha=0.5, weight=weight)
    unigram = Unigram.fit(train, vocab=VOCAB, alpha=0.5)
    bigram = InterpolatedBigram.fit(train, vocab=VOCAB, alpha=0.5, weight=weight)
    assert unigram.nll(test, window=window) == pytest.approx(expected[0])
    assert bigram.nll(test, window=window) == pytest.approx(expected[1])


def markov(length, seed):
    """A stream in which 80% of tokens follow the one before, v -> v + 1."""
    rng = np.random.default_rng(seed)
    follows, tokens = rng.random(length) < 0.8, rng.integers(0, VOCAB, length)
    for i in range(1, length):
        tokens[i] = (tokens[i - 1] + 1) % VOCAB if follows[i] else tokens[i]
    return tokens.astype(np.uint16)


def test_probabilities_sum_to_one_given_every_previous_token():
    bigram = InterpolatedBigram.fit(markov(500, 0), vocab=VOCAB, weight=0.7)
    for v in range(VOCAB):
        pairs = [np.array([v, w], dtype=np.uint16) for w in range(VOCAB)]
        assert sum(math.exp(-bigram.nll(pair, window=1)) for pair in pairs) == pytest.approx(1)


def test_the_chosen_weight_is_the_best_on_the_held_out_end():
    stream = markov(3000, 1)
    chosen = InterpolatedBigram.fit(stream, vocab=VOCAB, held_out=0.2).weight
    early = InterpolatedBigram.fit(stream[:2400], vocab=VOCAB, weight=0.5)
    grid = np.linspace(0.005, 0.995, 199)
    losses = [replace(early, weight=w).nll(stream[2400:], window=1) for w in grid]
    assert chosen == pytest.approx(grid[int(np.argmin(losses))], abs=0.006)
    assert 0.5 < chosen < 1


def test_the_bigram_finds_the_structure_that_the_unigram_cannot():
    train, test = markov(5000, 2), markov(2000, 3)
    unigram = Unigram.fit(train, vocab=VOCAB).nll(test, window=8)
    bigram = InterpolatedBigram.fit(train, vocab=VOCAB).nll(test, window=8)
    hit = 0.8 + 0.2 / VOCAB
    entropy = -hit * math.log(hit) - 0.2 * (VOCAB - 1) / VOCAB * math.log(0.2 / VOCAB)
    assert unigram == pytest.approx(math.log(VOCAB), abs=0.02)
    assert bigram == pytest.approx(entropy, abs=0.05)


def test_windows_cover_whole_ones_only():
    tokens = np.arange(12) % VOCAB
    inputs, targets = windowed_pairs(tokens, window=5, vocab=VOCAB)
    assert inputs.tolist() == tokens[:10].tolist()
    assert targets.tolist() == tokens[1:11].tolist()
    assert len(windowed_pairs(tokens[:11], window=5, vocab=VOCAB)[0]) == 10
    assert len(windowed_pairs(tokens[:10], window=5, vocab=VOCAB)[0]) == 5


@pytest.mark.parametrize("vocab", [65_536, 65_537, 1_000_000])
def test_pairs_of_large_vocabularies_do_not_collide(vocab):
    stream = np.array([0, vocab - 1, vocab - 1, 0, 1, vocab - 1, 0], dtype=np.int64)
    bigram = InterpolatedBigram.fit(stream, vocab=vocab, weight=1.0)
    pair = np.array([vocab - 1, 0])
    assert bigram.nll(pair, window=1) == pytest.approx(-math.log(2 / 3))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([1.0, 2.0, 3.0, 4.0]), "integer"),
        (np.array([[1, 2], [3, 4]]), "1-D"),
        (np.array([0, 1, 2, VOCAB]), "vocabulary"),
        (np.array([0, 1, 2, -1]), "vocabulary"),
        (np.array([1, 2, 3]), "at least"),
    ],
)
def test_bad_streams_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        InterpolatedBigram.fit(tokens, vocab=VOCAB)


@pytest.mark.slow
@pytest.mark.realdata
def test_a_quarter_of_the_wikipedia_text_on_real_wikitext(tmp_path):
    """All of it gives 1,779 and 227: a quarter tells single tokens as well, and pairs somewhat worse."""
    here = Path(os.environ.get("SPLITFG_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data")
    part = here / "text" / "wiki-train.0.u16.xz"
    if not part.exists():
        pytest.skip(f"no {part.name} in the data folder's text/")
    (tmp_path / "text").symlink_to(here / "text")
    valid = load_tokens("wikitext103", "valid", tmp_path)
    train = np.frombuffer(lzma.decompress(part.read_bytes()), dtype="<u2")
    unigram = Unigram.fit(train, vocab=50_257).nll(valid, window=128)
    bigram = InterpolatedBigram.fit(train, vocab=50_257).nll(valid, window=128)
    assert math.exp(unigram) == pytest.approx(1779, rel=0.01)
    assert 227 < math.exp(bigram) < 300
