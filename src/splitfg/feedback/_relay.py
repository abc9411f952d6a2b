"""The route from layer to layer, through a map of every layer's own response."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv1d_input, conv2d_input, conv2d_weight

from splitfg.feedback._map_rules import DeltaRule, MapRule
from splitfg.feedback._responses import Noise, NoiseInTurn, Response, white_noise
from splitfg.feedback._route import Route, Shares, read_places
from splitfg.numerics import widened
from splitfg.sites import Operation, Tape, convolution_geometry, layer_operations
from splitfg.types import Params

_ROWS = 4
"""Rows for every input of a map that one measurement takes at most; more teach little, and cost a larger pass."""


class Relay(Route):
    """Carries the gradient from layer to layer: a map, learned from a layer's response, replaces its transposed weight.

    For a layer z = W a + b, noise at a moves z by dz = W da, exactly. The map M learns dz ≈ M da, and

        δ_a = Mᵀ δ_z

    takes the place of Wᵀ δ_z; activations, norms and sums between layers are pulled back in closed form. Once the maps
    have converged this *is* the gradient, for any depth: the weights are measured, not read. The feedback waits for the
    layers above, as backpropagation's does; :class:`Direct` does not.

    Exact in the limit for ``nn.Linear`` and ``nn.Conv2d``. Other layers with ``layer_gradients`` get one linear map
    over their last dimension, which stays an approximation if they are not linear or differ by row, as in ensembles;
    give them ``pull_back(x, u)`` for an exact gradient. Known since Akrout et al. (2019) as weight mirrors.

    Args:
        rule: How the maps learn; ``None`` for the rule that suits the noise, see :class:`Route`.
        every: Measure at every n-th step only; between measurements the maps stay as they are.

    Example:
        >>> import torch
        >>> from splitfg import LearnedFeedback
        >>> from splitfg.feedback import Relay
        >>> from splitfg.testing import example_split
        >>> estimator, (split, x, y) = LearnedFeedback(route=Relay()), example_split()
        >>> estimate = estimator(split, x, y, generator=torch.Generator().manual_seed(0))
        >>> estimator.update_state(split, estimate)
    """

    by_layer: ClassVar[bool] = True
    lean: ClassVar[bool] = True

    def samples(self, tape: Tape) -> int | None:
        """Return enough for ``_ROWS`` rows at every input of a map: convolutions have rows in plenty."""
        needed = [_samples(o) for _, o in layer_operations(tape) if tape.is_active(o.input)]
        return max(needed, default=0)

    def noise(self, tape: Tape, generator: torch.Generator, *, alone: bool = False) -> Noise:
        """Draw white noise for everything that a layer with trained parameters below it reads."""
        places = read_places(tape)
        if not alone:
            return {place: white_noise(tape.operations[place].output, generator) for place in places}
        needed: dict[int, int] = {}
        for _, o in layer_operations(tape):
            needed[id(o.input)] = max(needed.get(id(o.input), 0), _samples(o))
        outputs = [tape.operations[place].output for place in places]
        like = {place: out[: needed[id(out)]] for place, out in zip(places, outputs, strict=True)}
        return NoiseInTurn(like, generator)

    def change(self, tape: Tape, noise: Noise, response: Response) -> Params:
        """Return the change of every layer's map, from how its input and output moved."""
        samples = {place: _samples(o) for place, o in layer_operations(tape) if tape.is_active(o.input)}
        calls = Counter(tape.operations[place].name for place in samples)
        rule, changes = self._rule(response), {}
        waiting: dict[str, list[tuple[Operation, Tensor, Tensor]]] = {}
        for place, moved in response.layers(samples, noise):
            operation = tape.operations[place]
            waiting.setdefault(operation.name, []).append((operation, *moved))
            del moved
            if len(waiting[operation.name]) == calls[operation.name]:  # no other call, so that memory can be freed
                changes[operation.name] = self._changed(operation.name, waiting.pop(operation.name), rule, response)
        return changes | {name: self._changed(name, made, rule, response) for name, made in waiting.items()}

    def _changed(
        self, name: str, calls: Sequence[tuple[Operation, Tensor, Tensor]], rule: MapRule, response: Response
    ) -> Tensor:
        """Return the change of one layer's map from all of its calls."""
        module = _module(calls[0][0])
        if len(calls) == 1 and isinstance(rule, DeltaRule) and isinstance(module, nn.Conv2d):
            _, da, dz = calls[0]
            m = self._map(name, _map_shape(module), da)
            return _convolved_change(rule, module, m, widened(da), widened(dz), fresh=response.fresh)
        pairs = [_rows(module, da, dz) for _, da, dz in calls]
        e, t = pairs[0] if len(pairs) == 1 else (torch.cat(parts, dim=-2) for parts in zip(*pairs, strict=True))
        m, e, t = self._map(name, (e.shape[0], t.shape[-1], e.shape[-1]), e), widened(e), widened(t)
        if isinstance(rule, DeltaRule) and response.fresh and t.is_contiguous():
            return rule.from_rest(t.baddbmm_(e, m.mT, alpha=-1), e)
        return rule.change(m, e, t)

    def back(self, tape: Tape, place: int | None, delta: Tensor) -> Shares:
        """Add Mᵀ δ to the gradient at the layer's input."""
        if place is None or not tape.is_active(tape.operations[place].input):
            return Shares()
        operation = tape.operations[place]
        return Shares(added={id(operation.input): self._through(operation, delta)})

    def _through(self, operation: Operation, delta: Tensor) -> Tensor:
        module, a = _module(operation), operation.input
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            weight = self._map(operation.name, _map_shape(module), delta).to(delta.dtype)
            formula = conv1d_input if isinstance(module, nn.Conv1d) else conv2d_input
            share: Tensor = formula(a.shape, weight.reshape(module.weight.shape), delta, *convolution_geometry(module))
            return share
        m = self._map(operation.name, (1, delta.shape[-1], a.shape[-1]), delta).to(delta.dtype)
        return (delta @ m[0]).sum_to_size(a.shape)


