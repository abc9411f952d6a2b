"""Cross-entropy on a head's outputs, with its derivative in closed form."""

from __future__ import annotations

from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from splitfg.heads._output_loss import OutputLoss, RowData, RowEntries, shape_problem
from splitfg.numerics import wide

# Outputs that eager code copies at a time: 8 MiB in float32.
_COPIED = 2**21

_INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class CrossEntropy(OutputLoss):
    """Softmax cross-entropy, as :func:`torch.nn.functional.cross_entropy` with mean reduction.

    With class weights w, smoothing s and C classes, row n has the target distribution
    a_nc = (1 - s) w_c 1[c = y_n] + (s / C) w_c, and

        l_n = - Σ_c a_nc log p_nc,    dl_n/dz_n = (Σ_c a_nc) p_n - a_n,    N = Σ_n w_{y_n},

    over the rows whose target is not ``ignore_index``.

    Args:
        ignore_index: Target value of rows to ignore.
        class_weights: One weight per class, shape ``(C,)``.
        label_smoothing: s in [0, 1).

    Raises:
        ValueError: If ``label_smoothing`` is outside [0, 1).

    Example:
        >>> from torch import nn
        >>> import splitfg
        >>> loss = splitfg.CrossEntropy(label_smoothing=0.1, ignore_index=0)
        >>> head = splitfg.LinearHead(nn.Linear(8, 3), loss=loss)
    """

    class_weights: Tensor | None
    targets_elsewhere: bool
    """Whether a batch may ignore all targets, because other processes have some; ``False`` unless a head sets it."""

    def __init__(
        self, *, ignore_index: int = -100, class_weights: Tensor | None = None, label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
        if not isinstance(class_weights, Tensor | None):
            raise ValueError(f"class_weights is a {type(class_weights).__name__}: pass a tensor, one weight per class")
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.targets_elsewhere = False
        self.register_buffer("class_weights", class_weights, persistent=False)

    def fold(self, target: Tensor, width: int) -> Tensor:  # noqa: ARG002 - a class index has no width
        """Return the class indices as int64, shape ``(n,)``."""
        return target.reshape(-1).long()

    def normaliser(self, target: Tensor, width: int) -> Tensor:
        """Compute Σ_n w_{y_n} over the rows that are not ignored."""
        dtype = torch.float32 if self.class_weights is None else wide(self.class_weights.dtype)
        return self._row_weight(self.fold(target, width), dtype).sum()

    def summed(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Compute Σ_n l_n."""
        return self._cross_entropy(outputs, target, "sum")

    def rowwise(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Compute l_n, which is zero for ignored rows."""
        return self._cross_entropy(outputs, target, "none")

    def rows(self, target: Tensor, normaliser: Tensor, width: int, dtype: torch.dtype) -> RowData:
        """Return labels and their weights, divided by N."""
        scale = normaliser.to(dtype)
        weight = (1 - self.label_smoothing) * self._row_weight(target, dtype) / scale
        if self.label_smoothing == 0.0:
            return _Labels(target, weight, weight, None)
        share = (target != self.ignore_index).to(dtype) / scale
        spread = self._spread(width, weight)
        return _Labels(target, weight, weight + share * spread.sum(), (share, spread))

    def accumulate(self, outputs: Tensor, bias: Tensor | None, statistics: RowData | None) -> RowData:
        """Update m_n = max_c z_nc and S_n = Σ_c exp(z_nc - m_n)."""
        count = max(1, _COPIED // max(1, outputs.shape[1]))
        # compiled code needs no memory for the exponentials
        if torch.compiler.is_compiling() or len(outputs) <= count:
            return _accumulated(outputs, bias, statistics)
        earlier = repeat(None) if statistics is None else zip(*(t.split(count) for t in statistics), strict=True)
        found = [_accumulated(rows, bias, own) for rows, own in zip(outputs.split(count), earlier, strict=False)]
        return tuple(torch.cat(each) for each in zip(*found, strict=True))

    def base(self, rows: RowData, statistics: RowData) -> Tensor:
        """Compute (1/N) Σ_n (Σ_c a_nc) log S_n."""
        loss: Tensor = (_Labels(*rows).mass * statistics[1].log()).sum()
        return loss

    def residual_(
        self, outputs: Tensor, bias: Tensor | None, first: Tensor | None, rows: RowData, statistics: RowData
    ) -> tuple[Tensor, RowEntries | None]:
        """Compute -(1/N) Σ_n Σ_c a_nc (z_nc - m_n) and δ = ((Σ_c a_c) p - a) / N over the block's columns c."""
        labels, (peak, total), width = _Labels(*rows), statistics, outputs.shape[1]
        column, weight = labels.label, labels.weight
        if first is not None:
            column = labels.label - first
            weight = weight * ((column >= 0) & (column < width))
        # any column will do for labels in other blocks and for ignored rows: their weight is zero
        column = column.clamp(0, width - 1).unsqueeze(1)
        if bias is not None:
            outputs.add_(bias)
        # subtract the maximum first, so that differences of large logits keep their precision
        outputs.sub_(peak.unsqueeze(1))
        read = outputs.gather(1, column).squeeze(1)
        expected = torch.where(weight != 0, weight * read, 0).sum()  # 0 * -inf would be NaN
        if labels.smoothing is None:
            outputs.exp_().mul_((labels.mass / total).unsqueeze(1))
        else:
            share, spread = labels.smoothing
            if first is not None:
                spread = spread[first + torch.arange(width, device=outputs.device)]
            expected = expected + (share * (outputs @ spread)).sum()
            outputs.exp_().mul_((labels.mass / total).unsqueeze(1)).addr_(share, spread, alpha=-1)
        return -expected, (column, -weight.unsqueeze(1))

    def curvature(self, outputs: Tensor, moves: Tensor, rows: RowData) -> Tensor:
        """Compute Σ_n (Σ_c a_nc) / N (Σ_c p_nc dz_ncg dz_nch - (Σ_c p_nc dz_ncg) (Σ_c p_nc dz_nch))."""
        shares = moves * outputs.softmax(dim=-1)
        means = shares.sum(-1)  # (G, n)
        mass = _Labels(*rows).mass
        squares = torch.einsum("gnc,hnc,n->gh", shares, moves, mass)
        return squares - torch.einsum("gn,hn,n->gh", means, means, mass)

    def shape_problems(self, leading: tuple[int, ...], width: int, target: Tensor) -> list[str]:
        """Require one class index per row of outputs."""
        shape, wanted = (*leading, width), f"{leading}, one class index per row of outputs"
        if len(leading) > 1 and tuple(target.shape) == (shape[0], *shape[2:]):
            wanted += (
                ", or move classes from dimension 1 to the last with split(..., output=lambda z: z.movedim(1, -1))"
            )
        return [] if tuple(target.shape) == leading else [shape_problem(target, wanted)]

    def value_problems(self, width: int, target: Tensor) -> list[str]:
        """Require integer classes in [0, C), at least one that counts, and one weight per class."""
        found = self._weight_problems(width)
        if target.dtype not in _INTEGER:
            found.append(
                f"targets are {target.dtype}, but cross-entropy needs integer class indices:"
                " pass target.long(), or use SquaredError() for values"
            )
        elif target.numel():
            classes = target.long()
            found += self._range_problems(width, classes[classes != self.ignore_index])
        return found

    def _range_problems(self, width: int, counted: Tensor) -> list[str]:
        if counted.numel() == 0:
            if self.targets_elsewhere:
                return []
            return [f"every target is ignore_index ({self.ignore_index}), so the loss is 0/0: skip such batches"]
        low, high = int(counted.min()), int(counted.max())
        if low >= 0 and high < width:
            return self._lost_weight_problems(counted)
        return [f"targets span {low}..{high}, but the head has {width} outputs: classes are 0..{width - 1}"]

    def _weight_problems(self, width: int) -> list[str]:
        weights = self.class_weights
        if weights is None:
            return []
        if weights.shape != (width,):
            return [
                f"class_weights has shape {tuple(weights.shape)}, but the head has {width} outputs:"
                " pass one weight per class"
            ]
        if not bool((weights.isfinite() & (weights >= 0)).all()):
            return ["class_weights holds negative, NaN or infinite weights: pass finite ones, 0 to ignore a class"]
        return []

    def _lost_weight_problems(self, counted: Tensor) -> list[str]:
        weights = self.class_weights
        if weights is None or self.targets_elsewhere or bool(self._row_weight(counted, weights.dtype).any()):
            return []
        return ["class_weights is 0 for the class of every target, so the loss is 0/0: skip such batches"]

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

    def _spread(self, width: int, like: Tensor) -> Tensor:
        """Compute (s / C) w_c, the smoothing mass of every class."""
        weights = like.new_ones(width) if self.class_weights is None else self.class_weights.to(like)
        return weights * (self.label_smoothing / width)


def _accumulated(outputs: Tensor, bias: Tensor | None, statistics: RowData | None) -> tuple[Tensor, Tensor]:
    """Update the statistics of some rows; copies the outputs."""
    logits = outputs.clone() if bias is None else outputs + bias
    # the maximum of a block of -inf (classes masked by the bias) is -inf, and -inf - (-inf) would be NaN
    peak = logits.amax(dim=1).clamp_min(torch.finfo(logits.dtype).min)
    if statistics is not None:
        peak = torch.maximum(peak, statistics[0])
    total = logits.sub_(peak.unsqueeze(1)).exp_().sum(dim=1)
    return (peak, total if statistics is None else total + statistics[1] * (statistics[0] - peak).exp())


class _Labels(NamedTuple):
    """Row data of cross-entropy.

    Attributes:
        label: y_n.
        weight: (1 - s) w_{y_n} / N, zero for ignored rows.
        mass: Σ_c a_nc / N.
        smoothing: 1 / N per row, zero for ignored ones, and (s / C) w_c per class; ``None`` without smoothing.
    """

    label: Tensor
    weight: Tensor
    mass: Tensor
    smoothing: tuple[Tensor, Tensor] | None
