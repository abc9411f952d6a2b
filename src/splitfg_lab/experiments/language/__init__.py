"""Language: GPT small8 with all methods of the paper, and count-based references."""

from __future__ import annotations

from splitfg_lab.experiments._search import BEFORE
from splitfg_lab.experiments.language._config import (
    EPOCH,
    TENTH,
    BigramMethod,
    KnnLMMethod,
    Language,
    Sizes,
    UnigramMethod,
)
from splitfg_lab.experiments.language._figures import figures, headlines
from splitfg_lab.experiments.language._paper_results import CORPUS
from splitfg_lab.experiments.language._presets import presets
from splitfg_lab.experiments.language._report_tables import tables
from splitfg_lab.experiments.spec import Experiment

__all__ = [
    "EPOCH",
    "EXPERIMENT",
    "SMOKE",
    "TENTH",
    "BigramMethod",
    "KnnLMMethod",
    "Language",
    "Sizes",
    "UnigramMethod",
]

SMOKE = (
    "steps=2",
    "warmup=1",
    "batch=2",
    "corpus=synthetic",
    "evaluations=1",
    "model.layers=1",
    "model.width=8",
    "model.heads=2",
    "model.context=8",
    "model.vocab=64",
)
"""Overrides for a run of a few seconds on synthetic data."""

EXPERIMENT = Experiment(
    name="language",
    title="GPT small8 on WikiText-103",
    source="Sections 4.4, 4.5 and 5, Tables 3, 4 and 14 to 16, Figures 1 and 3",
    runner="splitfg_lab.experiments.language.run:run",
    presets=presets(),
    tables=tables(),
    figures=figures(),
    smoke=SMOKE,
    no_checkpoints=("knn_lm", "unigram", "bigram"),
    # the number of logits at once; earlier runs counted rows
    immaterial=("block", "rows"),
    earlier=(
        ("model.init", "gpt2"),
        ("clip_apart", False),
        ("adaptive", False),
        ("adaptive_groups", []),
        *BEFORE,
        ("method:DirectPathMethod.tied_share", 1.0),
        ("method:ParallelPullMethod.skips", False),
        ("method:ParallelPullMethod.group", 1),
        ("method.feedback:MeanJacobianFeedback.limit", None),
        ("method.feedback.maps:MeanJacobianFeedback.limit", None),
    ),
    headlines=headlines(),
    note=CORPUS,
)
