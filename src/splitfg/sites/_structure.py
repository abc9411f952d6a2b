"""Layers of other libraries, recognised by their attributes and outputs instead of by their class."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

_CONV1D = ("transformers.pytorch_utils", "Conv1D")
_GAINS: WeakKeyDictionary[type[nn.Module], float | None] = WeakKeyDictionary()
_EPSILONS = ("eps", "variance_epsilon", "epsilon")


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is the ``Conv1D`` of transformers: z = a W + b with W of shape ``(in, out)``."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == _CONV1D and module._parameters.get("weight") is not None


def rms_offset(module: nn.Module) -> float | None:
    """Return c if a module computes (c + γ) x / sqrt(mean(x²) + ε) over the last dimension, for c = 0 or 1.

    Compares its output for random γ and x with the formula, once for every class. ``None`` for any other module.
    """
    if type(module).__module__.startswith("torch.") or not _looks_like_rms(module):
        return None
    kind = type(module)
    if kind not in _GAINS:
        _GAINS[kind] = _measured_offset(module)
    return _GAINS[kind]


def rms_epsilon(module: nn.Module) -> float:
    """Return ε of a module that :func:`rms_offset` recognises."""
    found: float = next(getattr(module, name) for name in _EPSILONS if hasattr(module, name))
    return found


def _looks_like_rms(module: nn.Module) -> bool:
    own: dict[str, Any] = module._parameters
    if set(own) != {"weight"} or next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        return False
    weight, known = own["weight"], [getattr(module, name) for name in _EPSILONS if hasattr(module, name)]
    return isinstance(weight, Tensor) and weight.ndim == 1 and len(known) == 1 and isinstance(known[0], float)


@torch.no_grad()
def _measured_offset(module: nn.Module) -> float | None:
    weight = module.get_parameter("weight")
    draws = torch.Generator().manual_seed(0)
    gain, x = (torch.randn(shape, generator=draws).to(weight.device) for shape in (weight.shape, (3, *weight.shape)))
    try:
        found = functional_call(module, {"weight": gain}, (x,))
    except Exception:  # it takes other inputs
        return None
    normed = x * (x.square().mean(-1, keepdim=True) + rms_epsilon(module)).rsqrt()
    for offset in (0.0, 1.0):
        expected = (offset + gain) * normed
        if isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5):
            return offset
    return None
