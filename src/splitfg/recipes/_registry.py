"""Recipes register themselves: every concrete subclass of a recipe base is known wherever that base is accepted."""

from __future__ import annotations

import inspect
from abc import ABC
from functools import cache
from importlib.metadata import entry_points
from typing import Any

PLUGINS = "splitfg.recipes"
"""Entry-point group of modules that define recipes; they are imported the first time that recipes are listed."""


class Recipe(ABC):  # noqa: B024 (its subclasses add the abstract methods)
    """Settings as data: a frozen dataclass that configs hold, runs record, and something is built from.

    A subclass needs no registration. It is accepted by its class name in configs, on the command line and in
    results files as soon as its module is imported; an installed package names that module as an entry point of the
    group ``splitfg.recipes``.
    """


def recipes(base: type[Any]) -> dict[str, type[Any]]:
    """Return the concrete recipes below a base, by class name.

    Args:
        base: A recipe base, such as :class:`~splitfg.recipes.MethodRecipe`.

    Raises:
        TypeError: Two of them have the same name.
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
