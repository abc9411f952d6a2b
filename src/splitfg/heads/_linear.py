"""Heads of linear layers, in closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitfg.calling import preserved
from splitfg.errors import raise_if
from splitfg.heads._base import Head
from splitfg.heads._cross_entropy import CrossEntropy
from splitfg.heads._output_loss import OutputLoss, RowData
from splitfg.heads._tiles import aligned, padded, tiles
from splitfg.numerics import wide
from splitfg.types import HeadGradient, Params

# Outputs in a block: 64 MiB in float32.
_BLOCK = 2**24


class LinearHead(Head):
    """One or more linear layers without nonlinearities between them, with an exact closed-form gradient.

    With one layer, outputs = h Wᵀ + b. With δ = dL/d(outputs),

        dL/dW = δᵀ h,    dL/db = Σ_n δ_n,    u = dL/dh = δ W.

    With two, outputs = W₂ (W₁ h + b₁) + b₂: the factored head, in which W₁ and W₂ are trained as a pair
    although they collapse to one map. Further layers follow the same rule, from the last to the first.

    The head computes the outputs in blocks, so that the logits of the whole batch never exist at once: blocks of whole
    rows if the outputs are few, blocks of columns, each computed twice, if they are many. It accumulates sums in
    float32 if the parameters are narrower.

    Args:
        layers: One or more :class:`torch.nn.Linear`; shared, not copied.
        loss: Loss on the outputs; cross-entropy by default.
        block: Largest number of outputs in a block; the head stores at most two blocks at a time.

    Raises:
        SplitError: If a layer is not a plain ``nn.Linear``, layers do not fit or share parameters, or ``block`` < 1.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import splitfg
        >>> head = splitfg.LinearHead(nn.Linear(8, 3))
        >>> h, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
        >>> gradient = head(h, y)
        >>> gradient.u.shape, gradient.grads["0.weight"].shape
        (torch.Size([16, 8]), torch.Size([3, 8]))
    """

    def __init__(self, *layers: nn.Linear, loss: OutputLoss | None = None, block: int = _BLOCK) -> None:
        super().__init__(loss if loss is not None else CrossEntropy())
        raise_if(_problems(layers, block))
        self.block = block
        self.depth = len(layers)
        for i, layer in enumerate(layers):
            self.add_module(str(i), layer)

    @property
    def layers(self) -> tuple[nn.Linear, ...]:
        """The linear layers, from h to the outputs."""
        return tuple(getattr(self, str(i)) for i in range(self.depth))

    @property
    def in_features(self) -> int:
        """Width of h."""
        return self.layers[0].in_features

    @property
    def out_features(self) -> int:
        """Number of outputs C."""
        return self.layers[-1].out_features

    @property
    def reverse_mode(self) -> bool:
        """``False``: the gradient has a closed form."""
        return False

    def outputs(self, params: Params, h: Tensor) -> Tensor:
        """Apply the layers one after another."""
        for i in range(self.depth):
            h = F.linear(h, params[f"{i}.weight"], params.get(f"{i}.bias"))
        return h

    def _exact(self, h: Tensor, target: Tensor, normaliser: Tensor) -> HeadGradient:
        trained = self.trained_params()
        sums = _Sums(trained)
        loss, u = self._differentiated(h, target, normaliser, sums)
        return HeadGradient(loss, u, sums.cast_like(trained))

    def _loss_and_u(self, h: Tensor, target: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
        return self._differentiated(h, target, normaliser, _Sums({}))

    def _differentiated(self, h: Tensor, target: Tensor, normaliser: Tensor, sums: _Sums) -> tuple[Tensor, Tensor]:
        """Compute loss and u; add the gradients of the parameters in ``sums`` to it."""
        flat, target = h.reshape(-1, h.shape[-1]), self.output_loss.fold(target, self.out_features)
        params, u = self.params(), torch.empty_like(h, memory_format=torch.contiguous_format).view_as(flat)
        losses, cut = [], tiles(len(flat), self.out_features, self.block)
        for part in cut.rows:
            read = self._read(params, _rows(flat, part))
            rows = self.output_loss.rows(_rows(target, part), normaliser, self.out_features, wide(h.dtype))
            loss, pulled = self._readout(params, read[-1], rows, cut.columns, sums)
            u[part] = self._pull_back(params, pulled, read, sums)
            losses.append(loss)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(), u.view(h.shape)

    def _read(self, params: Params, rows: Tensor) -> list[Tensor]:
        """Compute the input of each layer."""
        read = [rows]
        for i in range(self.depth - 1):
            read.append(F.linear(read[-1], params[f"{i}.weight"], params.get(f"{i}.bias")))
        return read

    def _readout(
        self, params: Params, x: Tensor, rows: RowData, columns: Sequence[slice], sums: _Sums
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss and its derivative by the last layer's input; add that layer's gradient to ``sums``."""
        name, loss = str(self.depth - 1), self.output_loss
        weight, bias = params[f"{name}.weight"], params.get(f"{name}.bias")
        firsts = _firsts(columns, x.device)
        place = x.new_empty(len(x), padded(columns[0].stop), dtype=wide(x.dtype))
        statistics: RowData | None = None
        for block in columns:
            outputs = _outputs(x, weight, block, place)
            statistics = loss.accumulate(outputs, _part(bias, block), statistics)
        assert statistics is not None
        total, pulled = loss.base(rows, statistics), _Sum(torch.empty_like(x, dtype=place.dtype))
        for i, block in reversed(list(enumerate(columns))):
            if i < len(columns) - 1:  # the buffer still holds the last block
                outputs = _outputs(x, weight, block, place)
            part, entries = loss.residual_(outputs, _part(bias, block), firsts[i], rows, statistics)
            delta = outputs if entries is None else outputs.scatter_add_(1, *entries)
            total = total + part
            sums.collect(name, block, delta, x)
            pulled.add_products(delta.to(weight.dtype), _rows(weight, block))
        return total, pulled.value

    def _pull_back(self, params: Params, pulled: Tensor, read: list[Tensor], sums: _Sums) -> Tensor:
        """Propagate from the last layer's input to h; add each layer's gradient to ``sums``."""
        for i in reversed(range(self.depth - 1)):
            weight = params[f"{i}.weight"]
            sums.collect(str(i), slice(0, weight.shape[0]), pulled, read[i])
            pulled = pulled.to(weight.dtype) @ weight
        return pulled


