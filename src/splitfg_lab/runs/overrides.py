"""Overrides from the command line, ``optimizer.rho=0.1``, parsed by the annotation of their field."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeVar

from splitfg_lab.runs._errors import ConfigError
from splitfg_lab.runs.config import (
    TAG,
    dataclass_members,
    field_types,
    format_annotation,
    from_json,
    members,
    to_json,
)
from splitfg_lab.runs.names import unknown
from splitfg_lab.runs.storage import parse_json

T = TypeVar("T")


def override(config: T, settings: Sequence[str]) -> T:
    """Return a copy of ``config`` with fields set by ``FIELD=VALUE`` texts, applied in order.

    Write values without quotes: ``K=8``, ``clip=none``, ``widths=64,32``. For a field that holds a dataclass, write the
    class name (``optimizer=Sgd``, with its defaults) or a JSON object.

    Raises:
        ConfigError: Settings cannot be parsed, name no field, or have the wrong type; the error lists all of them.
    """
    data = to_json(config)
    problems: list[str] = []
    for setting in settings:
        path, equals, text = (part.strip() for part in setting.partition("="))
        if not equals or not path:
            problems.append(f"{setting!r}: expected FIELD=VALUE, as in {_example(setting, data)}=...")
            continue
        _assign(type(config), data, path, text, problems)
    try:
        changed = from_json(type(config), data)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems, what="the overrides")
    return changed


def _example(setting: str, data: dict[str, Any]) -> str:
    """Return the field that a setting without a value names, or the first field."""
    return setting if setting in data else next(iter(data), "field")


def _assign(cls: type, data: dict[str, Any], path: str, text: str, problems: list[str]) -> None:
    *parents, last = path.split(".")
    walked = ""
    for name in parents:
        annotation = _annotation(cls, name, path, problems)
        if annotation is None:
            return
        walked = f"{walked}.{name}" if walked else name
        inner = data.get(name)
        classes = dataclass_members(annotation)
        if not isinstance(inner, dict) or not classes:
            problems.append(f"{path}: {walked} has no fields; it is {format_annotation(annotation)}, now {inner!r}")
            return
        cls, data = classes.get(inner.get(TAG, ""), next(iter(classes.values()))), inner
    annotation = _annotation(cls, last, path, problems)
    if annotation is not None:
        _set(annotation, data, last, path, text, problems)


def _annotation(cls: type, name: str, path: str, problems: list[str]) -> Any:
    known = field_types(cls)
    if name not in known:
        problems.append(f"{path}: {unknown(name, known, kind=f'field of {cls.__name__}')}")
    return known.get(name)


def _set(annotation: Any, data: dict[str, Any], name: str, path: str, text: str, problems: list[str]) -> None:
    try:
        data[name] = _parse(annotation, text)
    except ValueError:
        problems.append(f"{path}: expected {format_annotation(annotation)}, got {text!r}")


def _parse(annotation: Any, text: str) -> Any:
    """Parse text as the JSON value of an annotation.

    Raises:
        ValueError: The text is not such a value.
    """
    options = members(annotation)
    if len(options) > 1:
        return _parse_union(options, text)
    if dataclass_members(annotation):
        return parse_json(text) if text.startswith("{") else {TAG: text}
    origin = typing.get_origin(annotation)
    if origin is tuple:
        return _parse_tuple(annotation, text)
    if origin is Literal:
        return _parse_literal(typing.get_args(annotation), text)
    parse = _PARSERS.get(annotation, parse_json)
    return parse(text)


def _parse_union(options: tuple[Any, ...], text: str) -> Any:
    # any text can be a string or, misspelt, the name of a class: try these last
    for option in sorted(options, key=lambda o: 2 if o is str else bool(dataclass_members(o))):
        try:
            return _parse(option, text)
        except ValueError:
            continue
    raise ValueError(text)


def _parse_tuple(annotation: Any, text: str) -> list[Any]:
    if text.startswith("["):
        values = parse_json(text)
        if not isinstance(values, list):
            raise ValueError(text)
        return values
    parts = [part.strip() for part in text.strip("()").split(",") if part.strip()]
    arguments = typing.get_args(annotation)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = (arguments[0],) * len(parts)
    return [_parse(a, part) for a, part in zip(arguments, parts, strict=True)]


def _parse_literal(choices: tuple[Any, ...], text: str) -> Any:
    for choice in choices:
        if str(choice).lower() == text.lower():
            return choice
    raise ValueError(text)


def _parse_bool(text: str) -> bool:
    return bool(_parse_literal((True, False), text))


def _parse_none(text: str) -> None:
    if text.lower() != "none":
        raise ValueError(text)


_PARSERS: Final[dict[Any, Callable[[str], Any]]] = {
    int: int,
    float: float,
    bool: _parse_bool,
    str: str,
    types.NoneType: _parse_none,
}
