"""Reads the pickles in CIFAR's python archives without unpickling: opcodes are interpreted as literals, nothing runs.

The official batches were written by Python 2 with protocol 2: a dict of strings, lists of integers and one uint8
array. Only the opcodes such a file needs are understood, and any other is refused before its argument is even read.
The three names numpy writes into the file are compared as text; no name is ever looked up, no module imported, no
object built but dicts, lists, tuples, bytes, numbers and :class:`Array`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from splitfg.errors import DataError


@dataclass
class Array:
    """A C-ordered uint8 array as it stands in the file."""

    shape: tuple[int, ...] = ()
    data: bytes = b""


class _Dtype:
    """numpy's description of unsigned bytes."""


@dataclass(frozen=True)
class _Name:
    """A name in the file: compared, never looked up."""

    module: bytes
    name: bytes


_RECONSTRUCT: Final = _Name(b"numpy.core.multiarray", b"_reconstruct")
_NDARRAY: Final = _Name(b"numpy", b"ndarray")
_DTYPE: Final = _Name(b"numpy", b"dtype")


def read_literals(data: bytes) -> dict[bytes, Any]:
    """The dict a literal pickle describes; byte strings come back as ``bytes``.

    Raises:
        DataError: The bytes are no pickle, or use anything beyond literals and uint8 arrays.
    """
    try:
        reader, machine = _Reader(data), _Machine()
        while not machine.finished:
            code = reader.take(1)
            if code not in _OPCODES:
                raise ValueError(f"it uses the pickle opcode {code!r}, refused")
            read_argument, act = _OPCODES[code]
            act(machine, read_argument(reader))
        return machine.result()
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise DataError(f"not a batch of CIFAR's python version: {error}") from error


class _Reader:
    """Walks along the bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) != count:
            raise ValueError("the pickle is truncated")
        self.at += count
        return found

    def line(self) -> bytes:
        return self.take(self.data.index(b"\n", self.at) + 1 - self.at)[:-1]


def _no_argument(_reader: _Reader) -> None:
    return None


def _unsigned(size: int) -> Callable[[_Reader], int]:
    return lambda reader: int.from_bytes(reader.take(size), "little")


def _signed(reader: _Reader) -> int:
    return int.from_bytes(reader.take(4), "little", signed=True)


def _string(size: int) -> Callable[[_Reader], bytes]:
    return lambda reader: reader.take(int.from_bytes(reader.take(size), "little"))


def _name(reader: _Reader) -> _Name:
    return _Name(reader.line(), reader.line())


class _Machine:
    """A stack (set aside at every mark), a memo and the handful of opcodes that build literals."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.set_aside: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.finished = False

    def result(self) -> dict[bytes, Any]:
        if self.set_aside or len(self.stack) != 1:
            raise ValueError("the pickle is incomplete")
        value: dict[bytes, Any] = self.pop(dict)
        return value

    def pop(self, kind: type[Any]) -> Any:
        value = self.stack.pop()
        if not isinstance(value, kind):
            raise TypeError(f"{type(value).__name__} where {kind.__name__} belongs")
        return value

    def mark(self) -> None:
        self.set_aside.append(self.stack)
        self.stack = []

    def pop_group(self) -> list[Any]:
        group = self.stack
        self.stack = self.set_aside.pop()
        return group

    def peek(self, kind: type[Any]) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise TypeError(f"{type(self.stack[-1]).__name__} where {kind.__name__} belongs")
        return self.stack[-1]


def _push(machine: _Machine, argument: Any) -> None:
    machine.stack.append(argument)


def _proto(_machine: _Machine, argument: int) -> None:
    if argument != 2:
        raise ValueError(f"pickle protocol {argument}; the official files use 2")


def _put(machine: _Machine, argument: int) -> None:
    machine.memo[argument] = machine.stack[-1]


def _get(machine: _Machine, argument: int) -> None:
    machine.stack.append(machine.memo[argument])


def _tuple(size: int) -> Callable[[_Machine, Any], None]:
    def action(machine: _Machine, _argument: Any) -> None:
        if len(machine.stack) < size:
            raise IndexError("the stack is empty")
        items = tuple(machine.stack[-size:])
        del machine.stack[-size:]
        machine.stack.append(items)

    return action


