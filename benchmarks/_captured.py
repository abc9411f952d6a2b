"""Captured steps against eager ones on GPT small8: the same losses and the same parameters."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from splitfg.recipes import Adam, BackpropMethod, ConditionedLaw, FrozenMethod, Muon, SplitFGMethod
from splitfg.types import Params
from splitfg_lab.experiments._training import matmul_precision
from splitfg_lab.experiments.language import Language
from splitfg_lab.experiments.language._build import load_corpus, make_learner, make_split

_STEPS = 12
# Losses and, relative to how far they moved, parameters: TF32 rounding through twelve steps of Adam.
_LOSS_TOLERANCE = 0.01
_PARAMETER_TOLERANCE = 0.2

CASES = {
    "split_fg": Language(SplitFGMethod(K=4), rho=0.1),
    "split_fg-chunk1": Language(SplitFGMethod(K=4, chunk=1), rho=0.1),
    "conditioned": Language(SplitFGMethod(K=4, law=ConditionedLaw()), rho=0.1),
    "muon": Language(SplitFGMethod(K=4), Muon(lr=1.5e-3), rho=0.1),
    "frozen": Language(FrozenMethod()),
    "backprop": Language(BackpropMethod(), Adam(lr=1.5e-3)),
}


def compare() -> dict[str, dict[str, object]]:
    """Every case: whether it agrees, and by how much."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, dict[str, object]] = {}
    for name, config in CASES.items():
        try:
            with matmul_precision(config.matmul):
                found[name] = _compare(replace(config, corpus="synthetic", steps=_STEPS, warmup=2), device)
        except Exception as error:  # the other cases are worth knowing
            found[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        print(name, found[name], flush=True)
    return found


def _compare(config: Language, device: torch.device) -> dict[str, object]:
    start = {n: p.clone() for n, p in make_split(config, 0, device).trained_params().items()}
    eager_losses, eager = _train(replace(config, step="eager"), device)
    losses, params = _train(config, device)
    far = max(abs(a - b) for a, b in zip(losses, eager_losses, strict=True))
    moved = _distance(eager, start)
    apart = _distance(params, eager) / moved
    return {
        "ok": far < _LOSS_TOLERANCE and apart < _PARAMETER_TOLERANCE,
        "loss_difference": far,
        "parameter_difference": apart,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _train(config: Language, device: torch.device) -> tuple[list[float], Params]:
    split = make_split(config, 0, device)
    learner, batches = make_learner(config, split, load_corpus(config).train, device)
    generator = torch.Generator(device).manual_seed(0)
    losses = [learner.step(*batches(i), generator=generator).loss.item() for i in range(config.steps)]
    return losses, {n: p.clone() for n, p in split.trained_params().items()}


def _distance(first: Params, second: Params) -> float:
    squares = [(first[n] - second[n]).double().square().sum().item() for n in first]
    return math.sqrt(sum(squares))
