"""References without training: token counts, and recall over a frozen random trunk."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from splitfg.learners.knn_lm import KnnLM
from splitfg.learners.ngram import InterpolatedBigram, Unigram
from splitfg_lab.data import Windows
from splitfg_lab.experiments.language._build import Corpus, load_corpus, make_split
from splitfg_lab.experiments.language._config import BigramMethod, KnnLMMethod, Language, UnigramMethod
from splitfg_lab.experiments.language._validate import perplexity
from splitfg_lab.runs import RunContext

_WINDOWS_AT_ONCE = 32


def count_tokens(config: Language, method: UnigramMethod | BigramMethod, run: RunContext) -> Mapping[str, float]:
    """Count the training tokens and evaluate on the validation windows."""
    began = time.perf_counter()
    corpus, vocab = load_corpus(config), config.model.vocab
    extra: dict[str, float] = {}
    model: Unigram | InterpolatedBigram
    if isinstance(method, UnigramMethod):
        model = Unigram.fit(corpus.train.tokens, vocab=vocab, alpha=method.alpha)
    else:
        model = InterpolatedBigram.fit(corpus.train.tokens, vocab=vocab, alpha=method.alpha)
        extra = {"weight": model.weight}
    nll = model.nll(corpus.valid.tokens, window=corpus.valid.length)
    return _finished(run, began, nll, extra)


def recall(config: Language, method: KnnLMMethod, seed: int, run: RunContext) -> Mapping[str, float]:
    """Store training windows, tune on the windows after them, and evaluate on the validation windows."""
    began = time.perf_counter()
    corpus = load_corpus(config)
    model, tuned = _store(config, method, corpus, seed, run)
    total, done, searching = 0.0, 0, time.perf_counter()
    for x, y in corpus.valid.sweep(_WINDOWS_AT_ONCE):
        total += model.nll(x.to(run.device), y.to(run.device)).double().sum().item()
        done += len(x)
        run.progress(done, len(corpus.valid))
    chosen = model.retrieval
    settings = {"k": chosen.k, "beta": chosen.beta, "smoothing": chosen.smoothing, "tuning_nll": tuned}
    settings["retrieval_s"] = time.perf_counter() - searching
    return _finished(run, began, total / (len(corpus.valid) * corpus.valid.length), settings)


def _store(config: Language, method: KnnLMMethod, corpus: Corpus, seed: int, run: RunContext) -> tuple[KnnLM, float]:
    """Return a tuned memory and its loss on the tuning windows."""
    generator = torch.Generator(run.device).manual_seed(seed)
    split = make_split(config, seed, run.device)
    unigram = torch.from_numpy(Unigram.fit(corpus.train.tokens, vocab=config.model.vocab).probabilities)
    # a corpus that is too short for both is divided between them
    stored = min(method.windows, len(corpus.train) * method.windows // (method.windows + method.tuning))
    model = KnnLM(split.trunk, unigram.float().to(run.device), capacity=stored * corpus.train.length)
    for start in range(0, stored, _WINDOWS_AT_ONCE):
        x, y = _take(corpus.train, start, min(start + _WINDOWS_AT_ONCE, stored), run.device)
        model.step(x, y, generator=generator)
    losses = model.tune(*_take(corpus.train, stored, min(stored + method.tuning, len(corpus.train)), run.device))
    return model, losses[model.retrieval]


def _take(windows: Windows, start: int, stop: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = windows.take(np.arange(start, stop))
    return x.to(device), y.to(device)


def _finished(run: RunContext, began: float, nll: float, extra: Mapping[str, float]) -> dict[str, float]:
    run.count(steps=1, seconds=time.perf_counter() - began, jvps=0, trunk_backward=0)
    metrics = {"val_nll": nll, "val_ppl": perplexity(nll), **extra}
    run.log(1, metrics)
    return metrics
