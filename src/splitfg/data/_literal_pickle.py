"""Reads the pickles in CIFAR's python archives without unpickling: opcodes are interpreted as literals, nothing runs.

The official batches were written by Python 2 with protocol 2: a dict of strings, lists of integers and one uint8
array. Only the opcodes such a file needs are understood. The three names numpy writes into it are recognised as text;
no name is ever looked up, no module imported, no object built but dicts, lists, tuples, bytes, numbers and
:class:`Array`. Anything else is refused.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from splitfg.data.errors import DataError


@dataclass
class Array:
    """A C-ordered uint8 array as it stands in the file."""

    shape: tuple[int, ...] = ()
    data: bytes = b""


class _Dtype:
    """numpy's description of unsigned bytes."""


_RECONSTRUCT: Final = "numpy.core.multiarray _reconstruct"
_NDARRAY: Final = "numpy ndarray"
_DTYPE: Final = "numpy dtype"


@dataclass(frozen=True)
class _Name:
    """A name in the file: compared, never looked up."""

    text: str


def read_literals(data: bytes) -> Any:
    """The value a literal pickle describes; byte strings come back as ``bytes``.

    Raises:
        DataError: The bytes are no pickle, or use anything beyond literals and uint8 arrays.
    """
    try:
        machine = _Machine()
        for opcode, argument, _ in pickletools.genops(data):
            machine.step(opcode.name, argument)
        return machine.result()
    except DataError:
        raise
    except (
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DataError(f"not a batch of CIFAR's python version: {error}") from error


class _Machine:
    """A stack (set aside at every mark), a memo and the handful of opcodes that build literals."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.set_aside: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.finished = False

    def step(self, name: str, argument: Any) -> None:
        action = _ACTIONS.get(name)
        if action is None:
            raise DataError(f"not a batch of CIFAR's python version: it uses the pickle opcode {name}, refused")
        action(self, argument)

    def result(self) -> Any:
        if not self.finished or self.set_aside or len(self.stack) != 1:
            raise ValueError("the pickle is incomplete")
        return self.stack[0]

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


def _push_bytes(machine: _Machine, argument: str) -> None:
    machine.stack.append(argument.encode("latin-1"))


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


def _global(machine: _Machine, argument: str) -> None:
    if argument not in (_RECONSTRUCT, _NDARRAY, _DTYPE):
        raise DataError(f"not a batch of CIFAR's python version: it names {argument!r}, refused")
    machine.stack.append(_Name(argument))


def _reduce(machine: _Machine, _argument: Any) -> None:
    arguments = machine.pop(tuple)
    name = machine.pop(_Name)
    if name.text == _RECONSTRUCT and arguments == (_Name(_NDARRAY), (0,), b"b"):
        machine.stack.append(Array())
    elif name.text == _DTYPE and arguments == (b"u1", 0, 1):
        machine.stack.append(_Dtype())
    else:
        raise ValueError(f"{name.text} with arguments other than those of a uint8 array")


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


_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _proto,
    "MARK": lambda machine, _: machine.mark(),
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "BININT": _push,
    "BININT1": _push,
    "BININT2": _push,
    "SHORT_BINSTRING": _push_bytes,
    "BINSTRING": _push_bytes,
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "TUPLE": _tuple_of_group,
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "BINGET": _get,
    "LONG_BINGET": _get,
    "GLOBAL": _global,
    "REDUCE": _reduce,
    "BUILD": _build,
    "STOP": _stop,
}