def _module(operation: Operation) -> nn.Module:
    assert operation.module is not None
    return operation.module


def _map_shape(module: nn.Conv1d | nn.Conv2d) -> tuple[int, int, int]:
    """Return the shape ``(groups, out, in)`` of a convolution's map."""
    return module.groups, module.out_channels // module.groups, module.weight[0].numel()


def _convolved_change(rule: DeltaRule, module: nn.Conv2d, m: Tensor, da: Tensor, dz: Tensor, *, fresh: bool) -> Tensor:
    """Return the delta rule's change of a convolution's map by convolutions, without a matrix of patches.

    The same number as :meth:`DeltaRule.change` for the patches of ``da`` as rows, but for the scale of the noise, which
    is taken over the pixels instead of the padded patches.
    """
    geometry, shape = convolution_geometry(module), module.weight.shape
    predicted = F.conv2d(da, m.reshape(shape), None, *geometry)
    rest = dz.sub_(predicted) if fresh else dz - predicted
    product: Tensor = conv2d_weight(da, shape, rest, *geometry)
    rows = dz.shape[0] * dz.shape[2] * dz.shape[3]
    return product.reshape(m.shape).mul_(rule.step(rows, m.shape[-1], da))


def _samples(operation: Operation) -> int:
    """Samples that give ``_ROWS`` rows for every input of a layer's map."""
    module, z = _module(operation), operation.output
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        inputs, positions = module.weight[0].numel(), math.prod(z.shape[2:])
    else:
        inputs, positions = operation.input.shape[-1], math.prod(z.shape[1:-1])
    samples: int = math.ceil(_ROWS * inputs / max(positions, 1))
    return samples


def _rows(module: nn.Module, da: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
    """Changes of a layer's input and output as rows ``(groups, n, in)`` and ``(groups, n, out)``."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d):
        leading = torch.broadcast_shapes(da.shape[:-1], dz.shape[:-1])
        e = da.expand(*leading, da.shape[-1]).flatten(0, -2)
        return e[None], dz.expand(*leading, dz.shape[-1]).flatten(0, -2)[None]
    e = _patches(module, da)
    t = dz.flatten(2).unflatten(1, (module.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
    return e, t


def _patches(module: nn.Conv1d | nn.Conv2d, a: Tensor) -> Tensor:
    """Inputs of every output of a convolution: ``(groups, samples * pixels, in * kh * kw)``."""
    if isinstance(module, nn.Conv1d):  # as an image of one line
        a = a.unsqueeze(2)
    (kh, kw), (dh, dw), (sh, sw) = ((1, *n)[-2:] for n in (module.kernel_size, module.dilation, module.stride))
    ph, pw = (0, *convolution_geometry(module)[1])[-2:]
    padded = F.pad(a, (pw, pw, ph, ph))
    windows = padded.unfold(2, dh * (kh - 1) + 1, sh).unfold(3, dw * (kw - 1) + 1, sw)[..., ::dh, ::dw]
    grouped: Tensor = windows.unflatten(1, (module.groups, -1))  # (B, groups, in, H, W, kh, kw)
    return grouped.permute(1, 0, 3, 4, 2, 5, 6).flatten(4).flatten(1, 3)
