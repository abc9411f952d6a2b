"""Compute exact gradients of a few batches and the trunk's share of their energy."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from splitfg import Backprop, Split
from splitfg.numerics import norm
from splitfg.types import Learner
from splitfg_lab.data import Windows
from splitfg_lab.experiments._training import fit_budget, matmul_precision
from splitfg_lab.experiments.language._build import corpus_digests, load_corpus, make_learner, make_split
from splitfg_lab.experiments.language_energy import Energy
from splitfg_lab.runs import RunContext


def run(config: Energy, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Measure at initialisation, or during training."""
    training = config.training
    run.use_data(corpus_digests(training))
    with matmul_precision(training.matmul):
        windows, split = load_corpus(training).train, make_split(training, seed, run.device)

        def evaluate(_: Learner | None = None) -> dict[str, float]:
            return energy(split, windows, training.batch, config.batches)

        if not config.trained:
            began = time.perf_counter()
            found = evaluate()
            passes = 2 * config.batches
            run.count(steps=passes, seconds=time.perf_counter() - began, jvps=0, trunk_backward=passes)
            return found
        if run.restored is None:
            run.log(0, evaluate())
        learner, batches = make_learner(training, split, windows, run.device)
        generator = torch.Generator(run.device).manual_seed(seed)
        return fit_budget(training, learner, batches, generator=generator, run=run, evaluate=evaluate)


def energy(split: Split, windows: Windows, batch: int, batches: int) -> dict[str, float]:
    """The trunk's share e = ‖g_trunk‖² / ‖g‖², averaged over batches, and the variance it saves.

    Per trunk coordinate the variance falls by 1 / e. Over all coordinates it falls from P ‖g‖² to P_trunk ‖g_trunk‖²,
    since the head's coordinates have none left. The tied table counts as the head's: with the gradient of both its
    roles, or, in ``trunk_share_readout``, with that of the readout alone, as it is trained.
    """
    both = _share(split, windows, batch, batches, Backprop())
    inside, outside = (sum(p.numel() for p in ps.values()) for ps in (split.trunk_params(), split.head_params()))
    return {
        "trunk_share": both,
        "trunk_share_readout": _share(split, windows, batch, batches, Backprop(readout_only=True)),
        "coordinate_reduction": 1 / both,
        "total_reduction": (inside + outside) / (inside * both),
    }


def _share(split: Split, windows: Windows, batch: int, batches: int, exact: Backprop) -> float:
    trunk, head = split.trunk_params(), split.head_params()
    shares = []
    for step in range(batches):
        x, y = (part.to(next(iter(head.values())).device) for part in windows.step(step, batch))
        grads = exact(split, x, y).grads
        inside, outside = (norm({name: grads[name] for name in names}).square() for names in (trunk, head))
        shares.append(inside / (inside + outside))
    return torch.stack(shares).mean().item()
