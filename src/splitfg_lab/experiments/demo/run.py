"""Train on digits with one method."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn import functional as F

from splitfg import GradientLearner, LinearHead, Split
from splitfg.models import MLP, linear
from splitfg.types import Learner
from splitfg_lab.experiments.demo import Demo
from splitfg_lab.runs import RunContext, fit


def run(config: Demo, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Train, and evaluate on the held-out fifth."""
    generator = torch.Generator(run.device).manual_seed(seed)
    (x, y), (test_x, test_y) = _digits(run.device)
    run.use_data({"digits": _digest(x, y, test_x, test_y)})
    split = Split(MLP(x.shape[1], generator=generator), LinearHead(linear(128, 10, generator=generator)))
    estimator = run.spread(config.method.build())
    learner = GradientLearner(split, estimator, config.optimizer.build(split, rho=config.rho))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(0, len(x), (config.batch,), generator=torch.Generator().manual_seed(seed * 10**6 + step))
        rows = rows.to(run.device)
        return x[rows], y[rows]

    def evaluate(learner: Learner) -> dict[str, float]:
        logits = learner.predict(test_x)
        accuracy = 100 * (logits.argmax(1) == test_y).float().mean().item()
        return {"accuracy": accuracy, "test_loss": F.cross_entropy(logits, test_y).item()}

    return fit(
        learner,
        batch,
        steps=config.steps,
        generator=generator,
        run=run,
        evaluate=evaluate,
        evaluate_every=max(1, config.steps // 20),
        log_every=10,
    )


def _digest(*parts: Tensor) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.cpu().numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def _digits(device: torch.device) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Standardised pixels and labels, train and test, the same split always."""
    pixels, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(pixels, labels, test_size=0.2, random_state=0, stratify=labels)
    scaler = StandardScaler().fit(train_x)

    def tensors(px: object, lb: object) -> tuple[Tensor, Tensor]:
        scaled = scaler.transform(px)
        return torch.as_tensor(scaled, dtype=torch.float32, device=device), torch.as_tensor(lb, device=device)

    return tensors(train_x, train_y), tensors(test_x, test_y)
