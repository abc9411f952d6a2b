"""Every field of every config is explained, with its type and value."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from splitfg_lab.experiments import EXPERIMENTS
from splitfg_lab.runs.config import dataclass_members, field_types
from splitfg_lab.runs.fields import FieldHelp, explain, field_help

SHIPPED = [e for e in EXPERIMENTS if e.runner.startswith("splitfg_lab.")]


def config_classes(classes: set[type]) -> set[type]:
    """Config classes, and all classes that their fields may hold; a route may hold a route."""
    fields = [annotation for cls in classes for annotation in field_types(cls).values()]
    found = classes.union(*(dataclass_members(annotation).values() for annotation in fields))
    return classes if found == classes else config_classes(found)


CLASSES = config_classes({type(p.config) for e in SHIPPED for p in e.presets})


@pytest.mark.parametrize("cls", sorted(CLASSES, key=lambda c: f"{c.__module__}.{c.__name__}"), ids=lambda c: c.__name__)
def test_every_field_is_explained(cls: type) -> None:
    texts = field_help(cls)
    assert [name for name in field_types(cls) if not texts.get(name)] == []


@dataclass(frozen=True)
class Base:
    """A base.

    Args:
        size: Of the ``base``.
    """

    size: int = 1


@dataclass(frozen=True)
class Inner:
    """No section."""

    depth: int = 2


@dataclass(frozen=True)
class Outer(Base):
    """A config.

    Attributes:
        inner: Two lines
            of text: with a colon.
        rate: One line.

    Example:
        other: not a field.
    """

    inner: Inner = Inner()
    rate: float | None = None


def test_sections_of_bases_and_long_entries_are_read() -> None:
    assert list(explain(Outer())) == [
        FieldHelp("size", 1, "int", "Of the base."),
        FieldHelp("inner", "Inner", "Inner", "Two lines of text: with a colon."),
        FieldHelp("inner.depth", 2, "int", ""),
        FieldHelp("rate", None, "float | none", "One line."),
    ]
