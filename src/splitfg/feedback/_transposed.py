"""The exact route: reverse mode through every layer, in place of a map."""

from __future__ import annotations

import torch
from torch import Tensor

from splitfg.feedback._responses import Noise, Response
from splitfg.feedback._route import Route, Shares
from splitfg.sites import Tape
from splitfg.types import Params


class Transposed(Route):
    """Carries δ back through every layer by reverse mode, so that a sweep is backpropagation.

    δ_a = (∂layer / ∂a)ᵀ δ_z. For baselines with occasional exact steps; it learns nothing, and a step that uses it must
    count a reverse pass through the trunk.

    Example:
        >>> import torch
        >>> from splitfg import Backprop
        >>> from splitfg.estimators import LearnedFeedback
        >>> from splitfg.feedback import Transposed
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> exact, feedback = Backprop()(split, x, y), LearnedFeedback(Transposed())
        >>> with torch.no_grad():
        ...     tape = feedback.record(split, x)
        ...     grads = feedback.sweep(split, tape, split.head(tape.h, y).u).grads
        >>> torch.allclose(grads["layers.0.weight"], exact.grads["trunk.layers.0.weight"])
        True
    """

    def samples(self, tape: Tape) -> int | None:  # noqa: ARG002
        """Return 0: nothing is measured."""
        return 0

    def noise(self, tape: Tape, generator: torch.Generator, *, alone: bool = False) -> Noise:  # noqa: ARG002
        """Return no noise."""
        return {}

    def change(self, tape: Tape, noise: Noise, response: Response) -> Params:  # noqa: ARG002
        """Return no change."""
        return {}

    def back(self, tape: Tape, place: int | None, delta: Tensor) -> Shares:
        """Add the exact pullback to the gradient at the layer's input."""
        if place is None or not tape.is_active(tape.operations[place].input):
            return Shares()
        operation = tape.operations[place]
        with torch.enable_grad():
            a = operation.input.detach().clone().requires_grad_()
            z = operation.run(a)
            (share,) = torch.autograd.grad(z, a, delta.to(z.dtype))
        return Shares(added={id(operation.input): share})
