"""Modules that lose tangents: each compared by itself with a finite difference and with its own backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from splitfg.errors import shorten
from splitfg.splitting._audit import NO_GRAD, Operators, named_calls, without_rule
from splitfg.splitting._differences import DifferentPassError, Slope, measured
from splitfg.splitting._duals import Call, Pulled, dual_pass, each_call, joined, pulled, tangent_of, without_graph
from splitfg.splitting._replace import labelled
from splitfg.splitting._split import Split
from splitfg.types import Inputs, Params

_MEASURE = "use engine=CentralDifference()"
_ANYWAY = "to train with it as it is, pass check=False to split() or Split()"


def lost_tangents(split: Split, x: Inputs, v: Params, dtype: torch.dtype) -> list[str]:
    """List the innermost modules whose output has another tangent than backprop's derivative, grouped by cause.

    A module is compared at the tangent that it receives, so that an error in one module does not blame the next.

    Args:
        split: The network.
        x: Inputs.
        v: Direction, by parameter name.
        dtype: Precision of the computation.
    """
    operators = Operators()
    return _search(split, x, v, _ByDifference(dtype, operators).cause, operators)


def wrong_rules(split: Split, x: Inputs, v: Params, dtype: torch.dtype) -> list[str]:
    """List the innermost modules where a ``torch.autograd.Function`` has a jvp that is not the transpose of backward.

    Compares <c, J v> with <Jᵀ c, v> in every module that calls such a function, for random c and the tangent that the
    module receives. Takes the arguments of :func:`lost_tangents`.
    """

    def cause(seen: Call, tangent: Tensor, _name: str) -> str | None:
        found = pulled(seen)
        names = sorted(found.functions - {OF_HOOKS})
        if not names or found.agrees(tangent, dtype):
            return None
        return (
            f"the backward of {', '.join(names)} is not the transpose of its jvp: <c, J v> and <Jᵀ c, v> differ, so"
            " that estimates would differ from backprop. Correct one of the two, use engine=CentralDifference() if the"
            f" jvp is the wrong one, or, {_ANYWAY}"
        )

    return _search(split, x, v, cause, Operators())


OF_HOOKS = "BackwardHookFunction"
"""Name of torch's own function for hooks of modules on the backward pass."""

_Cause = Callable[[Call, Tensor, str], "str | None"]


def _search(split: Split, x: Inputs, v: Params, cause: _Cause, operators: Operators) -> list[str]:
    """Ask for the cause of an error in every call of a module, unless a module inside it is faulty."""
    found: dict[str, str] = {}
    faulty: set[str] = set()

    def leave(name: str, module: nn.Module, seen: Call, output: Any) -> None:
        if any(not name or other.startswith(f"{name}.") for other in faulty):
            return
        operators.paused = True
        try:
            problem = cause(seen, joined(output, tangent_of), name)
        except DifferentPassError:
            return
        finally:
            operators.paused = False
        if problem is not None:
            faulty.add(name)
            found[labelled(name, module)] = problem

    with dual_pass(split, v) as duals, named_calls(split.trunk, operators.stack), each_call(split, leave), operators:
        without_graph(split, x)(duals)
    return _by_cause(found)


def _by_cause(found: dict[str, str]) -> list[str]:
    """Word one problem for every cause, with the places that share it."""
    places: dict[str, list[str]] = {}
    for place, cause in found.items():
        places.setdefault(cause, []).append(place)
    return [f"{shorten(names)}: {cause}" for cause, names in places.items()]


@dataclass(frozen=True, eq=False)
class _ByDifference:
    """Compares the tangent of a module's output with a finite difference, and then with its backward pass."""

    dtype: torch.dtype
    operators: Operators

    def cause(self, seen: Call, tangent: Tensor, name: str) -> str | None:
        """Return the problem of a module's tangent; ``None`` if it is right."""
        slope = measured(seen.at, self.dtype)
        if slope is None or slope.agrees(tangent):
            return None
        backward = pulled(seen)
        if backward.products is not None and backward.agrees(tangent, self.dtype):
            return None  # a deliberate rule, such as a straight-through estimator
        through = measured(seen.at, self.dtype, no_grad=False)
        if through is not None and through.agrees(tangent):
            return NO_GRAD
        return self._worded(name, slope, tangent, backward)

    def _worded(self, name: str, slope: Slope, tangent: Tensor, backward: Pulled) -> str:
        lost = self.operators.lost.get(name)
        if backward.products is None:
            return (
                "it has neither a forward-mode rule nor a backward rule, although its outputs move with its inputs, as"
                f" in quantised layers: {_MEASURE}, replace it, or use .detach() on its inputs to treat them as"
                " constants"
            )
        if lost is not None:
            return without_rule(lost)
        what = f"the jvp of {', '.join(sorted(backward.functions))}" if backward.functions else "its tangent"
        return (
            f"{what} is not the derivative of its output (relative error {slope.deviation(tangent):.2g} against a"
            f" finite difference, and its backward differs too): correct it, {_MEASURE}, or, {_ANYWAY}"
        )
