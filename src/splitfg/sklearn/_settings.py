"""Settings of the estimators: defaults, names of methods and networks, validation."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any, Final

from splitfg.recipes import Recipe, TableMethod
from splitfg.recipes.tables import Network, NetworkRecipe, PlainNetwork, table_methods

DEFAULT_METHOD: Final = "learned_feedback"
"""The default ``method``: the most accurate one here without a backward pass through the trunk."""

NETWORKS: Final = ("tabm", "mlp")
"""Names that ``network`` accepts."""

_WHOLE = ("steps", "batch_size", "width", "layers", "members", "patience", "evaluate_every")
_POSITIVE = ("learning_rate", "clip")


def method_recipe(method: str | TableMethod) -> TableMethod:
    """Return the recipe that ``method`` names, or ``method`` itself if it is a recipe."""
    return table_methods()[method] if isinstance(method, str) else method


def network_recipe(network: str | NetworkRecipe, *, width: int, layers: int, members: int) -> NetworkRecipe:
    """Return the network that ``network`` names, or ``network`` itself if it is a recipe."""
    if not isinstance(network, str):
        return network
    if network == "mlp":
        return PlainNetwork(width=width, layers=layers)
    return Network(width=width, layers=layers, members=members)


def setting_problems(settings: Mapping[str, Any]) -> list[str]:
    """Return everything that is wrong with the settings of an estimator."""
    found = _choice_problems("method", settings["method"], TableMethod, table_methods(), "SplitFGMethod(K=8)")
    found += _choice_problems("network", settings["network"], NetworkRecipe, NETWORKS, "PlainNetwork(width=64)")
    found += [
        f"{name} must be a positive whole number, got {settings[name]!r}"
        for name in _WHOLE
        if not (isinstance(settings[name], Integral) and settings[name] >= 1)
    ]
    found += [
        f"{name} must be a positive number, got {settings[name]!r}"
        for name in _POSITIVE
        if not _number(settings[name]) > 0
    ]
    if not 0 < _number(settings["rho"]) <= 1:
        found.append(
            f'rho must be above 0 and at most 1, got {settings["rho"]!r}: to keep the trunk fixed use method="frozen"'
        )
    if not 0 < _number(settings["validation_fraction"]) < 1:
        found.append(f"validation_fraction must be between 0 and 1, got {settings['validation_fraction']!r}")
    return found


def _choice_problems(
    setting: str, value: object, recipe: type[Recipe], known: Collection[str], example: str
) -> list[str]:
    """Return why a value is neither a recipe nor a known name, with the nearest name."""
    if isinstance(value, recipe) or (isinstance(value, str) and value in known):
        return []
    if not isinstance(value, str):
        return [f"{setting} must be a name or a recipe such as {example}, got {type(value).__name__}"]
    near = difflib.get_close_matches(value.lower().replace("-", "_"), known, n=1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    return [f"{setting} {value!r} is unknown{meant}: choose one of {', '.join(known)}, or give a recipe"]


def _number(value: Any) -> float:
    """Return the value as a float; NaN, which fails every comparison, if it is not a number."""
    return float(value) if isinstance(value, Real) else float("nan")
