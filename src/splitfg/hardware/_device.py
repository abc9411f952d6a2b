"""The protocol of devices that run forward only."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from splitfg.types import Params


@runtime_checkable
class Device(Protocol):
    """A device that stores weights, runs forward, adds numbers to its tensors and reads them: two functions.

    With the third, the :class:`~splitfg.hardware.Wiring` that describes it, a
    :class:`~splitfg.hardware.DeviceTrunk` trains it.
    """

    def write(self, params: Params) -> None:
        """Store the weights, by name; called before a run if they have changed."""

    def run(self, inputs: tuple[Any, ...], add: Mapping[str, Tensor], read: Sequence[str]) -> Mapping[str, Any]:
        """Run one batch forward.

        Args:
            inputs: Inputs; the first dimension numbers rows.
            add: Numbers to add to tensors, by name; a row for every row of the inputs, broadcast to the tensor.
            read: Names of the tensors to return, as they are after the addition.

        Returns:
            Tensors or arrays by name.
        """


@runtime_checkable
class LayerDevice(Device, Protocol):
    """A device that can also run single layers by themselves, which makes measurements of their responses cheaper.

    :class:`~splitfg.feedback.LayerDifference` needs it.
    """

    def run_layers(self, given: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Run layers by themselves.

        Args:
            given: Inputs of layers, by the name of the layer's output tensor; each has its own number of rows.

        Returns:
            The layers' outputs, under the same names.
        """


@dataclass
class Counts:
    """Runs, inferences, writes and seconds of a device so far.

    Attributes:
        runs: Calls of :meth:`Device.run`.
        inferences: Rows that were run forward, over all calls.
        writes: Calls of :meth:`Device.write`.
        seconds: Seconds inside the device.
    """

    runs: int = 0
    inferences: int = 0
    writes: int = 0
    seconds: float = 0.0

    def timed_run(
        self, device: Device, inputs: tuple[Any, ...], add: Mapping[str, Tensor], read: Sequence[str]
    ) -> Mapping[str, Any]:
        """Run the device and count it."""
        with self._timed(len(inputs[0])):
            return device.run(inputs, add, read)

    def timed_layers(self, device: LayerDevice, given: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Run layers by themselves and count as many inferences as the one with most rows has."""
        with self._timed(max(map(len, given.values()))):
            return device.run_layers(given)

    def timed_write(self, device: Device, params: Params) -> None:
        """Write to the device and count it."""
        start = time.perf_counter()
        device.write(params)
        self.seconds += time.perf_counter() - start
        self.writes += 1

    @contextmanager
    def _timed(self, rows: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self.runs += 1
        self.inferences += rows
