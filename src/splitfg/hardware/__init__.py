"""Trunks on devices that can only add numbers to tensors, read tensors, and run.

A device is described by three things. Its :class:`Wiring` lists the layers (``nn.Linear``, ``nn.Conv2d``: matrices that
the device holds) and the functions between them (ReLU, sums, norms, reshapes). ``write(params)`` stores weights.
``run(inputs, add, read)`` runs a batch forward with numbers added to named tensors, and returns named tensors.
:class:`Device` is the protocol; ONNX Runtime (:mod:`splitfg.onnx`), a program behind a pipe (:class:`PipeDevice`) and a
simulated analog chip (:class:`AnalogDevice`) implement it.

:class:`DeviceTrunk` makes a trunk of it. Three methods train it, none with a derivative of the device:

- :class:`~splitfg.LearnedFeedback`: one run with readings and one with noise. For a layer z = W a + b, the response dz
  to noise da teaches a map M ≈ W; then δ_a = Mᵀ δ_z carries u from layer to layer. Functions between layers are pulled
  back in closed form, from what was read: splitfg computes them again from the readings of the layers, so that only
  layers need to be read. Layers above the last map are exact, and so is the head. Two inferences a row.
- :class:`ActivityPerturbation`: every row has its own noise at the outputs of layers, K copies of the batch in one run,
  one score for every row. 2K + 1 inferences a row; nothing but h and the layers' inputs is read.
- ``SplitFG(engine=CentralDifference())``: perturbed weights, 2K + 1 inferences a row; anything can be trained.

:attr:`DeviceTrunk.counts` counts runs, inferences and seconds, so that comparisons are by what a device charges for.
"""

from splitfg.hardware._activity import ActivityPerturbation
from splitfg.hardware._device import Counts, Device, LayerDevice
from splitfg.hardware._pipe import PipeDevice, serve
from splitfg.hardware._simulator import AnalogDevice
from splitfg.hardware._trunk import DeviceTrunk, Twin
from splitfg.hardware._wiring import Node, Ref, Wiring, function, layer

__all__ = [
    "ActivityPerturbation",
    "AnalogDevice",
    "Counts",
    "Device",
    "DeviceTrunk",
    "LayerDevice",
    "Node",
    "PipeDevice",
    "Ref",
    "Twin",
    "Wiring",
    "function",
    "layer",
    "serve",
]
