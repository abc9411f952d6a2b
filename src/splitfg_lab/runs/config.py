"""Configs: frozen dataclasses to JSON and back, validated field by field against their annotations.

A config may hold ints, floats, bools, strings, ``None``, literals, tuples, string-keyed dicts, other dataclasses and
unions of these. A nested dataclass carries its class name in JSON, ``{"type": "AdamW", "lr": 0.001}``, which
distinguishes the members of a union of dataclasses.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, TypeVar, cast

from splitfg.errors import SplitError
from splitfg.recipes import Recipe, recipes
from splitfg_lab.runs._errors import ConfigError
from splitfg_lab.runs.names import unknown

T = TypeVar("T")

TAG: Final = "type"
"""The JSON key that names the class of a nested dataclass."""

_INVALID: Final = object()
"""Returned by decoders that found a problem."""


def to_json(config: Any) -> dict[str, Any]:
    """Convert a config to JSON values: dataclasses become objects, tuples become arrays."""
    cls: type = type(config)
    return {name: _encode(getattr(config, name)) for name in field_types(cls)}


def from_json(cls: type[T], data: Any) -> T:
    """Convert JSON values to a config of class ``cls``; missing fields take their defaults.

    Raises:
        ConfigError: Fields are unknown, missing or of the wrong type; the error lists all of them.
    """
    problems: list[str] = []
    config = _decode_dataclass(cls, data, "", problems)
    if problems:
        raise ConfigError(problems)
    return cast(T, config)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A field in which two configs differ; a value is JSON, or ``None`` on a side without the field."""

    field: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        """``optimizer.rho: 0.1 -> 0.3``."""
        return f"{self.field}: {self.old or '(absent)'} -> {self.new or '(absent)'}"


def differences(old: Any, new: Any) -> tuple[Difference, ...]:
    """List the fields in which two configs differ, in the order of their fields."""
    return flat_differences(to_json(old), to_json(new))


def flat_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Difference, ...]:
    """List the fields in which the JSON of two configs differs."""
    before, after = dict(flatten(old)), dict(flatten(new))
    names = dict.fromkeys([*before, *after])
    return tuple(
        Difference(name, *(json.dumps(side[name]) if name in side else None for side in (before, after)))
        for name in names
        # compared as values, not as text: a float field may hold an int
        if name not in before or name not in after or before[name] != after[name]
    )


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and values of all fields in a config's JSON."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@functools.cache
def field_types(cls: type) -> Mapping[str, Any]:
    """Return the fields of a dataclass with their resolved annotations."""
    hints = typing.get_type_hints(cls)
    if TAG in hints:
        raise TypeError(f"{cls.__name__}.{TAG}: no field can have this name, it holds the class in JSON")
    return types.MappingProxyType({f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init})


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def dataclass_members(annotation: Any) -> dict[str, type]:
    """Return the dataclasses that an annotation allows, by their name in JSON.

    A recipe base allows every recipe below it, those of plugins included.
    """
    found: dict[str, type] = {}
    for member in members(annotation):
        if isinstance(member, type) and issubclass(member, Recipe):
            found.update(recipes(member))
        elif isinstance(member, type) and dataclasses.is_dataclass(member):
            found[member.__name__] = member
    return found


def format_annotation(annotation: Any) -> str:
    """Write an annotation for users: ``int | none``, ``'relu' | 'gelu'``, ``tuple[int, ...]``."""
    if annotation is types.NoneType:
        return "none"
    if annotation is Ellipsis:
        return "..."
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(format_annotation(a) for a in arguments)
    if origin is Literal:
        return " | ".join(repr(a) for a in arguments)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(format_annotation(a) for a in arguments)}]"
    return getattr(annotation, "__name__", str(annotation))


