"""Descriptions of config fields, read from the ``Args:`` and ``Attributes:`` sections of docstrings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from splitfg_lab.runs.config import dataclass_members, field_types, format_annotation, members

_ENTRY = re.compile(r"(\w+)(?: \([^)]*\))?: (.*)")


@dataclass(frozen=True)
class FieldHelp:
    """A field of a config: its dotted name, value, type and description."""

    name: str
    value: Any
    type: str
    text: str


def explain(config: Any, prefix: str = "") -> Iterator[FieldHelp]:
    """Yield all fields of a config; the value of a field that holds a dataclass is the name of its class."""
    cls: type = type(config)
    for name, annotation in field_types(cls).items():
        value = getattr(config, name)
        nested = dataclasses.is_dataclass(value) and type(value).__name__ in dataclass_members(annotation)
        shown = type(value).__name__ if nested else value
        yield FieldHelp(f"{prefix}{name}", shown, _type(annotation), field_help(cls).get(name, ""))
        if nested:
            yield from explain(value, f"{prefix}{name}.")


@functools.cache
def field_help(cls: type) -> Mapping[str, str]:
    """Return the descriptions in the docstrings of a class and its bases, by field."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        found |= _entries(text, "Args:") | _entries(text, "Attributes:")
    return found


def _entries(text: str, heading: str) -> dict[str, str]:
    """Parse the entries of one section of a docstring."""
    _, _, section = f"{text}\n".partition(f"\n{heading}\n")
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        entry = _ENTRY.fullmatch(line.strip())
        if entry and line.startswith("    ") and not line.startswith("     "):
            name = entry[1]
            found[name] = entry[2]
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return {name: text.replace("``", "") for name, text in found.items()}


def _type(annotation: Any) -> str:
    """Write an annotation, with the names of all classes that it allows."""
    classes = dataclass_members(annotation)
    if not classes:
        return format_annotation(annotation)
    others = [format_annotation(m) for m in members(annotation) if not dataclass_members(m)]
    return " | ".join([*classes, *others])
