"""Routes by which u reaches the layers of a trunk, through maps that learn from measured responses."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv1d_input, conv2d_input, conv2d_weight
from torch.utils import _pytree as pytree

from splitfg.errors import SplitError
from splitfg.feedback._every_nth import EveryNth
from splitfg.feedback._map_rules import DeltaRule, MapRule, Proximal
from splitfg.feedback._probes import Noise, Response
from splitfg.numerics import widened
from splitfg.sites import Operation, Tape, layer_operations
from splitfg.types import Params

_ROWS = 4
"""Rows for every input of a map that one measurement takes at most; more teach little, and cost a larger pass."""

_PATIENCE = 20
"""Measurements in a row that may be left unused before a warning."""


@dataclass(frozen=True)
class Shares:
    """Gradients at tensors, by their ``id``.

    Attributes:
        added: Shares that are added to those of other operations.
        fixed: Whole gradients, which replace the shares of all other operations.
    """

    added: Mapping[int, Tensor] = field(default_factory=dict)
    fixed: Mapping[int, Tensor] = field(default_factory=dict)


class Route(EveryNth, ABC):
    """Maps that carry a gradient to the places that layers read, and the rule by which they learn.

    Args:
        rule: How the maps learn; ``None`` for ``DeltaRule(1.0)`` where layers read white noise, which is the cheapest,
            and ``Proximal()`` elsewhere.
        every: Measure at every n-th step only; between measurements the maps stay as they are.
    """

    by_layer: ClassVar[bool] = False
    """Whether the maps learn from the responses of single layers, so that these may run alone."""

    def __init__(self, rule: MapRule | None = None, *, every: int = 1) -> None:
        self.rule = rule
        self.every = every
        self._maps: Params = {}
        self._unused = 0  # measurements, until the first one is applied

    def __repr__(self) -> str:
        settings = [repr(self.rule)] * (self.rule is not None) + [f"every={self.every}"] * (self.every > 1)
        return f"{type(self).__name__}({', '.join(settings)})"

    @abstractmethod
    def samples(self, tape: Tape) -> int | None:
        """Return how many samples of a batch a measurement needs; ``None`` for all of them."""

    @abstractmethod
    def noise(self, tape: Tape, generator: torch.Generator, *, alone: bool = False) -> Noise:
        """Draw the noise of one measurement.

        Args:
            tape: The recorded pass.
            generator: Source of the noise.
            alone: Whether layers run by themselves: noise is needed only for the samples that each of them takes.
        """

    @abstractmethod
    def change(self, tape: Tape, noise: Noise, response: Response) -> Params:
        """Return the change of the maps that a measurement asks for."""

    @abstractmethod
    def back(self, tape: Tape, place: int | None, delta: Tensor) -> Shares:
        """Carry δ on.

        Args:
            tape: The recorded pass.
            place: Of the layer at whose output δ is the gradient; ``None`` for h.
            delta: δ.
        """

    def count_measurement(self) -> None:
        """Count a measurement; warns if none of the first ``_PATIENCE`` has changed the maps."""
        self._unused += not self._maps
        if self._unused == _PATIENCE:
            warnings.warn(
                f"{_PATIENCE} estimates and the maps are still as they began, so that the layers below the last one do"
                " not learn: call estimator.update_state(network, estimate) after every estimate, or use"
                " GradientLearner, which does",
                stacklevel=5,
            )

    def apply(self, change: Mapping[str, Tensor]) -> None:
        """Add a change in place: captured steps replay on the same memory."""
        for name, step in change.items():
            if name in self._maps:
                self._maps[name].add_(step)
            else:
                self._maps[name] = self._initial(name, step) + step

    @property
    def maps(self) -> Mapping[str, Tensor]:
        """The maps that have been made so far, by name."""
        return self._maps

    def state_dict(self) -> dict[str, Tensor]:
        """Return the maps, and the number of steps if only some are measured."""
        return {**self._maps, **self._step_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the maps from :meth:`state_dict`."""
        self._maps = {name: m.clone() for name, m in self._take_steps(state).items()}

    def _initial(self, name: str, like: Tensor) -> Tensor:
        groups, outputs, inputs = like.shape
        return (self.rule or Proximal()).initial(name, groups, outputs, inputs, like)

    def _rule(self, response: Response) -> MapRule:
        return self.rule or (DeltaRule(1.0) if response.white else Proximal())

    def _map(self, name: str, shape: tuple[int, int, int], like: Tensor) -> Tensor:
        known = self._maps.get(name)
        if known is None:
            return self._initial(name, widened(like).new_empty(()).expand(shape))
        wanted = widened(like)
        if (known.device, known.dtype) != (wanted.device, wanted.dtype):  # a checkpoint is read to the CPU
            known = self._maps[name] = known.to(wanted)
        if tuple(known.shape) != shape:
            raise SplitError([f"the map of {name} is {tuple(known.shape)}, the layer needs {shape}: use a new route"])
        return known


