"""Output layers of Hugging Face's models, and the operations that some apply to the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from splitfg.splitting._hugging_face import base_model


class PassedOn(nn.Identity):
    """Takes the place of an output layer and returns its input; shows the layer's attributes.

    Args:
        layer: The output layer; its parameters are not registered.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._unregistered = (layer,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattr__(name)
        return getattr(self._unregistered[0], name)  # models read weight.dtype


class Kept(PassedOn):
    """Takes the place of an output layer, keeps its input, and returns logits of zero.

    For models that go on with the logits, so that the operations after the layer find the shape that they expect.
    """

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__(layer)
        self._width, self._read = width, [torch.empty(0)]

    def forward(self, h: Tensor) -> Tensor:
        """Keep h and return zeros ``(..., C)``, which take no memory."""
        self._read[0] = h
        return h.new_zeros(()).expand(*h.shape[:-1], self._width)

    def taken(self, _returned: Any) -> Tensor:
        """Return the layer's input in this pass."""
        h, self._read[0] = self._read[0], torch.empty(0)
        return h


class Postprocessed(nn.Module):
    """An output layer with the model's operations on its logits: z ↦ cap tanh(s z / cap) + b.

    Args:
        layer: The output layer.
        scale: s.
        cap: Bound of the logits; ``None`` for none.
        model: Holds b, the buffer ``final_logits_bias``; ``None`` for no b.
    """

    def __init__(self, layer: nn.Module, scale: float, cap: float | None, model: nn.Module | None) -> None:
        super().__init__()
        self.layer, self._scale, self._cap, self._unregistered = layer, scale, cap, (model,)

    def forward(self, h: Tensor) -> Tensor:
        """Return the logits ``(..., C)`` for h ``(..., d)``."""
        logits: Tensor = self.layer(h) * self._scale
        if self._cap is not None:
            logits = self._cap * torch.tanh(logits / self._cap)
        (model,) = self._unregistered
        return logits if model is None else logits + model.get_buffer("final_logits_bias").to(logits)


def postprocessed(model: nn.Module, layer: nn.Module) -> Postprocessed | None:
    """Return the output layer with the operations that a model's config and buffers name; ``None`` if there are none.

    The first batch validates that these are all: it compares the outputs with the model's own.
    """
    base = base_model(model)
    config: Any = base.config
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    names = ("logit_scale", "lm_head_multiplier", "logits_scaling")
    factor, multiplier, divisor = (getattr(config, name, None) for name in names)
    factor = multiplier if factor is None else factor
    biased = "final_logits_bias" in dict(base.named_buffers())
    if cap is None and factor is None and divisor is None and not biased:
        return None
    return Postprocessed(layer, (factor or 1.0) / (divisor or 1.0), cap, base if biased else None)
