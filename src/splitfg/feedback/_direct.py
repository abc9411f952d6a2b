"""The route straight from the last layer to every other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError
from splitfg.feedback._map_rules import AlignedMaps, MapRule, Proximal
from splitfg.feedback._responses import Noise, Response, white_noise
from splitfg.feedback._route import Route, Shares, read_places
from splitfg.numerics import widened
from splitfg.sites import Tape, layer_operations, leaves
from splitfg.types import Params


class Direct(Route):
    """Carries the gradient from the last layer straight to every other, through one map per layer input.

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
        for place in read_places(tape):
            read = tape.operations[place].output
            drawn[place] = white_noise(read[..., :1, :1] if _is_image(tape, read, target) else read, generator)
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
        return read_places(tape)

    def aligned(self, evidence: Params) -> Params:
        """Return the change of the maps that true gradients ask for, from the :meth:`evidence` of all rows."""
        rule = self.rule
        if not isinstance(rule, AlignedMaps):
            raise SplitError([f"{rule!r} takes no true gradients: use AlignedMaps()"])
        return {
            name: rule.turned(self._map(name, (1, *found.shape), found), found[None])
            for name, found in evidence.items()
        }

    def evidence(self, tape: Tape, gradients: Mapping[int, Tensor], deltas: Mapping[int, Tensor], u: Tensor) -> Params:
        """Return G = Σ over rows δᵀ g for every map.

        Args:
            tape: The recorded pass.
            gradients: True gradients g at the read places.
            deltas: True gradients at the outputs of layers; δ is that of the last.
            u: dL/dh, which is δ if some paths to h do not pass through the last layer.
        """
        last = _last_layer(tape)
        delta = u if last is None else deltas[last]
        rows, found = widened(delta.flatten(_row_dims(tape)).flatten(0, -2)), {}
        for place, name in _readers(tape).items():
            if place not in gradients:
                continue
            read = tape.operations[place].output
            g = gradients[place].expand(read.shape)
            g = g.flatten(2).sum(-1) if _is_image(tape, read, delta) else g.flatten(_row_dims(tape)).flatten(0, -2)
            found[name] = rows.mT @ widened(g)
        return found

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
    for place in read_places(tape):
        output = tape.operations[place].output
        name = next(o.name for _, o in layer_operations(tape) if o.input is output)
        calls = sum(known.partition(" call ")[0] == name for known in names.values())
        names[place] = f"{name} call {calls + 1}" if calls else name
    return names


def _last_layer(tape: Tape) -> int | None:
    """The place of the last layer, if all paths to h pass through it; ``None`` otherwise."""
    layers = layer_operations(tape)
    if not layers:
        return None
    place, last = layers[-1]
    after = {id(last.output)}
    for operation in tape.operations[place + 1 :]:
        inputs = leaves((operation.args, dict(operation.kwargs)))
        if any(tape.is_active(t) and id(t) not in after for t in inputs):
            return None
        after.update(map(id, leaves(operation.output)))
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
