"""Finite differences: J·v from runs of the trunk at perturbed parameters, for hardware that only runs forward."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfg.engines._forward_mode import chunk_problems
from splitfg.errors import raise_if
from splitfg.types import Params, TrunkFunction


@dataclass(frozen=True)
class _Difference(ABC):
    """Settings that the differences share."""

    step: float | None = None
    noise: float | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        raise_if(_problems(self.step, self.noise, self.chunk))

    @property
    def biased(self) -> bool:
        """``True``: by the truncation error of the difference."""
        return True

    @abstractmethod
    def __call__(self, f: TrunkFunction, params: Params, tangents: Params) -> tuple[Tensor, Tensor]:
        """Return ``h`` and ``dh`` of shape ``(c, *h.shape)``."""

    def _moves(self, params: Params, tangents: Params, *, order: int) -> list[tuple[Params, float | Tensor]]:
        """Return every tangent v with its ε; the default ε balances an error of this order against noise/ε."""
        count = next(iter(tangents.values())).shape[0]
        rows = [{name: v[k] for name, v in tangents.items()} for k in range(count)]
        return [(v, self.step or _step(params, v, self.noise, order=order)) for v in rows]


@dataclass(frozen=True)
class CentralDifference(_Difference):
    """J v ≈ (f(θ + ε v) - f(θ - ε v)) / 2ε: two runs per tangent, biased by a truncation error O(ε²).

    The default ε perturbs θ by a relative distance noise^(1/3), where ``noise`` is the relative precision of one
    measurement (the dtype's own by default): ε = noise^(1/3) (1 + ‖θ‖) / ‖v‖. This balances the truncation
    error, which grows as ε², against the measurement error, which shrinks as noise/ε. Set ``noise`` for a noisy or
    quantised device, e.g. ``noise=1/256`` for an 8-bit read-out.

    Args:
        step: A fixed ε.
        noise: Relative precision of a measurement.
        chunk: Tangents per pass; each pass measures h once.

    Raises:
        SplitError: If a setting is not positive.

    Example:
        >>> import torch
        >>> import splitfg
        >>> f = lambda params: params["w"] ** 2
        >>> params, tangents = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.eye(2)}
        >>> h, dh = splitfg.CentralDifference(step=0.5)(f, params, tangents)
        >>> dh
        tensor([[2., 0.],
                [0., 4.]])
    """

    def __call__(self, f: TrunkFunction, params: Params, tangents: Params) -> tuple[Tensor, Tensor]:
        """Return ``h`` and ``dh`` of shape ``(c, *h.shape)``."""
        moves = self._moves(params, tangents, order=3)
        dh = [(_run(f, _moved(params, v, e)) - f(_moved(params, v, -e))) / (2 * e) for v, e in moves]
        return _run(f, params), torch.stack(dh)


@dataclass(frozen=True)
class OneSidedDifference(_Difference):
    """J v ≈ (f(θ + ε v) - f(θ)) / ε: one run per tangent and one at θ, biased by a truncation error O(ε).

    The default ε = noise^(1/2) (1 + ‖θ‖) / ‖v‖ balances truncation, which grows as ε, against noise/ε.

    Args:
        step: A fixed ε.
        noise: Relative precision of a measurement; the dtype's own by default.
        chunk: Tangents per pass; each pass measures h once.

    Raises:
        SplitError: If a setting is not positive.

    Example:
        >>> import torch
        >>> import splitfg
        >>> f = lambda params: params["w"] ** 2
        >>> params, tangents = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.eye(2)}
        >>> h, dh = splitfg.OneSidedDifference(step=0.5)(f, params, tangents)
        >>> dh.diagonal()
        tensor([2.5000, 4.5000])
    """

    def __call__(self, f: TrunkFunction, params: Params, tangents: Params) -> tuple[Tensor, Tensor]:
        """Return ``h`` and ``dh`` of shape ``(c, *h.shape)``."""
        h = _run(f, params)
        dh = [(f(_moved(params, v, e)) - h) / e for v, e in self._moves(params, tangents, order=2)]
        return h, torch.stack(dh)


def _run(f: TrunkFunction, params: Params) -> Tensor:
    """Run f and copy its result: a device may return every result in the same buffer."""
    return f(params).clone()


def _moved(params: Params, tangent: Params, step: float | Tensor) -> Params:
    return {name: p + step * tangent[name] for name, p in params.items()}


def _step(params: Params, tangent: Params, noise: float | None, *, order: int) -> Tensor:
    """Compute ε = noise^(1/order) (1 + ‖θ‖) / ‖v‖, a scalar tensor."""
    precision = noise or max(torch.finfo(p.dtype).eps for p in params.values())
    relative = float(precision ** (1 / order))
    return relative * (1 + _norm(params)) / _norm(tangent)


def _norm(params: Params) -> Tensor:
    return torch.stack([p.square().sum() for p in params.values()]).sum().sqrt()


def _problems(step: float | None, noise: float | None, chunk: int | None) -> list[str]:
    found = chunk_problems(chunk)
    for name, value in (("step", step), ("noise", noise)):
        if value is not None and not (math.isfinite(value) and value > 0):
            found.append(f"{name} must be a positive number (or None for the default), got {value}")
    return found
