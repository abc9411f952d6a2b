"""Train a GPT with one method, or fit a reference, and measure perplexity on the validation split."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from splitfg.learners import CapturedLearner
from splitfg.types import Learner
from splitfg_lab.experiments._training import Displacement, fit_budget, matmul_precision
from splitfg_lab.experiments.language._build import corpus_digests, load_corpus, make_learner, make_split
from splitfg_lab.experiments.language._config import BigramMethod, KnnLMMethod, Language, UnigramMethod
from splitfg_lab.experiments.language._memory import explaining_memory
from splitfg_lab.experiments.language._references import count_tokens, recall
from splitfg_lab.experiments.language._validate import Validation, perplexity
from splitfg_lab.runs import RunContext
from splitfg_lab.runs.environment import PeakMemory


def run(config: Language, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Run one row of the tables."""
    run.use_data(corpus_digests(config))
    with matmul_precision(config.matmul):
        match config.method:
            case UnigramMethod() | BigramMethod():
                return count_tokens(config, config.method, run)
            case KnnLMMethod():
                return recall(config, config.method, seed, run)
            case _:
                return train(config, seed=seed, run=run)


def train(config: Language, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Train for the config's budget and return the metrics after the last step."""
    corpus = load_corpus(config)
    split = make_split(config, seed, run.device)
    learner, batches = make_learner(config, split, corpus.train, run.device, run)
    generator = torch.Generator(run.device).manual_seed(seed)
    validation, moved = Validation(corpus.valid, run.device, run), Displacement(split)

    def evaluate(_: Learner) -> dict[str, float]:
        nll = validation.nll(split)
        return {"val_nll": nll, "val_ppl": perplexity(nll), "trunk_moved": moved()}

    with explaining_memory(config, split, corpus.train):
        if isinstance(learner, CapturedLearner):
            learner.check(*batches(0), generator=generator)
        # comparing with eager code is no part of training
        run.memory = PeakMemory(run.device)
        return fit_budget(config, learner, batches, generator=generator, run=run, evaluate=evaluate)
