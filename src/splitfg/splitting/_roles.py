"""The roles of parameters in a split, and the policy for those that trunk and head share."""

from __future__ import annotations

from enum import Enum

from splitfg.errors import SplitError


class Tied(Enum):
    """Policy for a parameter that both trunk and head use, such as a tied vocabulary table.

    ``EXCLUDE``: the trunk reads its current value, but only the head's exact gradient trains it (the paper's
    readout-only surrogate, biased for that parameter). ``INCLUDE``: the trunk's estimate is added to the head's exact
    gradient (unbiased).

    Example:
        >>> from torch import nn
        >>> import splitfg
        >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 50, bias=False))
        >>> model[3].weight = model[0].weight
        >>> splitfg.split(model, tied=splitfg.Tied.EXCLUDE)
        Split(trunk=72, tied=400)
    """

    EXCLUDE = "exclude"
    INCLUDE = "include"


class Role(Enum):
    """The part of a split that trains a parameter."""

    TRUNK = "trunk"
    HEAD = "head"
    TIED = "tied"
    FROZEN = "frozen"


def policy(tied: Tied | str | None) -> Tied | None:
    """Return a policy from itself or its value.

    Raises:
        SplitError: If there is no such policy.
    """
    if tied is None or isinstance(tied, Tied):
        return tied
    known = {policy.value: policy for policy in Tied}
    if tied not in known:
        raise SplitError([f"tied is {tied!r}: use Tied.EXCLUDE (only the head trains it) or Tied.INCLUDE (both do)"])
    return known[tied]
