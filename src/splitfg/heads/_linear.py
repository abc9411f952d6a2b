"""One linear layer, or several in a row, in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitfg.errors import refuse
from splitfg.heads._base import Head
from splitfg.heads._losses import CrossEntropy, OutputLoss
from splitfg.types import HeadGradient, Params

# Rows are taken in chunks of at most this many output elements: 64 MiB in float32.
_CHUNK_ELEMENTS = 2**24


class LinearHead(Head):
    """Linear layers with nothing between them, differentiated by hand.

    With one layer, outputs = h Wᵀ + b. With δ = dL/d(outputs),

        dL/dW = δᵀ h,    dL/db = Σ_n δ_n,    u = dL/dh = δ W.

    With two, outputs = W₂ (W₁ h + b₁) + b₂: the factored head, in which W₁ and W₂ are trained as a pair
    although they collapse to one map. Further layers follow the same rule, from the last to the first.

    Rows are taken in chunks, so that the outputs of the whole batch never exist at once; sums are kept in
    float32 where the parameters are narrower.

    Args:
        layers: One or more :class:`torch.nn.Linear`, kept and shared, not copied.
        loss: The loss on the outputs; cross-entropy by default.
        rows: Rows per chunk; by default as many as keep a chunk of outputs within 64 MiB of float32.
    """

    def __init__(self, *layers: nn.Linear, loss: OutputLoss | None = None, rows: int | None = None) -> None:
        super().__init__(loss if loss is not None else CrossEntropy())
        refuse(_problems(layers, rows))
        self.rows = rows
        self.depth = len(layers)
        for i, layer in enumerate(layers):
            self.add_module(str(i), layer)

    @property
    def layers(self) -> tuple[nn.Linear, ...]:
        """The linear layers, from h to the outputs."""
        return tuple(getattr(self, str(i)) for i in range(self.depth))

    @property
    def in_features(self) -> int:
        """The width of h."""
        return self.layers[0].in_features

    @property
    def out_features(self) -> int:
        """The number of outputs C."""
        return self.layers[-1].out_features

    @property
    def reverse_mode(self) -> bool:
        """Never: the closed form needs no tape."""
        return False

    def outputs(self, params: Params, h: Tensor) -> Tensor:
        """The layers, one after another."""
        for i in range(self.depth):
            h = F.linear(h, params[f"{i}.weight"], params.get(f"{i}.bias"))
        return h

    def _exact(self, h: Tensor, target: Tensor, normaliser: Tensor) -> HeadGradient:
        rows, target = h.reshape(-1, h.shape[-1]), self.output_loss.fold(target, self.out_features)
        params, sums, u = self.params(), _Sums(), torch.empty_like(rows)
        loss = h.new_zeros((), dtype=_accumulation(h.dtype))
        for part in self._chunks(rows.shape[0]):
            part_loss, delta, inputs = self._forward(params, rows[part], target[part], normaliser)
            u[part] = self._pull_back(params, delta, inputs, sums)
            loss = loss + part_loss
        return HeadGradient(loss, u.view_as(h), sums.cast_like(params))

    def _chunks(self, count: int) -> Iterator[slice]:
        size = self.rows or max(1, _CHUNK_ELEMENTS // self.out_features)
        return (slice(start, min(start + size, count)) for start in range(0, count, size))

    def _forward(
        self, params: Params, rows: Tensor, target: Tensor, normaliser: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The loss, δ, and what each layer read."""
        inputs = [rows]
        for i in range(self.depth):
            inputs.append(F.linear(inputs[-1], params[f"{i}.weight"], params.get(f"{i}.bias")))
        outputs = inputs.pop()
        loss, delta = self.output_loss.residual_(outputs.to(_accumulation(outputs.dtype)), target, normaliser)
        return loss, delta, inputs

    def _pull_back(self, params: Params, delta: Tensor, inputs: list[Tensor], sums: _Sums) -> Tensor:
        """From δ at the outputs to u at h, collecting each layer's gradient on the way."""
        for i in reversed(range(self.depth)):
            weight = params[f"{i}.weight"]
            if f"{i}.bias" in params:
                sums.add(f"{i}.bias", delta.sum(dim=0))
            delta = delta.to(weight.dtype)
            sums.add_product(f"{i}.weight", delta.T, inputs[i])
            delta = delta @ weight
        return delta


class _Sums:
    """Gradients added up over chunks, in float32 or wider, without a zeroed buffer for the first."""

    def __init__(self) -> None:
        self._sums: Params = {}

    def add(self, name: str, value: Tensor) -> None:
        value = value.to(_accumulation(value.dtype))
        self._sums[name] = self._sums[name].add_(value) if name in self._sums else value

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        if name in self._sums and self._sums[name].dtype == left.dtype:
            self._sums[name].addmm_(left, right)
        else:
            self.add(name, left @ right)

    def cast_like(self, params: Params) -> Params:
        return {name: self._sums[name].to(p.dtype) for name, p in params.items()}


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _problems(layers: tuple[nn.Linear, ...], rows: int | None) -> list[str]:
    found = [] if layers else ["a linear head needs at least one nn.Linear"]
    for i, (first, second) in enumerate(pairwise(layers)):
        if first.out_features != second.in_features:
            found.append(f"layer {i} gives {first.out_features} features, but layer {i + 1} reads {second.in_features}")
    if rows is not None and rows < 1:
        found.append(f"rows must be at least 1, got {rows}")
    return found
