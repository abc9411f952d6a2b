"""Measuring how a trunk responds to noise at chosen places of a forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.func import jvp

from splitfg.errors import SplitError, raise_if
from splitfg.feedback._responses import Differences, LayersAlone, Noise, Response, Tangents, first_argument
from splitfg.sites import Alter, Operation, Tape

Rerun: TypeAlias = Callable[[Alter], Tape]
"""Runs the recorded pass again with altered outputs."""


class Probe(ABC):
    """Measures the response of a pass to noise, in the directions of that noise."""

    alone: ClassVar[bool] = False
    """Whether layers run by themselves, each on the samples that it needs."""

    @property
    @abstractmethod
    def passes(self) -> int:
        """Forward passes that a measurement takes, beside the recorded one."""

    @abstractmethod
    def __call__(self, tape: Tape, rerun: Rerun, noise: Noise) -> Response:
        """Measure.

        Args:
            tape: The pass without noise.
            rerun: Runs it again.
            noise: Unit noise.
        """


@dataclass(frozen=True)
class Difference(Probe):
    """One more forward pass, with noise added: (f(x + ε e) - f(x)) / ε.

    Exact whatever ε is where the response is linear, as that of a linear layer to a change of its input; elsewhere with
    an error O(ε).

    Args:
        step: ε, relative to the root mean square of what is perturbed.
        central: Take the mean of both directions, two passes with an error O(ε²).

    Example:
        >>> from splitfg import LearnedFeedback
        >>> from splitfg.feedback import Difference
        >>> LearnedFeedback(probe=Difference(step=0.1, central=True)).probe.passes
        2
    """

    step: float = 1.0
    central: bool = False

    def __post_init__(self) -> None:
        raise_if([] if self.step > 0 else [f"step must be positive, got {self.step}"])

    @property
    def passes(self) -> int:
        """One, or two if central."""
        return 2 if self.central else 1

    def __call__(self, tape: Tape, rerun: Rerun, noise: Noise) -> Response:
        """Measure by differences."""
        scale = self.step * _root_mean_square(tape, noise)
        above = _matched(tape, rerun(_adding(noise, scale)))
        below = _matched(tape, rerun(_adding(noise, -scale))) if self.central else tape
        return Differences(above, below, 2 * scale if self.central else scale)


@dataclass(frozen=True)
class LayerDifference(Probe):
    """Runs every layer once more by itself, with noise added to its input: (layer(a + ε e) - layer(a)) / ε.

    Linear layers run on the noise itself, layer(e) - layer(0), which is the same number.
    Cheaper than :class:`Difference`: nothing between layers runs again, every layer runs on as few samples as its map
    needs, no second pass is kept, and the noise stays white. It needs a trunk whose layers can be called alone, and a
    route that maps layers, as :class:`Relay`.

    Args:
        step: ε, relative to the root mean square of what is perturbed.

    Example:
        >>> from splitfg import LearnedFeedback
        >>> from splitfg.feedback import DeltaRule, LayerDifference, Relay
        >>> estimator = LearnedFeedback(route=Relay(DeltaRule(rate=1.0)), probe=LayerDifference())
        >>> estimator.probe.passes
        1
    """

    step: float = 1.0
    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        raise_if([] if self.step > 0 else [f"step must be positive, got {self.step}"])

    @property
    def passes(self) -> int:
        """One: every layer runs once more, on some of the samples."""
        return 1

    def __call__(self, tape: Tape, rerun: Rerun, noise: Noise) -> Response:  # noqa: ARG002
        """Return the responses of layers, each computed where it is asked for."""
        return LayersAlone(tape, self.step * _root_mean_square(tape, noise))


@dataclass(frozen=True)
class CoarseReadout(Probe):
    """A difference on a device that reads coarsely: every tensor that is read is quantised, and has noise added.

    A simulation, to choose a step and a rate before there is a device.

    Args:
        difference: The difference that is measured.
        bits: Bits of a reading, spread evenly over the range of the tensor; ``None`` for exact readings.
        noise: Standard deviation of the noise of a reading, relative to the tensor's root mean square.
        seed: Of that noise.

    Example:
        >>> from splitfg import LearnedFeedback
        >>> from splitfg.feedback import CoarseReadout, Proximal, Relay
        >>> probe = CoarseReadout(bits=8, noise=0.01)
        >>> estimator = LearnedFeedback(route=Relay(Proximal(rate=0.3)), probe=probe)  # a slow rate averages the noise
    """

    difference: Difference = field(default_factory=Difference)
    bits: int | None = None
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        found = [f"bits must be at least 1, got {self.bits}"] if self.bits is not None and self.bits < 1 else []
        raise_if(found + ([] if self.noise >= 0 else [f"noise must not be negative, got {self.noise}"]))
        object.__setattr__(self, "_generators", {})

    @property
    def passes(self) -> int:
        """Number of passes of the difference."""
        return self.difference.passes

    def __call__(self, tape: Tape, rerun: Rerun, noise: Noise) -> Response:
        """Measure by differences of coarse readings."""
        return self.difference(self._coarse(tape), lambda alter: self._coarse(rerun(alter)), noise)

    def _coarse(self, tape: Tape) -> Tape:
        operations = []
        for o in tape.operations:
            args = tuple(self._read(a) if i == 0 else a for i, a in enumerate(o.args))
            operations.append(replace(o, args=args, output=self._read(o.output)))
        return Tape(operations, self._read(tape.h))

    def _read(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if self.noise:
            size = self.noise * value.square().mean().sqrt()
            value = value + size * torch.randn(value.shape, generator=self._generator(value.device)).to(value)
        if self.bits is None:
            return value
        low, high = value.amin(), value.amax()
        width = ((high - low) / (2**self.bits - 1)).clamp_min(torch.finfo(value.dtype).tiny)
        return low + width * ((value - low) / width).round()

    def _generator(self, device: torch.device) -> torch.Generator:
        generators: dict[str, torch.Generator] = self._generators  # type: ignore[attr-defined]
        return generators.setdefault(str(device), torch.Generator().manual_seed(self.seed))


@dataclass(frozen=True)
class ForwardDerivative(Probe):
    """One Jacobian-vector product by forward mode: exact, without a step.

    Example:
        >>> import torch
        >>> from splitfg import LearnedFeedback
        >>> from splitfg.feedback import ForwardDerivative
        >>> from splitfg.testing import example_split
        >>> estimator, (split, x, y) = LearnedFeedback(probe=ForwardDerivative()), example_split()
        >>> estimate = estimator(split, x, y, generator=torch.Generator().manual_seed(0))
        >>> estimator.update_state(split, estimate)
    """

    @property
    def passes(self) -> int:
        """One: value and derivative come together."""
        return 1

    def __call__(self, tape: Tape, rerun: Rerun, noise: Noise) -> Response:
        """Measure by forward mode; all noise is one direction, so the derivative is by one number t."""

        def f(t: Tensor) -> dict[str, Any]:
            pushed = _matched(tape, rerun(_adding(noise, t)))
            inputs = [first_argument(o) for o in pushed.operations]
            outputs = [o.output if isinstance(o.output, Tensor) else None for o in pushed.operations]
            given = {f"in {i}": v for i, v in enumerate(inputs) if v is not None and v.is_floating_point()}
            given |= {f"out {i}": v for i, v in enumerate(outputs) if v is not None}
            return given | {"h": pushed.h}

        still = torch.zeros((), dtype=tape.h.dtype, device=tape.h.device)
        _, tangents = jvp(f, (still,), (torch.ones_like(still),))  # type: ignore[misc]
        return Tangents(tangents)


def _adding(noise: Noise, scale: Tensor) -> Alter:
    def alter(place: int, output: Any) -> Any:
        return output + scale * noise[place] if place in noise else output

    return alter


def _root_mean_square(tape: Tape, noise: Noise) -> Tensor:
    """The root mean square over everything that is perturbed; 1 where that is zero."""
    outputs = [tape.operations[place].output for place in noise]
    total = torch.stack([o.float().square().mean() for o in outputs]).mean().sqrt()
    return torch.where(total > 0, total, torch.ones_like(total)).to(tape.h.dtype)


class MismatchedPassError(SplitError):
    """Two passes that should differ by noise alone have other operations or shapes."""


def _matched(tape: Tape, other: Tape) -> Tape:
    same = len(tape.operations) == len(other.operations)
    if not same or any(map(_differ, tape.operations, other.operations)):
        raise MismatchedPassError(["the trunk takes another path under noise: make it independent of values"])
    return other


def _differ(a: Operation, b: Operation) -> bool:
    return a.name != b.name or getattr(a.output, "shape", None) != getattr(b.output, "shape", None)
