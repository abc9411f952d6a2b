"""A device in another process: messages over standard input and output, for any language.

A message is one line of JSON and then the bytes of its tensors, one after another, little-endian. To the process:

    {"do": "write", "tensors": [{"name": "0.weight", "dtype": "float32", "shape": [8, 4]}, ...]}
    {"do": "run", "read": ["h"], "tensors": [{"kind": "input", ...}, {"kind": "add", "name": "z", ...}]}

and back, after each: ``{"tensors": [...]}``, or ``{"error": "..."}`` without bytes.
"""

from __future__ import annotations

import ctypes
import json
import math
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, Self

import torch
from torch import Tensor

from splitfg.errors import SplitError, raise_if
from splitfg.hardware._device import Device
from splitfg.types import Params

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "int32": torch.int32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PATIENCE_S = 10.0


class PipeDevice:
    """A device behind a pipe: starts a program and sends it weights and batches; implements :class:`Device`.

    The program reads messages from standard input and answers on standard output, in the format that
    :mod:`splitfg.hardware` documents; :func:`serve` does it for a device in Python.

    Args:
        command: The program and its arguments. It runs as given, without a shell.

    Raises:
        SplitError: If it cannot be started, ends, or answers with an error.

    Example:
        >>> import sys
        >>> import torch
        >>> from torch import nn
        >>> from splitfg.hardware import PipeDevice
        >>> program = '''
        ... from torch import nn
        ... from splitfg.hardware import AnalogDevice, Wiring, serve
        ... serve(AnalogDevice(Wiring.of(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))))
        ... '''
        >>> with PipeDevice([sys.executable, "-c", program]) as device:
        ...     device.run((torch.randn(2, 4),), {}, ["1"])["1"].shape
        torch.Size([2, 8])
    """

    def __init__(self, command: Sequence[str]) -> None:
        try:
            self._process = subprocess.Popen(list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise SplitError([f"cannot start {command[0]}: {error.strerror or error}"]) from error
        self._waiting = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the program: close its input, and wait; a program that runs on for 10 seconds is killed."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):  # a program that has ended leaves bytes unsent
                    stream.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def write(self, params: Params) -> None:
        """Send the weights."""
        self._ask({"do": "write"}, [({"name": name}, p) for name, p in params.items()])

    def run(self, inputs: tuple[Any, ...], add: Mapping[str, Tensor], read: Sequence[str]) -> Params:
        """Send a batch, and return the answer."""
        sent = [({"kind": "input"}, torch.as_tensor(i)) for i in inputs]
        sent += [({"kind": "add", "name": name}, value) for name, value in add.items()]
        answer = self._ask({"do": "run", "read": list(read)}, sent)
        raise_if(
            ["the program of the device returns a tensor without a name"]
            if any("name" not in h for h, _ in answer)
            else []
        )
        return {head["name"]: tensor for head, tensor in answer}

    def _ask(self, head: dict[str, Any], tensors: Sequence[tuple[dict[str, Any], Tensor]]) -> list[Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        raise_if(_dtype_problems(t.dtype for _, t in tensors))
        # the next answer would be that of the message before
        raise_if(["an earlier message was interrupted: start the program again"] if self._waiting else [])
        self._waiting = True
        try:
            send(self._process.stdin, head, tensors)
            found, answer = receive(self._process.stdout)
        except (OSError, EOFError, ValueError) as error:
            code = self._process.poll()
            ended = f"ended with exit code {code}" if code is not None else f"does not answer as it should ({error})"
            raise SplitError([f"the program of the device {ended}: see what it printed to standard error"]) from error
        self._waiting = False
        if "error" in found:
            raise SplitError([f"the program of the device failed: {found['error']}"])
        return answer


def serve(device: Device, source: IO[bytes] | None = None, sink: IO[bytes] | None = None) -> None:
    """Answer messages with a device until the input ends: the other side of :class:`PipeDevice`.

    Args:
        device: The device.
        source: Input stream; standard input by default.
        sink: Output stream; standard output by default.
    """
    import sys

    source, sink = source or sys.stdin.buffer, sink or sys.stdout.buffer
    while True:
        try:
            head, tensors = receive(source)
        except EOFError:
            return
        try:
            answer = _answered(device, head, tensors)
            raise_if(_dtype_problems(t.dtype for _, t in answer))
        except Exception as error:  # the other side raises it
            send(sink, {"error": f"{type(error).__name__}: {error}"}, [])
        else:
            send(sink, {}, answer)


def _answered(device: Device, head: Mapping[str, Any], tensors: Sequence[Any]) -> list[tuple[dict[str, Any], Tensor]]:
    if head["do"] == "write":
        device.write({given["name"]: tensor for given, tensor in tensors})
        return []
    inputs = tuple(tensor for given, tensor in tensors if given["kind"] == "input")
    add = {given["name"]: tensor for given, tensor in tensors if given["kind"] == "add"}
    found = device.run(inputs, add, head["read"])
    return [({"name": name}, torch.as_tensor(found[name])) for name in head["read"]]


def send(sink: IO[bytes], head: Mapping[str, Any], tensors: Sequence[tuple[Mapping[str, Any], Tensor]]) -> None:
    """Write one message."""
    plain = [(given, t.detach().cpu().contiguous()) for given, t in tensors]
    described = [{**given, "dtype": _NAMES[t.dtype], "shape": list(t.shape)} for given, t in plain]
    sink.write(json.dumps({**head, "tensors": described}).encode() + b"\n")
    for _, t in plain:
        sink.write(ctypes.string_at(t.data_ptr(), t.nbytes) if t.nbytes else b"")
    sink.flush()


def receive(source: IO[bytes]) -> tuple[dict[str, Any], list[tuple[dict[str, Any], Tensor]]]:
    """Read one message.

    Raises:
        EOFError: The stream has ended.
        ValueError: The message is damaged.
    """
    line = source.readline()
    if not line:
        raise EOFError("the stream has ended")
    head: dict[str, Any] = json.loads(line)
    if not isinstance(head, dict) or not isinstance(head.get("tensors", []), list):
        raise ValueError("a message is an object in JSON with a list of tensors")
    found = []
    for given in head.get("tensors", []):
        dtype, shape = _described(given)
        count = math.prod(shape)
        data = bytearray(source.read(count * dtype.itemsize))
        if len(data) < count * dtype.itemsize:
            raise EOFError("the stream ended inside a tensor")
        values = torch.frombuffer(data, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        found.append((given, values.reshape(shape)))
    return head, found


def _described(given: Any) -> tuple[torch.dtype, list[int]]:
    """Return dtype and shape of a tensor in a message.

    Raises:
        ValueError: They are missing or wrong.
    """
    name, shape = (given.get("dtype"), given.get("shape")) if isinstance(given, dict) else (None, None)
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is unknown; it must be one of {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape!r} is no list of sizes")
    return _DTYPES[name], shape


def _dtype_problems(dtypes: Iterable[torch.dtype]) -> list[str]:
    odd = sorted({str(dtype) for dtype in dtypes if dtype not in _NAMES})
    return [f"tensors of {', '.join(odd)} cannot be sent: convert them to {' or '.join(_DTYPES)}"] if odd else []