class Relay(Route):
    """From layer to layer: every layer has a map of its own response, which replaces its transposed weight.

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

    def samples(self, tape: Tape) -> int | None:
        """Return enough for ``_ROWS`` rows at every input of a map: convolutions have rows in plenty."""
        needed = [_samples(o) for _, o in layer_operations(tape) if tape.is_active(o.input)]
        return max(needed, default=0)

    def noise(self, tape: Tape, generator: torch.Generator, *, alone: bool = False) -> Noise:
        """Draw white noise for everything that a layer with trained parameters below it reads."""
        places = _read_places(tape)
        if not alone:
            return {place: _randn(tape.operations[place].output, generator) for place in places}
        needed: dict[int, int] = {}
        for _, o in layer_operations(tape):
            needed[id(o.input)] = max(needed.get(id(o.input), 0), _samples(o))
        outputs = [tape.operations[place].output for place in places]
        return {p: _randn(out[: needed[id(out)]], generator) for p, out in zip(places, outputs, strict=True)}

    def change(self, tape: Tape, noise: Noise, response: Response) -> Params:
        """Return the change of every layer's map, from how its input and output moved."""
        samples = {place: _samples(o) for place, o in layer_operations(tape) if tape.is_active(o.input)}
        found: dict[str, list[tuple[Operation, Tensor, Tensor]]] = {}
        for place, moved in response.layers(samples, noise).items():
            operation = tape.operations[place]
            found.setdefault(operation.name, []).append((operation, *moved))
        rule = self._rule(response)
        return {name: self._changed(name, calls, rule) for name, calls in found.items()}

    def _changed(self, name: str, calls: Sequence[tuple[Operation, Tensor, Tensor]], rule: MapRule) -> Tensor:
        """Return the change of one layer's map from all of its calls."""
        module = _module(calls[0][0])
        if len(calls) == 1 and isinstance(rule, DeltaRule) and isinstance(module, nn.Conv2d):
            _, da, dz = calls[0]
            m = self._map(name, _map_shape(module), da)
            return _convolved_change(rule, module, m, widened(da), widened(dz))
        pairs = [_rows(module, da, dz) for _, da, dz in calls]
        e, t = (torch.cat(parts, dim=-2) for parts in zip(*pairs, strict=True))
        shape = (e.shape[0], t.shape[-1], e.shape[-1])
        return rule.change(self._map(name, shape, e), widened(e), widened(t))

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
            geometry = (module.stride, module.padding, module.dilation, module.groups)
            formula = conv1d_input if isinstance(module, nn.Conv1d) else conv2d_input
            share: Tensor = formula(a.shape, weight.reshape(module.weight.shape), delta, *geometry)
            return share
        m = self._map(operation.name, (1, delta.shape[-1], a.shape[-1]), delta).to(delta.dtype)
        return (delta @ m[0]).sum_to_size(a.shape)