def is_finite_number(value: Any) -> bool:
    """Return whether a JSON value is a finite number."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {TAG: type(value).__name__} | to_json(value)
    if isinstance(value, tuple):
        return [_encode(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _encode(v) for k, v in value.items()}
    return value


def _decode(annotation: Any, value: Any, at: str, problems: list[str]) -> Any:
    if annotation in _SCALARS:
        return _decode_scalar(annotation, value, at, problems)
    if len(members(annotation)) > 1:
        return _decode_union(annotation, value, at, problems)
    if annotation is Any:
        return value
    if classes := dataclass_members(annotation):
        if isinstance(value, Mapping):
            return _decode_tagged(classes, value, at, problems)
        return _reject(annotation, value, at, problems)
    origin = typing.get_origin(annotation)
    if origin is tuple:
        return _decode_tuple(annotation, value, at, problems)
    if origin is dict:
        return _decode_dict(annotation, value, at, problems)
    return _decode_scalar(annotation, value, at, problems)


def _decode_union(annotation: Any, value: Any, at: str, problems: list[str]) -> Any:
    classes = dataclass_members(annotation)
    if isinstance(value, Mapping) and classes:
        return _decode_tagged(classes, value, at, problems)
    for member in members(annotation):
        if member in _SCALARS and not _SCALARS[member](value):
            continue
        attempt: list[str] = []
        decoded = _decode(member, value, at, attempt)
        if not attempt:
            return decoded
    return _reject(annotation, value, at, problems)


def _decode_tagged(classes: dict[str, type], value: Mapping[str, Any], at: str, problems: list[str]) -> Any:
    name = value.get(TAG, next(iter(classes)) if len(classes) == 1 else None)
    if name not in classes:
        problems.append(f"{_join(at, TAG)}: {unknown(str(name), classes, kind='class')}")
        return _INVALID
    return _decode_dataclass(classes[name], value, at, problems)


def _decode_dataclass(cls: type, value: Any, at: str, problems: list[str]) -> Any:
    if not isinstance(value, Mapping):
        return _reject(cls, value, at, problems)
    known = field_types(cls)
    found = len(problems)
    if at and value.get(TAG, cls.__name__) != cls.__name__:
        problems.append(f"{at}.{TAG}: expected {cls.__name__}, got {value[TAG]!r}")
    given = {k: v for k, v in value.items() if not (at and k == TAG)}
    problems += [f"{_join(at, k)}: {unknown(str(k), known, kind='field')}" for k in given if k not in known]
    problems += [
        f"{_join(at, k)}: missing, expected {format_annotation(known[k])}" for k in _required(cls) if k not in given
    ]
    fields = {k: _decode(known[k], v, _join(at, k), problems) for k, v in given.items() if k in known}
    return _INVALID if len(problems) > found else _construct(cls, fields, at, problems)


def _construct(cls: type, fields: dict[str, Any], at: str, problems: list[str]) -> Any:
    """Build the dataclass, and list the errors of its ``__post_init__`` with the others."""
    try:
        return cls(**fields)
    except ValueError as error:
        found = error.problems if isinstance(error, SplitError) else (str(error),)
        problems += [f"{at}: {problem}" if at else problem for problem in found]
        return _INVALID


def _decode_tuple(annotation: Any, value: Any, at: str, problems: list[str]) -> Any:
    arguments = typing.get_args(annotation)
    if not isinstance(value, list | tuple):
        return _reject(annotation, value, at, problems)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        problems.append(f"{at}: expected {len(arguments)} values ({format_annotation(annotation)}), got {len(value)}")
        return _INVALID
    return tuple(_decode(a, v, f"{at}[{i}]", problems) for i, (a, v) in enumerate(zip(arguments, value, strict=True)))


def _decode_dict(annotation: Any, value: Any, at: str, problems: list[str]) -> Any:
    _, inner = typing.get_args(annotation)
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        return _reject(annotation, value, at, problems)
    return {k: _decode(inner, v, _join(at, k), problems) for k, v in value.items()}


def _decode_scalar(annotation: Any, value: Any, at: str, problems: list[str]) -> Any:
    if typing.get_origin(annotation) is Literal:
        choices = {(type(c), c): c for c in typing.get_args(annotation)}
        accepted = _hashable(value) and (type(value), value) in choices
        return value if accepted else _reject(annotation, value, at, problems)
    accept = _SCALARS.get(annotation)
    if accept is None:
        raise TypeError(f"{at}: configs cannot hold {format_annotation(annotation)}; see splitfg_lab.runs.config")
    if not accept(value):
        return _reject(annotation, value, at, problems)
    return float(value) if annotation is float else value


_SCALARS: Final[dict[Any, Callable[[Any], bool]]] = {
    int: lambda v: isinstance(v, int) and not isinstance(v, bool),
    float: is_finite_number,
    bool: lambda v: isinstance(v, bool),
    str: lambda v: isinstance(v, str),
    types.NoneType: lambda v: v is None,
}


def _reject(annotation: Any, value: Any, at: str, problems: list[str]) -> object:
    got = json.dumps(value, default=repr)
    got = got if len(got) <= 60 else f"{got[:57]}..."
    problems.append(f"{at or 'config'}: expected {format_annotation(annotation)}, got {got}")
    return _INVALID


def _required(cls: type) -> list[str]:
    return [
        f.name
        for f in dataclasses.fields(cls)
        if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]


def _hashable(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | None)


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
