"""Push tangents through a trunk, with errors that name the operator and the cure."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor

from splitfg.compiled import CompiledEngine
from splitfg.engines import ForwardMode
from splitfg.errors import raise_if
from splitfg.splitting import TANGENTS, ForwardOnlyTrunk, Split, explained, tangent_problems
from splitfg.splitting.checks import skip_checks
from splitfg.types import Engine, Inputs, Params, TrunkFunction


def push(
    engine: Engine, f: TrunkFunction, params: Params, tangents: Params, *, split: Split, x: Inputs
) -> tuple[Tensor, Tensor]:
    """Return f and its directional derivatives.

    Args:
        engine: Pushes the tangents.
        f: The function.
        params: Where to take the derivatives.
        tangents: Directions.
        split: The network that f runs, with the random numbers of f.
        x: Inputs of f.

    Raises:
        SplitError: An operator has no forward-mode rule; names operator and module.
    """
    if skip_checks():
        return engine(f, params, tangents)
    with explained(split, x), split.drawing() if isinstance(engine, CompiledEngine) else nullcontext():
        return engine(f, params, tangents)


def check_engine(engine: Engine, split: Split) -> None:
    """Raise :class:`SplitError` if forward mode meets a black box."""
    blind = isinstance(engine, ForwardMode) and isinstance(split.trunk, ForwardOnlyTrunk)
    kind = type(split.trunk).__name__
    cure = "use engine=CentralDifference() or OneSidedDifference()"
    raise_if([f"forward mode cannot see into a {kind}: {cure}"] if blind else [])


def check_tangents(engine: Engine, split: Split, x: Inputs) -> None:
    """Raise :class:`~splitfg.SplitError` on the first batch if J·v is not the derivative that backprop computes."""
    if not engine.biased and not skip_checks() and not isinstance(split.trunk, ForwardOnlyTrunk):
        split.validate_once(TANGENTS, lambda: tangent_problems(split, x, engine))
