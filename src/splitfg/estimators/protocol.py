"""The contract of an estimator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from splitfg.compiled import Compile, whole, with_compiled_trunk, with_explained_errors
from splitfg.splitting import Split
from splitfg.types import Estimate, Inputs, Target


@runtime_checkable
class Estimator(Protocol):
    """A pure function of a split and a batch: it changes no parameter, no input and no ``.grad``."""

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator) -> Estimate:
        """Estimate the gradient of everything that is trained.

        Args:
            split: The network.
            x: Inputs, a tensor of shape ``(B, ...)``, a tuple of positional arguments, or a dict of keyword arguments.
            y: Target: class indices of shape ``(B, ...)`` for cross-entropy, values of the outputs' shape for squared
                error.
            generator: The only source of randomness, on the parameters' device; methods that draw nothing leave it as
                it is.

        Returns:
            The loss, the gradients by parameter name, and statistics.

        Raises:
            SplitError: If network, batch or generator do not fit; lists every problem.
            NonFiniteError: If h, the loss, a score or a gradient is not finite.
        """


class Stateful(Protocol):
    """State that an estimator learns, saved in checkpoints beside the parameters."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors and numbers to restore the state from."""

    def load_state_dict(self, state: Any) -> None:
        """Restore the state from :meth:`state_dict`."""


@runtime_checkable
class LearningEstimator(Estimator, Protocol):
    """An estimator with learned state of its own. Calls are pure; a learner calls :meth:`update_state` after each."""

    def learned_state(self) -> Mapping[str, Stateful]:
        """Return the learned state by name; empty if the present settings learn nothing."""

    def update_state(self, split: Split, estimate: Estimate) -> None:
        """Learn from one of its estimates, in place: captured steps replay on the same memory."""


@runtime_checkable
class CompilableEstimator(Estimator, Protocol):
    """An estimator that declares how it compiles; others get a compiled trunk and head."""

    def compiled(self, split: Split, compile_: Compile) -> tuple[Split, Estimator]:
        """Return network and estimator with their heavy parts compiled, sharing all parameters and state.

        Args:
            split: The network.
            compile_: Compiles a function, such as :func:`splitfg.compiled.whole`.
        """


@runtime_checkable
class MessagingEstimator(Estimator, Protocol):
    """An estimator that exchanges messages with other processes, which a CUDA graph may or may not hold."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture a call with its messages."""

    def before_replay(self, split: Split, generator: torch.Generator) -> None:
        """Do on the host what a replayed call leaves out; captured learners call it before every replay."""


Measure: TypeAlias = Callable[[Inputs, Target], Tensor]
"""Returns a vector of means over the rows that it is called with."""


@runtime_checkable
class SharingEstimator(Estimator, Protocol):
    """An estimator that shares its rows with other processes, which must take the same steps."""

    def mean_over_rows(self, split: Split, measure: Measure, x: Inputs, y: Target, count: int) -> Tensor:
        """Average a measurement over the rows of all processes; a line search calls it before every step.

        Args:
            split: The network.
            measure: Measures the rows of this process.
            x: Inputs, as in a call of the estimator.
            y: Target.
            count: Length of the measurement, in all processes.
        """


def compiled(split: Split, estimator: Estimator, compile_: Compile = whole) -> tuple[Split, Estimator]:
    """Return network and estimator with their heavy parts compiled; the estimate is the same up to rounding.

    Args:
        split: The network.
        estimator: Any estimator; a :class:`CompilableEstimator` decides itself what is compiled.
        compile_: Compiles a function.

    Raises:
        SplitError: In a call of the estimator, if torch's compiler fails on the network.

    Example:
        >>> import torch
        >>> from splitfg import SplitFG
        >>> from splitfg.estimators import compiled
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> fast_split, fast = compiled(split, SplitFG(K=4), lambda function: function)
        >>> estimate = fast(fast_split, x, y, generator=torch.Generator().manual_seed(0))
    """
    compile_ = with_explained_errors(compile_)
    if isinstance(estimator, CompilableEstimator):
        return estimator.compiled(split, compile_)
    return with_compiled_trunk(split, compile_), estimator
