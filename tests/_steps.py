"""Optimizers by recipe, and gradients from nowhere to step them with."""

import pytest
import torch
from _toolkit import noise

from splitfg import (
    Estimate,
    Stats,
)
from splitfg.recipes import SGD, Adam, AdamL2, AdamW, LaggedRMS, Muon

RECIPES = {
    "adam": Adam(lr=0.1),
    "adam_l2": AdamL2(lr=0.1, weight_decay=0.3),
    "adamw": AdamW(lr=0.1, weight_decay=0.3),
    "sgd": SGD(lr=0.1),
    "sgd_momentum": SGD(lr=0.1, momentum=0.9),
    "lagged": LaggedRMS(lr=0.1),
    "muon": Muon(lr=0.1),
    "muon_original": Muon(lr=0.1, adjust="original"),
}


every_recipe = pytest.mark.parametrize("name", RECIPES)


def estimate_of(grads):
    return Estimate(torch.zeros(()), grads, Stats())


def made_up(split, seed=0):
    """Gradients from nowhere, for everything that is trained."""
    return estimate_of({n: noise(*p.shape, seed=seed + i) for i, (n, p) in enumerate(split.trained_params().items())})


def values(split):
    return {n: p.detach().clone() for n, p in split.model.named_parameters()}