class Direct(Route):
    """Straight from the last layer to every other: one map from each place that layers read.

    Independent noise e_i at all places at once moves the last layer's output by dz ≈ Σ_i J_i e_i. The map M_i learns
    the mean Jacobian J_i over rows, and

        δ_i = M_iᵀ δ_z

    is the gradient at place i. Every layer learns without waiting for another, and nothing is read but what the layers
    read and the last output. Biased by the covariance of Jacobian and gradient over rows, which is zero for a linear
    trunk and grows with depth. Rows are the leading dimensions that a place shares with the last output; on images
    noise is constant over the pixels of a channel.

    Args:
        rule: How the maps learn; :class:`FixedMaps` makes it direct feedback alignment.
        every: Measure at every n-th step only; between measurements the maps stay as they are.

    Example:
        >>> import torch
        >>> from splitfg import LearnedFeedback
        >>> from splitfg.feedback import Direct
        >>> from splitfg.testing import example_split
        >>> estimator, (split, x, y) = LearnedFeedback(route=Direct()), example_split()
        >>> estimate = estimator(split, x, y, generator=torch.Generator().manual_seed(0))
        >>> estimator.update_state(split, estimate)
    """

    def __init__(self, rule: MapRule | None = None, *, every: int = 1) -> None:
        super().__init__(rule if rule is not None else Proximal(rate=0.3), every=every)

    def samples(self, tape: Tape) -> int | None:  # noqa: ARG002
        """Return ``None``: the mean Jacobian is over all rows."""
        return None

    def noise(self, tape: Tape, generator: torch.Generator, *, alone: bool = False) -> Noise:  # noqa: ARG002
        """Draw independent noise for every place, constant over the pixels of images."""
        target, drawn = _target(tape), {}
        for place in _read_places(tape):
            read = tape.operations[place].output
            drawn[place] = _randn(read[..., :1, :1] if _is_image(tape, read, target) else read, generator)
        return drawn

    def change(self, tape: Tape, noise: Noise, response: Response) -> Params:
        """Return the change of all maps, which explain the response together."""
        last = _last_layer(tape)
        moved = response.h() if last is None else response.output(last)
        assert moved is not None
        rows = _row_dims(tape)
        t = widened(moved.flatten(rows).flatten(0, -2))
        parts = [widened(e.flatten(rows).flatten(0, -2)) for e in noise.values()]
        readers = _readers(tape)
        names, sizes = [readers[place] for place in noise], [part.shape[-1] for part in parts]
        maps = [self._map(name, (1, t.shape[-1], n), t) for name, n in zip(names, sizes, strict=True)]
        step = self._rule(response).change(torch.cat(maps, dim=-1), torch.cat(parts, dim=-1)[None], t[None])
        return dict(zip(names, step.split(sizes, dim=-1), strict=True))

    def back(self, tape: Tape, place: int | None, delta: Tensor) -> Shares:
        """Predict the gradient at every place from δ at the last layer's output; other layers pass nothing on."""
        if place != _last_layer(tape):
            return Shares()
        rows, fixed = delta.flatten(_row_dims(tape)), {}
        for read_place, name in _readers(tape).items():
            read = tape.operations[read_place].output
            fixed[id(read)] = self._predicted(tape, name, read, rows, delta)
        return Shares(fixed=fixed)

    def read_places(self, tape: Tape) -> list[int]:
        """Return the places that maps lead to."""
        return _read_places(tape)

    def aligned(self, tape: Tape, gradients: Mapping[int, Tensor], deltas: Mapping[int, Tensor], u: Tensor) -> Params:
        """Return the change of the maps that true gradients ask for: one step of the rule with G = Σ over rows δᵀ g.

        Args:
            tape: The recorded pass.
            gradients: True gradients g at the read places.
            deltas: True gradients at the outputs of layers; δ is that of the last.
            u: dL/dh, which is δ if some paths to h do not pass through the last layer.
        """
        last = _last_layer(tape)
        delta = u if last is None else deltas[last]
        rows, changes = widened(delta.flatten(_row_dims(tape)).flatten(0, -2)), {}
        for place, name in _readers(tape).items():
            if place not in gradients:
                continue
            read = tape.operations[place].output
            g = gradients[place].expand(read.shape)
            g = g.flatten(2).sum(-1) if _is_image(tape, read, delta) else g.flatten(_row_dims(tape)).flatten(0, -2)
            maps = self._map(name, (1, rows.shape[-1], g.shape[-1]), rows)
            changes[name] = (self.rule or Proximal()).change(maps, widened(g)[None], rows[None])
        return changes

    def _predicted(self, tape: Tape, name: str, read: Tensor, rows: Tensor, target: Tensor) -> Tensor:
        leading = rows.shape[:-1]
        if read.shape[: len(leading)] != leading:
            raise SplitError(
                [
                    f"{name} reads {tuple(read.shape)} and the last layer gives {tuple(target.shape)}: their rows"
                    " differ, so no direct map fits; use Relay()"
                ]
            )
        image = _is_image(tape, read, target)
        features = read.shape[1] if image else read[(0,) * len(leading)].numel()
        share = rows @ self._map(name, (1, rows.shape[-1], features), rows).to(rows.dtype)[0]
        if image:  # the map holds the sum over pixels
            return (share / (read.shape[-1] * read.shape[-2]))[..., None, None].expand(read.shape)
        return share.reshape(read.shape)


def _readers(tape: Tape) -> dict[int, str]:
    """Name the map of every read place by the first layer that reads it, numbered if that layer is called again."""
    names: dict[int, str] = {}
    for place in _read_places(tape):
        output = tape.operations[place].output
        name = next(o.name for _, o in layer_operations(tape) if o.input is output)
        calls = sum(known.partition(" call ")[0] == name for known in names.values())
        names[place] = f"{name} call {calls + 1}" if calls else name
    return names


