"""Networks in ONNX files, trained inside ONNX Runtime. Needs ``pip install 'splitfg[onnx]'``.

Importing this package imports neither torch nor onnx; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitfg.onnx._adapters import Adapter, LowRank, ScaleAndBias
    from splitfg.onnx._engine import OnnxDevice
    from splitfg.onnx._estimators import OnnxClassifier, OnnxRegressor
    from splitfg.onnx._file import OnnxFile
    from splitfg.onnx._inputs import inputs_of
    from splitfg.onnx._save import save, with_head
    from splitfg.onnx._show import Description, describe
    from splitfg.onnx._trunk import OnnxTrunk, example_model
    from splitfg.onnx._tuning import Rows, Tuning, fit_head, hidden, predict

__all__ = [
    "Adapter",
    "Description",
    "LowRank",
    "OnnxClassifier",
    "OnnxDevice",
    "OnnxFile",
    "OnnxRegressor",
    "OnnxTrunk",
    "Rows",
    "ScaleAndBias",
    "Tuning",
    "describe",
    "example_model",
    "fit_head",
    "hidden",
    "inputs_of",
    "predict",
    "save",
    "with_head",
]

_HOMES = {
    "Adapter": "_adapters",
    "Description": "_show",
    "LowRank": "_adapters",
    "OnnxClassifier": "_estimators",
    "OnnxDevice": "_engine",
    "OnnxFile": "_file",
    "OnnxRegressor": "_estimators",
    "OnnxTrunk": "_trunk",
    "Rows": "_tuning",
    "ScaleAndBias": "_adapters",
    "Tuning": "_tuning",
    "describe": "_show",
    "example_model": "_trunk",
    "fit_head": "_tuning",
    "hidden": "_tuning",
    "inputs_of": "_inputs",
    "predict": "_tuning",
    "save": "_save",
    "with_head": "_save",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'splitfg.onnx' has no attribute {name!r}")
    importlib.import_module("splitfg.splitting")  # before splitfg.heads, which imports it in turn
    try:
        return getattr(importlib.import_module(f"splitfg.onnx.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("onnx", "onnxruntime", "sklearn"):
            raise
        raise ImportError(f"splitfg.onnx.{name} needs onnx and onnxruntime: pip install 'splitfg[onnx]'") from error


def __dir__() -> list[str]:
    return sorted(__all__)
