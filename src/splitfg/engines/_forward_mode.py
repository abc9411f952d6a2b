"""Forward-mode automatic differentiation."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.utils import dlpack

from splitfg.errors import raise_if
from splitfg.types import Params, TrunkFunction


@dataclass(frozen=True)
class ForwardMode:
    """J·v exactly, by dual numbers; nothing is stored for a backward pass.

    The tangents of a chunk ride together: the primal is computed once and the tangents are batched over it.
    ``chunk=1`` is the paper's loop, whose memory grows neither with K nor with depth; ``chunk=None`` takes
    all K at once, the fastest.

    Args:
        chunk: Tangents per pass.
    """

    chunk: int | None = None

    def __post_init__(self) -> None:
        raise_if(chunk_problems(self.chunk))

    @property
    def biased(self) -> bool:
        """No: J·v is exact."""
        return False

    def __call__(self, f: TrunkFunction, params: Params, tangents: Params) -> tuple[Tensor, Tensor]:
        """``h`` and ``dh[k] = J v_k`` of shape ``(c, *h.shape)``."""

        def push(tangent: Params) -> tuple[Tensor, Tensor]:
            pushed: tuple[Tensor, Tensor] = jvp(f, (params,), (tangent,))  # type: ignore[assignment]
            return pushed

        tangents = {name: _alone(v) for name, v in tangents.items()}
        if next(iter(tangents.values())).shape[0] == 1:
            h, dh = push({name: v.squeeze(0) for name, v in tangents.items()})
            return h, dh.unsqueeze(0)
        both: tuple[Tensor, Tensor] = vmap(push, out_dims=(None, 0))(tangents)  # type: ignore[arg-type]
        return both


def _alone(tangents: Tensor) -> Tensor:
    """The same memory as a storage of its own: tangents that are a part of a larger one would be copied by torch."""
    if torch.compiler.is_compiling():
        return tangents
    try:
        alone: Tensor = dlpack.from_dlpack(dlpack.to_dlpack(tangents))  # type: ignore[attr-defined]
    except (RuntimeError, BufferError, TypeError):  # not in ordinary memory
        return tangents
    return alone


def chunk_problems(chunk: object) -> list[str]:
    """What is wrong with a chunk size."""
    if chunk is None or (not isinstance(chunk, bool) and isinstance(chunk, Integral) and int(chunk) >= 1):
        return []
    return [f"chunk must be at least 1 (or None for all), got {chunk}"]