def _outputs(x: Tensor, weight: Tensor, block: slice, place: Tensor) -> Tensor:
    """Write the product of x with a block of W's rows to the buffer ``place``."""
    outputs, weight = _columns(place, slice(0, block.stop - block.start)), _rows(weight, block)
    for part in aligned(slice(0, outputs.shape[1])):
        _Sum(_columns(outputs, part)).add_product(x, _rows(weight, part).T)
    return outputs


def _firsts(columns: Sequence[slice], device: torch.device) -> Sequence[Tensor | None]:
    """Return the first column of every block, or ``None`` for a single block."""
    if len(columns) == 1:
        return (None,)
    return torch.arange(0, columns[-1].stop, columns[0].stop, device=device).unbind()


def _part(bias: Tensor | None, block: slice) -> Tensor | None:
    return None if bias is None else _rows(bias, block)


def _rows(t: Tensor, part: slice) -> Tensor:
    """Slice rows; returns the tensor itself for all rows, as a slice costs as much time as a small product."""
    return t if part.stop - part.start == t.shape[0] else t[part]


def _columns(t: Tensor, part: slice) -> Tensor:
    return t if part.stop - part.start == t.shape[1] else t[:, part]


class _Sum:
    """Sums products in place, in float32 or wider; the first product overwrites the uninitialised memory."""

    def __init__(self, place: Tensor) -> None:
        self.value = place
        self._started = False

    def add(self, value: Tensor) -> None:
        self.value.add_(value) if self._started else self.value.copy_(value)
        self._started = True

    def add_product(self, left: Tensor, right: Tensor) -> None:
        if left.dtype != self.value.dtype:
            self.add(left @ right)
        elif self._started:
            self.value.addmm_(left, right)
        else:
            torch.mm(left, right, out=self.value)
            self._started = True

    def add_products(self, left: Tensor, right: Tensor) -> None:
        """Add a product, with its inner dimension split into aligned parts."""
        for part in aligned(slice(0, left.shape[1])):
            self.add_product(_columns(left, part), _rows(right, part))


