"""Nested state to JSON values and a flat dict of tensors, and back.

JSON cannot express tensors, tuples, infinite floats and dicts with integer keys (optimizers have those). An object
whose only key starts with ``$`` represents them: ``{"$tensor": "00003:learner.weight"}``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class StateEncoder:
    """Turn nested state into JSON values.

    Attributes:
        tensors: The tensors of the state: detached, on the CPU, contiguous, sharing no memory.
        problems: Values that have no JSON form, and where they are.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.problems: list[str] = []
        self._storages: set[int] = set()

    def encode(self, value: Any, at: str = "") -> Any:
        """Return the JSON value for ``value``, which is at the dotted path ``at``."""
        if isinstance(value, Tensor):
            return self._encode_tensor(value, at)
        if isinstance(value, Mapping):
            return self._encode_mapping(value, at)
        if isinstance(value, list | tuple):
            values = [self.encode(v, f"{at}[{i}]") for i, v in enumerate(value)]
            return {"$tuple": values} if isinstance(value, tuple) else values
        if type(value) is float and not math.isfinite(value):
            return {"$float": str(value)}
        if type(value) not in (int, float, str, bool, type(None)):
            self.problems.append(f"{at}: {type(value).__module__}.{type(value).__qualname__}")
        return value

    def _encode_mapping(self, value: Mapping[Any, Any], at: str) -> Any:
        items = [[k, self.encode(v, f"{at}.{k}" if at else str(k))] for k, v in value.items()]
        self.problems += [f"{at}: a key {k!r}" for k, _ in items if type(k) not in (str, int)]
        plain = all(isinstance(k, str) and not k.startswith("$") for k, _ in items)
        return dict(items) if plain else {"$dict": items}

    def _encode_tensor(self, value: Tensor, at: str) -> Any:
        if value.layout is not torch.strided or value.is_quantized:
            self.problems.append(f"{at}: a tensor that is not dense")
            return None
        tensor = value.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        # safetensors rejects tensors that share memory, as tied tables and views do
        name = f"{len(self.tensors):05d}:{at}"
        self.tensors[name] = tensor.clone() if storage in self._storages else tensor
        self._storages.add(storage)
        return {"$tensor": name}


def decode_state(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Invert :meth:`StateEncoder.encode`.

    Raises:
        KeyError: A tensor is missing.
        TypeError, ValueError: ``value`` is not the result of an encoder.
    """
    if isinstance(value, list):
        return [decode_state(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$tuple": values}:
            return tuple(decode_state(v, tensors) for v in values)
        case {"$float": text}:
            return float(text)
        case {"$dict": items}:
            return {k: decode_state(v, tensors) for k, v in items}
    return {k: decode_state(v, tensors) for k, v in value.items()}


def non_finite(value: Any) -> set[str]:
    """Return the dotted paths of floating-point tensors in nested state that hold a NaN or an infinity."""
    found = dict(_tensors(value, ""))
    floating = {at: tensor for at, tensor in found.items() if tensor.is_floating_point() and tensor.numel()}
    # all results are read at once: reading each would make the CPU wait for the GPU as many times
    by_device: dict[torch.device, list[str]] = defaultdict(list)
    for at, tensor in floating.items():
        by_device[tensor.device].append(at)
    bad: set[str] = set()
    for paths in by_device.values():
        fine = torch.stack([torch.isfinite(floating[at]).all() for at in paths]).tolist()
        bad |= {at for at, ok in zip(paths, fine, strict=True) if not ok}
    return bad


def _tensors(value: Any, at: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield at, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{at}.{key}" if at else str(key))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _tensors(inner, f"{at}[{i}]")