def _tuple_of_group(machine: _Machine, _argument: Any) -> None:
    group = tuple(machine.pop_group())
    machine.stack.append(group)


def _append(machine: _Machine, _argument: Any) -> None:
    value = machine.stack.pop()
    machine.peek(list).append(value)


def _appends(machine: _Machine, _argument: Any) -> None:
    group = machine.pop_group()
    machine.peek(list).extend(group)


def _set_item(machine: _Machine, _argument: Any) -> None:
    value = machine.stack.pop()
    key = machine.pop(bytes)
    machine.peek(dict)[key] = value


def _set_items(machine: _Machine, _argument: Any) -> None:
    group = machine.pop_group()
    if len(group) % 2 or not all(isinstance(key, bytes) for key in group[::2]):
        raise TypeError("a dict needs pairs with byte-string keys")
    machine.peek(dict).update(zip(group[::2], group[1::2], strict=True))


def _global(machine: _Machine, argument: _Name) -> None:
    if argument not in (_RECONSTRUCT, _NDARRAY, _DTYPE):
        raise ValueError(f"it names {argument.module!r} {argument.name!r}, refused")
    machine.stack.append(argument)


def _reduce(machine: _Machine, _argument: Any) -> None:
    arguments = machine.pop(tuple)
    name = machine.pop(_Name)
    if name == _RECONSTRUCT and arguments == (_NDARRAY, (0,), b"b"):
        machine.stack.append(Array())
    elif name == _DTYPE and arguments == (b"u1", 0, 1):
        machine.stack.append(_Dtype())
    else:
        raise ValueError(f"{name.name!r} with arguments other than those of a uint8 array")


def _build(machine: _Machine, _argument: Any) -> None:
    state = machine.pop(tuple)
    target = machine.stack[-1]
    if isinstance(target, _Dtype):
        if state != (3, b"|", None, None, None, -1, -1, 0):
            raise ValueError("a dtype other than plain unsigned bytes")
    elif isinstance(target, Array):
        _fill(target, state)
    else:
        raise TypeError(f"state for {type(target).__name__}")


def _fill(array: Array, state: tuple[Any, ...]) -> None:
    version, shape, dtype, fortran, data = state
    if version != 1 or fortran is not False or not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
        raise ValueError("an array that is not C-ordered uint8")
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise TypeError("an array shape that is no tuple of sizes")
    if math.prod(shape) != len(data):
        raise ValueError(f"an array of shape {shape} with {len(data):,} bytes")
    array.shape, array.data = shape, data


def _stop(machine: _Machine, _argument: Any) -> None:
    machine.finished = True


def _constant(make: Callable[[], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _argument: machine.stack.append(make())


_OPCODES: dict[bytes, tuple[Callable[[_Reader], Any], Callable[[_Machine, Any], None]]] = {
    b"\x80": (_unsigned(1), _proto),
    b"(": (_no_argument, lambda machine, _: machine.mark()),
    b"N": (_no_argument, _constant(lambda: None)),
    b"\x88": (_no_argument, _constant(lambda: True)),
    b"\x89": (_no_argument, _constant(lambda: False)),
    b"K": (_unsigned(1), _push),
    b"M": (_unsigned(2), _push),
    b"J": (_signed, _push),
    b"U": (_string(1), _push),
    b"T": (_string(4), _push),
    b"}": (_no_argument, _constant(dict)),
    b"]": (_no_argument, _constant(list)),
    b")": (_no_argument, _constant(tuple)),
    b"t": (_no_argument, _tuple_of_group),
    b"\x85": (_no_argument, _tuple(1)),
    b"\x86": (_no_argument, _tuple(2)),
    b"\x87": (_no_argument, _tuple(3)),
    b"a": (_no_argument, _append),
    b"e": (_no_argument, _appends),
    b"s": (_no_argument, _set_item),
    b"u": (_no_argument, _set_items),
    b"q": (_unsigned(1), _put),
    b"r": (_unsigned(4), _put),
    b"h": (_unsigned(1), _get),
    b"j": (_unsigned(4), _get),
    b"c": (_name, _global),
    b"R": (_no_argument, _reduce),
    b"b": (_no_argument, _build),
    b".": (_no_argument, _stop),
}