class _Sums:
    """Gradients of the layers' parameters, accumulated over blocks; parameters not passed are skipped."""

    def __init__(self, params: Params) -> None:
        self._whole = {name: torch.empty_like(p, dtype=wide(p.dtype)) for name, p in params.items()}
        self._sums: dict[tuple[str, int], _Sum] = {}

    def collect(self, layer: str, block: slice, delta: Tensor, x: Tensor) -> None:
        """Add δᵀ x and Σ_n δ_n to a block of a layer's rows."""
        if f"{layer}.bias" in self._whole:
            self._sum(f"{layer}.bias", block).add(delta.sum(dim=0))
        if f"{layer}.weight" not in self._whole:
            return
        delta = delta.to(x.dtype)
        for part in aligned(block):
            columns = slice(part.start - block.start, part.stop - block.start)
            self._sum(f"{layer}.weight", part).add_product(_columns(delta, columns).T, x)

    def cast_like(self, params: Params) -> Params:
        """Return the sums in the parameters' dtypes."""
        return {name: self._whole[name].to(p.dtype) for name, p in params.items()}

    def _sum(self, name: str, block: slice) -> _Sum:
        key = (name, block.start)
        if key not in self._sums:
            self._sums[key] = _Sum(_rows(self._whole[name], block))
        return self._sums[key]


def has_closed_form(layer: nn.Module) -> bool:
    """Whether a layer computes h Wᵀ + b from its own W and b: a subclass or a hook may compute anything else.

    A subclass with a forward pass of its own, such as timm's, is compared with ``nn.Linear`` on random rows, in both
    training modes: its outputs and its gradients must be the same.
    """
    if not isinstance(layer, nn.Linear) or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    if "weight" not in layer._parameters:
        return False
    plain = type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)
    return plain or _acts_as_linear(layer)


def _acts_as_linear(layer: nn.Linear) -> bool:
    """Whether a layer with W and b alone returns F.linear(h, W, b), with the same gradients, for random h."""
    held = {name for name, _ in chain(layer.named_parameters(), layer.named_buffers(), layer.named_children())}
    if not held <= {"weight", "bias"}:
        return False
    h = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0)).to(layer.weight)
    with preserved(layer):
        try:
            found = [_differentiated(layer.train(mode), layer, h) for mode in (True, False)]
        except Exception:  # it takes more than h
            return False
    expected = _differentiated(lambda rows: F.linear(rows, layer.weight, layer.bias), layer, h)
    return all(torch.equal(a, b) for one in found for a, b in zip(one, expected, strict=True))


def _differentiated(function: Callable[[Tensor], Tensor], layer: nn.Linear, h: Tensor) -> list[Tensor]:
    """Return the outputs of a function and their gradients by h, and by the parameters that require one."""
    with torch.enable_grad():
        rows = h.clone().requires_grad_()
        outputs = function(rows)
        wanted = [rows, *(p for p in layer.parameters() if p.requires_grad)]
        return [outputs.detach(), *torch.autograd.grad(outputs.sum(), wanted)]


def _problems(layers: tuple[nn.Linear, ...], block: int) -> list[str]:
    found = [] if layers else ["a linear head needs at least one layer: pass LinearHead(nn.Linear(...))"]
    strangers = {i: type(layer).__name__ for i, layer in enumerate(layers) if not has_closed_form(layer)}
    if strangers:
        return [
            f"layer {i} is a {kind}, not a plain nn.Linear: pass LinearHead(nn.Linear(...), ...), or use"
            " ReverseModeHead(module) for any other module"
            for i, kind in strangers.items()
        ]
    for i, (first, second) in enumerate(pairwise(layers)):
        if first.out_features != second.in_features:
            found.append(
                f"layer {i} returns {first.out_features} features, but layer {i + 1} reads {second.in_features}:"
                " make the widths equal"
            )
    owners = [id(p) for layer in layers for p in layer.parameters()]
    if len(set(owners)) < len(owners):
        found.append("two layers share a parameter, which the closed form does not support: use ReverseModeHead")
    if block < 1:
        found.append(f"block must be at least 1, got {block}")
    return found
