"""Losses on a head's outputs, with their derivative in closed form."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class OutputLoss(nn.Module, ABC):
    """A loss over rows of outputs, L = (1/N) Σ_n l_n, with dL/d(outputs) in closed form.

    The normaliser N is asked for separately, so that a batch can be handed over in parts: each part
    divides by the N of the whole batch, and the parts add up.
    """

    @abstractmethod
    def fold(self, target: Tensor, width: int) -> Tensor:
        """The target as rows: leading dimensions folded into one, for a head with ``width`` outputs."""

    @abstractmethod
    def normaliser(self, target: Tensor, width: int) -> Tensor:
        """N for this target, a scalar tensor; adds up over the parts of a batch."""

    @abstractmethod
    def summed(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Σ_n l_n as a differentiable function of the outputs ``(n, C)``, for a folded target."""

    @abstractmethod
    def rowwise(self, outputs: Tensor, target: Tensor) -> Tensor:
        """l_n for every row, shape ``(n,)``, for a folded target."""

    @abstractmethod
    def residual_(self, outputs: Tensor, target: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
        """The loss (1/N) Σ_n l_n and δ = dL/d(outputs), for a folded target; overwrites ``outputs``."""

    @abstractmethod
    def shape_problems(self, leading: tuple[int, ...], width: int, target: Tensor) -> list[str]:
        """What is wrong with the target's shape beside outputs of shape ``(*leading, width)``."""

    @abstractmethod
    def value_problems(self, width: int, target: Tensor) -> list[str]:
        """What is wrong with the target's dtype and values for ``width`` outputs."""


class CrossEntropy(OutputLoss):
    """Softmax cross-entropy, as :func:`torch.nn.functional.cross_entropy` with mean reduction.

    With class weights w, smoothing s and C classes, row n has the target distribution
    a_nc = (1 - s) w_c 1[c = y_n] + (s / C) w_c, and

        l_n = - Σ_c a_nc log p_nc,    dl_n/dz_n = (Σ_c a_nc) p_n - a_n,    N = Σ_n w_{y_n},

    over the rows whose target is not ``ignore_index``.

    Args:
        ignore_index: Target value of rows that do not count.
        class_weights: One weight per class, shape ``(C,)``.
        label_smoothing: s in [0, 1).
    """

    class_weights: Tensor | None

    def __init__(
        self, *, ignore_index: int = -100, class_weights: Tensor | None = None, label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.register_buffer("class_weights", class_weights, persistent=False)

    def fold(self, target: Tensor, width: int) -> Tensor:  # noqa: ARG002 - a class index has no width
        """Class indices, int64, shape ``(n,)``."""
        return target.reshape(-1).long()

    def normaliser(self, target: Tensor, width: int) -> Tensor:
        """Σ_n w_{y_n} over the rows that count."""
        dtype = torch.float32 if self.class_weights is None else self.class_weights.dtype
        return self._row_weight(self.fold(target, width), dtype).sum()

    def summed(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Σ_n l_n."""
        return self._cross_entropy(outputs, target, "sum")

    def rowwise(self, outputs: Tensor, target: Tensor) -> Tensor:
        """l_n, zero for ignored rows."""
        return self._cross_entropy(outputs, target, "none")

    def residual_(self, outputs: Tensor, target: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
        """δ = ((Σ_c a_c) p - a) / N, built in the memory of the logits."""
        weight = self._row_weight(target, outputs.dtype) / normaliser.to(outputs.dtype)
        counted = (target != self.ignore_index).to(outputs.dtype) / normaliser.to(outputs.dtype)
        index = target.clamp(0, outputs.shape[1] - 1).unsqueeze(1)
        spread = self._spread(outputs)
        mass = (1 - self.label_smoothing) * weight
        # the maximum comes off first: differences of large logits keep their digits
        outputs.sub_(outputs.amax(dim=1, keepdim=True))
        expected = mass * outputs.gather(1, index).squeeze(1)
        if spread is not None:
            expected = expected + counted * (outputs @ spread)
            mass = mass + counted * spread.sum()
        total = outputs.exp_().sum(dim=1)
        loss = (mass * total.log() - expected).sum()
        outputs.mul_((mass / total).unsqueeze(1))
        outputs.scatter_add_(1, index, -((1 - self.label_smoothing) * weight).unsqueeze(1))
        if spread is not None:
            outputs.addr_(counted, spread, alpha=-1)
        return loss, outputs

    def shape_problems(self, leading: tuple[int, ...], width: int, target: Tensor) -> list[str]:  # noqa: ARG002
        """One class index for each row of outputs."""
        wanted = f"{leading} (one class index for each row of outputs)"
        return [] if tuple(target.shape) == leading else [_shape_problem(target, wanted)]

    def value_problems(self, width: int, target: Tensor) -> list[str]:
        """Integer classes in [0, C), at least one that counts, weights that fit."""
        found = []
        if self.class_weights is not None and self.class_weights.shape != (width,):
            found.append(
                f"class_weights has shape {tuple(self.class_weights.shape)}, but the head has {width} outputs:"
                " give one weight per class"
            )
        if target.dtype not in _INTEGER:
            found.append(
                f"targets are {target.dtype}, but cross-entropy wants class indices as integers:"
                " pass target.long(), or use SquaredError() for values"
            )
        elif target.numel():
            classes = target.long()
            found += self._range_problems(width, classes[classes != self.ignore_index])
        return found

    def _range_problems(self, width: int, counted: Tensor) -> list[str]:
        if counted.numel() == 0:
            return [f"every target is ignore_index ({self.ignore_index}), so the loss is 0/0: drop such batches"]
        low, high = int(counted.min()), int(counted.max())
        if low >= 0 and high < width:
            return []
        return [f"targets span {low}..{high}, but the head has {width} outputs: classes are 0..{width - 1}"]

    def _cross_entropy(self, outputs: Tensor, target: Tensor, reduction: str) -> Tensor:
        weight = None if self.class_weights is None else self.class_weights.to(outputs)
        return F.cross_entropy(
            outputs,
            target,
            weight=weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=reduction,
        )

    def _row_weight(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        counted = (target != self.ignore_index).to(dtype)
        if self.class_weights is None:
            return counted
        classes = target.clamp(0, self.class_weights.shape[0] - 1)
        return counted * self.class_weights.to(counted)[classes]

    def _spread(self, outputs: Tensor) -> Tensor | None:
        """(s / C) w_c, what smoothing puts on every class; ``None`` without smoothing."""
        if self.label_smoothing == 0.0:
            return None
        classes = outputs.shape[1]
        weights = outputs.new_ones(classes) if self.class_weights is None else self.class_weights.to(outputs)
        return weights * (self.label_smoothing / classes)


class SquaredError(OutputLoss):
    """Half squared error, L = 1/(2N) Σ_n ‖ŷ_n - y_n‖², with δ = (ŷ - y) / N and N the number of rows.

    The target has the shape of the outputs; its last dimension may be left out where there is one output.
    """

    def fold(self, target: Tensor, width: int) -> Tensor:
        """Values, shape ``(n, width)``."""
        return target.reshape(-1, width)

    def normaliser(self, target: Tensor, width: int) -> Tensor:
        """The number of rows."""
        return torch.full((), target.numel() / width, dtype=torch.float32, device=target.device)

    def summed(self, outputs: Tensor, target: Tensor) -> Tensor:
        """½ Σ_n ‖ŷ_n - y_n‖²."""
        return self.rowwise(outputs, target).sum()

    def rowwise(self, outputs: Tensor, target: Tensor) -> Tensor:
        """½ ‖ŷ_n - y_n‖²."""
        return 0.5 * (outputs - target.to(outputs.dtype)).square().sum(dim=1)

    def residual_(self, outputs: Tensor, target: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
        """δ = (ŷ - y) / N, built in the memory of the outputs."""
        scale = normaliser.to(outputs.dtype)
        outputs.sub_(target.to(outputs.dtype))
        loss = 0.5 * outputs.square().sum() / scale
        return loss, outputs.div_(scale)

    def shape_problems(self, leading: tuple[int, ...], width: int, target: Tensor) -> list[str]:
        """The shape of the outputs."""
        shapes = [(*leading, width), leading] if width == 1 else [(*leading, width)]
        return [] if tuple(target.shape) in shapes else [_shape_problem(target, " or ".join(map(str, shapes)))]

    def value_problems(self, width: int, target: Tensor) -> list[str]:  # noqa: ARG002
        """Finite floating-point values."""
        if not target.is_floating_point():
            return [
                f"targets are {target.dtype}, but squared error wants values: pass target.float(),"
                " or use CrossEntropy() for classes"
            ]
        if not bool(torch.isfinite(target).all()):
            return ["targets hold NaN or infinite values: drop or impute those rows"]
        return []


def _shape_problem(target: Tensor, wanted: str) -> str:
    return f"targets have shape {tuple(target.shape)}, but the outputs ask for {wanted}"
