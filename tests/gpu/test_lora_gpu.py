"""The benchmark of adapters on a GPU: every method takes its steps, captured ones too."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
sys.path.insert(0, str(Path(__file__).parents[2]))
lora = importlib.import_module("benchmarks.lora")


def test_every_method_is_measured():
    device = torch.device("cuda")
    found = lora.steps(lora.SMALL, device)
    assert set(found) == {*lora.METHODS, *lora.CAPTURED}
    assert not [name for name, figures in found.items() if "ms" not in figures]
