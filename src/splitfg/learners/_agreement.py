"""Comparison of compiled with eager estimates, with rounding measured instead of guessed.

An estimate can be far more sensitive to rounding than its parts: Split-FG's gradient consists of K scores, sums over
all of h that nearly cancel, and a ReLU close to zero switches a whole term. Two correct programs in TF32 then differ
by several percent, and by more if the scores of the batch happen to be small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from splitfg.splitting import Role, Split
from splitfg.types import Estimate, Inputs

# Relative difference of a tensor that is always allowed, also where the measured rounding is smaller.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 0.03}
_NARROW_TOLERANCE = 0.3
# Relative to its own norm, or to this share of the norm over all parameters: some gradients are zero up to rounding.
_SHARE = 0.01
# Allowed multiple of the root mean square of the differences that rounding makes.
_ROUNDINGS = 5.0
_TF32, _DRAWS, _SEED = 2.0**-11, 4, 0

_CURE = "pass compile_=None, and report it with your torch version"

_TRUNK, _HEAD, _LEARNED = "gradients for the trunk", "gradients for the head", "learned state"

Run: TypeAlias = Callable[[Inputs], Estimate]
Roles: TypeAlias = Mapping[str, Role]
Key: TypeAlias = tuple[str, str]
"""A part of an estimate and the name of a tensor in it."""


@dataclass(frozen=True)
class Disagreement:
    """A gradient, or a tensor of learned state, on which two estimates differ by more than rounding.

    Attributes:
        part: ``gradients for the trunk``, ``gradients for the head`` or ``learned state``.
        name: Its name.
        far: Norm of the difference, relative to the eager tensor's norm.
        allowed: The largest value that rounding explains.
    """

    part: str
    name: str
    far: float
    allowed: float


def problems(found: Sequence[Disagreement]) -> list[str]:
    """Return one message for every part with disagreements, about the worst of its tensors."""
    messages = []
    for part in dict.fromkeys(one.part for one in found):
        # a difference that is not a number comes first
        worst, *rest = sorted((one for one in found if one.part == part), key=_seriousness, reverse=True)
        more = f" and {len(rest)} more tensors" if rest else ""
        messages.append(
            f"compiled and eager code compute different {part}: {worst.name}{more} (relative difference"
            f" {worst.far:.2g}, allowed {worst.allowed:.2g}): {_CURE}"
        )
    return messages


def _seriousness(one: Disagreement) -> float:
    return math.inf if math.isnan(one.far) or not one.allowed else one.far / one.allowed


class Rounding:
    """How far rounding moves each tensor of an eager estimate, in norm.

    Multiplies all parameters and inputs by 1 ± ε with random signs, ε the precision of the products, and takes the root
    mean square of the estimate's changes over four draws. Restores the parameters.

    Args:
        split: The network.
        relative: ε.
    """

    def __init__(self, split: Split, relative: float) -> None:
        self._split, self._relative = split, relative

    def measure(self, run: Run, x: Inputs, expected: Estimate) -> dict[Key, float]:
        """Return the root mean square of ‖change‖ for every gradient and every tensor of learned state."""
        wanted = _tensors(expected, self._split.roles)
        squares = dict.fromkeys(wanted, 0.0)
        for draw in range(_DRAWS):
            with self._moved(x, _SEED + draw) as moved:
                found = _tensors(run(moved), self._split.roles)
            for key, t in wanted.items():
                squares[key] += _norm(found[key] - t) ** 2
        return {key: (square / _DRAWS) ** 0.5 for key, square in squares.items()}

    @contextmanager
    def _moved(self, x: Inputs, seed: int) -> Iterator[Inputs]:
        params = [p for p in self._split.model.parameters() if p.is_floating_point()]
        # the same signs on all processes of a distributed run
        generators = {d: torch.Generator(d).manual_seed(seed) for d in {p.device for p in params}}
        kept = [p.detach().clone() for p in params]

        def noisy(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return t
            generator = generators.setdefault(t.device, torch.Generator(t.device).manual_seed(seed))
            signs = torch.empty_like(t).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
            return t + t * signs * self._relative

        try:
            with torch.no_grad():
                for p, value in zip(params, kept, strict=True):
                    p.copy_(noisy(value))
                inputs: Inputs = pytree.tree_map_only(Tensor, noisy, x)
            yield inputs
        finally:
            with torch.no_grad():
                for p, value in zip(params, kept, strict=True):
                    p.copy_(value)


def narrowest_dtype(model: nn.Module) -> torch.dtype:
    """Return the floating-point dtype of a model's parameters that rounds most, such as that of a bfloat16 base."""
    held = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max(held, key=lambda dtype: torch.finfo(dtype).eps)


def precision(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative precision of products of this dtype on the device, with TF32 and autocast as they are set."""
    if torch.is_autocast_enabled(device.type):
        return torch.finfo(torch.get_autocast_dtype(device.type)).eps
    tf32 = torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32
    if dtype is torch.float32 and device.type == "cuda" and tf32:
        return _TF32
    return torch.finfo(dtype).eps


def disagreements(
    expected: Estimate, found: Estimate, rounding: Mapping[Key, float], roles: Roles, dtype: torch.dtype
) -> list[Disagreement]:
    """List the tensors on which a compiled and an eager estimate differ by more than rounding."""
    tolerance, result = _TOLERANCE.get(dtype, _NARROW_TOLERANCE), []
    wanted, got = _tensors(expected, roles), _tensors(found, roles)
    sizes = {key: _norm(t) for key, t in wanted.items()}
    for (part, name), size in sizes.items():
        least = _SHARE * math.hypot(*(other for (p, _), other in sizes.items() if p == part))
        far = _norm(got[part, name] - wanted[part, name])
        allowed = max(tolerance * max(size, least), _ROUNDINGS * rounding[part, name])
        if not far <= allowed:
            scale = max(size, torch.finfo(torch.float32).tiny)
            result.append(Disagreement(part, name, far / scale, allowed / scale))
    return result


def descent_problems(expected: float, found: float, dtype: torch.dtype) -> list[str]:
    """List the difference of descents that eager and compiled code measure along the same direction."""
    if abs(found - expected) <= _TOLERANCE.get(dtype, _NARROW_TOLERANCE) * abs(expected):
        return []
    return [
        f"the line search measures another descent in compiled code, {found:.3g}, than in eager code, {expected:.3g}:"
        f" {_CURE}"
    ]


def _tensors(estimate: Estimate, roles: Roles) -> dict[Key, Tensor]:
    """Return the gradients and the floating-point tensors of learned state."""
    grads = {(_TRUNK if roles[n] is Role.TRUNK else _HEAD, n): g for n, g in estimate.grads.items()}
    learned = {(_LEARNED, n): t for n, t in estimate.state_update.items() if t.is_floating_point()}
    return grads | learned


def _norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t.detach(), dtype=torch.float64))
