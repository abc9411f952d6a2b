"""Pushing tangents, with words for what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from splitfg._black_box import BlackBoxTrunk
from splitfg._operators import explain
from splitfg._split import Split
from splitfg._validate import skip_checks
from splitfg.engines import ForwardMode
from splitfg.errors import refuse
from splitfg.types import Engine, Inputs, Params, TrunkFunction


def push(
    engine: Engine, f: TrunkFunction, params: Params, tangents: Params, *, split: Split, x: Inputs
) -> tuple[Tensor, Tensor]:
    """F and its directional derivatives; a missing forward-mode rule is explained by operator and module."""
    if skip_checks():
        return engine(f, params, tangents)
    with explained(split, x):
        return engine(f, params, tangents)


@contextmanager
def explained(split: Split, x: Inputs) -> Iterator[None]:
    """Words for a forward-mode pass of the trunk that fails in here."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        problem = explain(error, split, x)
        if problem is None:
            raise
        raise problem from error


def check_engine(engine: Engine, split: Split) -> None:
    """Refuse to look for forward-mode rules inside a black box."""
    blind = isinstance(engine, ForwardMode) and isinstance(split.trunk, BlackBoxTrunk)
    refuse(
        ["forward mode cannot see into a BlackBoxTrunk: use engine=CentralDifference() or OneSidedDifference()"]
        if blind
        else []
    )
