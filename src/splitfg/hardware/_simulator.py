"""A simulated analog device: noisy layers, drifting weights, coarse readings, inexact writes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError, raise_if
from splitfg.hardware._wiring import Node, Wiring
from splitfg.types import Params


class AnalogDevice:
    """Simulates an analog device with the layers of a wiring, to train on before there is a device.

    A weight w is written as w' = w + write_error · rms(W) · n₁ and acts as g w', where the gain g starts at one and
    moves by drift · n₂ with every run. A layer's output z has noise · rms(z) · n₃ added inside the device, so later
    layers read it. A reading r has read_noise · rms(r) · n₄ added and is rounded to ``bits`` over the range of the
    tensor. All n are standard normal.

    Args:
        wiring: Its layers; copied. Parameters must belong to layers.
        noise: Of every layer's output, relative.
        bits: Of a reading; ``None`` for exact readings.
        read_noise: Of a reading, relative.
        coarse: Names of the tensors whose readings are rounded and noisy; ``None`` for all.
        drift: Of every weight's gain, per run.
        write_error: Of every written weight, relative.
        seed: Of all of these.

    Raises:
        SplitError: If a setting is negative, or bits < 1.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from splitfg.hardware import AnalogDevice, Wiring
        >>> device = AnalogDevice(Wiring.of(nn.Sequential(nn.Linear(4, 8), nn.ReLU())), bits=6, noise=0.05)
        >>> device.run((torch.randn(2, 4),), {}, ["1"])["1"].shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        wiring: Wiring,
        *,
        noise: float = 0.0,
        bits: int | None = None,
        read_noise: float = 0.0,
        coarse: Collection[str] | None = None,
        drift: float = 0.0,
        write_error: float = 0.0,
        seed: int = 0,
    ) -> None:
        settings = {"noise": noise, "read_noise": read_noise, "drift": drift, "write_error": write_error}
        found = [f"{name} must not be negative, got {value}" for name, value in settings.items() if not value >= 0]
        found += [f"bits must be at least 1, got {bits}"] if bits is not None and bits < 1 else []
        loose = [n.name for n in wiring.nodes if any(isinstance(a, nn.Parameter) for a in n.args)]
        found += [f"{name} uses a parameter that belongs to no layer: put it into a module" for name in loose]
        strange = sorted(set(coarse or ()) - {node.writes for node in wiring.nodes})
        found += [f"coarse names {name!r}, which no node writes" for name in strange]
        raise_if(found)
        self.read_noise, self.coarse = read_noise, None if coarse is None else frozenset(coarse)
        self.noise, self.bits, self.drift, self.write_error = noise, bits, drift, write_error
        self._wiring = copy.deepcopy(wiring)
        self._weights = {
            f"{node.name}.{name}": p
            for node in self._wiring.nodes
            if node.module is not None
            for name, p in node.module.named_parameters()
        }
        self._generator = torch.Generator().manual_seed(seed)
        self._gains = {name: torch.ones_like(p) for name, p in self._weights.items()}
        self._written = {name: p.detach().clone() for name, p in self._weights.items()}

    def write(self, params: Params) -> None:
        """Store weights, with an error each."""
        unknown = sorted(set(params) - set(self._written))
        raise_if([f"the device has no weight named {', '.join(unknown)}: use the wiring's names"] if unknown else [])
        for name, p in params.items():
            if self._written[name].shape != p.shape:
                raise SplitError([f"{name} has shape {tuple(p.shape)}, the device {tuple(self._written[name].shape)}"])
            self._written[name] = p + self._normal(p, self.write_error)

    def run(self, inputs: tuple[Any, ...], add: Mapping[str, Tensor], read: Sequence[str]) -> dict[str, Tensor]:
        """Run one batch through the noisy layers."""
        with torch.no_grad():
            self._age()
            values = self._wiring.compute([torch.as_tensor(i) for i in inputs], add, self._noisy)
            return {name: self._read(name, values[name]) for name in read}

    def run_layers(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run noisy layers by themselves."""
        with torch.no_grad():
            self._age()
            nodes = {node.writes: node for node in self._wiring.nodes if node.writes in given}
            outputs = {name: node.module(given[name]) for name, node in nodes.items() if node.module is not None}
            return {name: self._read(name, self._noisy(nodes[name], out)) for name, out in outputs.items()}

    def _age(self) -> None:
        """Let the gains drift by one run."""
        for name, p in self._weights.items():
            if self.drift:
                self._gains[name] += self.drift * torch.randn(p.shape, dtype=p.dtype, generator=self._generator)
            p.copy_(self._written[name] * self._gains[name])

    def _noisy(self, node: Node, out: Tensor) -> Tensor:
        return out + self._normal(out, self.noise) if node.measured else out

    def _normal(self, like: Tensor, size: float) -> Tensor:
        """Return normal noise of this size, relative to the root mean square of ``like``."""
        if not size:
            return torch.zeros(())
        return size * like.square().mean().sqrt() * torch.randn(like.shape, dtype=like.dtype, generator=self._generator)

    def _read(self, name: str, value: Tensor) -> Tensor:
        if self.coarse is not None and name not in self.coarse:
            return value
        value = value + self._normal(value, self.read_noise)
        if self.bits is None:
            return value
        low, high = value.amin(), value.amax()
        width = ((high - low) / (2**self.bits - 1)).clamp_min(torch.finfo(value.dtype).tiny)
        read: Tensor = low + width * ((value - low) / width).round()
        return read
