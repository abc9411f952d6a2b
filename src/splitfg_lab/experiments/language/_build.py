"""Build the network, the corpus and the learner of a config."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from splitfg import GradientLearner, LinearHead, Split, Tied
from splitfg.errors import DataError
from splitfg.learners import CapturedLearner
from splitfg.models import GPT, GPTConfig
from splitfg_lab.data import Windows, data_digest, load_tokens
from splitfg_lab.data.device import DeviceWindows
from splitfg_lab.experiments._training import compiler, gradient_learner
from splitfg_lab.experiments.language._config import Language
from splitfg_lab.runs import RunContext
from splitfg_lab.runs.loop import Batches

_SYNTHETIC_TOKENS = 4096


@dataclass(frozen=True)
class Corpus:
    """Training and validation windows."""

    train: Windows
    valid: Windows


def load_corpus(config: Language) -> Corpus:
    """Load the token streams of a config.

    Raises:
        DataError: The files are missing, damaged or too short, or the vocabulary does not fit.
    """
    length, vocab = config.model.context, config.model.vocab
    if config.corpus == "synthetic":
        return Corpus(Windows(_synthetic(vocab, 0), length), Windows(_synthetic(vocab, 1), length))
    train, valid = load_tokens(config.corpus, "train"), load_tokens("wikitext103", "valid")
    if vocab < 50_257:
        raise DataError(f"{config.corpus} holds GPT-2 tokens", [f"model.vocab is {vocab:,}; 50,257 are needed"])
    return Corpus(Windows(train, length), Windows(valid, length))


def corpus_digests(config: Language) -> dict[str, str]:
    """Return the digests of the token streams of a config, by name; none for synthetic tokens."""
    if config.corpus == "synthetic":
        return {}
    splits = ((config.corpus, "train"), ("wikitext103", "valid"))
    return {f"{name}/{split}": data_digest(name, split) for name, split in splits}


def make_split(config: Language, seed: int, device: torch.device) -> Split:
    """Build the network with the same initial values on every device; freeze the untrained parameters."""
    trunk = GPT(GPTConfig(**asdict(config.model)), generator=torch.Generator().manual_seed(seed)).to(device)
    if config.light:
        _keep_light(trunk)
    layer = trunk.tied_linear()
    if config.tied == "fixed":
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        trunk.token.weight.requires_grad_(False)
    tied = Tied.INCLUDE if config.tied == "include" else Tied.EXCLUDE
    return Split(trunk, LinearHead(layer, block=config.block), tied=tied)


def make_learner(
    config: Language, split: Split, windows: Windows, device: torch.device, run: RunContext | None = None
) -> tuple[GradientLearner | CapturedLearner, Batches]:
    """Build the learner and its batches, compiled or captured if the config says so."""
    learner = gradient_learner(config, split, horizon=config.steps, run=run)
    batches = DeviceWindows(windows, batch=config.batch, steps=config.steps, device=device)
    if config.step == "eager":
        return learner, batches
    captured = CapturedLearner(learner, horizon=config.steps, batches=batches, compile_=compiler(config.step, device))
    return captured, captured.batch


def _keep_light(trunk: GPT) -> None:
    """Freeze the weight matrices; positions, norms, biases and the head's token table stay trainable."""
    for module in trunk.modules():
        if isinstance(module, nn.Linear):
            module.weight.requires_grad_(False)


def _synthetic(vocab: int, seed: int) -> NDArray[np.uint16]:
    """Draw tokens with frequencies proportional to 1 / rank."""
    odds = 1 / np.arange(1, vocab + 1)
    return np.random.default_rng(seed).choice(vocab, _SYNTHETIC_TOKENS, p=odds / odds.sum()).astype(np.uint16)
