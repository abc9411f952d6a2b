"""Networks and methods of the benchmark of engines; as a program, the peak memory of one."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from splitfg import (
    Backprop,
    DataError,
    GradientLearner,
    LinearHead,
    Split,
    parameter_groups,
)
from splitfg.estimators import Estimator
from splitfg.hardware import LayerDevice
from splitfg.onnx import OnnxTrunk, example_model
from splitfg.onnx._tuning import METHODS as TUNED
from splitfg.types import Params
from splitfg_lab.experiments.engines._networks import load_problem
from splitfg_lab.experiments.engines.run import reference

WIDTHS = {f"mlp{width}": width for width in (64, 256, 1024, 2048)}
NETWORKS = (*WIDTHS, "rapidocr", "torchcrepe")
METHODS = ("learned_feedback", "activity", "weights", "backprop")
"""Those of ``splitfg tune`` as it runs them, and backprop in PyTorch as a reference."""
_FEATURES, _CLASSES, _K = 64, 10, 8
COPIES = 2
"""Copies of the batch that activity perturbations run in one call: one noise in both directions."""


def available(network: str) -> bool:
    """Whether the file of a network is at hand."""
    try:
        return network in WIDTHS or load_problem(network, 0) is not None
    except DataError as error:
        print(f"{network} is left out: {error}", file=sys.stderr)
        return False


def model_and_batch(network: str, rows: int) -> tuple[bytes, torch.Tensor, torch.Tensor]:
    """Return a file, and a batch for it."""
    if network not in WIDTHS:
        problem = load_problem(network, 0)
        return problem.model, problem.train.x[0][:rows], problem.train.y[:rows]
    width, generator = WIDTHS[network], torch.Generator().manual_seed(0)
    model = example_model((_FEATURES, width, width, width, _CLASSES), 0)
    return model, torch.randn(rows, _FEATURES, generator=generator), torch.arange(rows) % _CLASSES


class CpuTimed:
    """A device that adds up the CPU seconds of its calls.

    Args:
        device: The device.
    """

    def __init__(self, device: LayerDevice) -> None:
        self._device, self.seconds = device, 0.0

    def write(self, params: Params) -> None:
        """Store the weights."""
        self._timed(self._device.write, params)

    def run(self, inputs: tuple[Any, ...], add: Mapping[str, torch.Tensor], read: Sequence[str]) -> Mapping[str, Any]:
        """Run one batch forward."""
        return self._timed(self._device.run, inputs, add, read)  # type: ignore[no-any-return]

    def run_layers(self, given: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """Run layers by themselves."""
        return self._timed(self._device.run_layers, given)  # type: ignore[no-any-return]

    def _timed(self, call: Callable[..., Any], *args: Any) -> Any:
        start = time.process_time()
        found = call(*args)
        self.seconds += time.process_time() - start
        return found


class Case:
    """One network that one method trains.

    Args:
        model: The bytes of a file.
        x: A batch.
        y: Its target.
        method: One of :data:`METHODS`.
    """

    def __init__(self, model: bytes, x: torch.Tensor, y: torch.Tensor, method: str) -> None:
        self.x, self.y = x, y
        self._model, self._plain, self._trunk = model, None, OnnxTrunk(model, threads=1)
        self._device = self._trunk.device = CpuTimed(self._trunk.engine)
        trunk: nn.Module = reference(self._trunk) if method == "backprop" else self._trunk
        with torch.no_grad():
            width = trunk(self.x[:2]).shape[-1]
        split = Split(trunk, LinearHead(nn.Linear(width, int(self.y.max()) + 1)))
        optimizer = torch.optim.Adam(parameter_groups(split, lr=1e-4), fused=True)
        self._learner = GradientLearner(split, estimator(method), optimizer)
        self._generator = torch.Generator().manual_seed(0)

    def step(self) -> None:
        """Take one step."""
        self._learner.step(self.x, self.y, generator=self._generator)

    def timed_step(self) -> tuple[float, float]:
        """Return the CPU seconds of a step, and those inside the engine."""
        start, engine = time.process_time(), self._device.seconds
        self.step()
        return time.process_time() - start, self._device.seconds - engine

    def timed_inference(self) -> float:
        """Return the CPU seconds of plain inference on the same rows."""
        plain = self._plain = self._plain or inference(self._model)
        start = time.process_time()
        plain(self.x)
        return time.process_time() - start

    def multiply_adds(self) -> tuple[float, float]:
        """Return the floating-point operations of matrix products on our side of a step, and those of the engine.

        Zeros for networks with grouped convolutions, which torch's counter counts wrongly.
        """
        if any(getattr(m, "groups", 1) > 1 for m in self._trunk.modules()):
            return 0.0, 0.0
        in_place: dict[Any, Any] = {torch.ops.aten.baddbmm_: _products}  # which torch leaves out
        with FlopCounterMode(display=False, custom_mapping=in_place) as ours:
            before = self._trunk.counts.inferences
            self.step()
            rows = self._trunk.counts.inferences - before
        with torch.no_grad(), FlopCounterMode(display=False) as forward:
            reference(self._trunk)(self.x)
        return ours.get_total_flops(), forward.get_total_flops() * rows / len(self.x)

    def parameters(self) -> int:
        """Count the trained numbers of the trunk."""
        return sum(p.numel() for p in self._trunk.parameters() if p.requires_grad)

    def inferences_per_row(self) -> float:
        """Return the inferences that a step takes for every row."""
        before = self._trunk.counts.inferences
        self.step()
        return round((self._trunk.counts.inferences - before) / len(self.x), 2)

    def python_calls(self) -> int:
        """Count the calls of Python functions and of built-in ones in a step."""
        count = 0

        def counted(frame: object, event: str, arg: object) -> None:  # noqa: ARG001
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(counted)
        try:
            self.step()
        finally:
            sys.setprofile(None)
        return count


def _products(_: Sequence[int], a: Sequence[int], b: Sequence[int], **__: object) -> int:
    """Count the floating-point operations of a batch of matrix products from their shapes."""
    return 2 * a[0] * a[1] * a[2] * b[2]


def estimator(method: str) -> Estimator:
    """Return a method by its name."""
    return Backprop() if method == "backprop" else TUNED[method](_K, False)


def inference(model: bytes) -> Any:
    """Return a function that runs the file in ONNX Runtime as it is."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads, options.enable_cpu_mem_arena = 4, 1, False
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x.numpy()})


def peak(folder: Path, what: str) -> dict[str, float]:
    """Return resident memory in MiB: after the imports, and at its peak during a few steps or inferences.

    Args:
        folder: Holds the network and a batch, which are made elsewhere so that making them does not count.
        what: A method, or ``inference`` with the times that the batch is repeated, such as ``inference16``.
    """
    torch.set_num_threads(1)
    before = _resident()
    model, batch = (folder / "model.onnx").read_bytes(), np.load(folder / "batch.npz")
    x, y = torch.as_tensor(batch["x"]), torch.as_tensor(batch["y"])
    if what.startswith("inference"):
        run, x = inference(model), x.repeat(int(what.removeprefix("inference")), *[1] * (x.ndim - 1))
        for _ in range(4):
            run(x)
    else:
        case = Case(model, x, y, what)
        for _ in range(4):
            case.step()
    return {"before": before, "peak": _resident()}


def _resident() -> float:
    """Return the peak in MiB; ``ru_maxrss`` would count the process that started this one, too."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


if __name__ == "__main__":
    print(json.dumps(peak(Path(sys.argv[1]), sys.argv[2])))