def _read_places(tape: Tape) -> list[int]:
    """Places of the operations whose outputs are read by layers; each once."""
    read = {id(o.input) for _, o in layer_operations(tape) if tape.is_active(o.input)}
    return [i for i, o in enumerate(tape.operations) if id(o.output) in read]


def _last_layer(tape: Tape) -> int | None:
    """The place of the last layer, if all paths to h pass through it; ``None`` otherwise."""
    layers = layer_operations(tape)
    if not layers:
        return None
    place, last = layers[-1]
    after = {id(last.output)}
    for operation in tape.operations[place + 1 :]:
        inputs = pytree.tree_leaves((operation.args, operation.kwargs))
        if any(tape.is_active(t) and id(t) not in after for t in inputs):
            return None
        after.update(map(id, pytree.tree_leaves(operation.output)))
    return place


def _target(tape: Tape) -> Tensor:
    last = _last_layer(tape)
    target: Tensor = tape.h if last is None else tape.operations[last].output
    return target


def _row_dims(tape: Tape) -> int:
    """Leading dimensions that number rows: all but the last; of feature maps ``(B, C, H, W)``, the samples."""
    target = _target(tape)
    return 1 if target.ndim == 4 and _has_convolutions(tape) else max(1, target.ndim - 1)


def _is_image(tape: Tape, read: Tensor, target: Tensor) -> bool:
    """Whether a convolution reads feature maps ``(B, C, H, W)`` here."""
    by_convolution = any(o.input is read and isinstance(o.module, nn.Conv2d) for o in tape.operations if o.module)
    return by_convolution and target.ndim in (2, 4)


def _has_convolutions(tape: Tape) -> bool:
    return any(isinstance(o.module, nn.Conv2d) for o in tape.operations)


def _module(operation: Operation) -> nn.Module:
    assert operation.module is not None
    return operation.module


def _map_shape(module: nn.Conv1d | nn.Conv2d) -> tuple[int, int, int]:
    """Return the shape ``(groups, out, in)`` of a convolution's map."""
    return module.groups, module.out_channels // module.groups, module.weight[0].numel()


def _convolved_change(rule: DeltaRule, module: nn.Conv2d, m: Tensor, da: Tensor, dz: Tensor) -> Tensor:
    """Return the delta rule's change of a convolution's map by convolutions, without a matrix of patches.

    The same number as :meth:`DeltaRule.change` for the patches of ``da`` as rows, but for the scale of the noise, which
    is taken over the pixels instead of the padded patches.
    """
    geometry: tuple[Any, ...] = (module.stride, module.padding, module.dilation, module.groups)
    shape = module.weight.shape
    rest = dz - F.conv2d(da, m.reshape(shape), None, *geometry)
    product: Tensor = conv2d_weight(da, shape, rest, *geometry)
    rows = dz.shape[0] * dz.shape[2] * dz.shape[3]
    return rule.step(rows, m.shape[-1], da) * product.reshape(m.shape)


def _samples(operation: Operation) -> int:
    """Samples that give ``_ROWS`` rows for every input of a layer's map."""
    module, z = _module(operation), operation.output
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        inputs, positions = module.weight[0].numel(), math.prod(z.shape[2:])
    else:
        inputs, positions = operation.input.shape[-1], math.prod(z.shape[1:-1])
    samples: int = math.ceil(_ROWS * inputs / positions)
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
    """What every output of a convolution reads: ``(groups, samples * pixels, in * kh * kw)``."""
    assert not isinstance(module.padding, str)  # such layers have no closed form
    if isinstance(module, nn.Conv1d):  # as an image of one line
        a = a.unsqueeze(2)
    (kh, kw), (dh, dw), (sh, sw) = ((1, *n)[-2:] for n in (module.kernel_size, module.dilation, module.stride))
    ph, pw = (0, *module.padding)[-2:]
    padded = F.pad(a, (pw, pw, ph, ph))
    windows = padded.unfold(2, dh * (kh - 1) + 1, sh).unfold(3, dw * (kw - 1) + 1, sw)[..., ::dh, ::dw]
    grouped: Tensor = windows.unflatten(1, (module.groups, -1))  # (B, groups, in, H, W, kh, kw)
    return grouped.permute(1, 0, 3, 4, 2, 5, 6).flatten(4).flatten(1, 3)


def _randn(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)
