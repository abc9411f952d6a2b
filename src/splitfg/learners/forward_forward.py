"""Forward-Forward: every layer learns by a local objective to be active on right labels and inactive on wrong ones.

Hinton, "The Forward-Forward algorithm: some preliminary investigations" (2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from splitfg.errors import raise_if
from splitfg.learners._batches import class_problems, feature_problems
from splitfg.learners.goodness import Contrast, HardNegatives, Negatives, Objective
from splitfg.models import MLP
from splitfg.training import Schedule, Update
from splitfg.types import Estimate, Inputs, Params, Stats, StepStats, Target

# Largest block of activations of candidate labels: 16 MiB in float32.
_BLOCK_ELEMENTS = 2**22
# Keeps the normalisation finite if a layer is zero on a row.
_EPS = 1e-6


class ForwardForward:
    """Forward-Forward training of a classifier: local losses per layer, without any reverse-mode pass.

    The label is concatenated to the features as a one-hot vector, v = [x, λ onehot(c)]; no feature is overwritten.
    With v_0 = v, layer l computes a_l = ReLU(W_l v_{l-1} + b_l) and passes on its direction only,
    v_l = a_l / rms(a_l), so that a layer cannot inherit the goodness g_l = mean(a_l²) of the one below. Its
    local loss is (1/B) Σ_n ℓ(g⁺_n, g⁻_n) over the true label and one wrong label of every example, and because
    ReLU'(z) a = a its gradient has a closed form:

        dL_l/dz_l = (1/B) ℓ'(g) · 2 a_l / width_l,    dL_l/dW_l = (dL_l/dz_l)ᵀ v_{l-1}.

    The prediction is argmax_c Σ_l g_l([x, λ onehot(c)]).

    Args:
        mlp: The network, with ``features + classes`` inputs.
        optimizer: Any ``torch.optim`` optimizer over its parameters.
        classes: Number of classes, at least 2.
        label_scale: λ, the label's one-hot entry, for standardised features.
        objective: The local loss; :class:`~splitfg.learners.goodness.Contrast` by default.
        negatives: Chooses wrong labels; :class:`~splitfg.learners.goodness.HardNegatives` by default.
        schedule: Factor on the learning rate, by step; constant by default.
        max_norm: Joint clipping bound; ``None`` for no clipping, which also makes layers fully independent.

    Raises:
        SplitError: If there are fewer than 2 classes, the network is too narrow, or ``label_scale`` is not positive.

    Example:
        >>> import torch
        >>> from splitfg.learners.forward_forward import ForwardForward
        >>> from splitfg.models import MLP
        >>> generator = torch.Generator().manual_seed(0)
        >>> mlp = MLP(10 + 3, widths=(32, 32), generator=generator)
        >>> learner = ForwardForward(mlp, torch.optim.Adam(mlp.parameters()), classes=3)
        >>> x, y = torch.randn(16, 10), torch.randint(0, 3, (16,))
        >>> stats = learner.step(x, y, generator=generator)
        >>> learner.predict(x).shape
        torch.Size([16, 3])
    """

    def __init__(
        self,
        mlp: MLP,
        optimizer: torch.optim.Optimizer,
        *,
        classes: int,
        label_scale: float = 3.0,
        objective: Objective | None = None,
        negatives: Negatives | None = None,
        schedule: Schedule | None = None,
        max_norm: float | None = 1.0,
    ) -> None:
        raise_if(_setting_problems(mlp, classes, label_scale))
        self.mlp, self.classes, self.label_scale = mlp, classes, label_scale
        self.objective: Objective = objective if objective is not None else Contrast()
        self.negatives: Negatives = negatives if negatives is not None else HardNegatives()
        self._update = Update(mlp, optimizer, schedule=schedule, max_norm=max_norm)

    @property
    def features(self) -> int:
        """Number of input features, without the one-hot label."""
        return self.mlp.sizes[0] - self.classes

    @torch.no_grad()
    def step(self, x: Inputs, y: Target, *, generator: torch.Generator) -> StepStats:
        """Learn from one batch: features ``(B, features)``, classes ``(B,)``."""
        raise_if(feature_problems(x, self.features) + class_problems(x, y, self.classes))
        assert isinstance(x, Tensor)
        y = y.long()
        wrong = self.negatives(y, self.classes, lambda: self._goodness(x), generator)
        estimate = self._local_gradients(x, y, wrong)
        self._update(estimate)
        return StepStats(estimate.loss, {**estimate.stats.norms, "jvps": 0, "trunk_backward": 0})

    @torch.no_grad()
    def predict(self, x: Inputs) -> Tensor:
        """Return the goodness of every class, summed over layers, ``(B, classes)``."""
        raise_if(feature_problems(x, self.features))
        assert isinstance(x, Tensor)
        return self._goodness(x)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, optimizer state and step count."""
        return self._update.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a :meth:`state_dict`."""
        self._update.load_state_dict(state)

    def _local_gradients(self, x: Tensor, y: Tensor, wrong: Tensor) -> Estimate:
        """Compute every layer's gradient of its own loss, with positives and negatives in one pass."""
        labels = torch.cat([y, wrong])
        onehot = F.one_hot(labels, self.classes).to(x.dtype)
        v = torch.cat([x.repeat(2, 1), self.label_scale * onehot], dim=1)
        loss, grads, norms = x.new_zeros(()), Params(), Params()
        for i, (weight, bias) in enumerate(self._layers()):
            a = torch.relu(F.linear(v, weight, bias))
            positive, negative = a.square().mean(dim=1).chunk(2)
            local, up, down = self.objective(positive, negative)
            dz = torch.cat([up, down]).unsqueeze(1) * a * (2 / (a.shape[1] * x.shape[0]))
            grads |= {f"layers.{i}.weight": dz.T @ v, f"layers.{i}.bias": dz.sum(dim=0)}
            norms |= {f"goodness/positive_{i}": positive.mean(), f"goodness/negative_{i}": negative.mean()}
            loss, v = loss + local.mean(), _direction(a)
        return Estimate(loss, grads, Stats(biased=True, norms=norms))

    def _goodness(self, x: Tensor) -> Tensor:
        """Compute Σ_l g_l for every class ``(B, classes)``, in blocks of rows and classes."""
        widest = max(self.mlp.sizes[1:])
        rows = max(1, min(x.shape[0], _BLOCK_ELEMENTS // widest))
        classes = max(1, _BLOCK_ELEMENTS // (widest * rows))
        return torch.cat([self._rows_goodness(part, classes) for part in x.split(rows)])

    def _rows_goodness(self, x: Tensor, block: int) -> Tensor:
        weight, bias = next(self._layers())
        # the first layer's pre-activation is linear in the label: compute the features' part once for all classes
        shared = F.linear(x, weight[:, : self.features], bias)
        labels = self.label_scale * weight[:, self.features :].T
        parts = [self._candidates(shared, labels[i : i + block]) for i in range(0, self.classes, block)]
        return torch.cat(parts, dim=1)

    def _candidates(self, shared: Tensor, labels: Tensor) -> Tensor:
        a = torch.relu(shared.unsqueeze(1) + labels)
        total = a.square().mean(dim=-1)
        for weight, bias in list(self._layers())[1:]:
            a = torch.relu(F.linear(_direction(a), weight, bias))
            total = total + a.square().mean(dim=-1)
        return total

    def _layers(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(len(self.mlp.layers)):
            layer = self.mlp.get_submodule(f"layers.{i}")
            yield layer.get_parameter("weight"), layer.get_parameter("bias")


def _direction(a: Tensor) -> Tensor:
    """Normalise the activations of every row: a / rms(a)."""
    return a / (a.square().mean(dim=-1, keepdim=True).sqrt() + _EPS)


def _setting_problems(mlp: MLP, classes: int, label_scale: float) -> list[str]:
    found = []
    if classes < 2:
        found.append(f"Forward-Forward needs at least 2 classes, got {classes}: it compares right with wrong labels")
    if mlp.sizes[0] <= classes:
        found.append(
            f"the network has {mlp.sizes[0]} inputs, which leaves no feature in addition to {classes} classes:"
            " build it with MLP(features + classes, ...)"
        )
    if not label_scale > 0:
        found.append(f"label_scale must be positive, got {label_scale}")
    return found
