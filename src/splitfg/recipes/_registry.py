"""Registration of recipes: every concrete subclass of a recipe base is accepted wherever the base is."""

from __future__ import annotations

import inspect
from abc import ABC
from functools import cache
from importlib.metadata import entry_points
from typing import Any

PLUGINS = "splitfg.recipes"
"""Entry-point group of modules that define recipes; they are imported the first time that recipes are listed."""


class Recipe(ABC):  # noqa: B024 (its subclasses add the abstract methods)
    """Settings as a frozen dataclass, which configs contain, runs record, and ``build`` turns into an object.

    A subclass needs no registration. It is accepted by its class name in configs, on the command line and in
    results files as soon as its module is imported; an installed package names that module as an entry point of the
    group ``splitfg.recipes``.
    """


def recipes(base: type[Any]) -> dict[str, type[Any]]:
    """Return the concrete subclasses of a recipe base, by class name.

    Args:
        base: A recipe base, such as :class:`~splitfg.recipes.MethodRecipe`.

    Raises:
        TypeError: If two of them have the same name.

    Example:
        >>> from splitfg.recipes import OptimizerRecipe, recipes
        >>> recipes(OptimizerRecipe)["SGD"](lr=0.1)
        SGD(lr=0.1, momentum=0.0)
    """
    _import_plugins()
    found: dict[str, type[Any]] = {}
    for cls in _subclasses(base):
        if found.setdefault(cls.__name__, cls) is not cls:
            other = found[cls.__name__]
            raise TypeError(
                f"two recipes are named {cls.__name__}, in {other.__module__} and {cls.__module__}: rename one"
            )
    return found


def _subclasses(base: type[Any]) -> list[type[Any]]:
    own = [] if inspect.isabstract(base) or base.__name__.startswith("_") else [base]
    return own + [cls for child in base.__subclasses__() for cls in _subclasses(child)]


@cache
def _import_plugins() -> None:
    for plugin in entry_points(group=PLUGINS):
        plugin.load()
